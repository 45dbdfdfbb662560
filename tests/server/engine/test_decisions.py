"""Log-probabilities of options: which tokens are evaluated, in how many steps, beside whom; and every way to end."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cache.layers import layout
from models.output.pieces import TokenLogprob
from server.engine import decisions
from server.engine.decisions import OptionNode
from server.engine.request import (
    Failed,
    Finished,
    FinishReason,
    OutOfMemory,
    Priority,
    PromptTooLarge,
    ScoredQuestion,
    StepFailed,
)
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_runner import EOS, FakeStep

pytestmark = pytest.mark.usefixtures("overlaps")

STATE = list(range(1, 40))
SINGLE = ((3,), (5,), (9,))
ALIKE = ((1,), (2, 3), (2, 4, 5), (2, 4, 6), (7, 8, 9))
PREFIXES = ((2,), (2, 3), (4,))


def question(number: int, options: Sequence[tuple[int, ...]] = SINGLE) -> ScoredQuestion:
    return ScoredQuestion(np.array([*STATE, 40 + number % 9, *([41] * (1 + number // 9))], np.int32), tuple(options))


def ask(harness: Harness, *questions: ScoredQuestion, **fields: Any) -> Collected:
    return harness.submit(STATE, max_tokens=0, questions=questions, **fields)


def logprob(option: Sequence[int]) -> float:
    """What the fake model tells of a path."""
    return -sum(option) / 8


def prefilled(harness: Harness) -> int:
    return sum(entry[1] for entry in harness.runner.log if entry[0] == "prefill")


def decoded(harness: Harness) -> list[int]:
    return [entry[1] for entry in harness.runner.log if entry[0] == "decode"]


def num_inner(options: Sequence[tuple[int, ...]]) -> int:
    """Tokens of the trie that have children."""
    return len({option[:size] for option in options for size in range(1, len(option))})


@pytest.mark.parametrize("options", [SINGLE, ALIKE, ((1, 2, 3), (1, 2, 4), (1, 5, 6))])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_sums_along_the_trie_each_token_once(options: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue(deque[Any]):
        def __iter__(self) -> Any:
            pytest.fail("a step looks at every question")

    looked, going_on = list[OptionNode](), OptionNode.going_on.fget  # type: ignore[attr-defined]
    counted = property(lambda node: [looked.append(node), going_on(node)][1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(OptionNode, "going_on", counted)
    monkeypatch.setattr(decisions, "deque", Queue)
    harness = Harness("T")
    sink = ask(harness, *(question(number, options) for number in range(count)))
    harness.run(sink)
    assert sink.last.option_logprobs == (tuple(map(logprob, options)),) * count
    assert len(looked) <= 3 * count * (1 + num_inner(options)), "each node is looked at a few times in all"
    shared = prefilled(harness) + sum(decoded(harness))
    own = sum(len(question(number).tokens) - len(STATE) for number in range(count))
    assert shared <= len(STATE) + own + count * num_inner(options)
    assert sink.last.prompt_tokens == len(STATE) + own + count * num_inner(options)
    assert sink.last.timings.cache_tokens + sink.last.timings.evaluated_tokens == sink.last.prompt_tokens


@pytest.mark.parametrize(("options", "depth"), [(SINGLE, 1), (ALIKE, 3), (((1, 2), (3, 4), (5, 6), (7, 8)), 2)])
def test_all_rows_go_one_token_deeper_in_a_step(options: Any, depth: int) -> None:
    harness = Harness("T", num_slots=8, chunk_tokens=64)
    harness.run(ask(harness, question(1, options), question(2, options)))
    assert len(decoded(harness)) == depth
    assert decoded(harness)[0] == 2


@pytest.mark.parametrize("kind", ["T", "W", "R", "TR"])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_every_kind_of_state_and_few_slots(kind: str, num_slots: int) -> None:
    harness = Harness(kind, num_slots=num_slots)
    long = ScoredQuestion(np.array([*STATE, 40, *([41] * 20)], np.int32), ALIKE)
    sink = ask(harness, long, question(2, ALIKE), question(3, ALIKE))
    harness.run(sink)
    assert sink.last.option_logprobs == (tuple(map(logprob, ALIKE)),) * 3
    if num_slots > 1:
        # A line may evaluate the question's last token again: it saves its leaf.
        trie = len({option[:size] for option in ALIKE for size in range(1, len(option) + 1)})
        assert prefilled(harness) + sum(decoded(harness)) <= len(STATE) + 21 + 2 * 2 + 3 * trie


def test_a_row_that_memory_cuts_short_is_an_error() -> None:
    harness = Harness("T")
    sink = ask(harness, question(1, ALIKE))
    while not (rows := [one for one in harness.worker._table if one.row is not None]):
        harness.step()
    harness.worker._table.end_truncated(rows[0])
    assert isinstance(sink.last.error, OutOfMemory)
    harness.run()


def test_the_end_of_the_answer_counts_in_all_options_where_one_begins_another() -> None:
    harness = Harness("T")
    sink = ask(harness, question(1, PREFIXES), question(2, SINGLE))
    harness.run(sink)
    assert sink.last.option_logprobs[0] == tuple(logprob(option) - EOS / 8 for option in PREFIXES)
    # Three more nodes are evaluated: 2, 2 3, and 4.
    assert sum(decoded(harness)) == 2 + 3


def test_a_model_that_gives_no_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStep, "logprob", lambda self, index, token, place=0: TokenLogprob(token, math.nan, ()))
    harness = Harness("T")
    sink = ask(harness, question(1, ALIKE), question(2))
    harness.run(sink)
    assert isinstance(sink.last.error, StepFailed)
    harness.run()
    assert not harness.worker.has_work


@pytest.mark.parametrize("kind", ["R", "W"])
def test_the_state_is_a_restore_point_for_other_questions(kind: str) -> None:
    harness = Harness(kind)
    harness.run(ask(harness, question(1)))
    sink = ask(harness, question(2))
    harness.run(sink)
    assert sink.started.hit_tokens == len(STATE)


def test_the_urgent_go_before_the_questions_of_the_background() -> None:
    harness = Harness("T", num_slots=1)
    many = ask(harness, *(question(number) for number in range(8)), priority=Priority.BACKGROUND)
    harness.step(3)
    other = harness.submit([90, 91, 92], max_tokens=2)
    harness.run(other)
    assert not many.is_over
    harness.run(many)


@pytest.mark.parametrize("steps", [0, 2, 3, 4, 5])
def test_a_cancel_ends_all_rows(steps: int) -> None:
    harness = Harness("T", num_slots=3)
    sink = ask(harness, *(question(number, ALIKE) for number in range(9)), request_id="d")
    harness.step(steps)
    harness.worker.cancel("d")
    assert isinstance(sink.last, Finished) and sink.last.reason is FinishReason.CANCELLED
    harness.step()
    assert not harness.worker.has_work
    harness.run(ask(harness, question(1)))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_question_that_fails_fails_its_request_only(kind: str) -> None:
    harness = Harness("T", num_slots=4)
    harness.runner.fault = lambda at, rows: "start" if at == kind and any(43 in row for row in rows) else None
    sink, other = ask(harness, question(1), question(3), question(2)), harness.submit([90, 91], max_tokens=6)
    harness.run(sink, other)
    assert isinstance(sink.last, Failed) and isinstance(sink.last.error, StepFailed)
    assert isinstance(other.last, Finished)
    harness.run()
    harness.runner.fault = lambda at, rows: None
    harness.run(again := ask(harness, question(3)))
    assert again.last.option_logprobs == (tuple(map(logprob, SINGLE)),)


def test_a_step_that_fails_once_is_repeated() -> None:
    harness, failed = Harness("T", num_slots=4), list[str]()

    def fault(at: str, rows: list[list[int]]) -> str | None:
        if at == "decode" and any(len(row) > len(STATE) + 3 for row in rows) and not failed:
            failed.append(at)
            return "read"
        return None

    harness.runner.fault = fault
    sink = ask(harness, *(question(number, ALIKE) for number in range(4)))
    harness.run(sink)
    assert failed and sink.last.option_logprobs == (tuple(map(logprob, ALIKE)),) * 4


def test_an_engine_that_stops_between_the_state_and_the_questions_says_so() -> None:
    harness = Harness("T")
    sink = ask(harness, question(1))
    while not harness.worker._scorings["r0"]._beginning:
        harness.step()
    harness.worker.stop()
    assert isinstance(sink.last, Failed)
    assert not harness.worker.has_work


def tight(num_tokens: int, num_sequences: int) -> Harness:
    """A worker whose budget holds so many sequences of so many tokens."""
    harness = Harness("T", num_slots=4)
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, np.ones(100, np.int32))
    harness.prefix_cache.layout.calibrate(caches)
    harness.prefix_cache.ledger.budget_bytes = num_sequences * harness.prefix_cache.layout.bytes_for(num_tokens)
    harness.runner.log.clear()
    return harness


@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_little_memory_makes_rows_wait(
    num_sequences: int, monkeypatch: pytest.MonkeyPatch, exact_buffers: None
) -> None:
    monkeypatch.setattr(layout, "GROWTH_TOKENS", 8)
    harness = tight(56, num_sequences)
    sink = ask(harness, *(question(number, ALIKE) for number in range(6)))
    harness.run(sink)
    assert sink.last.option_logprobs == (tuple(map(logprob, ALIKE)),) * 6
    assert max(decoded(harness)) <= max(num_sequences, 1)


def test_a_question_that_can_never_fit_is_an_error() -> None:
    harness = tight(300, 1)
    long = ScoredQuestion(np.array([*STATE, *([41] * 2000)], np.int32), SINGLE)
    sink = ask(harness, question(1), long)
    harness.run(sink)
    assert isinstance(sink.last.error, PromptTooLarge)
    harness.run(ask(harness, question(2)))
