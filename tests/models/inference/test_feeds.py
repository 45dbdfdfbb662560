"""Steps that evaluate several tokens of a row give the tokens, and leave the caches, of steps of one token.

An oracle drafts: it knows the tokens that plain steps give, and errs with some probability.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache

from cache.layers.kinds import CacheKind, kind_of, leaves_of, make_caches, split_at_head
from cache.layers.state import arrays_in
from models.adapter import NO_ADAPTER
from models.inference.abilities import MAX_FEED_TOKENS, measure_step_seconds
from models.inference.probe import Probe
from models.inference.runner import DecodeStep, Runner
from models.inference.sampling_params import SamplingParams
from models.mlx_lm_import import ArraysCache, RotatingKVCache
from models.output.pieces import TokenLogprob
from server.measure import launch
from tests.models.inference import test_runner as driver
from tests.models.inference.test_adapters import model_with
from tests.models.inference.test_probe import SlowModel
from tests.models.inference.test_runner import GREEDY, prompt, runner_of
from tests.support import tiny_models
from tests.support.tiny_models import VOCAB, WINDOW

NUM_TOKENS = 24
SEEDED = SamplingParams(
    temperature=1.1,
    top_p=0.95,
    seed=5,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    bad_words=((3, 4),),
    logit_bias=((5, 2.0), (6, 2.0)),
    top_logprobs=2,
)
WINDOWED = replace(
    SEEDED, repeat_last_n=6, dry_multiplier=2, dry_penalty_last_n=30, xtc_probability=0.5, min_tokens=4
)


class Drafting:
    """One row that decodes with drafts, as the engine does it."""

    def __init__(
        self,
        runner: Runner,
        given: Sequence[int],
        params: SamplingParams,
        *,
        bits: int | None = None,
        adapter: int = NO_ADAPTER,
    ) -> None:
        self.runner, self.given = runner, list(given)
        self.output: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.evaluated: list[int] = []
        """What the caches hold by what the runner says."""
        caches = runner.make_caches()
        for start in range(0, len(given) - 1, 13):
            runner.prefill(caches, np.array(given[start : min(start + 13, len(given) - 1)], np.int32), adapter)
        if bits is not None:
            caches = [cache.to_quantized(group_size=32, bits=bits) for cache in caches]
        self.row = runner.make_row(caches, params, given[-1], prompt=given, adapter=adapter)
        self.evaluated += given[:-1]

    def take(self, step: DecodeStep, index: int, drafted: Sequence[int]) -> int:
        """Accepts the samples of a step; returns how many drafted tokens they confirm."""
        samples = step.tokens()[index]
        assert len(samples) == len(drafted) + 1
        accepted = next((place for place, token in enumerate(drafted) if samples[place] != token), len(drafted))
        self.output += samples[: accepted + 1]
        self.logprobs += [step.logprob(index, samples[place], place) for place in range(accepted + 1)]
        return accepted

    def settled(self, num_held: int, fed: Sequence[int], accepted: int) -> None:
        """Makes known what the caches do not hold."""
        stays = [*fed, *self.output[len(self.output) - 1 - accepted :]]
        self.evaluated += stays[:num_held]
        self.row.known = stays[num_held:]
        assert [*self.given, *self.output] == self.evaluated + self.row.known

    def plain(self, count: int) -> "Drafting":
        """Steps of one token, double-buffered; at the end the last sample is known."""
        current = launch(self.runner, [self.row], None)
        for number in range(count):
            following = launch(self.runner, [self.row], current) if number + 1 < count else None
            self.take(current, 0, ())
            self.evaluated.append([*self.given, *self.output][len(self.evaluated)])
            current = cast(DecodeStep, following)
        self.row.known = self.output[-1:]
        return self


def prepared(rows: Sequence[Drafting], drafts: Sequence[Sequence[int]], *, samples: bool = True) -> DecodeStep:
    for one, draft in zip(rows, drafts, strict=True):
        one.row.draft = [*draft]
    return rows[0].runner.prepare([one.row for one in rows], None, samples=samples)


def step(rows: Sequence[Drafting], drafts: Sequence[Sequence[int]]) -> None:
    """One step of several rows, from known tokens."""
    runner, known = rows[0].runner, [list(one.row.known) for one in rows]
    launched = prepared(rows, drafts)
    runner.start(launched)
    accepted = [one.take(launched, index, draft) for index, (one, draft) in enumerate(zip(rows, drafts, strict=True))]
    held = runner.settle(launched, accepted) if launched.is_long else [1] * len(rows)
    for one, num_held, fed, count in zip(rows, held, known, accepted, strict=True):
        one.settled(num_held, fed, count)


def decode(rows: Sequence[Drafting], draft: Callable[[int, int], Sequence[int]], num_tokens: int) -> None:
    """Decodes each row to `num_tokens` at least; `draft` is asked for a row and its output's length."""
    while going := [index for index, row in enumerate(rows) if len(row.output) < num_tokens]:
        found = [rows[index] for index in going]
        drafts = [list(draft(index, len(rows[index].output))) for index in going]
        step(found, [one[: MAX_FEED_TOKENS - len(row.row.known)] for row, one in zip(found, drafts, strict=True)])


class Oracle:
    """Drafts up to five tokens of the texts, each wrong with probability `1 - odds`."""

    def __init__(self, texts: Sequence[Sequence[int]], odds: float, seed: int = 0) -> None:
        self._texts, self._odds, self._rng = texts, odds, np.random.default_rng(seed)

    def __call__(self, index: int, start: int) -> list[int]:
        right = self._texts[index][start : start + int(self._rng.integers(0, 6))]
        return [token if self._rng.random() < self._odds else (token + 1) % VOCAB for token in right]


@functools.cache
def plain(name: str, length: int, params: SamplingParams) -> Drafting:
    """The output of steps of one token, with some tokens more than tests decode."""
    return Drafting(runner_of(name), prompt(length), params).plain(NUM_TOKENS + 12)


def assert_as_plain(row: Drafting, expected: Drafting) -> None:
    """The same output, and the same caches: they go on alike in plain steps."""
    num_tokens, told = len(row.output), row.logprobs
    if row.row.known[1:]:
        step([row], [[]])
    row.plain(5)
    assert row.output == expected.output[: len(row.output)]
    assert len(row.output) > num_tokens
    for found, wanted in zip(told, expected.logprobs, strict=False):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.token_id == wanted.token_id
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-3)


# ------------------------------------------------------------------------------------------------- equal tokens


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", driver.ALL_NAMES)
def test_every_architecture_is_fed_several_tokens(name: str) -> None:
    runner = runner_of(name)
    assert runner.abilities.max_feed_tokens == MAX_FEED_TOKENS
    assert runner.abilities.feeds is not None
    seconds = runner.abilities.feeds.step_seconds
    assert list(seconds) == [1, 2, 4, 8, 16, 32] and min(seconds.values()) > 0


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", driver.ALL_NAMES)
def test_drafts_right_or_wrong_change_no_token_and_no_cache(name: str) -> None:
    # The sampler sees logits, whatever model they are from.
    is_sampled = name in ("llama", "gpt_oss", "qwen3_5", "gemma4")
    for odds, params in ((0.5, GREEDY), *(((0.9, SEEDED), (0.7, WINDOWED)) if is_sampled else ())):
        expected = plain(name, WINDOW - 5, params)
        row = Drafting(runner_of(name), prompt(WINDOW - 5), params)
        decode([row], Oracle([expected.output], odds), NUM_TOKENS)
        assert_as_plain(row, expected)


# ------------------------------------------------------------------------------------------------- layer caches


def state_of(caches: Sequence[Any]) -> list[mx.array]:
    """The rows of a window from the oldest on, and recurrent state."""
    found = list[mx.array]()
    for cache in leaves_of(caches):
        if isinstance(cache, ArraysCache):
            found += [state for state in cache.cache if state is not None]
        elif isinstance(cache, RotatingKVCache):
            found += [cache._temporal_order(rows)[:, :, -WINDOW + 1 :] for rows in (cache.keys, cache.values)]
        else:
            found += [rows[:, :, : cache.offset] for rows in (cache.keys, cache.values)]
    return found


@pytest.mark.parametrize("name", ["llama_swa", "qwen3_5"])
@pytest.mark.parametrize("length", range(WINDOW - 5, WINDOW + 3))
def test_a_rejection_at_each_place_around_a_border_leaves_the_caches_of_plain_steps(name: str, length: int) -> None:
    runner, num_drafted = runner_of(name), 4
    output = driver.alone(name, length, num_drafted + 2)
    for num_right in range(num_drafted + 1):
        wrong = [(token + 1) % VOCAB for token in output]
        row, other = (Drafting(runner, prompt(length), GREEDY) for _ in range(2))
        step([row], [[*output[:num_right], *wrong[num_right:num_drafted]]])
        assert row.output == output[: num_right + 1]
        if row.row.known[1:]:  # recurrent state went back
            assert len(row.evaluated) == length - 1 and name == "qwen3_5"
            row.row.known, rest = row.row.known[:-1], row.row.known[-1:]
            launched = launch(runner, [row.row], None)
            launched.tokens()
            row.row.known = rest
        other.plain(num_right + 1)
        assert other.output == row.output
        for found, expected in zip(state_of(row.row.caches), state_of(other.row.caches), strict=True):
            assert found.shape == expected.shape and mx.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_quantized_keys_and_values_forget_their_last_tokens_too() -> None:
    runner = runner_of("llama_wide_heads")
    expected = Drafting(runner, prompt(40), GREEDY, bits=8).plain(NUM_TOKENS + 12)
    row = Drafting(runner, prompt(40), GREEDY, bits=8)
    decode([row], Oracle([expected.output], 0.7), NUM_TOKENS)
    assert_as_plain(row, expected)


def test_references_to_earlier_state_end_with_the_step() -> None:
    runner = runner_of("qwen3_5")
    row = Drafting(runner, prompt(20), GREEDY)
    launched = prepared([row], [[1, 2]])
    held = weakref.ref(runner._batches[NO_ADAPTER]._rewinds[row.row])
    runner.start(launched)
    launched.tokens()
    assert held() is not None
    runner.settle(launched, [0])
    assert held() is None


# ------------------------------------------------------------------------------------------------- several rows


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_5", "mamba2", "nemotron_h", "llama4"])
def test_rows_beside_each_other_draft_each_for_itself(name: str) -> None:
    runner, lengths = runner_of(name), (WINDOW - 5, 9, 3 * WINDOW)
    runner.separate_all()
    expected = [plain(name, length, SEEDED) for length in lengths]
    rows = [Drafting(runner, prompt(length), SEEDED) for length in lengths]
    oracle, rng = Oracle([one.output for one in expected], 0.8), np.random.default_rng(1)
    decode(rows, lambda *place: oracle(*place) if rng.random() < 0.4 else (), NUM_TOKENS)
    for row, wanted in zip(rows, expected, strict=True):
        assert row.output[:NUM_TOKENS] == wanted.output[:NUM_TOKENS]
        assert_as_plain(row, wanted)


def test_rows_on_a_head_draft_behind_it() -> None:
    runner = runner_of("llama_swa")
    expected = [plain("llama_swa", length, GREEDY) for length in (50, 50)]
    rows = [Drafting(runner, prompt(50), GREEDY) for _ in range(2)]
    head = runner.make_caches()
    for row in rows:
        split_at_head(row.row.caches, head, 40)
    oracle = Oracle([one.output for one in expected], 0.8)
    decode(rows, lambda index, start: oracle(index, start) if start % 3 else (), NUM_TOKENS)
    for row, wanted in zip(rows, expected, strict=True):
        assert_as_plain(row, wanted)


@pytest.mark.usual("True-qwen3_5", "False-llama")
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("mixes", [True, False])
def test_each_row_drafts_with_its_adapter(mixes: bool, name: str, tmp_path: Path) -> None:
    model, adapters = model_with(name, tmp_path)
    runner = Runner(model, vocab_size=VOCAB, adapters=adapters, max_probe_seconds=float("inf"))
    runner.abilities.mixes = mixes
    expected = [Drafting(runner, prompt(20), GREEDY, adapter=adapter).plain(NUM_TOKENS) for adapter in range(3)]
    assert len({tuple(one.output) for one in expected}) == 3
    rows = [Drafting(runner, prompt(20), GREEDY, adapter=adapter) for adapter in range(3)]
    decode(rows, Oracle([one.output for one in expected], 0.7), 12)
    assert all(row.output[:12] == wanted.output[:12] for row, wanted in zip(rows, expected, strict=True))


# ------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("params", [GREEDY, SEEDED, WINDOWED])
def test_a_row_samples_on_as_after_what_was_accepted(params: SamplingParams) -> None:
    expected = plain("llama", WINDOW - 5, params).output
    row = Drafting(runner_of("llama"), prompt(WINDOW - 5), params)
    for draft, accepted in ((expected[:3], 3), ([expected[4], 1, 2], 1), ([], 0)):
        step([row], [draft])
        runner_of("llama")._sampler.release()
        after = row.row.sampling.after(row.given, row.output)
        assert len(row.output) and row.row.sampling.position == after.position == len(row.output)
        found, wanted = (arrays_in(vars(state)) for state in (row.row.sampling, after))
        assert len(found) == len(wanted) and all(map(mx.array_equal, found, wanted)), accepted


def test_each_sample_has_a_mask_of_its_own() -> None:
    runner, allowed = runner_of("llama"), (7, 8, 9)
    row = Drafting(runner, prompt(20), GREEDY)
    launched = prepared([row], [[7, 8]], samples=False)
    runner.start(launched)
    masks = [np.zeros(VOCAB // 32, np.int32) for _ in allowed]
    for mask, token in zip(masks, allowed, strict=True):
        mask[token // 32] = 1 << token % 32
    runner.sample(launched, masks)
    runner.start(launched)
    assert launched.tokens() == [list(allowed)]
    assert runner.settle(launched, [2]) == [3]


# ------------------------------------------------------------------------------------------------- the probe


def _forget_nothing(kind: CacheKind, cache: Any, num_tokens: int) -> None: ...


def _forget_in_number_only(kind: CacheKind, cache: Any, num_tokens: int) -> None:
    cache.trim(num_tokens)


def _nothing_before(kind: CacheKind, cache: Any) -> dict[str, Any]:
    return {"cache": cache.cache}


def _forget_one_too_many(kind: CacheKind, cache: Any, num_tokens: int) -> None:
    FORGET(kind, cache, num_tokens + 1)


FORGET = CacheKind.forget
PLANTED = [
    ("llama", KVCache(), "forget", _forget_nothing),
    ("llama", KVCache(), "forget", _forget_one_too_many),
    ("llama_swa", RotatingKVCache(WINDOW), "forget", _forget_in_number_only),
    ("llama4", ChunkedKVCache(WINDOW), "forget", _forget_nothing),
    ("deepseek_v32", KVCache(), "forget", _forget_nothing),
    ("qwen3_5", ArraysCache(1), "before_call", _nothing_before),
    ("mamba2", ArraysCache(1), "before_call", _nothing_before),
]


@pytest.mark.parametrize(("name", "cache", "part", "fault"), PLANTED)
def test_a_fault_in_taking_tokens_back_is_found_by_the_probe_and_told(
    name: str, cache: Any, part: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(kind_of(cache)), part, fault)
    assert "one by one" in str(Probe(tiny_models.build(name), VOCAB, max_seconds=float("inf")).find_feed_fault())
    if name != "llama":
        return
    runner = Runner(tiny_models.build(name), vocab_size=VOCAB, max_probe_seconds=float("inf"))
    assert runner.abilities.feeds is None
    assert "none, because several at once differ" in runner.abilities.drafts_form


@pytest.mark.parametrize(("name", "cache", "part", "fault"), PLANTED)
def test_a_fault_in_taking_tokens_back_changes_tokens(
    name: str, cache: Any, part: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(name, WINDOW - 5, GREEDY)
    row = Drafting(runner_of(name), prompt(WINDOW - 5), GREEDY)
    monkeypatch.setattr(type(kind_of(cache)), part, fault)
    try:
        decode([row], Oracle([expected.output], 0.6), NUM_TOKENS)
    except ValueError:  # rows are missing
        return
    assert row.output != expected.output[: len(row.output)]


def test_layer_caches_that_cannot_forget_are_told_before_anything_is_evaluated() -> None:
    class Concatenating:
        def make_cache(self) -> list[Any]:
            return [ConcatenateKVCache()]

    fault = Probe(Concatenating(), VOCAB).find_feed_fault()
    assert fault == "ConcatenateKVCache cannot forget its last tokens"


@pytest.mark.parametrize("seconds_per_token", [0.3, 9.0])
def test_a_slow_machine_feeds_one_token_and_says_why(seconds_per_token: float) -> None:
    slow = SlowModel(seconds_per_token)
    fault = Probe(slow, VOCAB, clock=lambda: slow.now, max_seconds=10).find_feed_fault()
    assert "could not be tested" in str(fault) and slow.now <= max(10, 2 * seconds_per_token)


def test_the_cost_of_longer_steps_counts_as_proportional_when_time_is_short() -> None:
    model: Any = tiny_models.build("llama")
    caches = make_caches(model)
    model(mx.array([[1]]), cache=caches)
    seconds = measure_step_seconds(model, caches, VOCAB, max_seconds=0)
    assert {width: value / seconds[1] for width, value in seconds.items()} == {n: n for n in (1, 2, 4, 8, 16, 32)}
    assert caches[0].offset == 1
