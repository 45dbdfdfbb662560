"""The budget while answers grow: what is stored goes first, then the youngest sequence waits, and nobody can tell."""

import functools
from typing import Any

import numpy as np
import pytest

from cache.budget import PADDING
from cache.layers import layout
from cache.layers.layout import Layout
from cache.lease import Lease
from cache.slots import CacheRequest
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from server.engine.request import Failed, FinishReason, OutOfMemory, Priority
from tests.support import tiny_models
from tests.support.engine_driver import Harness
from tests.support.fake_model import LAYOUTS
from tests.support.fake_runner import FakeRunner, reference

GROWTH = 8
"""Tokens that live buffers grow by in these tests."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch, exact_buffers: None) -> None:
    """Buffers grow by few rows, and are as large as asked for."""
    monkeypatch.setattr(layout, "GROWTH_TOKENS", GROWTH)


def prompt_of(seed: int, length: int) -> list[int]:
    """Returns a prompt of tokens 1..9 that parts from those of other seeds at once."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, 10, length)]


class Tight(Harness):
    """A worker whose budget holds so many sequences of so many tokens, and that notes how far it is exceeded."""

    def __init__(self, num_tokens: int, layout: str = "T", *, num_sequences: int = 1, **options: Any) -> None:
        super().__init__(layout, **options)
        self.calibrate()
        self.prefix_cache.ledger.budget_bytes = num_sequences * self.prefix_cache.layout.bytes_for(num_tokens)
        if isinstance(self.runner, FakeRunner):
            self.runner.log.clear()
        self.excess_bytes = self.snapshot_bytes = 0
        """The most that was held beyond the budget after a step, and the most that one restore point took."""

    def calibrate(self) -> None:
        caches = self.runner.make_caches()
        self.runner.prefill(caches, np.ones(140, np.int32))  # the fake's recurrent state grows, other than a model's
        self.prefix_cache.layout.calibrate(caches)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            super().step()
            ledger = self.prefix_cache.ledger
            live = sum(self.prefix_cache.layout.live_bytes(slot.caches) for slot in self.prefix_cache.slots)
            self.excess_bytes = max(self.excess_bytes, live + ledger.stored_bytes - ledger.budget_bytes)
            snapshots = [node.snapshot for node in self.prefix_cache.memory.nodes()]
            sizes = [snapshot.num_bytes for snapshot in snapshots if snapshot is not None]
            self.snapshot_bytes = max(self.snapshot_bytes, *sizes, 0)

    def run_until_preempted(self) -> None:
        for _ in range(2000):
            if self.worker.stats().num_preempted:
                return
            self.step()
        raise AssertionError("nobody had to wait")

    @property
    def num_prefilled(self) -> int:
        return sum(entry[1] for entry in self.runner.log if entry[0] == "prefill")


@pytest.mark.usual("T-*", "W-False", "WR-False")
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_answers_together_stay_within_the_budget_and_are_right(layout: str, overlaps: bool) -> None:
    harness = Tight(300, layout, runner=FakeRunner(layout, overlaps=overlaps), num_slots=8)
    sinks = [harness.submit(prompt_of(seed, 20), max_tokens=120, ignore_eos=True) for seed in range(8)]
    harness.run(limit=20_000)
    for seed, sink in enumerate(sinks):
        assert sink.tokens == reference(prompt_of(seed, 20), 120, ignore_eos=True)
        assert sink.last.reason is FinishReason.LENGTH and sink.last.timings.predicted_tokens == 120
    assert harness.worker.stats().num_preempted > 0
    assert harness.excess_bytes <= harness.snapshot_bytes, (
        "more is held than the budget and a restore point just taken"
    )
    assert harness.num_prefilled <= 8 * 120, "more was evaluated again than was generated"


def test_the_oldest_is_never_preempted_and_all_end_in_order() -> None:
    harness, ends = Tight(200, num_slots=4), list[int]()
    sinks = [harness.submit(prompt_of(seed, 20), max_tokens=150, ignore_eos=True) for seed in range(4)]
    for _ in range(2000):
        harness.step()
        ends += [number for number, sink in enumerate(sinks) if sink.is_over and number not in ends]
    assert ends == [0, 1, 2, 3]


def test_whoever_waits_goes_on_before_a_newcomer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, begun = Tight(200, num_slots=4), list[str | None]()
    begin = harness.prefix_cache.begin

    def note(request: CacheRequest) -> Lease | None:
        lease = begin(request)
        begun.extend([str(request.session_id)] if lease is not None else [])
        return lease

    monkeypatch.setattr(harness.prefix_cache, "begin", note)
    for seed, name in ((1, "old"), (2, "young")):
        harness.submit(prompt_of(seed, 20), max_tokens=150, ignore_eos=True, session_id=name)
    harness.run_until_preempted()
    newcomers = [
        harness.submit(prompt_of(seed, 5), max_tokens=9, session_id="new", ignore_eos=True) for seed in (3, 4)
    ]
    harness.run()
    assert begun == ["old", "young", "young", "new", "new"]
    for seed, sink in zip((3, 4), newcomers, strict=True):
        assert sink.tokens == reference(prompt_of(seed, 5), 9, ignore_eos=True)


def test_the_background_waits_first_and_keeps_no_newcomer_from_beginning() -> None:
    harness = Tight(200, num_slots=4)
    background = harness.submit(
        prompt_of(1, 20), max_tokens=150, ignore_eos=True, priority=Priority.BACKGROUND, request_id="background"
    )
    harness.step(4)
    younger = harness.submit(prompt_of(2, 20), max_tokens=150, ignore_eos=True)
    harness.run_until_preempted()
    newcomer = harness.submit(prompt_of(3, 5), max_tokens=9, ignore_eos=True)
    harness.run(younger, newcomer)
    assert not background.is_over
    harness.run()
    for seed, sink in zip((1, 2), (background, younger), strict=True):
        assert sink.tokens == reference(prompt_of(seed, 20), 150, ignore_eos=True)


def test_one_that_fills_the_budget_alone_ends_there_with_all_that_it_said() -> None:
    harness = Tight(100)
    sink = harness.submit(prompt_of(1, 20), max_tokens=150, ignore_eos=True)
    harness.run()
    assert sink.last.reason is FinishReason.LENGTH
    assert sink.tokens == reference(prompt_of(1, 20), 150, ignore_eos=True)[: len(sink.tokens)]
    assert len(sink.tokens) == 100 - 20 + 1, "the last token's state needs no memory"
    again = harness.submit(prompt_of(2, 50), max_tokens=20, ignore_eos=True)
    harness.run()
    assert again.tokens == reference(prompt_of(2, 50), 20, ignore_eos=True)


@pytest.mark.parametrize("layout", ["W", "WR"])
def test_restore_points_go_before_an_answer_ends_for_want_of_memory(layout: str) -> None:
    harness = Tight(140, layout)
    sink = harness.submit(prompt_of(1, 60), max_tokens=80, ignore_eos=True)
    harness.run()
    assert sink.tokens == reference(prompt_of(1, 60), 80, ignore_eos=True)


def test_a_replay_goes_on_with_its_own_randomness() -> None:
    harness = Tight(200, num_slots=4)
    for seed in range(3):
        harness.submit(prompt_of(seed, 20), max_tokens=150, ignore_eos=True, sampling=SamplingParams(top_k=3 + seed))
    harness.run()
    seeds = {(params.top_k, params.seed) for params in harness.runner.samplings}
    assert len(harness.runner.samplings) > 3 and len(seeds) == 3
    assert None not in {seed for _, seed in seeds}


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_device_without_memory_to_grow_is_asked_again(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Tight(2000, runner=FakeRunner(overlaps=overlaps))
    sinks = [harness.submit(prompt_of(seed, 20), max_tokens=60, ignore_eos=True) for seed in range(2)]
    harness.step(3)
    resize, failures = Layout.resize, list[int]()

    def fail_once(layout: Layout, caches: Any, capacity: int) -> None:
        if not failures:
            failures.append(capacity)
            caches[0].keys = None  # half-way through
            raise RuntimeError("[malloc] Unable to allocate 1048576 bytes.")
        resize(layout, caches, capacity)

    monkeypatch.setattr(Layout, "resize", fail_once)
    harness.run()
    assert failures
    for seed, sink in enumerate(sinks):
        assert sink.tokens == reference(prompt_of(seed, 20), 60, ignore_eos=True)


class SmallDevice(FakeRunner):
    """A fake runner whose device holds so many tokens of all decoding rows together, whatever the budget says."""

    def __init__(self, num_tokens: int, **options: Any) -> None:
        super().__init__(fault=self._find_fault, **options)
        self.num_tokens = num_tokens
        self.num_failures = 0

    def _find_fault(self, kind: str, rows: list[list[int]]) -> str | None:
        if kind == "decode" and sum(map(len, rows)) > self.num_tokens:
            self.num_failures += 1
            return "read"
        return None

    def prepare(self, rows: Any, previous: Any, **how: Any) -> Any:
        step = super().prepare(rows, previous, **how)
        if step.error is not None:
            step.error = RuntimeError("[malloc] Unable to allocate 1048576 bytes.")
        return step


@pytest.mark.parametrize("layout", ["T", "W", "R", "WR"])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(40, 30), (100, 300), (200, 600)])
def test_an_answer_that_was_estimated_to_fit_is_not_cut_short(
    layout: str, num_prompt: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though an allocator hands out larger buffers than it is asked for, and what was measured exceeds the budget."""
    live_bytes = Layout.live_bytes
    monkeypatch.setattr(Layout, "live_bytes", lambda layout, caches: live_bytes(layout, caches) + 8192)
    harness = Tight(num_prompt + max_tokens, layout)
    sink = harness.submit(prompt_of(1, num_prompt), max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    assert len(sink.tokens) == max_tokens


@pytest.mark.parametrize("overlaps", [True, False])
def test_rows_that_the_device_cannot_hold_together_are_not_tried_together_again(overlaps: bool) -> None:
    """They failed with every token or two, and all of their prompts were evaluated again each time."""
    runner = SmallDevice(250, overlaps=overlaps)
    harness = Tight(10_000, runner=runner, num_slots=4, chunk_tokens=512)
    sinks = [harness.submit(prompt_of(seed, 60), max_tokens=60, ignore_eos=True) for seed in range(4)]
    harness.step(2)
    newcomer = harness.submit(prompt_of(9, 60), max_tokens=60, ignore_eos=True)
    harness.run()
    assert 0 < harness.worker.stats().num_preempted <= 3 + 5, "one is held after each failure, and let go at each end"
    assert harness.num_prefilled <= (5 + 2 * harness.worker.stats().num_preempted) * 120
    for seed, sink in zip((0, 1, 2, 3, 9), (*sinks, newcomer), strict=True):
        assert sink.tokens == reference(prompt_of(seed, 60), 60, ignore_eos=True)


def test_a_buffer_that_cannot_be_sized_at_the_start_leaves_no_slot_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Tight(2000)
    harness.run(harness.submit(prompt_of(1, 20), max_tokens=4, ignore_eos=True))
    harness.run()

    def fail(layout: Layout, caches: Any, capacity: int) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1048576 bytes.")

    history = [*prompt_of(1, 20), *reference(prompt_of(1, 20), 4, ignore_eos=True)]
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "resize", fail)
        sink = harness.submit([*history, *prompt_of(2, 90)])
        harness.run()
        assert isinstance(sink.last, Failed) and isinstance(sink.last.error, OutOfMemory)
    assert not any(slot.is_leased for slot in harness.prefix_cache.slots)
    after = harness.submit([*history, 3], max_tokens=4, ignore_eos=True)
    harness.run()
    assert after.tokens == reference([*history, 3], 4, ignore_eos=True)


@functools.cache
def runner_for(name: str) -> Runner:
    return Runner(tiny_models.build(name), vocab_size=tiny_models.VOCAB)


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "windows": SamplingParams(
        temperature=0.8, seed=4, repetition_penalty=1.3, repeat_last_n=16, dry_multiplier=2, dry_allowed_length=1
    ),
}


STOPS = {"llama": "226 172", "gemma3": "197 267", "qwen3_5": "226 294", "falcon_h1": "226 309"}
"""Text near the end of each model's answer, made of two tokens."""


def texts(name: str, *, is_tight: bool) -> tuple[list[str], int]:
    """What clients read of five requests together, and how often one of them had to wait."""
    harness = Tight(1000, num_sequences=5, runner=runner_for(name), num_slots=5)
    sinks = [
        harness.submit(prompt_of(seed, 40), max_tokens=50, ignore_eos=True, sampling=sampling, stop=stop)
        for seed, (sampling, stop) in enumerate(
            [*((sampling, ()) for sampling in SAMPLINGS.values()), (SAMPLINGS["penalties"], (STOPS[name],))]
        )
    ]
    while any(sink.text == "" for sink in sinks):
        harness.step()
    if is_tight:
        ledger = harness.prefix_cache.ledger
        ledger.budget_bytes = ledger.charged_bytes - ledger.stored_bytes - ledger.slot_bytes(PADDING)
    harness.run(limit=5000)
    told = [f"{sink.text} {sink.last.reason} {sink.last.stop_text}" for sink in sinks]
    return told, harness.worker.stats().num_preempted


@pytest.mark.usual("llama", "falcon_h1")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "falcon_h1"])
def test_no_client_can_tell_that_it_waited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, windows, recurrent layers; greedy, seeded, penalties, a stop string: the text with and without."""
    wanted, num_preempted = texts(name, is_tight=False)
    assert num_preempted == 0 and wanted[-1].endswith(STOPS[name])
    for overlaps in (True, False):
        monkeypatch.setattr(runner_for(name), "overlaps", overlaps)
        found, num_preempted = texts(name, is_tight=True)
        assert found == wanted and num_preempted > 0
