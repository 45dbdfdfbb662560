"""From the worker to its readers: every post arrives in order, and a slow reader loses nothing; when to come back."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from server.engine.messages import MAX_PENDING, Generation, Mailbox
from server.engine.request import Delta, Event, Failed, Progress, Started
from server.engine.scheduler import MAX_SECONDS, MIN_SECONDS, UNKNOWN_SECONDS, QueuePace
from tests.support.awaited import awaited

STARTED = Started(0, 10, 0, 0)
END = Failed(RuntimeError("the end"))


def new_generation() -> Generation:
    """One on the running loop, which cancels nothing."""
    return Generation(lambda: None, Mailbox(asyncio.get_running_loop()))


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def posted_events_arrive() -> None:
    """Lets the loop take what was posted."""
    await asyncio.sleep(0)


@awaited
async def test_what_waits_for_a_reader_is_bounded_and_nothing_of_it_is_lost() -> None:
    generation = new_generation()
    generation.post([STARTED])
    for number in range(1000):
        generation.post([Delta(f"{number} ", (number,))])
    await posted_events_arrive()
    assert generation.is_behind
    reader = aiter(generation)
    first = await anext(reader)
    generation.post([Delta("1000 ", (1000,))])
    await posted_events_arrive()
    assert generation.is_behind, "one event read is not all that waits"
    generation.post([END])
    events = [first] + [event async for event in reader]
    assert len(events) <= MAX_PENDING + 2
    assert text(events) == "".join(f"{number} " for number in range(1001))
    assert tokens(events) == list(range(1001))
    assert events[0] is STARTED and events[-1] is END


@awaited
async def test_a_reader_who_has_caught_up_is_behind_no_longer_and_keeps_the_order() -> None:
    generation, events = new_generation(), list[Event]()
    reader = aiter(generation)
    for number in range(10 * MAX_PENDING):
        generation.post([Delta(f"{number} ", (number,)), Progress(1, 10)])
        await posted_events_arrive()
        if number % 3 == 0 or number > 5 * MAX_PENDING:
            events.append(await anext(reader))
    while generation.is_behind:
        events.append(await anext(reader))
    generation.post([Delta("last", (-1,)), END])
    events += [event async for event in reader]
    assert tokens(events) == [*range(10 * MAX_PENDING), -1]
    assert len(events) < 10 * MAX_PENDING


class SleepingLoop:
    """A loop that runs nothing before it is told to, and counts how often it was woken."""

    def __init__(self) -> None:
        self.woken: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.woken.append(callback)

    def run_once(self) -> None:
        due, self.woken = self.woken, []
        for callback in due:
            callback()


def sleeping() -> tuple[SleepingLoop, Mailbox]:
    loop = SleepingLoop()
    return loop, Mailbox(cast(Any, loop))


def test_a_loop_that_did_not_read_yet_is_woken_once() -> None:
    loop, mailbox = sleeping()
    read: list[int] = []
    for number in range(8):
        mailbox.post(partial(read.append, number))
    assert len(loop.woken) == 1
    loop.run_once()
    assert read == list(range(8))


def test_what_is_posted_while_the_loop_reads_is_read_too() -> None:
    loop, mailbox = sleeping()
    read: list[str] = []

    def first() -> None:
        read.append("first")
        mailbox.post(lambda: read.append("second"))

    mailbox.post(first)
    loop.run_once()
    loop.run_once()
    assert read == ["first", "second"]


@awaited
async def test_a_delivery_that_raises_is_reported_and_strands_no_other() -> None:
    read, errors = list[int](), list[BaseException]()

    def deliver(number: int) -> None:
        if number % 3:
            raise ValueError(number)
        read.append(number)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    mailbox, is_read = Mailbox(loop), asyncio.Event()
    for number in (1, 2, 3, 4, 6):
        mailbox.post(partial(deliver, number))
    mailbox.post(is_read.set)
    await is_read.wait()
    assert read == [3, 6] and [str(error) for error in errors] == ["1", "2", "4"]


def test_each_post_to_a_closed_loop_says_so() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        assert not mailbox.post(lambda: None)


def test_all_that_several_threads_post_arrives_in_the_order_of_each() -> None:
    num_threads, num_posts = 4, 2000
    read: list[tuple[int, int]] = []

    async def run() -> None:
        mailbox, all_read = Mailbox(asyncio.get_running_loop()), asyncio.Event()

        def take(thread: int, number: int) -> None:
            read.append((thread, number))
            if len(read) == num_threads * num_posts:
                all_read.set()

        def post_all(thread: int) -> None:
            for number in range(num_posts):
                mailbox.post(partial(take, thread, number))

        threads = [threading.Thread(target=post_all, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(all_read.wait(), 120)
        for thread in threads:
            thread.join(120)

    asyncio.run(run())
    for thread in range(num_threads):
        assert [number for which, number in read if which == thread] == list(range(num_posts))


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
