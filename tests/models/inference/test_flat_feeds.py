"""Rows that feed several tokens each in one model call: logits and state are those of a row alone, token by token."""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial, partialmethod
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from cache.layers.kinds import CacheKind, HeadedKVCache, head_length, kind_of, leaves_of, make_caches, split_at_head
from models.inference import batch as batches
from models.inference import grouping, ragged
from models.inference.batch import DecodeBatch
from models.inference.grouping import Costs
from models.inference.groups import Clock, GroupLayer
from models.inference.probe import Form, Probe, last_rows
from models.inference.ragged import NotRagged, Padding, inputs_of, ragged_attention
from models.inference.row import DecodeRow
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.mlx_lm_import import ArraysCache, RotatingKVCache
from tests.models.inference import test_runner as driver
from tests.models.inference.test_feeds import (
    NUM_TOKENS,
    SEEDED,
    Drafting,
    Oracle,
    assert_as_plain,
    decode,
    plain,
    step,
)
from tests.models.inference.test_runner import GREEDY
from tests.support import tiny_models
from tests.support.tiny_models import VOCAB, WINDOW

MAX_FEED = 9
HEAD_TOKENS = WINDOW + 9
APART = {*driver.ROW_BY_ROW, "deepseek_v3", "nemotron_h"}
"""nemotron_h knows no lengths of rows where it updates recurrent state."""
NAMES = [name for name in driver.ALL_NAMES if name not in APART]

IN_GROUPS = partial(grouping.plan, costs=Costs(1e6))


class FedRow(DecodeRow):
    """A row that decodes greedily, beside the bare model that evaluates the same tokens one by one."""

    def __init__(self, name: str, tokens: Sequence[int], bits: int | None = None) -> None:
        self.model: Any = tiny_models.build(name)
        self.tokens = list(tokens)
        """All that the caches hold, and those to be fed."""
        self.num_held = len(self.tokens) - 1
        super().__init__(self._filled(bits))
        self.reference = self._filled(bits)
        self._logits: dict[int, mx.array] = {}
        self._truth = list(tokens)

    def _filled(self, bits: int | None = None) -> list[Any]:
        caches = list(make_caches(self.model))
        for start in range(0, len(self.tokens) - 1, 13):
            mx.eval(self.model(mx.array([self.tokens[start:-1][:13]]), cache=caches))
        return [cache.to_quantized(group_size=32, bits=bits) for cache in caches] if bits else caches

    @property
    def unheld(self) -> list[int]:
        return self.tokens[self.num_held :]

    def expected(self, place: int) -> tuple[int, mx.array]:
        """The token that follows the one at `place`, and the logits."""
        while place not in self._logits:
            logits = self.model(mx.array([self._truth[-1:]]), cache=self.reference)[0, -1]
            self._logits[len(self._truth) - 1] = logits
            self._truth.append(cast(int, mx.argmax(logits).item()))
        return self._truth[place + 1], self._logits[place]

    def guess(self, length: int, wrong_at: int) -> list[int]:
        """What follows, but for one token if `wrong_at` is within."""
        found = [self.expected(len(self.tokens) - 1 + place)[0] for place in range(length)]
        return [(token + (place == wrong_at)) % VOCAB for place, token in enumerate(found)]

    def accept(self, draft: Sequence[int], logits: mx.array) -> int:
        """Samples behind the last known token and each of the draft that agrees; returns how many tokens stay."""
        num_known = len(self.unheld)
        for place in range(len(draft) + 1):
            token, expected = self.expected(len(self.tokens) - 1)
            assert mx.allclose(logits[place], expected, rtol=1e-3, atol=1e-3), (len(self.tokens), place)
            assert cast(int, mx.argmax(logits[place]).item()) == token
            self.tokens.append(token)
            if draft[place : place + 1] != [token]:
                break
        return num_known + place

    def assert_state_is_right(self) -> None:
        for own, other in zip(leaves_of(self.caches), leaves_of(self._filled()), strict=True):
            if isinstance(own, ArraysCache):
                for state, expected in zip(own.cache, other.cache, strict=True):
                    assert mx.allclose(state, expected, rtol=1e-3, atol=1e-3)
                continue
            assert own.offset == other.offset
            count = min(own.offset - head_length([own]), WINDOW)
            for rows, expected in zip(last_rows(own, count), last_rows(other, count), strict=True):
                assert mx.allclose(rows, expected, rtol=1e-3, atol=1e-3)


class Feeding:
    """Steps of a batch whose rows feed drafts: some agree, some do not."""

    def __init__(self, name: str, choose: Any = None) -> None:
        self.name, self.model = name, cast(Any, tiny_models.build(name))
        self.rng = np.random.default_rng(len(name))
        self.batch = DecodeBatch(choose, MAX_FEED)
        self.rows: list[FedRow] = []
        self.head = list(make_caches(self.model))
        self.num_joined = 0

    def join(self, length: int, *, on_head: bool = False, bits: int | None = None) -> FedRow:
        self.num_joined += 1
        beginning = driver.prompt(HEAD_TOKENS) if on_head else []
        row = FedRow(self.name, beginning + driver.prompt(length, self.num_joined), bits)
        if on_head:
            split_at_head(row.caches, self.head, HEAD_TOKENS)
        self.rows.append(row)
        return row

    def leave(self, row: FedRow) -> None:
        self.rows.remove(row)
        self.batch.remove(row.caches)

    def step(self, *widths: int) -> None:
        """Each row feeds one known token and a draft, so many in all or a random number, of which some stay.

        And what it has to feed again.
        """
        lengths = widths or self.rng.integers(1, MAX_FEED + 1, len(self.rows)).tolist()
        drafts = {
            row: row.guess(min(length - 1, MAX_FEED - len(row.unheld)), int(self.rng.integers(MAX_FEED)))
            for row, length in zip(self.rows, lengths, strict=True)
        }
        layers = self.batch.arrange(self.rows, float("inf"), [len(row.unheld + drafts[row]) for row in self.rows])
        order = cast(list[FedRow], self.batch.rows)
        fed = [row.unheld + drafts[row] for row in order]
        with ragged_attention():
            logits = self._evaluate(fed, layers)
        self.batch.advance()
        cuts = np.cumsum([len(tokens) for tokens in fed])[:-1].tolist()
        parts = zip(order, mx.split(logits, cuts) if cuts else [logits], strict=True)
        stays = {row: row.accept(drafts[row], part[len(row.unheld) - 1 :]) for row, part in parts}
        self.batch.settle(stays)
        for row, number in stays.items():
            row.num_held += number

    def _evaluate(self, fed: Sequence[Sequence[int]], layers: Sequence[Any]) -> mx.array:
        inputs, seen = inputs_of(mx.array(list(itertools.chain(*fed))), [*map(len, fed)], layers)
        logits = cast(mx.array, self.model(inputs, cache=layers)).flatten(0, 1)
        return logits if seen is None else logits[seen]

    def feed_again(self) -> None:
        """Until each row has one known token."""
        if any(row.unheld[1:] for row in self.rows):
            self.step(*[1] * len(self.rows))

    def plain_step(self) -> None:
        """One token of each row."""
        self.feed_again()
        layers = self.batch.arrange(self.rows, float("inf"))
        order = cast(list[FedRow], self.batch.rows)
        with ragged_attention():
            logits = self.model(mx.array([row.tokens[-1:] for row in order]), cache=layers)
        self.batch.advance()
        for row, part in zip(order, logits, strict=True):
            row.num_held += row.accept([], part)

    def run(self, num_steps: int) -> None:
        """Random steps, and then a look at the state."""
        for _ in range(num_steps):
            self.step()
            self.plain_step()
        self.check()

    def check(self) -> None:
        self.feed_again()
        self.batch.dissolve()
        for row in self.rows:
            row.assert_state_is_right()


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", NAMES)
def test_feeds_in_long_histories_of_rows_that_come_and_go_change_no_token(name: str) -> None:
    """Alone, in groups, on a head and not, around the window; among them steps of one token each."""
    feeding = Feeding(name, IN_GROUPS)
    away: list[FedRow] = []
    for length in (1, WINDOW - 4, 3 * WINDOW):
        feeding.join(length)
    feeding.join(5, on_head=True)
    for _ in range(16):
        change = feeding.rng.integers(8)
        if change == 0 and len(feeding.rows) < 7:
            feeding.join(int(feeding.rng.integers(1, 3 * WINDOW)))
        elif change == 1 and len(feeding.rows) < 7:
            feeding.join(int(feeding.rng.integers(1, WINDOW)), on_head=True)
        elif change == 2 and len(feeding.rows) > 2:
            away.append(feeding.rows[feeding.rng.integers(len(feeding.rows))])
            feeding.leave(away[-1])
        elif change == 3 and away:
            feeding.rows.append(away.pop())
        elif change == 4:
            feeding.batch.dissolve_groups()
            feeding.batch.choose = feeding.rng.choice(np.array([None, IN_GROUPS]))
        elif change == 5:
            feeding.rng.shuffle(cast(Any, feeding.rows))
        elif change == 6:
            feeding.plain_step()
        feeding.step()
    feeding.check()


def test_latent_attention_refuses() -> None:
    feeding = Feeding("deepseek_v3")
    for length in (5, 9):
        feeding.join(length)
    with pytest.raises(NotRagged, match="latent"):
        feeding.step(2, 1)


def test_masks_and_indices_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counter[str]()
    for name in ("_mask", "_indices"):

        def counting(*args: Any, original: Any, name: str) -> Any:
            made[name] += 1
            return original(*args)

        original = getattr(GroupLayer, name)
        monkeypatch.setattr(GroupLayer, name, partialmethod(counting, original=original, name=name))
    feeding = Feeding("gpt_oss", IN_GROUPS)
    for length in (50, 60, 70):
        feeding.join(length)
    feeding.step(3, 3, 2)
    assert made == {"_mask": 2, "_indices": 2}, "the model has four layers: two with a window, two without"


@pytest.mark.parametrize("widths", [(8, 1, 1, 1), (1, 3, 3, 1), (2, 2, 2, 2)])
def test_attention_sees_no_more_queries_than_tokens(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is asked once for neighbours in a group that feed equally many."""
    shapes = list[tuple[int, ...]]()

    def attend(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        shapes.append(queries.shape)
        return attention(queries, *args, **options)

    feeding, attention = Feeding("gpt_oss", IN_GROUPS), ragged._mlx_attention
    for length in (50, 60, 55, 70):
        feeding.join(length)
    drafts = {row: row.guess(width - 1, MAX_FEED) for row, width in zip(feeding.rows, widths, strict=True)}
    monkeypatch.setattr(ragged, "_mlx_attention", attend)
    layers = feeding.batch.arrange(feeding.rows, float("inf"), widths)
    fed = [token for row in cast(list[FedRow], feeding.batch.rows) for token in (row.tokens[-1], *drafts[row])]
    with ragged_attention():
        feeding.model(mx.array(fed)[:, None], cache=layers)
    num_layers = len(leaves_of(layers))
    assert sum(shape[0] * shape[2] for shape in shapes) == num_layers * sum(widths)
    order = [len(drafts[row]) for row in cast(list[FedRow], feeding.batch.rows)]
    assert len(shapes) == num_layers * sum(1 for _ in itertools.groupby(order))


def test_rings_have_slack_only_where_rows_may_feed_several_tokens() -> None:
    places, own_bytes = list[list[int]](), list[list[int]]()
    for max_feed_tokens in (1, MAX_FEED):
        feeding = Feeding("llama_swa", IN_GROUPS)
        feeding.batch.max_feed_tokens = max_feed_tokens
        rows = [feeding.join(length) for length in (2 * WINDOW, WINDOW // 2)]
        feeding.plain_step()
        (group,) = feeding.batch._groups
        places.append([layer.keys.shape[2] for layer in group.layers.values()])
        own_bytes.append([feeding.batch.own_bytes(row.caches) for row in rows])
        feeding.check()
    assert places[0][0] == WINDOW
    assert [more - few for few, more in zip(*places, strict=True)] == [MAX_FEED - 1, 0, MAX_FEED - 1]
    assert own_bytes[0] == own_bytes[1]


# ------------------------------------------------------------------------------------------------ planted faults


def _one_token_ahead(layer: GroupLayer, seen: int) -> mx.array:
    mask: mx.array = MASK(layer, seen)
    return mask if layer._clock.lengths is None else mask | mx.roll(mask, 1, -1)


def _without_slack(layer: GroupLayer, like: Any, clock: Clock, buffer: Any, head_tokens: int, _: int) -> None:
    INIT(layer, like, clock, buffer, head_tokens, 0)


def _one_more_stays(clock: Clock, counts: Sequence[int]) -> None:
    CLOCK(clock, [max(0, count - 1) for count in counts])


def _one_more_stays_alone(kind: CacheKind, cache: Any, num_tokens: int) -> None:
    if num_tokens > 1:
        ALONE(kind, cache, num_tokens - 1)


def _all_at_the_first(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> mx.array:
    counts = lengths or [1] * len(offsets)
    return OFFSETS(tuple(first for first, count in zip(offsets, counts, strict=True) for _ in range(count)), ())


def _without_mask_on_heads(member: Any, *args: Any) -> Any:
    return None if isinstance(member, HeadedKVCache) else MASK_OF(member, *args)


def _by_query_head(mask: mx.array, repeats: tuple[int, int]) -> mx.array:
    return mx.repeat(mask, repeats[0], -2)


ROTATING = type(kind_of(RotatingKVCache(WINDOW)))
MASK, INIT, CLOCK, ALONE = GroupLayer._mask, GroupLayer.__init__, Clock.rewind, ROTATING.forget
OFFSETS, MASK_OF = ragged._offset_array, ragged._mask_of


def _never_back(stays: Sequence[bool], new: Any, old: Any) -> Any:
    return new


def _all_back_at_once(stays: Sequence[bool], new: Any, old: Any) -> Any:
    return CHOSEN([False] * len(stays), new, old)


def _others_back(stays: Sequence[bool], new: Any, old: Any) -> Any:
    return CHOSEN(stays[::-1], new, old)


def _padding_attended(padding: Padding, padded: mx.array) -> mx.array:
    return padded.swapaxes(1, 2).flatten(0, 1)[: padding.seen.size, :, None]


def _masked_on(*args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArraysCache, "finalize", lambda _: None)
        PUT_BACK(*args)


CHOSEN, PUT_BACK = ragged._chosen, ragged.put_back

PLANTED = [
    ("llama_swa", GroupLayer, "_mask", _one_token_ahead),
    ("llama_swa", GroupLayer, "__init__", _without_slack),
    ("llama_swa", Clock, "rewind", _one_more_stays),
    ("llama_swa", ROTATING, "forget", _one_more_stays_alone),
    ("llama_swa", ragged, "_offset_array", _all_at_the_first),
    ("llama_swa", ragged, "_mask_of", _without_mask_on_heads),
    ("llama_swa", mx, "tile", _by_query_head),
    ("qwen3_5", ragged, "_chosen", _never_back),
    ("qwen3_5", ragged, "_chosen", _all_back_at_once),
    ("qwen3_5", ragged, "_chosen", _others_back),
    ("qwen3_5", ArraysCache, "prepare", lambda *_: None),
    ("qwen3_5", Padding, "flatten", _padding_attended),
    ("qwen3_5", batches, "put_back", _masked_on),
]


@pytest.mark.parametrize(("model", "owner", "name", "fault"), PLANTED)
def test_a_fault_in_feeds_is_found_by_the_probe(
    model: str, owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = str(Probe(tiny_models.build(model), VOCAB, max_seconds=float("inf")).find_flat_fault(Form.HEADS))
    assert "one by one" in found or "ValueError" in found


# ------------------------------------------------------------------------------------------------- in the runner


def test_rows_that_cannot_feed_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [plain("llama_swa", length, GREEDY) for length in (50, 60)]
    monkeypatch.setattr(ragged, "_offset_array", _all_at_the_first)
    runner = Runner(tiny_models.build("llama_swa"), vocab_size=VOCAB, max_probe_seconds=float("inf"))
    assert (
        runner.abilities.form is Form.HEADS
        and runner.abilities.max_feed_tokens > 1
        and not runner.abilities.feeds_together
    )
    runner.abilities.costs = Costs(1e6)
    rows = [Drafting(runner, driver.prompt(length), GREEDY) for length in (50, 60)]
    decode(rows, Oracle([one.output for one in expected], 0.7), 12)
    assert all(row.output[:12] == wanted.output[:12] for row, wanted in zip(rows, expected, strict=True))
    step(rows, [[], []])
    (group,) = runner._batches[0]._groups
    assert WINDOW in [layer.keys.shape[2] for layer in group.layers.values()], "rings without slack"


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", driver.ALL_NAMES)
def test_rows_of_most_architectures_feed_several_tokens_in_one_call(name: str) -> None:
    assert driver.runner_of(name).abilities.feeds_together == (name not in APART)


@pytest.mark.usual("gpt_oss-greedy", "llama_swa-greedy", "qwen3_5-seeded")
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["llama_swa", "gpt_oss", "qwen3_5"])
def test_two_to_eight_rows_with_drafts_that_come_and_go_say_what_each_says_alone(
    name: str, params: SamplingParams
) -> None:
    """Some on one head, in groups by other costs, detached and back; feeds of one token to six."""
    runner, rng = driver.runner_of(name), np.random.default_rng(3)
    assert runner.abilities.feeds_together
    runner.separate_all()
    head, away = runner.make_caches(), list[Drafting]()

    def joined(length: int, *, on_head: bool = False) -> Drafting:
        row = Drafting(runner, driver.prompt(length), params)
        if on_head:
            split_at_head(row.row.caches, head, 40)
        return row

    live = [joined(WINDOW - 5), joined(50, on_head=True)]
    every = list(live)
    for _ in range(22):
        change = rng.integers(6)
        if change <= 2 and len(live) < 8:
            on_head = bool(rng.integers(2))
            live.append(joined(50 if on_head else int(rng.choice([9, 60, 3 * WINDOW])), on_head=on_head))
            every.append(live[-1])
        elif change == 3 and len(live) > 2:
            away.append(live.pop(int(rng.integers(len(live)))))
            runner.detach(away[-1].row)
        elif change == 4 and away:
            live.append(away.pop())
        elif change == 5:
            runner.separate_all()
            runner.abilities.costs = Costs(float(rng.choice([0, 20, 1e6])))
        oracle = Oracle([plain(name, len(row.given), params).output for row in live], 0.8, seed=int(rng.integers(99)))
        step(live, [oracle(index, len(row.output)) for index, row in enumerate(live)])
        live = [row for row in live if len(row.output) < NUM_TOKENS] or [joined(9), joined(60)]
    assert len(every) > 5
    for row in every:
        expected = plain(name, len(row.given), params)
        assert row.output == expected.output[: len(row.output)]
        assert_as_plain(row, expected)


def test_a_failing_step_with_drafts_harms_no_row_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, lengths = driver.runner_of("llama"), (9, 50, 60)
    runner.separate_all()
    monkeypatch.setattr(runner.abilities, "costs", Costs(1e6))
    model = driver.FlakyModel(runner, monkeypatch)
    rows = [Drafting(runner, driver.prompt(length), GREEDY) for length in lengths]
    step(rows, [[1, 2], [], [3]])
    model.fails = True
    with pytest.raises(RuntimeError):
        step(rows[1:], [[1, 2], []])
    runner.drain([row.row for row in rows[1:]])
    model.fails = False
    assert [row.row.is_lost for row in rows] == [False, True, True]
    live = [rows[0], *(Drafting(runner, driver.prompt(length), GREEDY) for length in lengths[1:])]
    expected = [plain("llama", length, GREEDY) for length in lengths]
    decode(live, Oracle([one.output for one in expected], 0.7), 10)
    for row, wanted in zip(live, expected, strict=True):
        assert_as_plain(row, wanted)


def test_a_row_that_left_before_its_step_was_settled_is_in_no_later_one() -> None:
    """An error between a step's end and its settling takes the row out."""
    model: Any = tiny_models.build("llama")
    rows = [DecodeRow(list(make_caches(model))) for _ in range(2)]
    batch = DecodeBatch(None, MAX_FEED)
    batch.hold(rows[0], 3)
    batch.remove(rows[0].caches, keeps_state=False)
    batch.hold(rows[1], 3)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=rows[1].caches))
    batch.settle({rows[1]: 2})
    assert rows[1].caches[0].offset == 2


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_batch_holds_neither_a_row_that_left_nor_recurrent_state_twice(name: str) -> None:
    model: Any = tiny_models.build(name)
    rows = [DecodeRow(list(make_caches(model))) for _ in range(3)]
    for row in rows:
        mx.eval(model(mx.array([[1, 2, 3]]), cache=row.caches))
    batch = DecodeBatch(None)
    batch.arrange(rows, 0.0)
    recurrent = [[leaf for leaf in row.leaves if isinstance(leaf, ArraysCache)] for row in rows]
    assert all(leaf.empty() for row in recurrent for leaf in row)
    batch.remove(rows[0].caches)
    assert [leaf.empty() for leaf in recurrent[0]] == [False] * len(recurrent[0])
    if not recurrent[0]:
        left = weakref.ref(rows.pop(0).caches[0])
        del row, recurrent
        gc.collect()
        assert left() is None
