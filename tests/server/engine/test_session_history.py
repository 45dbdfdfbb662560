"""The last turn of each session, which its pin holds: bounded, and never replaced by its own beginning."""

import numpy as np
import pytest

from server.engine import sequence
from tests.support.engine_driver import Harness

TOKENS = np.arange(100, dtype=np.int32)


def test_a_turn_that_is_the_beginning_of_another_does_not_take_its_place() -> None:
    """A prefix that was primed, or a request that was cancelled early, says nothing new of its session."""
    sessions = Harness().worker.state
    sessions.record("", "s", TOKENS)
    sessions.record("", "s", TOKENS[:25].copy())
    assert sessions.last("", "s") is TOKENS and sessions.last("", "another") is None
    longer = np.arange(200, dtype=np.int32)
    sessions.record("", "s", longer)
    assert sessions.last("", "s") is longer


def test_a_forgotten_session_is_that_of_its_namespace_only() -> None:
    sessions = Harness().worker.state
    for namespace in ("ours", "theirs"):
        sessions.record(namespace, "s", TOKENS)
    sessions.forget("ours", "s")
    sessions.forget("ours", "never seen")
    assert sessions.last("ours", "s") is None and sessions.last("theirs", "s") is TOKENS


def test_what_sessions_remember_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_BYTES", 10 * 4600)
    sessions = Harness().worker.state
    for number in range(30):
        sessions.record("", f"{number}", np.full(1000, number, np.int32))
        assert sessions.turn_bytes <= sequence.MAX_BYTES
    assert sessions.last("", "0") is None and sessions.last("", "29") is not None
    for number in range(30):
        sessions.forget("", f"{number}")
    assert sessions.turn_bytes == 0
    sessions.record("", "s", np.full(20_000, 7, np.int32))
    assert (sessions.last("", "s"), sessions.turn_bytes) == (None, 0)


def test_a_turn_that_was_cut_short_keeps_no_longer_array() -> None:
    sessions = Harness().worker.state
    sessions.record("", "s", np.arange(100_000, dtype=np.int32)[:10])
    tokens = sessions.last("", "s")
    assert tokens is not None
    assert tokens.base is None
