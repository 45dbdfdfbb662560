"""Server-sent events: JSON payloads, heartbeats in silence, errors after the start, and the end of a client.

A stream is a series of `data:` lines with one JSON object each and ends with `data: [DONE]`. Comments, which
clients skip, keep the connection open while nothing else is sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.api.errors import explain

SEPARATOR = "\n"
DONE = ServerSentEvent("[DONE]", sep=SEPARATOR)


class EventStream(EventSourceResponse):
    """Streams payloads to one client. However it ends, `on_close` is called, a disconnect included."""

    def __init__(
        self,
        payloads: AsyncIterator[Mapping[str, Any]],
        *,
        request_id: str,
        heartbeat_seconds: float,
        drain_seconds: float,
        describe: Callable[[], str],
        on_close: Callable[[], None],
    ) -> None:
        """`describe` says in a few words what a silent stream is waiting for."""
        self._on_close = on_close
        content = with_heartbeats(_encoded(payloads, request_id), heartbeat_seconds, describe)
        # Heartbeats depend on what was sent before, which the library's own pings do not know: they are off.
        super().__init__(content, sep=SEPARATOR, ping=0, shutdown_grace_period=drain_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream; returns when it ended or the client left."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _encoded(payloads: AsyncIterator[Mapping[str, Any]], request_id: str) -> AsyncIterator[ServerSentEvent]:
    try:
        async for payload in payloads:
            yield _event(payload)
    except Exception as error:  # the border of the process: the status was sent, so the stream must tell
        yield _event(explain(error, request_id).body())
        return
    yield DONE


def _event(payload: Mapping[str, Any]) -> ServerSentEvent:
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return ServerSentEvent(text, sep=SEPARATOR)


async def with_heartbeats(
    events: AsyncIterator[ServerSentEvent], seconds: float, describe: Callable[[], str]
) -> AsyncIterator[ServerSentEvent]:
    """Yields `events`, and a comment whenever `seconds` passed without one."""
    upcoming: asyncio.Future[ServerSentEvent | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(_next_of(events))
            done, _ = await asyncio.wait((upcoming,), timeout=seconds)
            if not done:
                yield ServerSentEvent(comment=describe(), sep=SEPARATOR)
                continue
            event, upcoming = upcoming.result(), None
            if event is None:
                return
            yield event
    finally:
        if upcoming is not None:
            upcoming.cancel()


async def _next_of(events: AsyncIterator[ServerSentEvent]) -> ServerSentEvent | None:
    return await anext(events, None)
