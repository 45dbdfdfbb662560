"""Heartbeats come in silence only, and no way of ending a stream leaves its source running."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from sse_starlette.event import ServerSentEvent

from server.api.sse import with_heartbeats

BEAT = b": waiting\n\n"


async def paced(pauses: Sequence[float], closed: list[bool]) -> AsyncIterator[ServerSentEvent]:
    """One event after each pause."""
    try:
        for number, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            yield ServerSentEvent(str(number), sep="\n")
    finally:
        closed.append(True)


async def collect(pauses: Sequence[float], seconds: float) -> list[bytes]:
    events = with_heartbeats(paced(pauses, []), seconds, lambda: "waiting")
    return [event.encode() async for event in events]


def test_silence_is_filled_and_nothing_is_lost() -> None:
    sent = asyncio.run(collect([0.2, 0, 0.2], 0.05))
    assert [event for event in sent if event != BEAT] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert sent[:2] == [BEAT, BEAT]
    first, second = sent.index(b"data: 0\n\n"), sent.index(b"data: 1\n\n")
    assert second == first + 1
    assert BEAT in sent[second:]


def test_a_steady_stream_needs_no_heartbeat() -> None:
    assert BEAT not in asyncio.run(collect([0.02] * 20, 0.3))


@pytest.mark.parametrize("seconds", [0.01, 30])
def test_leaving_a_stream_ends_its_source(seconds: float) -> None:
    closed: list[bool] = []

    async def leave() -> None:
        events = with_heartbeats(paced([0, 60], closed), seconds, lambda: "waiting")

        async def read() -> None:
            async for _ in events:
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert closed == [True]


def test_an_error_of_the_source_passes_through() -> None:
    async def broken() -> AsyncIterator[ServerSentEvent]:
        yield ServerSentEvent("0", sep="\n")
        raise ValueError("broken")

    async def read() -> None:
        async for _ in with_heartbeats(broken(), 30, lambda: ""):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
