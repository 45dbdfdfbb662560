"""Drafts pay where text is copied, and cost nothing where it is not, in simulated time."""

import itertools
import math
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pydoc_data.topics import topics
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.history import History, PredictionFollower
from models.inference.abilities import Feeds
from server.engine.draft_cost import OverheadBudget, StallFilter
from server.engine.request import DraftSource, GenerationRequest
from server.engine.speculation import Drafting, Speculation, choose

KNOTS = (1, 2, 4, 8, 16, 32)
MAX_FEED_TOKENS = 33

Curve = Callable[[int], float]
"""Seconds of a model call, by its tokens."""


def flat(num_tokens: int) -> float:
    return 0.01


def linear(num_tokens: int) -> float:
    return 0.01 * num_tokens


def stepped(num_tokens: int) -> float:
    """As a GPU with 4-bit weights: a second tile of rows takes as long as the first."""
    return float(np.interp(num_tokens, (1, 2, 4, 8, 10, 32, 1024), (0.01, 0.0103, 0.0145, 0.028, 0.045, 0.045, 1.44)))


def memory_bound(num_tokens: int) -> float:
    return 0.01 * (1 + 0.06 * (num_tokens - 1))


@cache
def prose() -> list[int]:
    """Words as tokens."""
    return [crc32(word.encode()) % 50_000 for text in topics.values() for word in text.split()]


def edited(text: Sequence[int], error_rate: float, seed: int) -> list[int]:
    """Some tokens replaced, dropped or preceded by new ones."""
    chance, output = random.Random(seed), list[int]()
    for token in text:
        if chance.random() >= error_rate:
            output.append(token)
        else:
            output += chance.choice([[], [60_000 + chance.randrange(1000)], [60_000 + chance.randrange(1000), token]])
    return output


def request_of(prompt: Sequence[int], prediction: Sequence[int] | None = None) -> GenerationRequest:
    expected = None if prediction is None else np.array(prediction, np.int32)
    return GenerationRequest("1", np.array(prompt, np.int32), max_tokens=1000, prediction=expected)


class Simulation:
    """An engine in simulated time, whose rows say given texts."""

    def __init__(
        self,
        curve: Curve,
        *,
        measured: Curve | None = None,
        lost_seconds: float = 0.0,
        call_seconds: float = 0.0,
        looking_seconds: float = 0.0,
        together: bool = True,
        again: bool = False,
        draft_seconds: float | None = None,
        accuracy: float = 0.0,
        noise: float = 0.1,
        drafter: DraftSource = DraftSource.MTP,
    ) -> None:
        """`measured`: what is found at load. `lost_seconds` are those of a plain step that overlaps with none.

        `call_seconds` are what a call with drafts takes beyond `curve`; `draft_seconds` and `accuracy` those of the
        `drafter`, by token.
        """
        self.curve, self.together = curve, together
        self.lost_seconds, self.call_seconds, self.looking_seconds = lost_seconds, call_seconds, looking_seconds
        self.draft_seconds, self.accuracy = draft_seconds, accuracy
        self.pace: Callable[[float], float] = lambda now: 1.0
        """Stretches what is done at some time."""
        self.now = 0.0
        self._chance, self._noise = random.Random(0), noise
        step_seconds = {knot: (measured or curve)(knot) * self._chance.uniform(0.97, 1.03) for knot in KNOTS}
        self.speculation = Speculation(
            History(),
            Feeds(step_seconds, together, draft_seconds=draft_seconds),
            feeds_again=again,
            drafter=drafter,
        )
        self._again = again

    def begin(self, prompt: Sequence[int], prediction: Sequence[int] | None = None) -> Drafting:
        return self.speculation.begin(request_of(prompt, prediction), 0)

    def run(self, rows: Sequence[tuple[Drafting, Sequence[int]]]) -> float:
        """Has rows say their texts, together, until one has ended; returns the speed against that without drafts.

        As the engine, it starts a plain step before the tokens of the one before are looked at.
        """
        said, begun = Said(rows), self.now
        num_rows, is_under_way, left_seconds = len(rows), False, math.nan
        while not said.is_over:
            if not is_under_way:
                is_under_way = not self._step_with_drafts(said)
                if is_under_way:
                    took = self._pass(self.curve(num_rows) + self.lost_seconds)
                    if not math.isnan(left_seconds):
                        self.speculation.observe_resumed(num_rows, left_seconds + took)
                continue
            left_seconds = self._pass(self.looking_seconds)
            is_under_way = not self.speculation.may_draft(said.drafting)
            said.accept([0] * num_rows)
            if is_under_way:
                self.speculation.observe_plain(num_rows, self._pass(self.curve(num_rows)), left_seconds)
        for row in said.drafting:
            row.end()
        return said.num_tokens / num_rows * self.curve(num_rows) / (self.now - begun)

    def _step_with_drafts(self, said: "Said") -> bool:
        """False where there is nothing to draft, and nothing to evaluate again."""
        drafts = self.speculation.plan(said.drafting, said.limits, partial(self._predict, said), said.known)
        fed = [len(draft) + number for draft, number in zip(drafts, said.known, strict=True)]
        if max(fed) == 1:
            return False
        took = self._pass(self.looking_seconds + self._step_seconds(fed)) + self._drafting_seconds
        self._drafting_seconds = 0.0
        accepted = said.agreed(drafts)
        said.accept(accepted)
        drafted = [len(draft) for draft in drafts]
        if self._again:
            said.known = [2 + a if a < d else 1 for a, d in zip(accepted, drafted, strict=True)]
        self.speculation.learn(said.drafting, fed, drafted, accepted, took)
        return True

    _drafting_seconds = 0.0

    def _predict(self, said: "Said", wanted: list[int]) -> list[list[int]]:
        assert self.draft_seconds is not None
        self._drafting_seconds = self._pass(max(wanted) * self.draft_seconds)
        self.speculation.observe_drafter(wanted, self._drafting_seconds)
        following = zip(said.following(max(wanted)), wanted, strict=True)
        return [
            [token if self._chance.random() < self.accuracy else -9 for token in text[:number]]
            for text, number in following
        ]

    def _step_seconds(self, fed: list[int]) -> float:
        num_rows, longer = len(fed), [number for number in fed if number > 1]
        if self.together:
            num_tokens = num_rows * max(fed) if self._again else sum(fed)
            return self.curve(num_rows) + self.curve(num_tokens) - self.curve(num_rows) + self.call_seconds
        rest = self.curve(num_rows - len(longer)) if len(longer) < num_rows else 0.0
        return rest + sum(self.curve(number) + self.call_seconds for number in longer)

    def _pass(self, seconds: float) -> float:
        """Lets time pass, with noise."""
        if not seconds:
            return 0.0
        seconds *= self._chance.lognormvariate(-(self._noise**2) / 2, self._noise)
        took = seconds * self.pace(self.now)
        self.now += took
        return took


class Said:
    """What rows have said, and will."""

    def __init__(self, rows: Sequence[tuple[Drafting, Sequence[int]]]) -> None:
        self.drafting, self._texts = [row for row, _ in rows], [text for _, text in rows]
        self._at = [0] * len(rows)
        self.known = [1] * len(rows)

    @property
    def num_tokens(self) -> int:
        return sum(self._at)

    @property
    def limits(self) -> list[int]:
        return [len(text) - place - 1 for text, place in zip(self._texts, self._at, strict=True)]

    @property
    def is_over(self) -> bool:
        return min(self.limits) < 0

    def following(self, num_tokens: int) -> list[list[int]]:
        pairs = zip(self._texts, self._at, strict=True)
        return [[*text[place : place + num_tokens]] for text, place in pairs]

    def agreed(self, drafts: Sequence[Sequence[int]]) -> list[int]:
        following = self.following(MAX_FEED_TOKENS)
        pairs = zip(drafts, following, strict=True)
        return [[*map(int.__eq__, draft, text), False].index(False) for draft, text in pairs]

    def accept(self, accepted: Sequence[int]) -> None:
        for index, (row, number) in enumerate(zip(self.drafting, accepted, strict=True)):
            for token in self._texts[index][self._at[index] :][: number + 1]:
                row.push(token)
            self._at[index] += number + 1


def planned(speculation: Speculation, rows: Sequence[Drafting], limits: Sequence[int]) -> list[list[int]]:
    """The drafts of rows with one known token, for which no drafter drafts."""
    return speculation.plan(rows, limits, lambda wanted: [[] for _ in wanted], [1] * len(rows))


def seen_plain(together: bool = True, draft_seconds: float | None = None) -> Simulation:
    """Where steps without drafts are known, by rows, and further tokens cost nothing."""
    simulation = Simulation(flat, together=together, draft_seconds=draft_seconds)
    for num_rows in [1, 2, 3, 4, 5, 6, 7] * 3:
        simulation.speculation.observe_plain(num_rows, flat(num_rows), 0.0)
    return simulation


def prose_rows(simulation: Simulation, num_rows: int) -> list[tuple[Drafting, Sequence[int]]]:
    """Rows that write on in a text of words."""
    rows: list[tuple[Drafting, Sequence[int]]] = []
    text = prose()
    for number in range(num_rows):
        start = 2500 * number % (len(text) - 2500)
        rows.append((simulation.begin(text[start : start + 1000]), text[start + 1000 : start + 1600]))
    return rows


def copied_rows(
    simulation: Simulation, num_rows: int, error_rate: float, num_tokens: int = 1000
) -> list[tuple[Drafting, Sequence[int]]]:
    """Rows that each rewrite a text of their own."""
    rows: list[tuple[Drafting, Sequence[int]]] = []
    text = prose()
    for number in range(num_rows):
        start = 2500 * number % (len(text) - 2500)
        own = text[start : start + num_tokens]
        rows.append((simulation.begin([*own, 70_000 + number]), own[:5] + edited(own[5:], error_rate, number)))
    return rows


def partly_copied_rows(simulation: Simulation, num_rows: int) -> list[tuple[Drafting, Sequence[int]]]:
    """Rows that copy 30 tokens of a prompt after each 100 new ones."""
    rows: list[tuple[Drafting, Sequence[int]]] = []
    text = prose()
    for number in range(0, 2500 * num_rows, 2500):
        new, own = text[30_000 + number :], text[number : number + 600]
        said = [[*new[100 * part : 100 * part + 100], *own[30 * part : 30 * part + 30]] for part in range(20)]
        rows.append((simulation.begin([*own, 70_000 + number]), [*itertools.chain.from_iterable(said)]))
    return rows


CURVES = (flat, linear, stepped, memory_bound)


@pytest.mark.usual("*-0.003-[14]", "*-0.0-32")
@pytest.mark.parametrize("num_rows", [1, 4, 8, 32])
@pytest.mark.parametrize("lost_seconds", [0.0, 0.003])
@pytest.mark.parametrize("curve", CURVES)
def test_prose_is_never_slower(curve: Curve, lost_seconds: float, num_rows: int) -> None:
    simulation = Simulation(curve, lost_seconds=lost_seconds)
    assert simulation.run(prose_rows(simulation, num_rows)) >= 0.99


@pytest.mark.parametrize("num_rows", [1, 4, 8, 32])
@pytest.mark.parametrize("together", [True, False])
def test_copying_is_not_slower_where_each_token_costs_as_much(num_rows: int, together: bool) -> None:
    simulation = Simulation(linear, lost_seconds=0.001, together=together)
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) >= 0.98


WAYS = ((True, False), (False, False), (False, True), (True, True))
"""Whether rows with drafts share a call, and whether they evaluate again what stayed of one."""


@pytest.mark.parametrize(
    ("num_rows", "way", "error_rate"),
    [
        *itertools.product((1, 4), WAYS, (0.1, 0.7)),
        *((num_rows, way, 0.3) for num_rows, way in zip((8, 32, 8, 32), WAYS, strict=True)),
    ],
)
def test_texts_that_only_look_alike_cost_nothing(num_rows: int, way: tuple[bool, bool], error_rate: float) -> None:
    together, again = way
    simulation = Simulation(memory_bound, lost_seconds=0.003, together=together, again=again)
    assert simulation.run(copied_rows(simulation, num_rows, error_rate)) >= 0.985


@pytest.mark.parametrize(
    ("curve", "num_rows", "least"),
    [
        (flat, 1, 8.0),
        (flat, 8, 4.0),
        (memory_bound, 1, 4.0),
        (memory_bound, 4, 2.2),
        (stepped, 1, 3.0),
        (stepped, 8, 1.7),
    ],
)
def test_copying_is_faster_where_further_tokens_cost_less(curve: Curve, num_rows: int, least: float) -> None:
    simulation = Simulation(curve, lost_seconds=0.001)
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) >= least
    stats = simulation.speculation.stats
    assert stats.accepted[DraftSource.HISTORY] > 0.5 * stats.drafted[DraftSource.HISTORY]
    assert stats.accepted[DraftSource.PREDICTION] == 0


@pytest.mark.parametrize(
    ("curve", "draft_seconds", "accuracy", "num_rows", "least"),
    [
        *((memory_bound, 0.001, accuracy, 1, least) for accuracy, least in ((0.95, 2.3), (0.8, 1.5), (0.6, 1.15))),
        *((memory_bound, 0.001, accuracy, num_rows, 1.2) for accuracy, num_rows in ((0.8, 4), (0.9, 8))),
        *((memory_bound, *costs, num_rows, 0.985) for costs in ((0.001, 0.1), (0.01, 0.9)) for num_rows in (1, 8)),
        *((linear, 0.001, 0.9, num_rows, 0.985) for num_rows in (1, 8)),
    ],
)
@pytest.mark.parametrize("drafter", [DraftSource.MTP, DraftSource.DRAFT])
def test_a_drafter_makes_prose_faster_or_costs_nothing(
    curve: Curve, draft_seconds: float, accuracy: float, num_rows: int, least: float, drafter: DraftSource
) -> None:
    simulation = Simulation(
        curve, lost_seconds=0.0005, draft_seconds=draft_seconds, accuracy=accuracy, drafter=drafter
    )
    assert simulation.run(prose_rows(simulation, num_rows)) >= least
    stats = simulation.speculation.stats
    assert {source for source, number in stats.drafted.items() if number} <= {drafter, DraftSource.HISTORY}
    if least > 1:
        assert stats.accepted[drafter] > 0.35 * stats.drafted[drafter]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_an_mtp_module_loses_keeps_no_text_from_being_followed(num_rows: int) -> None:
    speeds = list[float]()
    for draft_seconds in (None, 0.003):
        simulation = Simulation(memory_bound, looking_seconds=5e-5, draft_seconds=draft_seconds, accuracy=0.1)
        speeds.append(simulation.run(partly_copied_rows(simulation, num_rows)))
    assert speeds[1] >= 0.95 * speeds[0]
    assert speeds[0] > 1.1


def test_a_drafter_whose_tokens_a_grammar_forbids_is_soon_asked_no_more() -> None:
    speculation, num_asked = seen_plain(draft_seconds=0.002).speculation, 0
    row = speculation.begin(request_of([1, 2, 3]), 0)

    def forbidden(wanted: list[int]) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        row.learn(1, 0, first=0)
        return [[-9]]

    for token in range(100, 140):
        speculation.observe_plain(1, flat(1), 0.0)
        speculation.plan([row], [8], forbidden, [1])
        row.push(token)
    assert 0 < num_asked < 20


def test_an_mtp_module_is_tried_again_once_it_may_pay() -> None:
    simulation = Simulation(memory_bound, draft_seconds=0.003, accuracy=0.05)

    def new_text(seed: int) -> list[tuple[Drafting, Sequence[int]]]:
        """Nothing in it was ever said."""
        text = random.Random(seed).choices(range(50_000), k=1600)
        return [(simulation.begin(text[:1000]), text[1000:])]

    for seed in range(8):
        simulation.run(new_text(seed))
    simulation.accuracy = 0.95
    speeds = [simulation.run(new_text(seed)) for seed in range(8, 12)]
    assert max(speeds) > 1.3, speeds


@pytest.mark.parametrize(("num_rows", "least"), [(2, 1.9), (4, 1.4), (8, 1.1)])
def test_rows_that_feed_again_are_faster_in_one_call_than_apart(num_rows: int, least: float) -> None:
    speeds = list[float]()
    for together in (False, True):
        simulation = Simulation(memory_bound, lost_seconds=0.001, together=together, again=True)
        speeds.append(simulation.run(copied_rows(simulation, num_rows, 0.05)))
    assert speeds[1] >= least and speeds[1] > 1.1 * speeds[0], speeds


def bound_by_overhead(num_tokens: int) -> float:
    """As a tiny model on a CPU: what surrounds the calls takes the time, for each token."""
    return 0.001 + 0.0007 * num_tokens


def calls_alone(num_tokens: int) -> float:
    """The seconds that are measured at load for `bound_by_overhead`."""
    return 0.0009 + 0.00006 * num_tokens


COSTS: tuple[dict[str, Any], ...] = (
    {"curve": bound_by_overhead, "measured": calls_alone, "call_seconds": 0.005},
    {"curve": bound_by_overhead, "measured": calls_alone, "call_seconds": 0.003, "together": False},
    {"curve": linear, "measured": stepped},
    {"curve": memory_bound, "together": False, "again": True, "call_seconds": 0.02},
)


@pytest.mark.parametrize(
    ("num_rows", "costs"), [*itertools.product((1, 4), COSTS), *zip((32, 16, 16, 32), COSTS, strict=True)]
)
def test_drafts_that_cost_far_more_than_was_measured_make_nothing_slower(
    num_rows: int, costs: dict[str, Any]
) -> None:
    """Behind the first 60 tokens, in which the costs are learned."""
    simulation = Simulation(**costs, lost_seconds=0.0005, looking_seconds=2e-6 * num_rows)
    simulation.run(copied_rows(simulation, num_rows, 0.02, num_tokens=60))
    assert simulation.run(copied_rows(simulation, num_rows, 0.05)) >= 0.97
    assert simulation.run(copied_rows(simulation, num_rows, 0.2)) >= 0.975


def stretches(simulation: Simulation, num_rows: int, number: int) -> list[float]:
    """The speeds at which rows copy one text of 60 tokens after another."""
    text, speeds = prose(), list[float]()
    for _ in range(number):
        starts = [int(simulation.now * 1000) % 20_000 + 300 * row for row in range(num_rows)]
        copied = [text[start : start + 60] for start in starts]
        speeds.append(simulation.run([(simulation.begin([*own, -1]), own) for own in copied]))
    return speeds


@pytest.mark.parametrize("looking_seconds", [0.0, 2e-5])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_drafts_go_on_after_a_stall(num_rows: int, looking_seconds: float) -> None:
    simulation = Simulation(memory_bound, lost_seconds=0.001, looking_seconds=looking_seconds)
    usual = min(stretches(simulation, num_rows, 8)[2:])
    for number in range(5):
        stall = iter([1.0] * number + [1e6])
        simulation.pace = lambda now, stall=stall: next(stall, 1.0)  # type: ignore[misc]
        stretches(simulation, num_rows, 1)
        assert not [*stall], "too short a stretch for the stall"
        assert stretches(simulation, num_rows, 1)[0] > 0.85 * usual


@pytest.mark.parametrize("num_rows", [1, 4])
def test_drafts_return_within_some_answers_after_a_stall_of_several_steps(num_rows: int) -> None:
    """Which looks like drafts that cost too much."""
    simulation = Simulation(memory_bound, lost_seconds=0.001)
    usual = min(stretches(simulation, num_rows, 8)[2:])
    for number in range(3, 8):
        stall = iter([1.0] * number + [20.0] * 3)
        simulation.pace = lambda now, stall=stall: next(stall, 1.0)  # type: ignore[misc]
        assert max(stretches(simulation, num_rows, 10)) > 0.85 * usual
        assert not [*stall], "too short a stretch for the stall"


def test_only_what_comes_twice_is_no_stall() -> None:
    stalls = StallFilter()
    assert [stalls.filtered(seconds, 1.0) for seconds in (9.0, 1.0, 9.0, 5.0, 6.0, 1.0)] == [
        1.5,
        1.0,
        1.5,
        5.0,
        5.0,
        1.0,
    ]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_drafts_that_cost_too_much_return_once_they_pay(num_rows: int) -> None:
    simulation = Simulation(memory_bound, call_seconds=0.2)
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) > 0.9
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) > 0.97
    simulation.call_seconds = 0.0
    simulation.run(copied_rows(simulation, num_rows, 0.02, num_tokens=1500))
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) > 1.5


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("factor", "seconds"), [(4.0, 1.0), (10.0, 0.3)])
def test_drafts_return_once_a_machine_is_no_longer_busy(factor: float, seconds: float, num_rows: int) -> None:
    simulation = Simulation(memory_bound, lost_seconds=0.001)
    usual = min(stretches(simulation, num_rows, 8)[2:])
    busy_until = simulation.now + seconds
    simulation.pace = lambda now: factor if now < busy_until else 1.0
    while simulation.now < busy_until:
        stretches(simulation, num_rows, 1)
    assert max(stretches(simulation, num_rows, 2)) > 0.85 * usual


@pytest.mark.parametrize("measured", [flat, stepped])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_cost_that_was_measured_wrong_is_soon_known_better(measured: Curve, num_rows: int) -> None:
    simulation = Simulation(linear, measured=measured)
    simulation.run(copied_rows(simulation, num_rows, 0.02))
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) >= 0.97


# -- the best lengths

calls_of = st.lists(st.lists(st.tuples(st.floats(0.02, 1), st.floats(0.01, 2)), max_size=3), min_size=1, max_size=3)


@given(calls_of, st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.integers(1, 4))
def test_no_other_lengths_are_expected_to_be_faster(
    steps: list[list[tuple[float, float]]], more: list[float], num_rows: int
) -> None:
    """Of one call; of several, none give more tokens beyond those of plain steps."""
    options = [
        list(itertools.accumulate(call, lambda one, other: (one[0] + other[0], one[1] + other[1]))) for call in steps
    ]
    rest = [0.0, *itertools.accumulate(more[: len(options)])]
    plain = num_rows / rest[-1]

    def value(lengths: Sequence[int]) -> float:
        chosen = [call[length - 1] for call, length in zip(options, lengths, strict=True) if length]
        took = rest[len(options) - len(chosen)] + sum(cost for _, cost in chosen)
        tokens = num_rows + sum(accepted for accepted, _ in chosen)
        return float(tokens / took - plain if len(options) == 1 else tokens - plain * took)

    best = max(map(value, itertools.product(*(range(len(call) + 1) for call in options))))
    choice = choose(options, rest, num_rows)
    if choice is None:
        assert best == pytest.approx(0.0, abs=1e-6)
    else:
        assert value(choice.lengths) == pytest.approx(best)
        assert value(choice.lengths) > 0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60), st.booleans())
def test_no_draft_is_longer_than_its_limit(limits: list[int], num_agreed: int, together: bool) -> None:
    simulation = seen_plain(together)
    text = list(range(100))
    rows = [simulation.begin([*text, -1]) for _ in limits]
    for row in rows:
        for token in text[:num_agreed]:
            row.push(token)
    drafts = planned(simulation.speculation, rows, limits)
    for draft, limit in zip(drafts, limits, strict=True):
        assert draft == text[num_agreed : num_agreed + len(draft)]
        assert len(draft) <= min(limit, MAX_FEED_TOKENS - 1)
    if together:
        assert any(drafts) == (num_agreed >= 3 and max(limits) > 0)


falling = st.lists(st.floats(0.3, 1), max_size=4).map(lambda odds: [*itertools.accumulate(odds, float.__mul__)])


@given(st.lists(st.tuples(falling, st.integers(1, 4)), min_size=1, max_size=3), st.sampled_from(CURVES))
def test_no_other_drafts_of_padded_rows_are_expected_to_be_faster(
    rows: list[tuple[list[float], int]], curve: Curve
) -> None:
    num_rows, known = len(rows), [number for _, number in rows]
    simulation = Simulation(curve, together=True, again=True)
    simulation.speculation.observe_plain(num_rows, curve(num_rows), 0.0)
    calls, plain = simulation.speculation._cost.calls, curve(num_rows)

    def speed(lengths: tuple[int, ...]) -> float:
        """Behind what known tokens take; with a rejection a row feeds two tokens again, and so do others."""
        drafts = [chances[:length] for (chances, _), length in zip(rows, lengths, strict=True)]
        longest = max(map(int.__add__, known, lengths))
        stays = math.prod(draft[-1] for draft in drafts if draft)
        again = max(0.0, calls[2 * num_rows] - calls[num_rows]) * (1 - stays)
        took = 1 + (calls[num_rows * longest] - calls[num_rows * max(known)] + again) / plain
        return (num_rows + sum(map(sum, drafts))) / took

    # A longer row makes room in the others.
    widths = range(max(known), 9)
    fits = [[min(max(0, width - number), len(chances)) for chances, number in rows] for width in widths]
    best = max(speed(tuple(lengths)) for lengths in [[0] * num_rows, *fits])
    found = simulation.speculation._choose([chances for chances, _ in rows], known, 1e9)
    if found is None:
        assert best <= num_rows * 1.031
    else:
        assert speed(tuple(found.lengths)) == pytest.approx(best)
        assert found.tokens / found.cost == pytest.approx(best)


# -- what is followed


def next_draft(simulation: Simulation, row: Drafting) -> list[int]:
    return planned(simulation.speculation, [row], [8])[0]


def test_a_prediction_is_followed_from_the_first_token_and_again_behind_a_change() -> None:
    simulation = seen_plain()
    row = simulation.begin([1], prediction=[10, 11, 12, 13, 14, 15, 16, 17])
    assert simulation.speculation.may_draft([row])
    assert next_draft(simulation, row) == [10, 11, 12, 13, 14, 15, 16, 17]
    for token in (10, 11, 99, 13, 14):
        row.push(token)
    assert next_draft(simulation, row) == []
    row.push(15)
    assert next_draft(simulation, row) == [16, 17]
    row.push(16)
    assert row.prediction is not None
    assert (row.prediction.num_confirmed, row.prediction.num_missed) == (6, 2)
    simulation.speculation.learn([row], [3], [2], [1], 0.01)
    assert simulation.speculation.stats.drafted[DraftSource.PREDICTION] == 2
    assert simulation.speculation.stats.accepted[DraftSource.PREDICTION] == 1


@given(
    prediction=st.lists(st.integers(0, 1), min_size=1, max_size=30), output=st.lists(st.integers(0, 2), max_size=60)
)
@example(prediction=[1, 1, 1, 1, 2, *range(3, 9)], output=[1] * 60)
@example(prediction=[1, 1, 1, 2, 1, 1, 1, 3], output=[1] * 4)
def test_no_more_of_a_prediction_is_confirmed_than_the_output_says(prediction: list[int], output: list[int]) -> None:
    follower = PredictionFollower(np.array(prediction, np.int32))
    for token in output:
        follower.push(token)
    assert follower.num_confirmed + follower.num_missed == len(prediction)
    assert follower.num_confirmed <= len(output)
    assert follower.num_confirmed <= sum(prediction.count(token) for token in set(output))


def test_a_prediction_as_long_as_a_context_takes_few_bytes() -> None:
    tokens = np.random.default_rng(1).integers(0, 150_000, 50_000).astype(np.int32)
    tracemalloc.start()
    follower = PredictionFollower(tokens)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    for token in (7, *tokens[-8:-4].tolist()):
        follower.push(token)
    assert follower.next_tokens(9) == tokens[-4:].tolist()
    assert num_bytes < 32 * len(tokens)


TEXT = list(range(50))


def drafts_after(simulation: Simulation) -> list[int]:
    """What follows the beginning of `TEXT` in another request."""
    row = simulation.speculation.begin(request_of([-5, -6]), 0)
    for token in TEXT[:6]:
        row.push(token)
    return planned(simulation.speculation, [row], [5])[0]


@pytest.mark.parametrize("options", [{"is_volatile": True}, {"cache_prompt": False}])
def test_what_is_not_kept_is_followed_by_its_own_request_only(options: dict[str, bool]) -> None:
    simulation = seen_plain()
    request = replace(request_of([*TEXT, -9]), **options)  # type: ignore[arg-type]
    row = simulation.speculation.begin(request, 0)
    for token in TEXT[:6]:
        row.push(token)
    assert planned(simulation.speculation, [row], [5]) == [TEXT[6:11]]
    row.end()
    assert drafts_after(simulation) == []


def test_a_request_that_wants_no_drafts_gets_none_and_is_followed_by_others() -> None:
    simulation = seen_plain()
    row = simulation.speculation.begin(replace(request_of([*TEXT, -9]), speculates=False), 0)
    for token in TEXT[:6]:
        row.push(token)
    assert not simulation.speculation.may_draft([row])
    assert planned(simulation.speculation, [row], [5]) == [[]]
    row.end()
    assert drafts_after(simulation) == TEXT[6:11]


@pytest.mark.parametrize("is_volatile", [False, True])
def test_a_tool_result_is_followed_as_calls_quote_it(is_volatile: bool) -> None:
    simulation = seen_plain()
    quotable = (np.array(TEXT, np.int32),)
    row = simulation.speculation.begin(replace(request_of([1, 2]), quotable=quotable, is_volatile=is_volatile), 0)
    for token in TEXT[:6]:
        row.push(token)
    assert planned(simulation.speculation, [row], [5]) == [TEXT[6:11]]
    assert drafts_after(simulation) == ([] if is_volatile else TEXT[6:11])


def test_a_draft_that_came_to_nothing_does_not_make_later_steps_seem_cheap() -> None:
    """As where a grammar forbids what the drafter drafts, and then forces tokens."""
    drafted = []
    for drafts_in_vain in (False, True):
        speculation = Speculation(History(), Feeds(dict.fromkeys(KNOTS, 0.01), together=True, draft_seconds=0.001))
        said, num_drafted = list(range(100, 2000)), 0
        row = speculation.begin(request_of([1, 2, 3], said), 0)
        for _ in range(3):
            speculation.observe_plain(1, 0.01, 0.0)
        while said:
            speculation.observe_plain(1, 0.01, 0.0)
            if drafts_in_vain:
                speculation.observe_drafter([1], 0.009)
            (draft,) = planned(speculation, [row], [8])
            if draft:
                num_accepted = len(draft)
                seconds = 0.01 * (1 + 1.2 * num_accepted)
                speculation.learn([row], [1 + num_accepted], [num_accepted], [num_accepted], seconds)
            num_drafted += len(draft)
            for token in said[: len(draft) + 1]:
                row.push(token)
            del said[: len(draft) + 1]
        drafted.append(num_drafted)
    assert drafted[0] == drafted[1]


def test_looking_for_drafts_takes_a_bounded_part_of_the_time_and_goes_on_after_a_stall() -> None:
    budget, num_looked = OverheadBudget(), 0
    for _ in range(1000):
        num_looked += budget.may_look_up
        budget.observe_plain(0.05 * budget.may_look_up)
    assert 250 <= num_looked <= 310
    assert [budget.left(of_drafter) > 2 for of_drafter in (False, True)] == [True, True]
    budget.observe_plain(30.0)
    for _ in range(12):
        budget.observe_plain(0.0)
    assert budget.may_look_up
