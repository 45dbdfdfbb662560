"""What a slow reader gets, and what waits for him."""

import asyncio
from collections.abc import Awaitable, Callable

from server.engine.messages import MAX_PENDING, Generation, Mailbox
from server.engine.request import Delta, Event, Failed, Progress, Started

STARTED = Started(0, 10, 0, 0)
END = Failed(RuntimeError("the end"))


def with_generation(act: Callable[[Generation], Awaitable[list[Event]]]) -> list[Event]:
    """Runs `act` on a loop, with a generation that cancels nothing."""

    async def run() -> list[Event]:
        return await act(Generation(lambda: None, Mailbox(asyncio.get_running_loop())))

    return asyncio.run(asyncio.wait_for(run(), 10))


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def posted_events_arrive() -> None:
    """Lets the loop take what was posted."""
    await asyncio.sleep(0)


def test_a_reader_who_keeps_up_gets_every_event_as_it_came() -> None:
    async def act(generation: Generation) -> list[Event]:
        posted: list[Event] = [STARTED, Progress(5, 10), Delta("a", (1,)), Delta("b", (2,)), END]
        generation.post(posted)
        read = [event async for event in generation]
        assert read == posted
        return read

    with_generation(act)


def test_what_waits_for_a_reader_is_bounded_and_nothing_of_it_is_lost() -> None:
    async def act(generation: Generation) -> list[Event]:
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
        return [first] + [event async for event in reader]

    events = with_generation(act)
    assert len(events) <= MAX_PENDING + 2
    assert text(events) == "".join(f"{number} " for number in range(1001))
    assert tokens(events) == list(range(1001))
    assert events[0] is STARTED and events[-1] is END


def test_a_reader_who_has_caught_up_is_behind_no_longer_and_keeps_the_order() -> None:
    async def act(generation: Generation) -> list[Event]:
        events: list[Event] = []
        reader = aiter(generation)
        for number in range(10 * MAX_PENDING):
            generation.post([Delta(f"{number} ", (number,)), Progress(1, 10)])
            await posted_events_arrive()
            if number % 3 == 0 or number > 5 * MAX_PENDING:
                events.append(await anext(reader))
        while generation.is_behind:
            events.append(await anext(reader))
        generation.post([Delta("last", (-1,)), END])
        return events + [event async for event in reader]

    events = with_generation(act)
    assert tokens(events) == [*range(10 * MAX_PENDING), -1]
    assert len(events) < 10 * MAX_PENDING
