"""Drafts pay where text is copied, and cost nothing where it is not, in simulated time."""

import itertools
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pydoc_data.topics import topics
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.history import History
from server.engine.request import DraftSource, GenerationRequest
from server.engine.speculation import (
    Drafting,
    PredictionFollower,
    Speculation,
    StepCost,
    choose_apart,
    choose_together,
)

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
            output += chance.choice([[], [-2 - chance.randrange(1000)], [-2 - chance.randrange(1000), token]])
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
        together: bool = True,
        again: bool = False,
        draft_seconds: float | None = None,
        accuracy: float = 0.0,
    ) -> None:
        """`measured`: what is found at load. `lost_seconds`: of a step that overlaps with none.

        `draft_seconds` and `accuracy` are those of an MTP module, by token.
        """
        self.curve, self.lost_seconds, self.together = curve, lost_seconds, together
        self.draft_seconds, self.accuracy = draft_seconds, accuracy
        self._chance = random.Random(0)
        self.speculation = Speculation(
            History(),
            {knot: self._noisy((measured or curve)(knot), 0.03) for knot in KNOTS},
            feeds_together=together,
            max_feed_tokens=MAX_FEED_TOKENS,
            feeds_again=again,
            draft_seconds=draft_seconds,
        )
        self._again = again
        self._drafting_seconds = 0.0

    def _noisy(self, seconds: float, noise: float = 0.1) -> float:
        return seconds * self._chance.lognormvariate(-(noise**2) / 2, noise)

    def begin(self, prompt: Sequence[int], prediction: Sequence[int] | None = None) -> Drafting:
        return self.speculation.begin(request_of(prompt, prediction), 0)

    def run(self, rows: Sequence[tuple[Drafting, Sequence[int]]]) -> float:
        """Has rows say their texts, together, until one has ended; returns the speed against that without drafts."""
        drafting, texts = [row for row, _ in rows], [text for _, text in rows]
        at, known, seconds = [0] * len(rows), [1] * len(rows), 0.0
        while all(place < len(text) for place, text in zip(at, texts, strict=True)):
            drafts = [list[int]() for _ in rows]
            waits = max(known) > 1 or self.speculation.may_draft(drafting)
            if waits:
                seconds += self.lost_seconds
                limits = [len(text) - place - 1 for text, place in zip(texts, at, strict=True)]
                rest = [text[place:] for text, place in zip(texts, at, strict=True)]
                drafts = self.speculation.plan(drafting, limits, partial(self._predict, rest))
            took = self._noisy(self._step([len(draft) + num for draft, num in zip(drafts, known, strict=True)]))
            seconds += took
            accepted = []
            for index, draft in enumerate(drafts):
                following = texts[index][at[index] :]
                agreed = [a == b for a, b in zip(draft, following, strict=False)]
                accepted.append([*agreed, False].index(False))
                for token in following[: accepted[-1] + 1]:
                    drafting[index].push(token)
                at[index] += accepted[-1] + 1
                known[index] = 2 + accepted[-1] if self._again and accepted[-1] < len(draft) else 1
            if any(drafts):
                self.speculation.learn(drafting, list(map(len, drafts)), accepted, took + self.lost_seconds)
            elif not waits:
                self.speculation.observe(len(rows), took)
        for row in drafting:
            row.end()
        return sum(at) / len(rows) * self.curve(len(rows)) / (seconds + self._drafting_seconds)

    def _predict(self, following: Sequence[Sequence[int]], wanted: list[int]) -> list[list[int]]:
        assert self.draft_seconds is not None
        seconds = self._noisy(max(wanted) * self.draft_seconds)
        self._drafting_seconds += seconds
        self.speculation.observe_drafting(wanted, seconds)
        rows = zip(following, wanted, strict=True)
        return [
            [token if self._chance.random() < self.accuracy else -9 for token in text[:num]] for text, num in rows
        ]

    def _step(self, feeds: list[int]) -> float:
        if self.together:
            return self.curve(sum(feeds))
        plain = sum(num == 1 for num in feeds)
        return (self.curve(plain) if plain else 0.0) + sum(self.curve(num) for num in feeds if num > 1)


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
        rows.append((simulation.begin([*own, -1 - number]), own[:5] + edited(own[5:], error_rate, number)))
    return rows


CURVES = (flat, linear, stepped, memory_bound)


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
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) >= 0.99


@pytest.mark.parametrize("num_rows", [1, 4, 8, 32])
@pytest.mark.parametrize(("together", "again"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("error_rate", [0.1, 0.3, 0.7])
def test_texts_that_only_look_alike_cost_nothing(
    num_rows: int, together: bool, again: bool, error_rate: float
) -> None:
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
    ("accuracy", "num_rows", "least"), [(0.95, 1, 2.3), (0.8, 1, 1.5), (0.6, 1, 1.15), (0.8, 4, 1.2), (0.9, 8, 1.2)]
)
def test_an_mtp_module_makes_prose_faster(accuracy: float, num_rows: int, least: float) -> None:
    simulation = Simulation(memory_bound, lost_seconds=0.0005, draft_seconds=0.001, accuracy=accuracy)
    assert simulation.run(prose_rows(simulation, num_rows)) >= least
    stats = simulation.speculation.stats
    assert stats.accepted[DraftSource.MTP] > 0.35 * stats.drafted[DraftSource.MTP]


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize(
    ("curve", "draft_seconds", "accuracy"),
    [(memory_bound, 0.001, 0.1), (memory_bound, 0.01, 0.9), (linear, 0.001, 0.9)],
)
def test_an_mtp_module_that_does_not_pay_costs_nothing(
    curve: Curve, draft_seconds: float, accuracy: float, num_rows: int
) -> None:
    simulation = Simulation(curve, lost_seconds=0.0005, draft_seconds=draft_seconds, accuracy=accuracy)
    assert simulation.run(prose_rows(simulation, num_rows)) >= 0.985


def test_a_text_that_is_copied_is_followed_rather_than_an_mtp_module() -> None:
    simulation = Simulation(memory_bound, draft_seconds=0.002, accuracy=0.6)
    assert simulation.run(copied_rows(simulation, 1, 0.02)) >= 3.5


def test_an_mtp_module_is_tried_again_once_it_may_pay() -> None:
    simulation = Simulation(memory_bound, draft_seconds=0.001, accuracy=0.05)
    simulation.run(prose_rows(simulation, 1))
    simulation.accuracy = 0.9
    for _ in range(4):
        simulation.run(prose_rows(simulation, 1))
    drafted = simulation.speculation.stats.drafted[DraftSource.MTP]
    assert simulation.run(prose_rows(simulation, 1)) > 1.3, drafted


def test_rows_whose_drafts_are_evaluated_apart_are_faster_where_one_copies() -> None:
    simulation = Simulation(memory_bound, together=False, again=True)
    rows = [*copied_rows(simulation, 1, 0.01), *prose_rows(simulation, 1)]
    assert simulation.run(rows) >= 1.1


@pytest.mark.parametrize("measured", [flat, stepped])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_cost_that_was_measured_wrong_is_soon_known_better(measured: Curve, num_rows: int) -> None:
    simulation = Simulation(linear, measured=measured)
    simulation.run(copied_rows(simulation, num_rows, 0.02))
    assert simulation.run(copied_rows(simulation, num_rows, 0.02)) >= 0.97


def test_steps_that_waited_for_something_else_change_little() -> None:
    cost = StepCost({1: 1.0, 2: 1.1, 4: 1.2}, feeds_together=True, feeds_again=False)
    before = cost.step([3])
    cost.learn([3], 50.0)
    assert cost.step([3]) < 1.1 * before
    for _ in range(200):
        cost.learn([3], 1.15)
    assert cost.step([3]) == pytest.approx(1.15, rel=0.02)


# -- the best lengths

chances_of_row = st.lists(st.floats(0.02, 0.999), max_size=3).map(
    lambda odds: list(itertools.accumulate(odds, lambda all_before, next_one: all_before * next_one))
)
seconds = st.lists(st.floats(0.1, 3.0), min_size=6, max_size=6).map(
    lambda more: dict(zip(KNOTS, itertools.accumulate(more), strict=True))
)


@given(st.lists(chances_of_row, min_size=1, max_size=3), seconds, st.floats(0, 1), st.booleans())
def test_no_other_lengths_are_expected_to_be_faster(
    chances: list[list[float]], step_seconds: dict[int, float], overlap: float, together: bool
) -> None:
    cost = StepCost(step_seconds, feeds_together=together, feeds_again=False)
    cost.overlap = overlap
    found = (choose_together if together else choose_apart)(chances, cost)
    every = itertools.product(*(range(len(row) + 1) for row in chances))
    speeds = {lengths: _speed(chances, lengths, cost) for lengths in every}
    best = max(speeds.values())
    if found is None:
        assert best == pytest.approx(speeds[(0,) * len(chances)])
    else:
        assert speeds[tuple(found.tokens_of)] == pytest.approx(best)
        assert found.tokens / found.seconds == pytest.approx(best)


def _speed(chances: list[list[float]], lengths: tuple[int, ...], cost: StepCost) -> float:
    tokens = len(lengths) + sum(sum(row[:length]) for row, length in zip(chances, lengths, strict=True))
    if not any(lengths):
        return tokens / cost.plain(len(lengths))
    return tokens / cost.step([1 + length for length in lengths])


@pytest.mark.parametrize("stall", [0.2, 5.0, 500.0])
def test_after_a_stall_no_call_is_expected_to_take_less_than_no_time(stall: float) -> None:
    """The first step of two rows waited for something else, so one row less seems to save more than its own call."""
    cost = StepCost({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.2, 16: 0.3}, feeds_together=False, feeds_again=True)
    cost.observe(1, 0.010)
    cost.observe(2, stall)
    chances = [[0.9, 0.81, 0.729, 0.6561], [0.5, 0.25, 0.125, 0.0625, 0.0312]]
    shared_seconds = cost.plain(2) - cost.plain(1)
    assert all(seconds > 0 for row in chances for _, seconds in cost.row_calls(row, shared_seconds))
    found = choose_apart(chances, cost)
    assert found is not None and found.seconds > 0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60), st.booleans())
def test_no_draft_is_longer_than_its_limit(limits: list[int], num_agreed: int, together: bool) -> None:
    simulation = Simulation(flat, together=together)
    text = list(range(100))
    rows = [simulation.begin([*text, -1]) for _ in limits]
    for row in rows:
        for token in text[:num_agreed]:
            row.push(token)
    drafts = simulation.speculation.plan(rows, limits)
    for draft, limit in zip(drafts, limits, strict=True):
        assert draft == text[num_agreed : num_agreed + len(draft)]
        assert len(draft) <= min(limit, MAX_FEED_TOKENS - 1)
    if together:
        assert any(drafts) == (num_agreed >= 3 and max(limits) > 0)


# -- what is followed


def next_draft(simulation: Simulation, row: Drafting) -> list[int]:
    return simulation.speculation.plan([row], [8])[0]


def test_a_prediction_is_followed_from_the_first_token_and_again_behind_a_change() -> None:
    simulation = Simulation(flat)
    row = simulation.begin([1], prediction=[10, 11, 12, 13, 14, 15, 16, 17])
    assert simulation.speculation.may_draft([row])
    assert next_draft(simulation, row) == [10, 11, 12, 13, 14, 15, 16, 17]
    for token in (10, 11, 99, 13, 14):
        row.push(token)
    assert next_draft(simulation, row) == []
    row.push(15)
    assert next_draft(simulation, row) == [16, 17]
    row.push(16)
    assert (row.accepted_prediction, row.rejected_prediction) == (6, 2)
    simulation.speculation.learn([row], [2], [1], 0.01)
    assert simulation.speculation.stats.drafted[DraftSource.PREDICTION] == 2
    assert simulation.speculation.stats.accepted[DraftSource.PREDICTION] == 1


def test_a_repeated_part_of_a_prediction_is_taken_for_the_next_one() -> None:
    follower = PredictionFollower(np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6], np.int32))
    for token in (1, 2, 9, 1, 2, 3):
        follower.push(token)
    assert follower.next_tokens(1) == [4]
    for token in (9, 1, 2, 3):
        follower.push(token)
    assert follower.next_tokens(1) == [5]


def test_a_short_prediction_of_which_nothing_is_said_is_missed() -> None:
    follower = PredictionFollower(np.array([1, 2], np.int32))
    follower.push(3)
    assert (follower.num_confirmed, follower.num_missed) == (0, 2)
    assert follower.next_tokens(4) == []


@given(
    prediction=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 2), max_size=60),
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
    return simulation.speculation.plan([row], [5])[0]


def test_prompts_and_outputs_are_followed_by_later_requests() -> None:
    simulation = Simulation(flat)
    first = simulation.begin([1, 2])
    for token in TEXT:
        first.push(token)
    assert drafts_after(simulation) == []
    first.end()
    assert drafts_after(simulation) == TEXT[6:11]


@pytest.mark.parametrize("options", [{"is_volatile": True}, {"cache_prompt": False}])
def test_what_is_not_kept_is_followed_by_its_own_request_only(options: dict[str, bool]) -> None:
    simulation = Simulation(flat)
    request = replace(request_of([*TEXT, -9]), **options)  # type: ignore[arg-type]
    row = simulation.speculation.begin(request, 0)
    for token in TEXT[:6]:
        row.push(token)
    assert simulation.speculation.plan([row], [5]) == [TEXT[6:11]]
    row.end()
    assert drafts_after(simulation) == []


def test_a_request_that_wants_no_drafts_gets_none_and_is_followed_by_others() -> None:
    simulation = Simulation(flat)
    row = simulation.speculation.begin(replace(request_of([*TEXT, -9]), speculates=False), 0)
    for token in TEXT[:6]:
        row.push(token)
    assert not simulation.speculation.may_draft([row])
    assert simulation.speculation.plan([row], [5]) == [[]]
    row.end()
    assert drafts_after(simulation) == TEXT[6:11]


@pytest.mark.parametrize("is_volatile", [False, True])
def test_a_tool_result_is_followed_as_calls_quote_it(is_volatile: bool) -> None:
    simulation = Simulation(flat)
    quotable = (np.array(TEXT, np.int32),)
    row = simulation.speculation.begin(replace(request_of([1, 2]), quotable=quotable, is_volatile=is_volatile), 0)
    for token in TEXT[:6]:
        row.push(token)
    assert simulation.speculation.plan([row], [5]) == [TEXT[6:11]]
    assert drafts_after(simulation) == ([] if is_volatile else TEXT[6:11])
