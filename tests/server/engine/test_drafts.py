"""Drafts in the engine: whatever they say, clients and the cache see what they see without."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.layers import layout as layout_module
from cache.lease import Lease
from models.inference.abilities import Feeds
from models.inference.sampling_params import SamplingParams
from models.output.grammar import OutputGrammar
from models.output.pieces import ReasoningFormat, Thinking
from server.engine.decode import MAX_KNOWN_TOKENS
from server.engine.request import Event, Failed, Finished, FinishReason
from tests.server.engine.test_grammar import BOUND, CALLS, bound_reference, sampled
from tests.server.engine.test_preemption import Tight
from tests.support import fake_model
from tests.support.engine_driver import EXPECTED_TOKENS, Collected, Harness, single_call
from tests.support.fake_grammar import Circle, allowed_after
from tests.support.fake_runner import EOS, FakeRunner, next_token, reference
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("overlaps")

LAYOUTS = ("T", "W", "R", "WR", "C")
ERROR_RATES = (0.0, 0.3, 1.0)


def prompt_of(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 10, length)]


class Drafted(Harness):
    """A worker with drafts that sees after every step that logs and layer caches hold the same tokens."""

    def __init__(self, layout: str = "T", oracle: Oracle | None = None, **options: Any) -> None:
        super().__init__(layout, speculation=oracle, **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            super().step()
            # Else it would be learned as the next step begins.
            self.worker._decode.learn(self.worker._decode.seconds)
            assert_logs_hold(self)


def assert_logs_hold(harness: Harness) -> None:
    for slot in harness.prefix_cache.slots:
        if slot.is_leased and slot.caches:
            fake_model.assert_holds(slot.caches, slot.log.view().tolist(), fake_model.WINDOW - 1)
            assert slot.offset <= slot.capacity, "more was evaluated than buffers were reserved for"


def told(sink: Collected) -> list[Event]:
    """Returns the events without times, and without what tells that tokens were drafted."""
    return [_timeless(event) for event in sink.events]


def _timeless(event: Event) -> Event:
    if not isinstance(event, Finished):
        return event
    counts = replace(event.timings, prompt_ms=0, predicted_ms=0, drafted_tokens=0, accepted_tokens=0)
    return replace(event, timings=counts)


FREE = reference(prompt_of(1, 20), 40, ignore_eos=True)
SINGLE_CALL = single_call(FREE, 4, 9)
CLOSED = Thinking(ReasoningFormat("30 ", "12 ", (11, 12, 13)), is_open=True, max_tokens=5)

ENDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 17},
    "one token": {"max_tokens": 1},
    "end of turn": {"ignore_eos": False},
    "stop token": {"stop_token_ids": frozenset({FREE[9]})},
    "kept stop token": {"stop_token_ids": frozenset({FREE[9]}), "keeps_stop": True},
    "stop text": {"stop": (f"{FREE[8]} {FREE[9]}",)},
    "kept stop text": {"stop": (f"{FREE[8]} {FREE[9]}",), "keeps_stop": True},
    "stop text that is begun again and again": {"stop": (f"{FREE[3]} 99", f"{FREE[12]} 99", f"{FREE[39]}")},
    "least length": {"stop_token_ids": frozenset(FREE[3:9]), "sampling": SamplingParams(min_tokens=8)},
    "one call": {"single_call": SINGLE_CALL},
    "closed reasoning": {"thinking": CLOSED, "max_tokens": 20},
    "reasoning that closes the answer": {"thinking": CLOSED, "max_tokens": 7},
    "log-probabilities": {"sampling": SamplingParams(top_logprobs=2)},
    "private": {"cache_prompt": False},
    "grammar": {"grammar": BOUND},
    "end of a grammar": {"grammar": OutputGrammar(Circle(num_tokens=9))},
    "grammar behind reasoning": {"grammar": BOUND, "thinking": CLOSED},
    "calls": {"grammar": CALLS},
    "calls behind reasoning": {"grammar": CALLS, "thinking": CLOSED},
    "end of a grammar behind reasoning": {"grammar": OutputGrammar(Circle(num_tokens=9)), "thinking": CLOSED},
}


def along(outputs: dict[tuple[int, ...], list[int]]) -> Callable[[Sequence[int], Sequence[int]], int]:
    """Returns a truth for oracles: the known outputs of prompts, and then anything."""

    def after(prompt: Sequence[int], output: Sequence[int]) -> int:
        known = outputs.get(tuple(prompt), [])
        return known[len(output)] if len(output) < len(known) else 7

    return after


def run_turns(harness: Harness, fields: dict[str, Any]) -> tuple[list[Event], list[int], int]:
    """Runs a turn and the next; returns the first one's events, its output, and what the second restored."""
    prompt = prompt_of(1, 20)
    sink = harness.submit(prompt, **{"max_tokens": 40, "ignore_eos": True, **fields})
    harness.run()
    output = [token for event in sink.events for token in getattr(event, "token_ids", ())]
    output += sink.last.rest.token_ids
    following = harness.submit([*prompt, *output, 48, 48], max_tokens=1)
    harness.run()
    assert len(harness.runner.before) == 2, "a sequence was replayed"
    return told(sink), output, following.started.hit_tokens


@pytest.mark.parametrize("layout", ["T", "W", "WR"])
@pytest.mark.parametrize("end", ENDS)
def test_events_and_cached_tokens_are_those_without_drafts(end: str, layout: str) -> None:
    plain = run_turns(Drafted(layout), ENDS[end])
    for error_rate, idles in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.4), (1.0, 0.0)):
        oracle = Oracle(error_rate, idles=idles, after=along({tuple(prompt_of(1, 20)): plain[1]}))
        assert run_turns(Drafted(layout, oracle), ENDS[end]) == plain
        assert oracle.begun[0].output == plain[1] and all(drafting.has_ended for drafting in oracle.begun)
        assert (oracle.num_accepted > 0) == (error_rate < 1 and end != "one token")


def test_steps_without_drafts_and_without_prefill_are_observed() -> None:
    oracle = Oracle(idles=1.0)
    harness = Drafted(oracle=oracle, chunk_tokens=16)
    first = harness.submit(prompt_of(1, 10), max_tokens=20, ignore_eos=True)
    harness.step(6)
    assert oracle.observed == [1] * 5
    harness.submit(prompt_of(2, 40), max_tokens=20, ignore_eos=True)
    harness.step(3)
    assert oracle.observed == [1] * 5
    harness.step(4)
    assert oracle.observed == [1] * 5 + [2] * 4
    harness.run(first)


class Timed(Oracle):
    """An oracle whose look-ups and plans take time; adds up the seconds of which it is told."""

    told_seconds = 0.0

    def may_draft(self, rows: Sequence[Any]) -> bool:
        self.harness.now += 1
        return super().may_draft(rows)

    def learn(self, rows: Any, fed: Any, drafted: Any, accepted: Any, seconds: float) -> None:
        super().learn(rows, fed, drafted, accepted, seconds)
        self.told_seconds += seconds

    def observe_plain(self, num_rows: int, seconds: float, looking_seconds: float) -> None:
        super().observe_plain(num_rows, seconds, looking_seconds)
        self.told_seconds += seconds + looking_seconds

    def observe_resumed(self, num_rows: int, seconds: float) -> None:
        super().observe_resumed(num_rows, seconds)
        self.told_seconds += seconds

    harness: Harness


@pytest.mark.parametrize("layout", ["T", "R"])
def test_all_seconds_of_decoding_are_told_once(layout: str) -> None:
    """Else what drafts cost would not be compared with what they bring."""

    class Slow(FakeRunner):
        def prepare(self, *arguments: Any, **options: Any) -> Any:
            oracle.harness.now += 2
            return super().prepare(*arguments, **options)

        def start(self, step: Any) -> None:
            oracle.harness.now += 4
            super().start(step)

        def settle(self, *arguments: Any) -> Any:
            oracle.harness.now += 8
            return super().settle(*arguments)

    oracle = Timed(0.3, idles=0.6)
    harness = oracle.harness = Drafted(layout, oracle, runner=Slow(layout))
    harness.submit(prompt_of(1, 10), max_tokens=60, ignore_eos=True)
    harness.step()
    while not oracle.learned or not oracle.observed:
        harness.step()
    begun, told_before, is_complete = harness.now, oracle.told_seconds, 0
    for _ in range(20):
        harness.step()
        left = harness.now - begun - (oracle.told_seconds - told_before)
        assert round(left) in (0, 1), "all but looking, where drafts have ended plain steps"
        is_complete += round(left) == 0
    assert is_complete > 5 and len(oracle.learned) > 4 and len(oracle.observed) > 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_tell_what_was_drafted_and_accepted(layout: str) -> None:
    oracle = Oracle(0.3)
    harness, prompt = Drafted(layout, oracle), prompt_of(1, 20)
    sink = harness.submit(prompt, max_tokens=30, ignore_eos=True, prediction=np.array([1, 2], np.int32))
    harness.run()
    (drafting,) = oracle.begun
    timings = sink.last.timings
    assert (timings.drafted_tokens, timings.accepted_tokens) == (drafting.drafted, drafting.accepted)
    assert 0 < timings.accepted_tokens < timings.drafted_tokens and timings.predicted_tokens == 30
    # Each step gave its accepted tokens and one sample; that of the last token may have had no step of its own.
    assert timings.accepted_tokens <= 30 - len([1 for feed in harness.runner.feeds if feed[0][1]])
    assert (sink.last.accepted_prediction_tokens, sink.last.rejected_prediction_tokens) == (0, 0)


def test_nothing_is_launched_behind_the_last_token_after_drafts(overlaps: bool) -> None:
    class Once(Oracle):
        """Drafts for the first step only."""

        def may_draft(self, rows: Sequence[Any]) -> bool:
            return not self.asked

    harness = Drafted(oracle=Once())
    sink = harness.submit(prompt_of(1, 20), max_tokens=10, ignore_eos=True, cache_prompt=False)
    harness.run()
    assert sink.tokens == FREE[:10]
    assert [entry for entry in harness.runner.log if entry[0] == "decode"] == [("decode", 1)] * 4


@pytest.mark.parametrize("layout", ["T", "R"])
def test_feeds_stay_within_what_the_runner_takes(layout: str) -> None:
    harness, prompt = Drafted(layout, Oracle(0.2, length=40)), prompt_of(1, 20)
    harness.runner.abilities.feeds = Feeds({}, together=True, max_tokens=5)
    sink = harness.submit(prompt, max_tokens=60, ignore_eos=True)
    harness.run()
    assert sink.tokens == reference(prompt, 60, ignore_eos=True)
    assert max(known + drafted for feed in harness.runner.feeds for known, drafted in feed) == 5


@pytest.mark.parametrize("layout", ["R", "WR"])
@pytest.mark.usefixtures("exact_buffers")
def test_what_is_fed_again_after_drafts_taken_back_is_bounded(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "GROWTH_TOKENS", 4)

    def after(prompt: Sequence[int], output: Sequence[int]) -> int:
        """Right but for every third token of the output."""
        return next_token([*prompt, *output]) + (len(output) % 3 == 2)

    harness, prompt = Drafted(layout, Oracle(after=after, length=3)), prompt_of(1, 20)
    sink = harness.submit(prompt, max_tokens=90, ignore_eos=True)
    harness.run()
    assert sink.tokens == reference(prompt, 90, ignore_eos=True)
    fed = [feed for (feed,) in harness.runner.feeds]
    assert max(known for known, _ in fed) > MAX_KNOWN_TOKENS, "no list of known tokens grew"
    assert all(drafted == 0 for known, drafted in fed if known > MAX_KNOWN_TOKENS)
    assert max(known + drafted for known, drafted in fed) <= MAX_KNOWN_TOKENS + 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cancel_after_a_step_with_drafts_leaves_what_was_accepted_in_the_cache(layout: str) -> None:
    for error_rate in ERROR_RATES:
        harness, prompt = Drafted(layout, Oracle(error_rate)), prompt_of(1, 20)
        sink = harness.submit(prompt, max_tokens=40, ignore_eos=True, request_id="r")
        harness.step(3)
        held = harness.prefix_cache.slots[sink.started.slot].offset
        harness.worker.cancel("r")
        assert sink.last.reason is FinishReason.CANCELLED
        assert sink.tokens == reference(prompt, len(sink.tokens), ignore_eos=True)
        following = harness.submit([*prompt, *sink.tokens, 48, 48], max_tokens=1)
        harness.run()
        assert following.started.hit_tokens == held
        assert held == 20 + len(sink.tokens) - 1 or "R" in layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("exact_buffers")
def test_whoever_waits_for_memory_goes_on_with_drafts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "GROWTH_TOKENS", 8)
    oracle = Oracle(0.2, idles=0.2)
    harness = Tight(300, layout, num_slots=8, speculation=oracle)
    sinks = [harness.submit(prompt_of(seed, 20), max_tokens=120, ignore_eos=True) for seed in range(6)]
    while harness.worker.has_work:
        harness.step()
        assert_logs_hold(harness)
    assert harness.worker.stats().num_preempted > 0
    for seed, sink in enumerate(sinks):
        assert sink.tokens == reference(prompt_of(seed, 20), 120, ignore_eos=True)
    for drafting in oracle.begun:
        assert drafting.has_ended and drafting.output == reference(
            drafting.request.tokens.tolist(), 120, ignore_eos=True
        )
    assert len(oracle.begun) == len(sinks), "a drafter did not survive a replay"
    assert harness.excess_bytes <= harness.snapshot_bytes


def test_a_last_token_beside_drafts_is_evaluated_once_memory_is_reserved_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first answer ends as the first drafts come, and has used up all that was reserved for it."""
    monkeypatch.setattr(layout_module, "GROWTH_TOKENS", 4)
    oracle, append, spare_tokens = Oracle(length=3, idles=1.0), Lease.append, list[int]()

    def appended(lease: Lease, *tokens: int) -> None:
        append(lease, *tokens)
        spare_tokens.append(lease.spare_tokens)

    monkeypatch.setattr(Lease, "append", appended)
    harness, prompts = Drafted(oracle=oracle), [prompt_of(seed, 20) for seed in (1, 2)]
    lengths = EXPECTED_TOKENS + 1, 60
    asked = zip(prompts, lengths, strict=True)
    sinks = [harness.submit(prompt, max_tokens=length, ignore_eos=True) for prompt, length in asked]
    while len(sinks[0].tokens) < EXPECTED_TOKENS:
        harness.step()
    oracle.idles = 0.0
    harness.run()
    assert [len(sink.tokens) for sink in sinks] == [*lengths]
    following = harness.submit([*prompts[0], *sinks[0].tokens, 48], max_tokens=1)
    harness.run()
    assert following.started.hit_tokens == 20 + lengths[0], "the last token was not kept"
    assert oracle.num_accepted > 0 and min(spare_tokens) >= 0, "a token was evaluated without memory for it"


PARTS = ("prepare", "start", "read", "settle")


def failing_at(steps: Iterator[str | None]) -> Callable[[str, list[list[int]]], str | None]:
    """Returns faults of decode steps: which part of each next one fails."""
    return lambda kind, rows: next(steps, None) if kind == "decode" else None


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("layout", ["T", "WR"])
def test_a_failed_step_with_drafts_costs_nobody_a_token(layout: str, num_rows: int, part: str) -> None:
    for failing in range(1, 5):
        steps = iter([None] * (failing - 1) + [part])
        runner = FakeRunner(layout, fault=failing_at(steps))
        oracle = Oracle(0.2)
        harness = Drafted(oracle=oracle, runner=runner)
        prompts = [prompt_of(seed, 20) for seed in range(num_rows)]
        sinks = [harness.submit(prompt, max_tokens=25, ignore_eos=True) for prompt in prompts]
        harness.run()
        for prompt, sink, drafting in zip(prompts, sinks, oracle.begun, strict=True):
            right = reference(prompt, 25, ignore_eos=True)
            assert isinstance(sink.last, Finished) and sink.tokens == right
            assert drafting.output == right, "the drafter was told of other tokens"
        assert not any(slot.is_leased for slot in harness.prefix_cache.slots)


class FirstsSeen(FakeRunner):
    """Sees that the first step of each row is without a draft."""

    def prepare(self, rows: Any, previous: Any, **how: Any) -> Any:
        drafted = [row for row in rows if row.draft]
        self.num_drafted += len(drafted)
        self.num_first += len([row for row in drafted if not row.has_stepped])
        for row in rows:
            row.has_stepped = True
        return super().prepare(rows, previous, **how)

    def make_row(self, *arguments: Any, **options: Any) -> Any:
        row: Any = super().make_row(*arguments, **options)
        row.has_stepped = False
        return row

    num_drafted = num_first = 0


def test_suspects_have_no_drafts_until_a_step_of_theirs_succeeds() -> None:
    class Later(Oracle):
        """Drafts once a step has failed."""

        def may_draft(self, rows: Sequence[Any]) -> bool:
            return len(runner.before) > 2

    runner = FirstsSeen(fault=failing_at(iter([None, None, "read"])))
    harness = Harness(speculation=Later(), runner=runner)
    prompts = [prompt_of(seed, 20) for seed in (1, 2)]
    sinks = [harness.submit(prompt, max_tokens=25, ignore_eos=True) for prompt in prompts]
    harness.run()
    assert [sink.tokens for sink in sinks] == [reference(prompt, 25, ignore_eos=True) for prompt in prompts]
    assert len(runner.before) == 4 and runner.num_drafted > 4 and runner.num_first == 0


def test_drafts_at_fault_cost_one_replay() -> None:
    class Runner(FakeRunner):
        """Fails at drafts."""

        num_failed = 0

        def start(self, step: Any) -> None:
            super().start(step)
            if step.is_long:
                self.num_failed += 1
                raise RuntimeError("the device cannot do this")

    runner = Runner()
    harness, prompt = Drafted(oracle=Oracle(), runner=runner), prompt_of(1, 20)
    sink = harness.submit(prompt, max_tokens=25, ignore_eos=True)
    harness.run()
    assert sink.tokens == reference(prompt, 25, ignore_eos=True)
    assert runner.num_failed == 1


def test_an_error_of_ours_while_drafts_are_accepted_is_not_hidden_behind_a_replay() -> None:
    class Decoder:
        """Fails within the tokens of a step."""

        num_pushed = 0

        def push(self, token: int) -> str:
            self.num_pushed += 1
            if self.num_pushed == 12:
                raise ValueError("a decoder's fault")
            return f"{token} "

        def finish(self) -> str:
            return ""

    harness = Harness(speculation=Oracle(0.0))
    harness.worker._make_decoder = Decoder
    sink = harness.submit(prompt_of(1, 20), max_tokens=30, ignore_eos=True)
    with pytest.raises(ValueError, match="decoder"):  # at which the engine fails its requests
        harness.run(sink)
    assert not sink.is_over


@pytest.mark.parametrize("layout", ["T", "R"])
def test_a_draft_ends_before_what_a_grammar_forbids(layout: str) -> None:
    def after(prompt: Sequence[int], output: Sequence[int]) -> int:
        """Right, but forbidden at every fourth token."""
        return EOS if len(output) % 4 == 3 else sampled([*prompt, *output], allowed_after([*output]))

    oracle, prompt = Oracle(after=after), prompt_of(1, 20)
    harness = Drafted(layout, oracle)
    sink = harness.submit(prompt, max_tokens=30, grammar=BOUND)
    harness.run()
    assert sink.tokens == bound_reference(prompt, 30)
    assert harness.runner.feeds and all(drafted <= 3 for ((_, drafted),) in harness.runner.feeds)
    assert oracle.begun[0].refused.count(3) > 3, "what cannot come true is not counted as wrong"


def test_nothing_is_evaluated_behind_the_end_of_a_grammar() -> None:
    prompt = prompt_of(1, 20)
    oracle = Oracle(length=20, after=along({tuple(prompt): bound_reference(prompt, 30)}))
    harness = Drafted(oracle=oracle)
    sink = harness.submit(prompt, max_tokens=30, grammar=OutputGrammar(Circle(num_tokens=9)))
    harness.run()
    assert sink.tokens == bound_reference(prompt, 9)
    assert harness.runner.feeds == [[(1, 8)]]


def test_a_grammar_that_fails_ahead_fails_its_request_only_there() -> None:
    told_of = []
    for oracle in (None, Oracle(after=lambda p, o: sampled([*p, *o], allowed_after([*o])))):
        harness = Drafted(oracle=oracle)
        failing = harness.submit(prompt_of(1, 20), max_tokens=16, grammar=OutputGrammar(Circle(fails_after=4)))
        other = harness.submit(prompt_of(2, 20), max_tokens=16, grammar=BOUND)
        harness.run()
        assert isinstance(failing.last, Failed) and len(failing.tokens) == 4
        assert other.tokens == bound_reference(prompt_of(2, 20), 16)
        told_of.append([*told(other), *told(failing)[:-1]])
    assert told_of[0] == told_of[1]


def test_a_thought_that_begins_or_ends_within_a_draft_binds_what_is_behind() -> None:
    markers, num_thoughts = ReasoningFormat("11 ", "12 ", closing_ids=(12,)), 0
    opening = [seed for seed in range(99) if sampled(prompt_of(seed, 20), [11, *allowed_after([])]) == 11]
    for seed, is_open in [*((seed, False) for seed in opening[:8]), *((seed, True) for seed in range(8))]:
        fields: dict[str, Any] = {
            "max_tokens": 24,
            "grammar": OutputGrammar(Circle(), reasoning_start=11),
            "thinking": Thinking(markers, is_open=is_open, max_tokens=5),
        }
        plain = Harness()
        sink = plain.submit(prompt_of(seed, 20), **fields)
        plain.run()
        harness = Drafted(oracle=Oracle(0.1, seed=seed, after=along({tuple(prompt_of(seed, 20)): sink.tokens})))
        drafted = harness.submit(prompt_of(seed, 20), **fields)
        harness.run()
        assert told(drafted) == told(sink)
        num_thoughts += 12 in sink.tokens
    assert opening and num_thoughts > 8
