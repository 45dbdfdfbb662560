"""Requests that evaluate a prompt and generate nothing."""

from typing import Any

import numpy as np
import pytest

from cache.slots import Lookup
from server.engine.request import Delta, Finished, FinishReason
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_model import LAYOUTS
from tests.support.fake_runner import FakeRunner

pytestmark = pytest.mark.usefixtures("overlaps")
PREFIX = [1, 2, 3, 4, 5] * 8


def prime(harness: Harness, prompt: list[int], **fields: Any) -> Collected:
    """Primes a prompt and returns its events."""
    sink = harness.submit(prompt, max_tokens=0, **fields)
    harness.run(sink)
    return sink


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_primed_prefix_is_restored_whole_and_nothing_was_sampled(layout: str) -> None:
    harness = Harness(layout)
    sink = prime(harness, PREFIX)
    assert isinstance(sink.last, Finished) and sink.last.reason is FinishReason.LENGTH
    assert sink.last.timings.predicted_tokens == 0 and not any(isinstance(e, Delta) for e in sink.events)
    assert all(kind == "prefill" for kind, *_ in harness.runner.log)
    for end in (7, 8):
        later = harness.submit([*PREFIX, end, 9, 9], max_tokens=3)
        harness.run(later)
        assert later.started.hit_tokens == len(PREFIX)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_priming_again_evaluates_nothing(layout: str) -> None:
    harness = Harness(layout)
    prime(harness, PREFIX)
    harness.runner.log.clear()
    again = prime(harness, PREFIX)
    assert again.last.timings.cache_tokens == len(PREFIX) and again.last.timings.evaluated_tokens == 0
    assert harness.runner.log == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_end_of_a_primed_prefix_is_an_explicit_restore_point_also_where_it_was_known(layout: str) -> None:
    harness = Harness(layout)
    harness.run(harness.submit([*PREFIX, 6, 7, 8], max_tokens=4))
    prime(harness, PREFIX)
    nodes = list(harness.prefix_cache.memory.nodes())
    node = next(node for node in nodes if node.stop == len(PREFIX))
    assert node.is_explicit
    assert harness.prefix_cache.peek(Lookup(np.array([*PREFIX, 9, 9], np.int32))) == len(PREFIX)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prime_that_is_cancelled_keeps_its_progress(layout: str) -> None:
    harness = Harness(layout, chunk_tokens=8)
    harness.submit(PREFIX, max_tokens=0, request_id="p")
    harness.step(3)
    harness.worker.cancel("p")
    harness.run()
    again = prime(harness, PREFIX)
    assert again.started.match_tokens == 24
    if layout == "T":
        assert again.started.hit_tokens == 24


def test_a_prime_that_fails_fails_alone() -> None:
    harness = Harness(runner=FakeRunner(fault=lambda kind, rows: "prepare" if kind == "prefill" else None))
    sink = harness.submit(PREFIX, max_tokens=0)
    harness.run()
    assert not isinstance(sink.last, Finished)
    assert not any(slot.is_leased for slot in harness.prefix_cache.slots)


def test_two_primes_of_one_prefix_evaluate_it_once() -> None:
    harness = Harness()
    sinks = [harness.submit([*PREFIX, *PREFIX], max_tokens=0) for _ in range(2)]
    harness.run()
    assert sorted(sink.last.timings.cache_tokens for sink in sinks) == [0, 2 * len(PREFIX)]


def test_any_request_that_somebody_waits_for_ends_what_is_evaluated_ahead() -> None:
    harness = Harness()
    ahead = [
        harness.submit([*range(start, start + 199)], max_tokens=0, is_idle_work=True, session_id=session)
        for start, session in ((1, "s"), (300, "other"))
    ]
    harness.step(3)
    turn = harness.submit([*range(1, 200), 7], session_id="s")
    assert [sink.last.reason for sink in ahead] == [FinishReason.CANCELLED] * 2
    harness.run()
    assert turn.started.hit_tokens > 0, "what was evaluated ahead stays"


def test_nothing_is_evaluated_ahead_while_a_prompt_waits_for_its_first_token() -> None:
    harness = Harness()
    turn = harness.submit([*range(1, 200)], max_tokens=4)
    harness.step(2)
    ahead = harness.submit([*range(300, 400)], max_tokens=0, is_idle_work=True)
    assert ahead.last.reason is FinishReason.CANCELLED
    harness.run()
    assert turn.last.reason is FinishReason.LENGTH


def test_what_is_evaluated_ahead_is_no_turn_of_its_session() -> None:
    harness = Harness()
    harness.submit([*range(1, 60)], session_id="s", max_tokens=2)
    harness.run()
    before = harness.worker.state.last("", "s")
    harness.submit([*range(1, 40), *range(100, 140)], max_tokens=0, is_idle_work=True, session_id="s")
    harness.run()
    after = harness.worker.state.last("", "s")
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()
