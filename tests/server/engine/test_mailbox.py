"""Posting from threads to an event loop: everything arrives, in order, and a loop is woken no more than it must."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from server.engine.messages import Mailbox


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


def test_a_delivery_that_raises_is_reported_and_strands_no_other() -> None:
    read, errors = list[int](), list[BaseException]()

    def deliver(number: int) -> None:
        if number % 3:
            raise ValueError(number)
        read.append(number)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        mailbox, is_read = Mailbox(loop), asyncio.Event()
        for number in (1, 2, 3, 4, 6):
            mailbox.post(partial(deliver, number))
        mailbox.post(is_read.set)
        await asyncio.wait_for(is_read.wait(), 30)

    asyncio.run(run())
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
        await asyncio.wait_for(all_read.wait(), 30)
        for thread in threads:
            thread.join()

    asyncio.run(run())
    for thread in range(num_threads):
        assert [number for which, number in read if which == thread] == list(range(num_posts))
