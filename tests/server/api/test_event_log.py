"""Events reach every listener in order; who is slow loses the oldest, and is told how many."""

import json
from typing import Any

import pytest

from server.api.activity import CAPACITY, KEEP_SECONDS, EventLog, Listener, LiveEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[EventLog, Clock]:
    clock = Clock()
    return EventLog("e", wall=lambda: 5.0, clock=clock), clock


def numbers(read: list[LiveEvent]) -> list[Any]:
    """The field `n` of events, and the count of what was lost as a string."""
    return [f"lost {one.fields['count']}" if one.name == "lost" else one.fields["n"] for one in read]


def drain(listener: Listener) -> list[Any]:
    found: list[Any] = []
    while read := listener.take():
        found += numbers(read)
    return found


def test_every_listener_gets_what_happens_from_then_on_in_order() -> None:
    log, _ = make()
    log.publish("x", None, n=0)
    first = log.listen(None)
    log.publish("x", None, n=1)
    second = log.listen(None)
    log.publish("x", "ours", n=2)
    assert drain(first) == [1, 2] and drain(second) == [2]
    assert not first.wake.is_set() and first.take() == []
    log.publish("x", None, n=3)
    assert first.wake.is_set() and drain(first) == [3]


def test_a_namespace_hears_of_itself_and_of_what_concerns_all() -> None:
    log, _ = make()
    ours, theirs, owner = log.listen("ours"), log.listen("theirs"), log.listen(None)
    for n, namespace in enumerate(["ours", "theirs", None, ""]):
        log.publish("x", namespace, n=n)
    assert (drain(ours), drain(theirs), drain(owner)) == ([0, 2], [1, 2], [0, 1, 2, 3])
    log.publish("x", "theirs", n=4)
    assert not ours.wake.is_set()


def test_a_slow_listener_is_told_how_many_of_its_own_events_it_lost() -> None:
    log, _ = make()
    ours, owner = log.listen("ours"), log.listen(None)
    for n in range(CAPACITY + 100):
        log.publish("x", "ours" if n % 10 == 0 else "theirs", n=n)
    assert drain(ours) == list(range(0, CAPACITY + 100, 10)), "another's events push out none"
    read = drain(owner)
    assert read[0] == "lost 100" and read[1:] == list(range(100, CAPACITY + 100))
    log.publish("x", "ours", n=-1)
    assert drain(owner) == [-1]


def test_one_that_loses_more_later_is_told_again() -> None:
    log, _ = make()
    owner = log.listen(None)
    for num_lost in (3, 5):
        for n in range(CAPACITY + num_lost):
            log.publish("x", None, n=n)
        read = owner.take()
        assert numbers(read) == [f"lost {num_lost}", *range(num_lost, CAPACITY + num_lost)]
        assert drain(log.listen(None, read[0].id)) == numbers(read)[1:], "a client goes on behind what it lost"
    assert owner.take() == []


def test_one_that_comes_back_goes_on_behind_its_last_event() -> None:
    log, _ = make()
    first = log.listen(None)
    for n in range(5):
        log.publish("x", None, n=n)
    read = first.take()
    log.leave(first)
    log.publish("x", None, n=5)
    assert drain(log.listen(None, read[2].id)) == [3, 4, 5]
    assert drain(log.listen(None, read[4].id)) == [5]
    assert drain(log.listen(None, first.place_id)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("last_id", ["other-3", "e-99", "e--1", "e-x", "", "e-" + "9" * 40, "e-٣"])
def test_an_id_that_is_not_known_is_answered_with_a_loss_of_unknown_size(last_id: str) -> None:
    log, _ = make()
    log.listen(None)
    log.publish("x", None, n=0)
    assert drain(log.listen(None, last_id))[0] == "lost None"


def test_nothing_is_kept_once_nobody_has_listened_for_a_while() -> None:
    log, clock = make()
    wanted: list[bool] = []
    log.on_wanted = wanted.append
    listener = log.listen(None)
    log.publish("x", None, n=0)
    place = listener.place_id
    log.leave(listener)
    log.leave(listener)
    clock.now += KEEP_SECONDS
    assert log.is_wanted, "it may come back"
    clock.now += 1
    log.publish("x", None, n=1)
    assert wanted == [True, False]
    again = log.listen(None, place)
    assert wanted == [True, False, True] and drain(again) == ["lost None"]


def test_a_frame_is_an_event_with_its_place() -> None:
    log, _ = make()
    listener = log.listen(None)
    log.publish("disk.read", "ours", tokens=3, text="a\nb")
    (event,) = listener.take()
    head, name, data, *rest = event.frame.decode().split("\n")
    assert (head, name, rest) == ("id: e-1", "event: disk.read", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "disk.read", "time": 5.0, "tokens": 3, "text": "a\nb",
    }  # fmt: skip


def test_closing_wakes_all_who_wait() -> None:
    log, _ = make()
    listener = log.listen(None)
    log.close()
    assert log.is_closed and listener.wake.is_set()
