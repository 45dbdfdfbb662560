"""Rows on a head: the tokens that they say, what a step costs, and faults that the probe must see."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from cache.layers.kinds import HeadedKVCache, head_length, leaves_of, split_at_head
from models.inference import ragged
from models.inference.grouping import Costs
from models.inference.groups import GroupLayer
from models.inference.probe import Form, Probe
from models.inference.ragged import Parts
from models.inference.runner import Runner
from models.mlx_lm_import import KVCache
from tests.models.inference import test_runner as driver
from tests.models.inference.test_groups import fuse, grouped, groups_of, launches_of_a_step
from tests.models.inference.test_runner import Decoding, Sequence, prompt
from tests.support import tiny_models
from tests.support.greedy import assert_greedy
from tests.support.tiny_models import VOCAB, WINDOW


class HeadedDecoding(Decoding):
    """Rows whose prompts begin alike, by `head`; the heads of their caches."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.heads: dict[int, list[Any]] = {}
        self.prompts: dict[Sequence, list[int]] = {}

    def join_with(self, head: int, length: int) -> Sequence:
        """A row with copies of all its tokens."""
        tokens, caches = self._prompt(head, length), self.runner.make_caches()
        self._prefill(caches, tokens[:-1])
        return self._joined(caches, tokens)

    def join_on(self, head: int, length: int) -> Sequence:
        """A row that begins on a head, and evaluates its own tokens behind it."""
        tokens, caches = self._prompt(head, length), self.runner.make_caches()
        self._prefill(caches, tokens[:head])
        split_at_head(caches, self.heads[head], head)
        self._prefill(caches, tokens[head:-1])
        return self._joined(caches, tokens)

    def put_on_head(self, sequence: Sequence) -> None:
        """What the cache does between two steps of a running row."""
        tokens = self.prompts[sequence]
        head = next(length for length in HEADS if tokens[:length] == prompt(length, seed=1))
        self.runner.separate(sequence.row.caches)
        if not head_length(leaves_of(sequence.row.caches)):
            split_at_head(sequence.row.caches, self.heads.setdefault(head, self.runner.make_caches()), head)

    def check(self, name: str) -> None:
        self.read()
        for sequence, tokens in self.prompts.items():
            if sequence.output:
                assert_greedy(tiny_models.build(name), tokens, sequence.output)

    def _prompt(self, head: int, length: int) -> list[int]:
        return prompt(head, seed=1) + prompt(length, seed=len(self.prompts))

    def _prefill(self, caches: list[Any], tokens: list[int]) -> None:
        for start in range(0, len(tokens), 13):
            self.runner.prefill(caches, np.array(tokens[start : start + 13], np.int32))

    def _joined(self, caches: list[Any], tokens: list[int]) -> Sequence:
        sequence = Sequence(self.runner.make_row(caches, driver.GREEDY, tokens[-1]), len(tokens))
        self.live.append(sequence)
        self.prompts[sequence] = tokens
        return sequence


HEADS = (WINDOW - 3, 2 * WINDOW + 7)


# One for each kind of layer cache, and of masks. The probe tries heads of all models.
@pytest.mark.usual("llama", "gpt_oss", "lfm2")
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "gemma4", "lfm2", "falcon_h1"])
def test_long_histories_with_heads_that_come_and_go_change_no_token(name: str) -> None:
    """Rows of two heads and of none: joins, leaves, returns, separated rows, groups by other costs."""
    rng, decoding = np.random.default_rng(len(name)), HeadedDecoding(grouped(name))
    away: list[Sequence] = []
    for head in HEADS:
        decoding.put_on_head(decoding.join_with(head, 5))
        decoding.join_on(head, 3)
    for _ in range(35):
        change = rng.integers(8)
        head = int(rng.choice(HEADS))
        if change == 0 and len(decoding.live) < 7:
            decoding.join_on(head, int(rng.integers(1, 2 * WINDOW)))
        elif change == 1 and len(decoding.live) < 7:
            decoding.join_with(head, int(rng.integers(1, 2 * WINDOW)))
        elif change == 2:
            decoding.put_on_head(decoding.live[rng.integers(len(decoding.live))])
        elif change == 3 and len(decoding.live) > 1:
            decoding.read()
            leaving = decoding.live[rng.integers(len(decoding.live))]
            if leaving.output:
                decoding.leave(leaving)
                away.append(leaving)
        elif change == 4 and away:
            decoding.return_(away.pop())
        elif change == 5:
            decoding.runner.separate_all()
        elif change == 6:
            decoding.runner.abilities.costs = Costs(float(rng.choice([0, 20, 1e6])))
        elif change == 7:
            rng.shuffle(cast(Any, decoding.live))
        decoding.step(int(rng.integers(1, 9)))
    assert any(head_length(leaves_of(row.row.caches)) for row in decoding.live)
    decoding.check(name)


def filled(num_tokens: int) -> list[Any]:
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 2, num_tokens, 4))] * 2)
    return [cache]


def test_rows_on_one_head_attend_to_it_once_and_hold_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = HeadedDecoding(grouped("llama"))
    decoding.put_on_head(decoding.join_with(HEADS[1], 30))
    decoding.join_with(HEADS[0], 4)
    for length in (5, 6, 33):
        decoding.join_on(HEADS[1], length)
    seen = list[int]()

    def counting(queries: mx.array, *args: Any) -> Any:
        seen.append(queries.shape[0])
        return over_head(queries, *args)

    over_head, num_layers = ragged._over_head, len(decoding.runner.make_caches())
    monkeypatch.setattr(ragged, "_over_head", counting)
    for member_tokens in (40.0, 0.0):
        decoding.runner.abilities.costs = Costs(member_tokens)
        decoding.step(3)
        assert bool(groups_of(decoding.runner)) == bool(member_tokens)
        decoding.runner.separate_all()
    assert set(seen) == {4} and len(seen) == 6 * num_layers
    heads = {id(leaf.head) for row in decoding.live for leaf in row.row.caches if isinstance(leaf, HeadedKVCache)}
    assert len(heads) == num_layers
    decoding.check("llama")


def test_a_long_head_in_half_precision_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(0)
    keys, values, tail = (mx.random.normal((1, 2, num, 8)).astype(mx.bfloat16) for num in (1000, 1000, 3))
    queries = mx.random.normal((3, 4, 1, 8)).astype(mx.bfloat16)
    members = [(queries[row : row + 1], tail, tail, None, None) for row in range(3)]
    whole = ragged._attend_from_head(members, keys, values, 1.0)
    monkeypatch.setattr(ragged, "_BLOCK_TOKENS", 300)
    blocks = ragged._attend_from_head(members, keys, values, 1.0)
    together = [mx.concatenate([mx.repeat(rows, 3, 0), mx.repeat(tail, 3, 0)], axis=2) for rows in (keys, values)]
    expected = mx.fast.scaled_dot_product_attention(queries, *together, scale=1.0)
    for found in (whole, blocks):
        assert mx.allclose(found.astype(mx.float32), expected.astype(mx.float32), atol=0.02).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_values_of_a_long_head_do_not_overflow(dtype: mx.Dtype) -> None:
    keys = [mx.zeros((1, 1, num_tokens, 8), dtype) for num_tokens in (9000, 3)]
    values = [mx.full((1, 1, num_tokens, 8), 10.0, dtype) for num_tokens in (9000, 3)]
    queries = mx.ones((1, 2, 1, 8), dtype)
    found = ragged._attend_from_head([(queries, keys[1], values[1], None, None)], keys[0], values[0], 1.0)
    assert mx.allclose(found.astype(mx.float32), mx.array(10.0), rtol=0.01).item()


# ------------------------------------------------------------------------------------------------ planted faults


def _one_short(parts: Parts) -> Any:
    for head, members in RUNS.fget(parts):  # type: ignore[attr-defined]
        yield (None if head is None else head[:, :, :-1]), members


def _merged_without_peaks(*parts: mx.array) -> mx.array:
    one, _, one_total, other, _, total = parts
    return (one + other) / (one_total + total)


def _from_tail_alone(cache: HeadedKVCache) -> int:
    return int(cache.tail.offset)


RUNS, OFFSET, END = Parts.runs, HeadedKVCache.offset, GroupLayer._end_of


# The other model has sinks, which the merge of a head and a tail counts once.
@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    [
        ("llama_swa", Parts, "runs", property(_one_short)),
        ("llama_swa", ragged, "_merge", _merged_without_peaks),
        ("gpt_oss", ragged, "_merge", _merged_without_peaks),
        ("llama_swa", HeadedKVCache, "offset", property(_from_tail_alone)),
        ("llama_swa", GroupLayer, "_end_of", lambda layer, offset: END(layer, offset) - (layer.head is not None)),
    ],
)
def test_a_fault_with_heads_leaves_each_row_its_own_beginning(
    name: str, owner: Any, attribute: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, fault)
    form, text = Probe(tiny_models.build(name), VOCAB, max_seconds=float("inf")).find_form()
    assert form is Form.GROUPS, text


# ------------------------------------------------------------------------------------------------ cost of a step


@pytest.mark.parametrize("num_rows", [8, 32])
def test_a_step_of_rows_on_a_head_has_fewer_than_twice_the_operations_of_one_row(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse(monkeypatch)
    counts = list[int]()
    for count in (1, num_rows):
        decoding = HeadedDecoding(grouped("llama"))
        decoding.join_with(HEADS[1], 5)
        if count > 1:
            decoding.put_on_head(decoding.live[0])
            for row in range(count - 1):
                decoding.join_on(HEADS[1], 4 + row % 5)
        counts.append(launches_of_a_step(decoding, tmp_path))
    assert counts[1] <= 1.9 * counts[0], counts
