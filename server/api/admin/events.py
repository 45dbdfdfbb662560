"""`GET /v1/events`: what happens, as server-sent events; a slow reader loses some, and is told how many.

A request hears of its own namespace; who owns the server (see `server.api.auth.is_owner`) of all, or of the one that
`?namespace=` names. Events of models are for everybody.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from server.api.auth import listed_namespace
from server.api.context import context_of
from server.api.dialect import dialect_of
from server.api.errors import ApiError, Code
from server.api.live.event_log import EventLog, Listener, LiveEvent, Lost, frame_of
from server.api.sse import sse_comment
from server.api.stream import AnswerStream

MAX_LISTENERS = 64
RETRY_MS = 2000
"""What clients are told to wait before they come back."""


async def get_events(request: Request) -> Response:
    """Streams until the client leaves or the server stops; raises ApiError (503) where too many listen."""
    context = context_of(request)
    log, config = context.activity.log, context.config
    if log.num_listeners >= MAX_LISTENERS:
        message = f"{MAX_LISTENERS} clients listen to events already; close one of them, or read GET /v1/stats"
        raise ApiError(Code.TOO_MANY_LISTENERS, message)
    seconds = _seconds(request)
    listener = log.listen(listed_namespace(request, config), request.headers.get("last-event-id"))
    return AnswerStream(
        _frames(log, listener, seconds),
        dialect_of(request),
        request_id=request.state.request_id,
        heartbeat_seconds=config.heartbeat_seconds,
        drain_seconds=0.0,
        heartbeat=lambda: sse_comment("listening"),
        on_close=listener.close,
    )


def _seconds(request: Request) -> float | None:
    """Returns how long the stream lasts; None for as long as its client stays."""
    given = request.query_params.get("seconds")
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > 4:
        raise ApiError(Code.INVALID_VALUE, "seconds: must be a whole number from 0 to 9999", "seconds")
    return float(given)


async def _frames(log: EventLog, listener: Listener, seconds: float | None) -> AsyncIterator[bytes]:
    yield f"id: {listener.place_id}\nretry: {RETRY_MS}\n: listening\n\n".encode()
    end = None if seconds is None else time.monotonic() + seconds
    while not log.is_closed:
        left = None if end is None else end - time.monotonic()
        try:
            await asyncio.wait_for(listener.wake.wait(), left)
        except TimeoutError:
            return
        if read := listener.take():
            yield b"".join(_frame(log, one) for one in read)


def _frame(log: EventLog, one: LiveEvent | Lost) -> bytes:
    if isinstance(one, LiveEvent):
        return one.frame
    return frame_of("lost", {"time": round(time.time(), 3), "count": one.count}, log.id_before(one.next_number))
