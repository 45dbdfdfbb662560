"""Bound rows in the engine: each token is sampled among those that its grammar allows after all before it."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from models.inference.sampling_params import SamplingParams
from models.output.grammar import CallOpener, OutputGrammar
from models.output.pieces import ReasoningFormat, Thinking
from server.api.errors import as_api_error
from server.engine.request import AnswerUnbound, Failed
from tests.server.engine.test_preemption import Tight, prompt_of
from tests.support.engine_driver import Harness
from tests.support.fake_grammar import Circle, allowed_after
from tests.support.fake_runner import EOS, VOCABULARY, FakeRunner, next_token, reference

pytestmark = pytest.mark.usefixtures("overlaps")

BOUND = OutputGrammar(Circle())
NUMBERED = ReasoningFormat("11 ", "12 ", closing_ids=(12,))


def sampled(tokens: Sequence[int], allowed: Sequence[int]) -> int:
    """Returns what the fake runner samples after `tokens` among those allowed."""
    first = next_token(tokens)
    return next(each % VOCABULARY for each in range(first, first + VOCABULARY) if each % VOCABULARY in allowed)


def bound_reference(prompt: Sequence[int], num_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(sampled([*prompt, *output], allowed_after(output)))
    return output


def test_a_thought_is_free_but_cannot_end_the_answer() -> None:
    harness = Harness()
    for seed in range(40):
        prompt, output = prompt_of(seed, 20), list[int]()
        thinking = Thinking(NUMBERED, is_open=True, max_tokens=6)
        sink = harness.submit(prompt, max_tokens=20, grammar=BOUND, thinking=thinking)
        harness.run()
        while len(output) < 6 and (not output or output[-1] != 12):
            output.append(sampled([*prompt, *output], [each for each in range(VOCABULARY) if each != EOS]))
        output += [] if output[-1] == 12 else [12]
        answer = list[int]()
        while len(output) + len(answer) < 20:
            answer.append(sampled([*prompt, *output, *answer], allowed_after(answer)))
        assert sink.tokens == [*output, *answer]


def test_the_first_token_may_begin_a_thought_and_no_later_one() -> None:
    harness, num_thoughts = Harness(), 0
    for seed in range(60):
        prompt = prompt_of(seed, 20)
        grammar = OutputGrammar(Circle(), reasoning_start=11)
        sink = harness.submit(prompt, max_tokens=12, grammar=grammar, thinking=Thinking(NUMBERED, max_tokens=2))
        harness.run()
        first = sampled(prompt, [11, *allowed_after([])])
        assert sink.tokens[0] == first
        if first != 11:
            assert sink.tokens == bound_reference(prompt, 12)
        num_thoughts += first == 11
    assert 0 < num_thoughts < 60


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone() -> None:
    harness = Harness()
    failing = harness.submit(prompt_of(1, 20), max_tokens=16, grammar=OutputGrammar(Circle(fails_after=4)))
    other = harness.submit(prompt_of(2, 20), max_tokens=16, grammar=BOUND)
    free = harness.submit(prompt_of(3, 20), max_tokens=16, ignore_eos=True)
    harness.run()
    assert isinstance(failing.last, Failed) and len(failing.tokens) == 4
    assert isinstance(failing.last.error, AnswerUnbound)
    told = as_api_error(failing.last.error)
    assert told is not None and told.status == 400 and "too much work; ask for a shorter answer" in told.message
    assert other.tokens == bound_reference(prompt_of(2, 20), 16)
    assert free.tokens == reference(prompt_of(3, 20), 16, ignore_eos=True)
    again = harness.submit(prompt_of(1, 20), max_tokens=4, grammar=BOUND)
    harness.run()
    assert again.tokens == bound_reference(prompt_of(1, 20), 4)


OPENERS = [11, 23, 37, 41]
CALLS = OutputGrammar(Circle(num_tokens=4), opener=CallOpener(re.compile(rf"\b(?:{'|'.join(map(str, OPENERS))}) ()")))


def calls_reference(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model says with the four tokens behind each opener bound."""
    output: list[int] = []
    bound: list[int] | None = None
    while len(output) < num_tokens:
        held = [*prompt, *output]
        output.append(next_token(held) if bound is None else sampled(held, allowed_after(bound)))
        if bound is not None:
            bound = None if len(bound) == 3 else [*bound, output[-1]]
        elif output[-1] in OPENERS:
            bound = []
    return output


def test_calls_are_bound_from_the_opener_to_their_end_and_nothing_else_is() -> None:
    harness, num_calls = Harness(), 0
    prompts = [prompt_of(seed, 20) for seed in range(30)]
    for number in range(0, 30, 3):
        group = prompts[number : number + 3]
        sinks = [
            harness.submit(prompt, max_tokens=60, ignore_eos=True, grammar=None if n == 2 else CALLS)
            for n, prompt in enumerate(group)
        ]
        harness.run()
        for n, (prompt, sink) in enumerate(zip(group, sinks, strict=True)):
            free = reference(prompt, 60, ignore_eos=True)
            assert sink.tokens == (free if n == 2 else calls_reference(prompt, 60))
            num_calls += n != 2 and sink.tokens != free
    assert num_calls > 10


def test_a_row_holds_up_the_pipeline_only_while_a_call_is_open() -> None:
    waits = list[bool]()

    class Runner(FakeRunner):
        def prepare(self, *given: Any, **told: Any) -> Any:
            waits.append(not told["samples"])
            return super().prepare(*given, **told)

    harness, prompt = Harness(runner=Runner("T")), prompt_of(3, 20)
    sink = harness.submit(prompt, max_tokens=60, ignore_eos=True, grammar=CALLS)
    harness.run()
    assert sink.tokens == calls_reference(prompt, 60)
    assert 0 < sum(waits) <= 4 * sum(token in OPENERS for token in sink.tokens) < 30


def test_the_token_of_an_opener_opens_a_call_and_its_text_does_not() -> None:
    harness, prompt = Harness(), prompt_of(1, 20)
    free = reference(prompt, 40, ignore_eos=True)
    by_token = OutputGrammar(Circle(num_tokens=4), opener=CallOpener(re.compile(rf"{free[5]} ()"), token=free[5]))
    by_other = OutputGrammar(Circle(num_tokens=4), opener=CallOpener(re.compile(rf"{free[5]} ()"), token=VOCABULARY))
    bound = harness.submit(prompt, max_tokens=40, ignore_eos=True, grammar=by_token)
    other = harness.submit(prompt, max_tokens=40, ignore_eos=True, grammar=by_other)
    harness.run()
    assert other.tokens == free
    assert bound.tokens[:6] == free[:6] and bound.tokens[6] in allowed_after([])


def test_a_call_whose_grammar_fails_goes_on_free_and_ends_nothing() -> None:
    harness, prompt = Harness(), prompt_of(3, 20)
    failing = OutputGrammar(Circle(num_tokens=4, fails_after=0), opener=CALLS.opener)
    sink = harness.submit(prompt, max_tokens=60, ignore_eos=True, grammar=failing)
    harness.run()
    assert sink.tokens == reference(prompt, 60, ignore_eos=True) != calls_reference(prompt, 60)


BOUND_ROWS = {"sample": (BOUND, bound_reference, 12), "sample_again": (CALLS, calls_reference, 50)}
"""Of the operation by which rows are sampled: a grammar, what the fake model says, and how many tokens of it."""


@pytest.mark.parametrize("part", ["prepare", "start", "read", "sampling"])
@pytest.mark.parametrize("failing", [1, 3, 8, 13])
@pytest.mark.parametrize("operation", BOUND_ROWS)
def test_a_failed_step_costs_no_bound_row_a_token(
    operation: str, part: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, said, max_tokens = BOUND_ROWS[operation]
    steps, sample, samples = iter(range(1, 1000)), getattr(FakeRunner, operation), iter(range(1, 1000))

    def failing_sample(*arguments: object, **options: object) -> None:
        if part == "sampling" and next(samples) == failing:
            raise RuntimeError("the fake model failed at sampling")
        sample(*arguments, **options)

    def fault(kind: str, rows: list[list[int]]) -> str | None:
        return part if part != "sampling" and kind == "decode" and next(steps) == failing else None

    monkeypatch.setattr(FakeRunner, operation, failing_sample)
    harness, prompts = Harness(runner=FakeRunner("T", fault=fault)), [prompt_of(seed, 20) for seed in (1, 2, 3)]
    sinks = [harness.submit(prompt, max_tokens=max_tokens, ignore_eos=True, grammar=grammar) for prompt in prompts]
    harness.run()
    assert sum(isinstance(sink.last, Failed) for sink in sinks) <= 1
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == said(prompt, len(sink.tokens))
        assert isinstance(sink.last, Failed) or len(sink.tokens) == max_tokens


@pytest.mark.parametrize("operation", BOUND_ROWS)
def test_bound_rows_that_waited_for_memory_go_on_where_they_were(operation: str) -> None:
    grammar, said, _ = BOUND_ROWS[operation]
    harness, sampling = Tight(300, num_slots=8), SamplingParams(min_tokens=120)
    sinks = [
        harness.submit(prompt_of(seed, 20), max_tokens=120, ignore_eos=True, sampling=sampling, grammar=grammar)
        for seed in range(8)
    ]
    harness.run(limit=20_000)
    assert harness.worker.stats().num_preempted > 0
    for seed, sink in enumerate(sinks):
        assert sink.tokens == said(prompt_of(seed, 20), 120)
