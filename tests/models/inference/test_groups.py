"""Rows that share buffers: which are put together, what is copied when rows come and go, and the tokens they give."""

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.types import LayerCache
from models.inference import grouping, ragged
from models.inference.grouping import Buffer, Costs, Row, Wanted, plan
from models.inference.groups import Clock, GroupLayer
from models.inference.probe import Form, Probe
from models.inference.ragged import join_layers
from models.inference.runner import Runner
from server.measure import launch
from tests.models.inference import test_runner as driver
from tests.models.inference.test_runner import Decoding
from tests.models.inference.test_runner import Sequence as Decoded
from tests.support import tiny_models
from tests.support.tiny_models import VOCAB, WINDOW

PLENTY = 1e9
DEAR_MEMBERS = Costs(1e6)


def rows_of(*lengths: int, spare: int = 200, group: int | None = None) -> list[Row]:
    return [Row(length, length + spare, group) for length in lengths]


def members(wanted: Sequence[Wanted]) -> list[set[int]]:
    return [set(one.rows) for one in wanted]


def test_a_newcomer_joins_a_group_that_has_room_and_a_full_one_is_made_anew() -> None:
    running = rows_of(500, 510, group=0)
    joined = plan([*running, *rows_of(505)], [Buffer(4, 640)], costs=Costs(100), spare_tokens=PLENTY)
    assert joined == [Wanted((0, 1, 2), Buffer(4, 640), 0)]
    (anew,) = plan([*running, *rows_of(505)], [Buffer(2, 640)], costs=Costs(1000), spare_tokens=PLENTY)
    assert anew.kept is None and anew.buffer.room == 4


def test_nothing_is_copied_that_the_steps_to_come_do_not_repay() -> None:
    """Two groups that one would serve a little better: the copies cost more than 128 steps save."""
    running = [*rows_of(4000, 4000, group=0), *rows_of(4001, 4001, group=1)]
    kept = plan(running, [Buffer(2, 4100), Buffer(2, 4100)], costs=Costs(20), spare_tokens=PLENTY)
    assert members(kept) == [{0, 1}, {2, 3}]
    together = plan(running, [Buffer(2, 4100), Buffer(2, 4100)], costs=Costs(2000), spare_tokens=PLENTY)
    assert members(together) == [{0, 1, 2, 3}]


# ------------------------------------------------------------------------------------------------- the choice


def cuts(places: list[int]) -> Iterator[list[list[int]]]:
    """Partitions into neighbours."""
    if not places:
        yield []
    for stop in range(1, len(places) + 1):
        yield from ([places[:stop], *rest] for rest in cuts(places[stop:]))


def partitions(places: list[int]) -> Iterator[list[list[int]]]:
    if not places:
        yield []
        return
    for rest in partitions(places[1:]):
        yield [[places[0]], *rest]
        for number, member in enumerate(rest):
            yield [*rest[:number], [places[0], *member], *rest[number + 1 :]]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 300), st.booleans()), min_size=1, max_size=6)
    | st.lists(st.tuples(st.sampled_from([100, 110, 900]), st.just(0), st.just(True)), min_size=2, max_size=6),
    st.builds(Costs, st.floats(0, 5000)) | st.builds(Costs, st.floats(0, 5000), st.floats(0, 5000), st.floats(1, 16)),
    st.one_of(st.just(PLENTY), st.floats(0, 5000)),
)
def test_a_plan_is_the_cheapest_and_fits_into_the_spare_memory(
    described: list[tuple[int, int, bool]], costs: Costs, spare_tokens: float
) -> None:
    rows = [Row(tokens, tokens + 1 + spare, can_share=shares) for tokens, spare, shares in described]
    wanted = plan(rows, [], costs=costs, spare_tokens=spare_tokens)
    places = [place for one in wanted for place in one.rows]
    assert len(places) == len(set(places)) and all(rows[place].can_share for place in places)
    for one in wanted:
        assert 1 < len(one.rows) <= one.buffer.room
        assert max(rows[place].tokens for place in one.rows) < one.buffer.capacity
    held = sum(one.buffer.room * one.buffer.capacity for one in wanted)
    assert held - sum(rows[place].reserved_tokens for place in places) <= spare_tokens

    def cost(partition: list[list[int]]) -> float:
        members = [[rows[place].tokens for place in member] for member in partition]
        return sum(costs.of(len(lengths), min(lengths), max(lengths)) for lengths in members)

    sharing = [place for place, row in enumerate(rows) if row.can_share]
    apart = [[place] for place in sharing if place not in places]
    if wanted and spare_tokens == PLENTY:
        # Where masks cost, only neighbours by length are compared.
        by_length = sorted(sharing, key=lambda place: rows[place].tokens)
        compared = partitions(sharing) if costs == Costs(costs.member) else cuts(by_length)
        least = min(cost(partition) for partition in compared)
        found = cost([*(list(one.rows) for one in wanted), *apart])
        # What a cheaper one would save is not worth its copies.
        copied = sum(rows[place].tokens for place in sharing)
        assert grouping.EXPECTED_STEPS * (found - least) <= grouping.COPY_TOKENS * copied + 1e-3


class SlowPlanner(grouping._Planner):
    """Sums each member's lengths anew, and compares all arrangements."""

    def _cheapest_members(self, most_padding: float) -> tuple[float, list[list[int]]]:
        order = self._sorted_places()
        best: list[tuple[float, list[list[int]]]] = [(0.0, [])]
        for stop in range(1, len(order) + 1):
            options = []
            for start in range(stop):
                lengths = [self.rows[place].tokens for place in order[start:stop]]
                if len(lengths) == 1 or max(lengths) * len(lengths) - sum(lengths) <= most_padding:
                    cost = self.costs.of(len(lengths), min(lengths), max(lengths))
                    options.append((best[start][0] + cost, start))
            cost, start = min(options)
            best.append((cost, [order[start:stop], *best[start][1]]))
        return best[-1]

    def plan(self, spare_tokens: float) -> list[Wanted]:
        fitting = [option for _, option in self.options() if self.extra_tokens(option) <= spare_tokens]
        return min(fitting, key=self.total_cost)


sixteenths = st.integers(0, 80_000).map(lambda number: number / 16)
"""Sums of these are exact in any order."""


@given(
    st.lists(
        st.builds(
            lambda tokens, spare, group, shares: Row(tokens, tokens + 1 + spare, group if shares else None, shares),
            st.integers(1, 3000) | st.sampled_from([100, 110, 900]),
            st.integers(0, 300),
            st.sampled_from([None, None, 0, 1, 2]),
            st.sampled_from([True, True, True, False]),
        ),
        min_size=1,
        max_size=16,
    ),
    st.lists(
        st.builds(Buffer, st.sampled_from([2, 4, 8]), st.sampled_from([128, 1024, 4096])), min_size=3, max_size=3
    ),
    st.builds(Costs, sixteenths, st.just(0.0) | sixteenths, st.integers(16, 256).map(lambda number: number / 16)),
    st.one_of(st.just(PLENTY), st.floats(0, 5000)),
)
def test_a_plan_is_that_of_the_planner_that_skips_nothing(
    rows: list[Row], groups: list[Buffer], costs: Costs, spare_tokens: float
) -> None:
    expected = SlowPlanner(rows, groups, costs).plan(spare_tokens)
    assert plan(rows, groups, costs=costs, spare_tokens=spare_tokens) == expected


# ------------------------------------------------------------------------------------------ what is moved


def grouped(name: str, *, costs: Costs = DEAR_MEMBERS) -> Runner:
    """The model's runner, which puts rows together as if another member cost so many tokens."""
    runner = driver.runner_of(name)
    runner.separate_all()
    runner.abilities.costs = costs
    return runner


def groups_of(runner: Runner) -> list[int]:
    """Rows in each group."""
    return [len(group.rows) for batch in runner._batches.values() for group in batch._groups]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a row was moved in a layer, in and out and within."""
    counted: Counter[str] = Counter()
    for name in ("take", "given", "move", "grow"):
        original = getattr(GroupLayer, name)

        def counting(layer: GroupLayer, *args: Any, name: str = name, original: Any = original) -> Any:
            counted[name] += 1
            return original(layer, *args)

        monkeypatch.setattr(GroupLayer, name, counting)
    return counted


def test_a_join_moves_one_row_and_a_leave_at_most_two(moves: Counter[str]) -> None:
    decoding = Decoding(grouped("llama"))
    num_layers = len(decoding.runner.make_caches())
    rows = [decoding.join(length) for length in (40, 41, 42)]
    decoding.step(2)
    assert groups_of(decoding.runner) == [3]
    moves.clear()
    rows.append(decoding.join(39))
    decoding.step(2)
    assert moves == {"take": num_layers} and groups_of(decoding.runner) == [4]
    moves.clear()
    decoding.leave(rows[0])
    decoding.step(2)
    assert moves == {"given": num_layers, "move": num_layers} and groups_of(decoding.runner) == [3]
    driver.assert_like_alone("llama", *rows)


# One for each kind of layer cache, and of masks: what moves is theirs. Short histories are tried on all models.
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4", "lfm2", "falcon_h1", "mamba2", "deepseek_v3"])
def test_long_histories_of_rows_that_come_and_go_change_no_token(name: str) -> None:
    """Joins, leaves, returns, separated rows, memory that comes and goes, and other costs."""
    rng, decoding = np.random.default_rng(len(name)), Decoding(grouped(name))
    if name in driver.WITHOUT_GROUPS:
        decoding.runner.abilities.costs = None
    away: list[Decoded] = []
    all_rows = [decoding.join(int(length)) for length in rng.integers(2, 3 * WINDOW, 3)]
    for _ in range(28):
        change = rng.integers(7)
        if change == 0 and len(decoding.live) < 7:
            all_rows.append(decoding.join(int(rng.integers(1, 3 * WINDOW))))
        elif change == 1 and len(decoding.live) > 1:
            decoding.read()
            leaving = decoding.live[rng.integers(len(decoding.live))]
            if leaving.output:
                decoding.leave(leaving)
                away.append(leaving)
        elif change == 2 and away:
            decoding.return_(away.pop())
        elif change == 3:
            decoding.runner.separate(decoding.live[rng.integers(len(decoding.live))].row.caches)
        elif change == 4:
            decoding.runner.separate_all()
        elif change == 5 and decoding.runner.abilities.costs is not None:
            decoding.runner.abilities.costs = Costs(float(rng.choice([0, 20, 1e6])))
        elif change == 6:
            rng.shuffle(cast(Any, decoding.live))
        decoding.step(int(rng.integers(1, 9)))
    decoding.read()
    driver.assert_like_alone(name, *[row for row in all_rows if row.output])


def test_shared_buffers_stay_within_the_spare_memory() -> None:
    runner = grouped("llama")
    decoding = Decoding(runner)
    rows = [decoding.join(length).row for length in (90, 10, 11)]
    own_bytes = [sum(cache.nbytes for cache in row.caches) for row in rows]
    for spare_bytes in (0.0, float(own_bytes[0])):
        runner.separate_all()
        step = runner.prepare(rows, None, spare_bytes=spare_bytes)
        runner.start(step)
        for row, tokens in zip(rows, step.tokens(), strict=True):
            row.known = tokens
        assert groups_of(runner), "rows of like lengths share what they have"
        assert runner.padding_bytes <= spare_bytes
        assert [runner.own_bytes(row.caches) for row in rows if runner.own_bytes(row.caches)]
    runner.separate_all()
    assert runner.padding_bytes == 0 and all(runner.own_bytes(row.caches) == 0 for row in rows)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "llama"])
def test_rows_are_joined_once_while_they_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, joined = Decoding(driver.runner_of(name)), list[object]()

    def counting(*args: Any) -> list[LayerCache]:
        joined.append(args)
        return join_layers(*args)

    monkeypatch.setattr("models.inference.batch.join_layers", counting)
    for length in (20, 21):
        decoding.join(length)
    decoding.step(6)
    assert len(joined) == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_row_that_leaves_keeps_no_other_in_memory_and_its_own_size(name: str, exact_buffers: None) -> None:
    decoding = Decoding(grouped(name))
    rows = [decoding.join(length) for length in (30, 60, 61, 62)]
    before = [cache.nbytes for cache in rows[0].row.caches]
    decoding.step(3)
    decoding.read()
    decoding.leave(rows[0])
    after = [cache.nbytes for cache in rows[0].row.caches]
    held = [int(mx.get_array_buffer_size(cache.keys, cache.values)) for cache in rows[0].row.caches]
    assert held == after and all(size <= largest + 4096 for size, largest in zip(after, before, strict=True))


# ------------------------------------------------------------------------------------------------ planted faults


def _with_one_hidden(layer: GroupLayer, seen: int) -> mx.array:
    mask: mx.array = MASK(layer, seen)
    mask[..., :1] = False
    return mask


def _one_further(layer: GroupLayer, offset: Any) -> Any:
    return PLACE(layer, offset + 1 if layer.window else offset)


def _without_moving(layer: GroupLayer, source: int, target: int) -> None: ...


def _one_longer(clock: Clock) -> None:
    ADVANCE(clock)
    ADVANCE(clock)


def _a_neighbours_where_lengths_are_even(layer: GroupLayer) -> tuple[mx.array, mx.array]:
    keys, values = FETCH(layer)
    return (mx.roll(keys, 1, 0) if layer._clock.is_even else keys), values


MASK, PLACE, ADVANCE, FETCH = GroupLayer._mask, GroupLayer._place_of, Clock.advance, GroupLayer.keys_and_values


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (GroupLayer, "_mask", _with_one_hidden),
        (GroupLayer, "_place_of", _one_further),
        (GroupLayer, "move", _without_moving),
        (Clock, "advance", _one_longer),
        (GroupLayer, "keys_and_values", _a_neighbours_where_lengths_are_even),
    ],
)
def test_a_fault_in_groups_leaves_each_row_its_own_buffers(
    owner: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    form, text = Probe(tiny_models.build("llama_swa"), VOCAB, max_seconds=float("inf")).find_form(shares_heads=False)
    assert form is Form.ROWS, text


# --------------------------------------------------------------------------------------------------- failures


def _given_or(layer: GroupLayer, working: Iterator[Any], fail: Any, *place: Any) -> Any:
    return next(working, fail)(layer, *place)


@pytest.mark.parametrize("call", ["separate", "separate_all", "detach"])
def test_rows_that_cannot_leave_a_group_decode_on_in_it(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(grouped("llama"))
    rows = [decoding.join(length) for length in (30, 31, 32)]
    decoding.step(2)
    decoding.read()

    def fail(*_: Any) -> None:
        raise RuntimeError("[malloc] out of memory")

    given_rows: dict[str, list[Any]] = {"separate": [rows[0].row.caches], "detach": [rows[0].row]}
    leaving = given_rows.get(call, [])
    for num_layers in range(2):
        working = iter([GroupLayer.given] * num_layers)
        with monkeypatch.context() as patch:
            patch.setattr(GroupLayer, "given", partialmethod(_given_or, working, fail))
            with pytest.raises(RuntimeError, match="memory"):
                getattr(decoding.runner, call)(*leaving)
        decoding.step(2)
        decoding.read()
    driver.assert_like_alone("llama", *rows)


def test_a_step_that_fails_when_it_is_read_takes_shared_state_with_it() -> None:
    decoding = Decoding(grouped("llama"))
    rows = [decoding.join(length) for length in (30, 31)]
    decoding.step(2)
    decoding.read()
    rows[0].row.known, rows[1].row.known = [1], [2]
    step = launch(decoding.runner, [row.row for row in rows], None)
    step.sampled = cast(Any, _Failing())
    with pytest.raises(RuntimeError, match="device"):
        step.tokens()
    decoding.runner.drain([row.row for row in rows])
    assert groups_of(decoding.runner) == [] and all(row.row.is_lost for row in rows)


class _Failing:
    def tolist(self) -> list[int]:
        raise RuntimeError("the device was lost")


# ----------------------------------------------------------------------------------- cost of a step


VIEWS = {
    "Reshape",
    "Transpose",
    "Slice",
    "Split",
    "Squeeze",
    "ExpandDims",
    "Broadcast",
    "Unflatten",
    "Flatten",
    "Copy",
}
"""Nodes of MLX's graph that compute nothing."""


def num_launches(array: mx.array, folder: Path) -> int:
    """Operations of a graph that a GPU would be given; a concatenation copies each of its inputs."""
    mx.export_to_dot(str(folder / "graph.dot"), array)
    text = (folder / "graph.dot").read_text()
    labels = dict(re.findall(r'\{ (\d+) \[label ="([A-Za-z]+)', text))
    inputs = Counter(labels.get(node) for node in re.findall(r"-> (\d+)", text))
    computing = [name for name in labels.values() if name not in VIEWS and name != "Concatenate"]
    return len(computing) + inputs["Concatenate"]


NUM_ONCE = 8
"""Operations of a step for all layers: index arrays, offsets and a mask. The model here has three layers."""


def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, rotary embeddings and norms become one operation each, as a GPU gets them."""

    def attention(queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any = None, **_: Any) -> mx.array:
        return mx.abs(mx.depends(queries, [keys, values, *([mask] if isinstance(mask, mx.array) else [])]))

    monkeypatch.setattr(ragged, "_mlx_attention", attention)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(mx.fast, "rope", lambda x, *_, offset, **options: mx.abs(x))
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, *_: mx.abs(x))


def launches_of_a_step(decoding: Decoding, folder: Path) -> int:
    runner, rows = decoding.runner, [sequence.row for sequence in decoding.live]
    first = launch(runner, rows, None)
    first.tokens()
    step = runner.prepare(rows, first)
    assert step.sampled is not None
    count = num_launches(step.sampled, folder)
    runner.start(step)
    step.tokens()
    runner.separate_all()
    return count


@pytest.mark.parametrize("num_rows", [8, 32])
def test_a_step_of_many_rows_has_few_more_operations_than_one_of_one(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse(monkeypatch)
    counts = []
    for lengths in ([50], [40 + row % 5 for row in range(num_rows)]):
        decoding = Decoding(grouped("llama"))
        for length in lengths:
            decoding.join(length)
        counts.append(launches_of_a_step(decoding, tmp_path))
    assert counts[1] <= 1.1 * counts[0] + NUM_ONCE, counts


def num_calls(act: Callable[[], object]) -> int:
    """Calls of functions, of Python and of C, that `act` makes."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # whose callbacks are calls as well
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_step_of_32_rows_takes_at_most_twice_the_python_of_one_row() -> None:
    """In a step that nobody joins or leaves. With three layers, as here, what is done once for all weighs much."""
    runner, counts = grouped("llama"), list[int]()
    for lengths in ([50], [40 + row % 5 for row in range(32)]):
        decoding = Decoding(runner)
        rows = [decoding.join(length).row for length in lengths]
        steps = [launch(runner, rows, None)]
        steps.append(launch(runner, rows, steps[0]))
        counts.append(num_calls(partial(runner.prepare, rows, steps[1])))
        runner.separate_all()
    assert counts[1] <= 2 * counts[0], counts
