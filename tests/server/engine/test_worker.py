"""The engine's worker over the token-carrying fake model: what clients see, and what stays cached."""

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache.budget import PinLimit
from cache.lease import Lease
from cache.memory_tier import PinName
from cache.slots import CacheRequest, Lookup
from models.inference.sampling_params import SamplingParams
from models.output.pieces import ReasoningFormat, Thinking
from server.engine.commands import clear_cache, pin_session, unpin_session
from server.engine.request import (
    Failed,
    Finished,
    FinishReason,
    OutOfMemory,
    Priority,
    PromptTooLarge,
    StepFailed,
)
from server.engine.worker import COPIED_PER_EVALUATED
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_model import LAYOUTS
from tests.support.fake_runner import EOS, FakeRunner, next_token, reference
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("overlaps")


def answer(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Returns the reference answer without its end of turn, which is never text."""
    return [token for token in reference(prompt, max_tokens) if token != EOS]


def prompt_of(seed: int, length: int) -> list[int]:
    """Returns a prompt of tokens 1..9."""
    rng = random.Random(seed)
    return [rng.randint(1, 9) for _ in range(length)]


@pytest.mark.parametrize("priority", Priority)
def test_the_cache_is_told_who_waits(priority: Priority, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, told = Harness(), []
    begin = harness.prefix_cache.begin

    def watch(request: CacheRequest) -> Lease | None:
        told.append(request.is_background)
        return begin(request)

    monkeypatch.setattr(harness.prefix_cache, "begin", watch)
    harness.run(harness.submit(prompt_of(1, 40), priority=priority))
    assert told == [priority is Priority.BACKGROUND]


def test_a_chunk_runs_between_two_decode_steps_while_a_long_prompt_prefills() -> None:
    harness = Harness(chunk_tokens=16)
    harness.submit(prompt_of(1, 5), max_tokens=60, ignore_eos=True)
    harness.step(4)
    harness.submit(prompt_of(2, 100), max_tokens=1)
    harness.runner.log.clear()
    harness.step(6)
    assert [entry[0] for entry in harness.runner.log] == ["prefill", "decode"] * 6


def test_a_prompt_alone_on_a_gpu_goes_in_long_chunks_and_others_in_short_ones() -> None:
    def lengths(harness: Harness, *, num_steps: int) -> list[int]:
        harness.runner.log.clear()
        harness.step(num_steps)
        return [entry[1] for entry in harness.runner.log if entry[0] == "prefill"]

    harness = Harness(chunk_tokens=16)
    harness.worker.use_long_chunks()
    first = harness.submit(prompt_of(1, 301), max_tokens=60, ignore_eos=True)
    assert lengths(harness, num_steps=3) == [128, 128, 44]
    # Beside a stream that decodes, and while somebody waits.
    second = harness.submit(prompt_of(2, 100), max_tokens=1)
    assert lengths(harness, num_steps=3) == [16, 16, 16]
    harness.run()
    assert first.tokens == reference(prompt_of(1, 301), 60, ignore_eos=True)
    assert second.tokens == reference(prompt_of(2, 100), 1)


@pytest.mark.parametrize("far", [1 << 20, 256])
def test_a_prompt_alone_is_cut_at_the_same_places_whatever_of_it_is_restored(
    far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.worker.FAR_TOKENS", far)
    prompt = prompt_of(1, 501)

    def find_ends(num_known: int) -> list[int]:
        harness = Harness(chunk_tokens=16)
        harness.worker.use_long_chunks()
        harness.submit(prompt[:num_known], max_tokens=1)
        harness.run()
        harness.runner.log.clear()
        answer = harness.submit(prompt, max_tokens=1, ignore_eos=True)
        harness.run()
        assert answer.tokens == reference(prompt, 1, ignore_eos=True)
        lengths = [entry[1] for entry in harness.runner.log if entry[0] == "prefill"]
        assert 500 - sum(lengths) in (num_known, num_known - 1)
        return list(itertools.accumulate(lengths, initial=500 - sum(lengths)))

    places = find_ends(1)[1:]
    assert places[:2] == [128, 256] and places[-1] == 500
    for num_known in (2, 17, 127, 129, 200, 256, 257, 371):
        start, *ends = find_ends(num_known)
        assert ends == [end for end in places if end > start]
    # A rest that fits is one chunk, which a miss may have cut.
    assert find_ends(490)[1:] == [500]


def test_work_for_later_goes_in_short_chunks_for_whoever_comes_meanwhile() -> None:
    harness = Harness(chunk_tokens=16)
    harness.worker.use_long_chunks()
    harness.submit(prompt_of(1, 301), max_tokens=0, is_idle_work=True)
    harness.step(2)
    assert harness.runner.log == [("prefill", 16)] * 2


def test_long_chunks_are_not_for_windows_nor_far_into_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, far, expected in (("W", 1 << 20, [16, 16]), ("T", 128, [128, 16])):
        monkeypatch.setattr("server.engine.worker.FAR_TOKENS", far)
        harness = Harness(layout, chunk_tokens=16)
        harness.worker.use_long_chunks()
        harness.submit(prompt_of(1, 301), max_tokens=1)
        harness.step(2)
        assert harness.runner.log == [("prefill", num) for num in expected]


def test_short_prompts_and_pieces_of_one_share_a_chunk() -> None:
    harness = Harness("R", chunk_tokens=16)
    prompts = prompt_of(1, 8), prompt_of(2, 6), [9] * 9
    sinks = [harness.submit(prompts[0], user_start=5), *map(harness.submit, prompts[1:])]
    harness.step()
    assert harness.runner.log == [("prefill", 5), ("prefill", 2), ("prefill", 5), ("decode", 2)]
    harness.step()
    assert harness.runner.log[4:] == [("prefill", 8), ("decode", 3)]
    harness.run(*sinks)
    assert [sink.tokens for sink in sinks] == [answer(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("num_restored", "decoding"), [(16 * COPIED_PER_EVALUATED, [1, 2]), (7 * COPIED_PER_EVALUATED, [2, 2])]
)
def test_state_that_is_copied_back_takes_tokens_of_a_chunk(num_restored: int, decoding: list[int]) -> None:
    harness = Harness(chunk_tokens=16, num_slots=2)
    prompts = [prompt_of(seed, num_restored) for seed in range(4)]
    for prompt in prompts:
        harness.run(harness.submit(prompt, max_tokens=1))
    harness.run()
    returning = [harness.submit([*prompt, 7], max_tokens=9, ignore_eos=True) for prompt in prompts[:2]]
    harness.runner.log.clear()
    harness.step(2)
    assert [sink.started.tier for sink in returning] == ["memory", "memory"]
    assert [entry[1] for entry in harness.runner.log if entry[0] == "decode"] == decoding


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_token_is_evaluated_too_when_nobody_waits(layout: str, overlaps: bool) -> None:
    harness = Harness(runner=FakeRunner(layout, overlaps=overlaps))
    for seed, count in ((2, 6), (3, 40)):
        prompt = prompt_of(seed, 50)
        harness.submit(prompt, max_tokens=count)
        harness.run()
        history = [*prompt, *reference(prompt, count)]
        sink = harness.submit([*history, 1, 2, 3], max_tokens=1)
        harness.run()
        assert sink.started.hit_tokens == len(history)


class ToldAtStart(FakeRunner):
    """Notes for each step how many tokens a client had been told when it was prepared and when it started."""

    def __init__(self, *, overlaps: bool) -> None:
        super().__init__(overlaps=overlaps)
        self.sink = Collected()
        self.told: list[tuple[str, int]] = []

    def prepare(self, rows: Any, previous: Any, **how: Any) -> Any:
        self.told.append(("prepare", len(self.sink.tokens)))
        return super().prepare(rows, previous, **how)

    def start(self, step: Any) -> None:
        self.told.append(("start", len(self.sink.tokens)))
        super().start(step)


def test_a_step_is_prepared_before_the_last_one_is_told_and_started_when_the_runner_wants_it(overlaps: bool) -> None:
    runner = ToldAtStart(overlaps=overlaps)
    harness = Harness(runner=runner)
    runner.sink = harness.submit(prompt_of(1, 10), max_tokens=3, ignore_eos=True, cache_prompt=False)
    harness.run()
    prepared = [("prepare", 0), ("prepare", 0), ("prepare", 1)]
    started = [("start", told if overlaps else number) for number, (_, told) in enumerate(prepared)]
    assert runner.told == [event for pair in zip(prepared, started, strict=True) for event in pair]


def test_a_sequence_that_ended_hears_nothing_more() -> None:
    for disturb in (
        lambda harness: harness.worker.cancel("r"),
        lambda harness: harness.worker.stop(),
        lambda harness: setattr(harness.runner, "fault", lambda kind, rows: "prepare"),
    ):
        harness = Harness()
        sink = harness.submit(prompt_of(1, 20), max_tokens=3, ignore_eos=True, request_id="r")
        harness.run(sink)
        assert harness.prefix_cache.slots[sink.started.slot].is_leased
        disturb(harness)
        harness.run()
        assert isinstance(sink.last, Finished)
        assert not any(slot.is_leased for slot in harness.prefix_cache.slots)


def test_a_turn_does_not_wait_for_an_answer_that_its_client_leaves_unread() -> None:
    harness = Harness()
    prompt = prompt_of(1, 40)
    unread = harness.submit(prompt, session_id="chat", max_tokens=200, ignore_eos=True)
    turn = harness.submit([*prompt, 1, 2, 3], session_id="chat", max_tokens=2)
    harness.step(5)
    assert not turn.events
    unread.is_behind = True
    harness.run(turn)
    assert turn.tokens == answer([*prompt, 1, 2, 3], 2) and not unread.is_over


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cancelled_prefill_keeps_its_progress(layout: str) -> None:
    harness = Harness(layout, chunk_tokens=16)
    prompt = prompt_of(8, 100)
    sink = harness.submit(prompt, request_id="gone")
    harness.step(4)
    harness.worker.cancel("gone")
    assert sink.last.reason is FinishReason.CANCELLED
    again = harness.submit(prompt)
    harness.run()
    assert again.started.hit_tokens == 64
    assert again.tokens == answer(prompt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cancelled_answer_keeps_what_was_generated(layout: str) -> None:
    harness = Harness(layout)
    prompt = prompt_of(9, 20)
    sink = harness.submit(prompt, request_id="gone", max_tokens=50, ignore_eos=True)
    harness.step(9)
    harness.worker.cancel("gone")
    said = sink.tokens
    harness.step(2)
    assert sink.tokens == said and len(said) > 3
    again = harness.submit([*prompt, *said, 3], max_tokens=2)
    harness.run()
    assert again.started.hit_tokens >= len(prompt) + len(said) - 1
    assert again.tokens == answer([*prompt, *said, 3], 2)


@pytest.mark.parametrize("part", ["prepare", "start", "read"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_fails_fails_alone(layout: str, part: str) -> None:
    poison = 77
    runner = FakeRunner(
        layout, fault=lambda kind, rows: part if kind == "decode" and any(poison in row for row in rows) else None
    )
    harness = Harness(runner=runner)
    good = [harness.submit(prompt_of(seed, 12), max_tokens=15, ignore_eos=True) for seed in (1, 2)]
    harness.step(5)
    bad = harness.submit([*prompt_of(3, 6), poison], max_tokens=5)
    harness.run()
    assert isinstance(bad.last, Failed) and isinstance(bad.last.error, StepFailed)
    for seed, sink in zip((1, 2), good, strict=True):
        assert sink.tokens == reference(prompt_of(seed, 12), 15, ignore_eos=True)


def test_an_error_that_nobody_read_is_taken_before_the_next_step() -> None:
    drained: list[int] = []
    runner = FakeRunner(fault=lambda kind, rows: "read" if kind == "decode" and len(runner.log) == 4 else None)
    runner.drain = lambda lost=(): drained.append(len(runner.log))  # type: ignore[method-assign]
    harness = Harness(runner=runner)
    sinks = [harness.submit(prompt_of(seed, 12), max_tokens=5, ignore_eos=True) for seed in (1, 2)]
    harness.run()
    assert drained
    assert [sink.tokens for sink in sinks] == [reference(prompt_of(seed, 12), 5, ignore_eos=True) for seed in (1, 2)]


def test_a_prefill_that_fails_harms_nobody_else() -> None:
    poison = 77
    runner = FakeRunner("R", fault=lambda kind, rows: "x" if kind == "prefill" and poison in rows[0] else None)
    harness = Harness(runner=runner)
    before = prompt_of(1, 40)
    harness.run(harness.submit(before))
    bad = harness.submit([*before[:20], poison, 1, 2, 3])
    harness.run()
    assert isinstance(bad.last, Failed)
    again = harness.submit(before)
    harness.run()
    assert again.started.hit_tokens == 39
    assert again.tokens == answer(before)


def test_a_prompt_beyond_the_whole_budget_is_refused_and_others_go_on() -> None:
    harness = Harness(budget_bytes=40_000)
    small = harness.submit(prompt_of(1, 10))
    harness.run()
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, harness.prefix_cache.slots[0].log.view(0, 4))
    harness.prefix_cache.layout.calibrate(caches)
    huge = harness.submit(prompt_of(2, 3000))
    after = harness.submit(prompt_of(3, 10))
    harness.run()
    assert small.is_over and after.tokens == answer(prompt_of(3, 10))
    assert isinstance(huge.last.error, PromptTooLarge)


class ShortRunner(FakeRunner):
    """A fake runner whose next steps of some kinds find no memory."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = list(failing)

    def prefill(self, *arguments: Any) -> None:
        self._fail("prefill")
        super().prefill(*arguments)

    def prepare(self, rows: Any, previous: Any, **how: Any) -> Any:
        self._fail("decode")
        return super().prepare(rows, previous, **how)

    def _fail(self, kind: str) -> None:
        if kind in self.failing:
            self.failing.remove(kind)
            raise RuntimeError("[malloc] Unable to allocate 1048576 bytes.")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_without_memory_is_tried_again_with_half_of_what_was_stored_given_up(kind: str) -> None:
    runner = ShortRunner()
    harness = Harness(runner=runner, num_slots=2)
    for seed in range(6):
        harness.run(harness.submit(prompt_of(seed, 40), max_tokens=2))
    stored = harness.prefix_cache.ledger.stored_bytes
    runner.failing = [kind] * 2
    sinks = [harness.submit(prompt_of(seed, 40), max_tokens=9, ignore_eos=True) for seed in (20, 21)]
    harness.run()
    for sink, seed in zip(sinks, (20, 21), strict=True):
        assert sink.tokens == reference(prompt_of(seed, 40), 9, ignore_eos=True)
    assert harness.prefix_cache.memory.num_evictions > 0
    assert stored > 0 and runner.failing == []


def test_a_request_that_finds_no_memory_thrice_is_told_to_come_back() -> None:
    harness = Harness(runner=ShortRunner(*["prefill"] * 3))
    sink = harness.submit(prompt_of(1, 40))
    harness.run()
    assert isinstance(sink.last.error, OutOfMemory) and sink.last.error.retry_after_seconds > 0
    later = harness.submit(prompt_of(1, 40))
    harness.run()
    assert later.tokens == answer(prompt_of(1, 40))


def test_a_prompt_that_finds_no_memory_thrice_waits_for_the_end_of_another() -> None:
    runner = ShortRunner()
    harness = Harness(runner=runner)
    first = harness.submit(prompt_of(1, 40), max_tokens=20, ignore_eos=True)
    harness.step(5)
    runner.failing = ["prefill"] * 3
    second = harness.submit(prompt_of(2, 40), ignore_eos=True)
    newcomer = harness.submit(prompt_of(3, 40), ignore_eos=True)
    while not first.is_over:
        assert not second.is_over and not newcomer.events, "those behind it do not take the memory that it waits for"
        harness.step()
    harness.run()
    for sink, seed, max_tokens in ((first, 1, 20), (second, 2, 8), (newcomer, 3, 8)):
        assert sink.tokens == reference(prompt_of(seed, 40), max_tokens, ignore_eos=True)
    assert runner.failing == [] and harness.worker.stats().num_preempted == 1


def test_a_prompt_that_finds_no_memory_alone_after_waiting_is_told_to_come_back() -> None:
    runner = ShortRunner()
    harness = Harness(runner=runner)
    first = harness.submit(prompt_of(1, 40), max_tokens=20, ignore_eos=True)
    harness.step(5)
    runner.failing = ["prefill"] * 4
    second = harness.submit(prompt_of(2, 40))
    harness.run()
    assert first.tokens == reference(prompt_of(1, 40), 20, ignore_eos=True)
    assert isinstance(second.last.error, OutOfMemory)


def test_a_prime_without_memory_is_tried_again_to_its_very_end() -> None:
    harness = Harness(runner=ShortRunner("prefill"))
    sink = harness.submit(prompt_of(1, 40), max_tokens=0)
    harness.run()
    assert isinstance(sink.last, Finished)
    assert harness.prefix_cache.peek(Lookup(np.array([*prompt_of(1, 40), 1], np.int32))) == 40


def budgeted(num_tokens: int) -> Harness:
    """A worker with a budget of so many tokens of the fake model."""
    harness = Harness()
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, np.array([1, 2, 3, 4], np.int32))
    harness.prefix_cache.layout.calibrate(caches)
    harness.prefix_cache.ledger.budget_bytes = int(num_tokens * harness.prefix_cache.layout.bytes_per_token)
    return harness


def test_what_cannot_fit_beside_a_pin_is_told_to_come_back() -> None:
    harness = budgeted(700)
    harness.run(harness.submit(prompt_of(1, 200), session_id="s", max_tokens=2))
    harness.prefix_cache.pins.pin(PinName("", "s"), np.array(prompt_of(1, 200), np.int32))
    refused = harness.submit(prompt_of(2, 600), max_tokens=2)
    harness.run()
    assert isinstance(refused.last.error, OutOfMemory)
    harness.prefix_cache.pins.release(PinName("", "s"))
    taken = harness.submit(prompt_of(2, 600), max_tokens=2)
    harness.run()
    assert isinstance(taken.last, Finished)


def test_cache_prompt_false_neither_reuses_nor_keeps() -> None:
    harness = Harness()
    prompt = prompt_of(4, 50)
    harness.run(harness.submit(prompt))
    private = harness.submit(prompt, cache_prompt=False)
    harness.run()
    assert private.started.hit_tokens == 0 and private.tokens == answer(prompt)
    secret = prompt_of(5, 50)
    harness.run(harness.submit(secret, cache_prompt=False))
    again = harness.submit(secret)
    harness.run()
    assert again.started.match_tokens == 0


def test_stop_fails_what_still_runs() -> None:
    harness = Harness()
    sinks = [harness.submit(prompt_of(seed, 20), max_tokens=50, ignore_eos=True) for seed in range(6)]
    harness.step(3)
    harness.worker.stop()
    assert all(isinstance(sink.last, Failed) for sink in sinks)
    assert not harness.worker.has_work
    assert harness.runner.log[-1] == ("close",), "the device was not let go of"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("seed", "drafts"), [*[(seed, False) for seed in range(3)], (4, True)])
def test_a_random_day_ends_with_every_answer_right(layout: str, seed: int, drafts: bool) -> None:
    """One seed is one history: requests, cancels, faults, pins, clears; every finished answer is the reference."""
    rng = random.Random(seed)
    faults = {"left": 3}

    def fault(kind: str, rows: list[list[int]]) -> str | None:
        if faults["left"] and rng.random() < 0.02:
            faults["left"] -= 1
            return rng.choice(["prepare", "start", "read", "settle"] if drafts else ["prepare", "start", "read"])
        return None

    runner = FakeRunner(layout, fault=fault)
    oracle = Oracle(rng.choice([0.1, 0.5]), seed=seed, idles=0.3) if drafts else None
    budget_bytes = rng.choice([60_000, 1 << 30])
    harness = Harness(runner=runner, num_slots=3, budget_bytes=budget_bytes, speculation=oracle)
    histories: list[list[int]] = [prompt_of(0, 12)]
    running: dict[str, tuple[list[int], int, Collected]] = {}
    for number in range(40):
        base = rng.choice(histories)
        prompt = [*base[: rng.randint(1, len(base))], *prompt_of(rng.randint(0, 99), rng.randint(1, 30))]
        count, session = rng.randint(0, 12), rng.choice([None, "a", "b"])
        sink = harness.submit(
            prompt, max_tokens=count, session_id=session, request_id=f"q{number}", user_start=len(prompt) // 2
        )
        running[f"q{number}"] = (prompt, count, sink)
        harness.step(rng.randint(0, 6))
        if rng.random() < 0.2:
            harness.worker.cancel(rng.choice(list(running)))
        if rng.random() < 0.2:
            label = rng.choice("ab")
            command: Callable[..., object] = pin_session if rng.random() < 0.5 else unpin_session
            with contextlib.suppress(PinLimit):
                command(harness.worker, "", label)
        if rng.random() < 0.05:
            clear_cache(harness.worker, "")
        harness.prefix_cache.check()
        histories.append([*prompt, *reference(prompt, count)])
    harness.run()
    for prompt, count, sink in running.values():
        assert sink.is_over
        said = sink.tokens
        assert said == answer(prompt, count)[: len(said)]
        if isinstance(sink.last, Finished) and sink.last.reason is not FinishReason.CANCELLED:
            assert said == answer(prompt, count)
    assert not any(slot.is_leased for slot in harness.prefix_cache.slots)


def test_sampling_parameters_reach_the_runner_untouched() -> None:
    harness = Harness()
    wanted = SamplingParams(temperature=0.3, seed=9)
    harness.run(harness.submit(prompt_of(1, 5), sampling=wanted))
    assert harness.runner.samplings == [wanted]


def test_a_replayed_row_knows_its_prompt_from_its_output() -> None:
    """A penalty on repetition looks at both, those on presence and frequency at the output only."""
    failures = iter([None, None, None, "read"])
    runner = FakeRunner(fault=lambda kind, rows: next(failures, None) if kind == "decode" and len(rows) > 1 else None)
    harness = Harness(runner=runner)
    prompts = [prompt_of(3, 9), prompt_of(4, 12)]
    harness.run(*[harness.submit(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts])
    for prompt in prompts:
        first, again = [generated for held, generated in runner.before if held == prompt]
        assert first == []
        assert 0 < len(again) < 8 and again == reference(prompt, 8, ignore_eos=True)[: len(again)]


CLOSING = (11, 12, 13)
NUMBERED = ReasoningFormat("30 ", "12 ", CLOSING)
"""Markers of `NumberDecoder`'s texts: a thought ends with token 12."""


def thinking_reference(prompt: list[int], max_tokens: int, limit: int) -> list[int]:
    """What the fake model answers when its thought, open from the start, is closed after `limit` tokens."""
    output: list[int] = []
    forced: list[int] | None = None
    while len(output) < max_tokens and (not output or output[-1] != EOS):
        if forced is None and 12 not in output and len(output) == limit:
            forced = list(CLOSING)
        output.append(forced.pop(0) if forced else next_token([*prompt, *output]))
    return output


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thought_is_closed_after_its_last_token_and_the_answer_goes_on(layout: str, limit: int) -> None:
    harness = Harness(layout)
    thinking = Thinking(NUMBERED, is_open=True, max_tokens=limit)
    prompts = [prompt_of(seed, 20 + seed) for seed in range(6)]
    sinks = [
        harness.submit(prompt, max_tokens=14, thinking=thinking if n % 3 else None)
        for n, prompt in enumerate(prompts)
    ]
    harness.run()
    for n, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        expected = thinking_reference(prompt, 14, limit) if n % 3 else reference(prompt, 14)
        assert sink.tokens == [token for token in expected if token != EOS]
        thought = expected[: min(limit, *(i for i, token in enumerate([*expected, 12]) if token in (12, EOS)))]
        assert sink.last.reasoning_tokens == (len(thought) if n % 3 else None)
        assert sink.last.timings.predicted_tokens == len(expected)


@pytest.mark.parametrize("part", ["prepare", "start", "read"])
@pytest.mark.parametrize("failing", range(1, 9))
def test_a_failed_step_does_not_lose_a_forced_token(part: str, failing: int) -> None:
    steps = iter(range(1, 1000))
    runner = FakeRunner("T", fault=lambda kind, rows: part if kind == "decode" and next(steps) == failing else None)
    harness = Harness(runner=runner)
    prompts = [prompt_of(seed, 20) for seed in (1, 2)]
    thinking = Thinking(NUMBERED, is_open=True, max_tokens=3)
    sinks = [harness.submit(prompt, max_tokens=12, thinking=thinking) for prompt in prompts]
    harness.run()
    for prompt, sink in zip(prompts, sinks, strict=True):
        if not isinstance(sink.last, Failed):
            expected = thinking_reference(prompt, 12, 3)
            assert sink.tokens == [token for token in expected if token != EOS]
