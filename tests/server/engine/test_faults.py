"""Whatever operation of the runner fails, once or from then on: nobody gets a wrong token, the worker
goes on, and no slot and no memory is lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cache.slots import Slot
from cache.types import LayerCache
from server.engine.request import EngineError, Failed, FinishReason
from tests.server.engine.test_preemption import Tight, prompt_of
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_runner import FakeRunner, reference
from tests.support.oracle import Oracle

NO_MEMORY = "[malloc] Unable to allocate 1048576 bytes."


@dataclass
class Faults:
    """Counts operations, and has one of them fail."""

    at: int
    """Which one, from 0."""
    is_lasting: bool
    message: str
    only: str = ""
    """The only kind of operation that counts; all do where this is empty."""
    count: int = 0
    is_armed: bool = True
    failed: list[str] = field(default_factory=list)

    def meet(self, operation: str) -> None:
        """Raises where it is this operation's turn."""
        if not self.is_armed or self.only not in ("", operation):
            return
        number, self.count = self.count, self.count + 1
        if number == self.at or (self.is_lasting and number > self.at):
            self.failed.append(operation)
            raise RuntimeError(self.message)


class FaultyRunner(FakeRunner):
    """A fake runner each of whose operations may fail."""

    faults = Faults(0, False, "", is_armed=False)
    slots: Sequence[Slot] = ()

    def make_caches(self) -> list[LayerCache]:
        self.faults.meet("make_caches")
        return super().make_caches()

    def make_row(self, *arguments: Any, **options: Any) -> Any:
        self.faults.meet("make_row")
        return super().make_row(*arguments, **options)

    def prefill(self, *arguments: Any) -> None:
        self.faults.meet("prefill")
        super().prefill(*arguments)

    def prepare(self, *arguments: Any, **how: Any) -> Any:
        self.faults.meet("prepare")
        return super().prepare(*arguments, **how)

    def start(self, step: Any) -> None:
        self.faults.meet("start")
        super().start(step)

    def settle(self, *arguments: Any) -> list[int]:
        self.faults.meet("settle")
        return super().settle(*arguments)

    def separate(self, caches: Sequence[LayerCache]) -> None:
        """An idle sequence shares nothing."""
        if any(slot.is_leased and slot.caches is caches for slot in self.slots):
            self.faults.meet("separate")

    def detach(self, row: Any) -> None:
        self.faults.meet("detach")
        super().detach(row)


def day(harness: Tight) -> Iterator[tuple[Collected, Sequence[int], int]]:
    """Runs requests that share a prefix, wait for memory, go on from an answer, are cancelled or evaluate only."""
    trunk = prompt_of(0, 40)

    def ask(prompt: Sequence[int], max_tokens: int, **fields: Any) -> tuple[Collected, Sequence[int], int]:
        return harness.submit(prompt, max_tokens=max_tokens, ignore_eos=True, **fields), prompt, max_tokens

    yield ask(trunk, 30, session_id="a", user_start=20)
    harness.step(2)
    yield ask([*trunk[:30], *prompt_of(1, 20)], 30, user_start=30)
    yield ask(prompt_of(2, 40), 30, request_id="leaves")
    yield ask(prompt_of(3, 30), 0)
    harness.step(3)
    harness.worker.cancel("leaves")
    ledger = harness.prefix_cache.ledger
    budget_bytes, ledger.budget_bytes = ledger.budget_bytes, ledger.charged_bytes - ledger.stored_bytes
    harness.run()
    ledger.budget_bytes = budget_bytes
    yield ask([*trunk, *reference(trunk, 30, ignore_eos=True), 3, 3], 2, session_id="a")
    yield ask(prompt_of(4, 60), 2)
    harness.run()


def assert_right(sink: Collected, prompt: Sequence[int], max_tokens: int) -> None:
    """Asserts that what a client got is right as far as it goes, and that it ended as events say."""
    right = reference(prompt, max_tokens, ignore_eos=True)
    assert sink.is_over and sink.tokens == right[: len(sink.tokens)]
    if isinstance(sink.last, Failed):
        assert isinstance(sink.last.error, EngineError)
    else:
        # With little memory an answer may end early; it says so.
        assert len(sink.tokens) == max_tokens or sink.last.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)


@pytest.mark.usual("*-T-*", "once-WR-fault", "lasting with drafts-WR-memory")
@pytest.mark.parametrize("message", ["the device fails", NO_MEMORY], ids=["fault", "memory"])
@pytest.mark.parametrize("layout", ["T", "WR"])
@pytest.mark.parametrize(
    ("is_lasting", "stride", "drafts"),
    [(False, 7, False), (True, 13, False), (False, 13, True), (True, 29, True)],
    ids=["once", "lasting", "once with drafts", "lasting with drafts"],
)
def test_whatever_fails_nobody_gets_a_wrong_token(
    layout: str, is_lasting: bool, stride: int, message: str, drafts: bool
) -> None:
    for at in range(0, 10_000, stride):
        faults = Faults(at, is_lasting, message)
        run_day(layout, faults, Oracle(0.2, length=3, idles=0.3) if drafts else None)
        if not faults.failed:
            break


@pytest.mark.parametrize("operation", ["make_caches", "prefill", "make_row", "prepare", "start", "settle", "detach"])
@pytest.mark.parametrize("number", range(3))
def test_each_operation_may_fail(operation: str, number: int) -> None:
    faults = Faults(number, False, "the device fails", only=operation)
    run_day("W", faults, Oracle(0.2) if operation == "settle" else None)
    assert faults.failed == [operation]


@pytest.mark.parametrize("message", ["the device fails", NO_MEMORY], ids=["fault", "memory"])
@pytest.mark.parametrize("num_steps", [1, 9], ids=["prefilling", "decoding"])
@pytest.mark.usefixtures("overlaps")
def test_a_sequence_that_is_lost_where_it_is_cut_for_a_head_is_evaluated_again(num_steps: int, message: str) -> None:
    runner = FaultyRunner("T")
    runner.head_tokens, runner.faults = 4, Faults(0, False, message, only="separate")
    harness = Tight(1000, runner=runner, num_slots=3, chunk_tokens=16)
    runner.slots = harness.prefix_cache.slots
    prompts = [prompt_of(0, 90), [*prompt_of(0, 90)[:16], *prompt_of(1, 10)]]
    asked = list[Collected]()
    for prompt in prompts:
        assert harness.worker.stats().requests.decoding == (num_steps > 1 and len(asked) == 1)
        asked.append(harness.submit(prompt, max_tokens=20, ignore_eos=True))
        harness.step(num_steps)
    harness.run()
    assert runner.faults.failed and not any(slot.is_leased for slot in harness.prefix_cache.slots)
    for sink, prompt in zip(asked, prompts, strict=True):
        assert_right(sink, prompt, 20)
    assert [len(sink.tokens) for sink in asked] == [20, 20]


def run_day(layout: str, faults: Faults, oracle: Oracle | None = None) -> None:
    """Runs a day with faults, and then asks for something without."""
    runner = FaultyRunner(layout)
    runner.faults = Faults(0, False, "", is_armed=False)
    harness = Tight(100, layout, runner=runner, num_sequences=2, num_slots=3, chunk_tokens=64, speculation=oracle)
    runner.faults, runner.slots = faults, harness.prefix_cache.slots
    asked = list(day(harness))
    for sink, prompt, max_tokens in asked:
        assert_right(sink, prompt, max_tokens)
    faults.is_armed = False
    assert not harness.worker.has_work
    assert not any(slot.is_leased for slot in harness.prefix_cache.slots)
    last = harness.submit(prompt_of(5, 30), max_tokens=5, ignore_eos=True)
    harness.run()
    assert last.tokens == reference(prompt_of(5, 30), 5, ignore_eos=True)


def test_a_step_that_could_not_start_is_not_read_later(caplog: pytest.LogCaptureFixture) -> None:
    harness, faults = Harness(), iter([None, None, "start"])
    harness.runner.fault = lambda kind, rows: next(faults, None) if kind == "decode" else None
    prompts = [prompt_of(1, 20), prompt_of(2, 20)]
    sinks = [harness.submit(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
    harness.run()
    assert [sink.tokens for sink in sinks] == [reference(prompt, 6, ignore_eos=True) for prompt in prompts]
    assert caplog.text.count("replaying each") == 1
