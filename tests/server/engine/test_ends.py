"""What ends an answer besides the model: tokens and texts of the request's own, loops, and none of them too early."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from models.inference.sampling_params import SamplingParams
from models.output.pieces import ReasoningFormat, Thinking
from server.engine.output import LoopWatch
from server.engine.request import FinishReason, LoopRule
from tests.server.engine.test_preemption import Tight, prompt_of
from tests.support.engine_driver import Collected, Harness, single_call
from tests.support.fake_runner import EOS, VOCABULARY, ScriptedRunner, next_token, reference

pytestmark = pytest.mark.usefixtures("overlaps")

PROMPT = prompt_of(1, 20)
FREE = reference(PROMPT, 12, ignore_eos=True)


def answer(harness: Harness | None = None, prompt: Sequence[int] = PROMPT, **fields: Any) -> Collected:
    harness = harness or Harness()
    sink = harness.submit(prompt, **{"max_tokens": 12, "ignore_eos": True, **fields})
    harness.run()
    return sink


def without_early_ends(prompt: Sequence[int], count: int, least: int, ends: Sequence[int]) -> list[int]:
    """Returns what the fake model answers, the end included."""
    output: list[int] = []
    while len(output) < count:
        token = next_token([*prompt, *output])
        while len(output) < least and token in ends:
            token = (token + 1) % VOCABULARY
        output.append(token)
        if token in ends:
            break
    return output


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    sink = answer(stop_token_ids=frozenset({FREE[4], 49}))
    assert sink.tokens == FREE[: FREE.index(FREE[4])]
    assert (sink.last.reason, sink.last.stop_token) == (FinishReason.STOP, FREE[4])


def test_a_stop_token_and_a_stop_text_are_part_of_the_answer_where_that_is_asked_for() -> None:
    assert answer(stop_token_ids=frozenset({FREE[4]}), keeps_stop=True).tokens == FREE[: FREE.index(FREE[4]) + 1]
    stop = f"{FREE[2]} {FREE[3]}"
    assert answer(stop=(stop,)).text.split() == [str(token) for token in FREE[:2]]
    kept = answer(stop=(stop,), keeps_stop=True)
    assert kept.text == " ".join(map(str, FREE[:4]))
    assert kept.last.stop_text == stop


@pytest.mark.parametrize("least", [0, 1, 3, 7, 11])
def test_no_token_ends_the_answer_too_early(least: int) -> None:
    sampling = SamplingParams(min_tokens=least)
    for seed in range(20):
        prompt = prompt_of(seed, 20)
        stops = frozenset(reference(prompt, 5, ignore_eos=True)[1:3])
        expected = without_early_ends(prompt, 12, least, [*stops, EOS])
        sink = answer(prompt=prompt, sampling=sampling, stop_token_ids=stops, ignore_eos=False)
        is_ended = expected[-1] in {*stops, EOS}
        assert sink.tokens == (expected[:-1] if is_ended else expected)
        assert len(sink.tokens) >= least


def test_an_answer_that_waits_for_memory_keeps_its_least_length() -> None:
    harness = Tight(300, num_slots=8)
    prompts = [prompt_of(seed, 20) for seed in range(8)]
    sampling = SamplingParams(min_tokens=100)
    sinks = [harness.submit(prompt, max_tokens=100, sampling=sampling) for prompt in prompts]
    harness.run(limit=20_000)
    assert harness.worker.stats().num_preempted > 0
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == without_early_ends(prompt, 100, 100, [EOS])


def test_an_answer_of_one_call_ends_with_it_and_the_next_turn_finds_all_of_it() -> None:
    harness = Harness()
    sink = answer(harness, single_call=single_call(FREE, 2, 5))
    assert sink.tokens == FREE[:6]
    assert (sink.last.reason, sink.last.stop_text) == (FinishReason.STOP, None)
    following = answer(harness, [*PROMPT, *sink.tokens, 48, 48])
    assert following.started.hit_tokens == len(PROMPT) + 6


def ends_in_loop(tokens: Sequence[int], rule: LoopRule) -> bool:
    """As vLLM finds it: each pattern is compared with what stands before it."""

    def repeats(size: int) -> bool:
        count = max(rule.min_count, -(-rule.min_tokens // size))
        return (
            len(tokens) >= size * count
            and len({tuple(tokens[-size * n : len(tokens) - size * (n - 1)]) for n in range(1, count + 1)}) == 1
        )

    return any(repeats(size) for size in range(max(rule.min_pattern, 1), rule.max_pattern + 1))


@pytest.mark.parametrize(
    "rule", [LoopRule(3, 1, 2), LoopRule(4, 2, 3), LoopRule(6, 3, 2), LoopRule(5, 0, 4), LoopRule(4, 1, 2, 12)]
)
def test_a_loop_is_found_with_the_token_that_completes_it(rule: LoopRule) -> None:
    num_loops = 0
    for seed in range(300):
        chance, watch, tokens = random.Random(seed), LoopWatch(rule), list[int]()
        pattern = [chance.randrange(3) for _ in range(chance.randint(1, 6))]
        for place in range(60):
            tokens.append(chance.randrange(3) if chance.random() < 0.1 else pattern[place % len(pattern)])
            is_loop = watch.accept(tokens[-1])
            assert is_loop == ends_in_loop(tokens, rule), tokens
            num_loops += is_loop
    assert num_loops > 100


LOOP = LoopRule(max_pattern=4, min_count=3)
CIRCLE = [5, 6, 7, 21, 22, 21, 22, 21, 22, 21, 22, 8, 9, 31, 32]


def test_a_loop_ends_the_answer_as_a_limit_does_and_the_next_turn_finds_all_of_it() -> None:
    harness = Harness(runner=ScriptedRunner(script=CIRCLE))
    free, guarded = answer(harness), answer(harness, prompt_of(2, 20), loops=LOOP)
    assert free.tokens == CIRCLE[:12] and not free.last.is_loop
    assert (guarded.tokens, guarded.last.reason, guarded.last.is_loop) == (CIRCLE[:9], FinishReason.LENGTH, True)
    following = answer(harness, [*prompt_of(2, 20), *guarded.tokens, 48, 48])
    assert following.started.hit_tokens == 20 + 9
    late = answer(harness, prompt_of(3, 20), loops=LOOP, sampling=SamplingParams(min_tokens=10))
    assert late.tokens == CIRCLE[:11]


@pytest.mark.parametrize("closing", [(12, 14), ()])
def test_a_loop_in_a_thought_ends_the_thought_and_the_answer_follows(closing: tuple[int, ...]) -> None:
    thinking = Thinking(ReasoningFormat("11 ", "12 ", closing), is_open=True)
    sink = answer(Harness(runner=ScriptedRunner(script=CIRCLE)), max_tokens=15, thinking=thinking, loops=LOOP)
    if closing:
        assert sink.tokens == [*CIRCLE[:9], *closing, *CIRCLE[11:15]]
        assert (sink.last.is_loop, sink.last.reasoning_tokens) == (False, 9)
    else:
        assert (sink.tokens, sink.last.is_loop) == (CIRCLE[:9], True)
