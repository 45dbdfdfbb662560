"""When a refused request is told to come back."""

import pytest

from server.engine.scheduler import MAX_SECONDS, MIN_SECONDS, NUM_ENDS, UNKNOWN_SECONDS, QueuePace


def pace_of(seconds_between_ends: float, num_ends: int) -> tuple[QueuePace, float]:
    """Returns a pace after so many ends, with others waiting throughout, and the time."""
    pace = QueuePace()
    pace.change(100.0, has_waiting=True)
    now = 100.0
    for _ in range(num_ends):
        now += seconds_between_ends
        pace.end(now)
    return pace, now


def test_half_of_the_queue_has_had_its_turn_by_then() -> None:
    pace, now = pace_of(0.5, 20)
    assert pace.retry_after_seconds(64, now) == 16
    assert pace.retry_after_seconds(8, now) == 2


@pytest.mark.parametrize(("between", "seconds"), [(0.001, MIN_SECONDS), (100.0, MAX_SECONDS)])
def test_it_is_never_none_nor_longer_than_a_minute(between: float, seconds: int) -> None:
    pace, now = pace_of(between, 5)
    assert pace.retry_after_seconds(64, now) == seconds


def test_until_a_request_has_ended_it_is_as_long_as_that_has_taken() -> None:
    pace = QueuePace()
    assert pace.retry_after_seconds(64, 50.0) == UNKNOWN_SECONDS
    pace.change(50.0, has_waiting=True)
    assert pace.retry_after_seconds(64, 51.0) == UNKNOWN_SECONDS
    assert pace.retry_after_seconds(64, 60.0) == 10


def test_time_in_which_nobody_waits_does_not_count() -> None:
    pace, now = pace_of(1.0, 10)
    pace.change(now, has_waiting=False)
    pace.end(now + 500.0)
    pace.change(now + 1000.0, has_waiting=True)
    assert pace.retry_after_seconds(20, now + 1000.0) == 10


def test_only_the_latest_ends_count() -> None:
    pace, now = pace_of(10.0, 20)
    for _ in range(NUM_ENDS):
        now += 0.25
        pace.end(now)
    assert pace.retry_after_seconds(64, now) == 8


def test_it_grows_while_nothing_ends() -> None:
    pace, now = pace_of(1.0, 10)
    assert pace.retry_after_seconds(20, now) == 10
    assert pace.retry_after_seconds(20, now + 10.0) == 20
