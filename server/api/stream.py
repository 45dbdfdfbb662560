"""A streamed answer, framed by its dialect: heartbeats, errors after the start, and the end of a client."""

from collections.abc import AsyncIterator, Callable

from sse_starlette.sse import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from server.api.dialect import Dialect
from server.api.errors import explain


class AnswerStream(EventSourceResponse):
    """Streams frames to one client. However it ends, `on_close` is called, a disconnect included."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        dialect: Dialect,
        *,
        request_id: str,
        heartbeat_seconds: float,
        drain_seconds: float,
        heartbeat: Callable[[], bytes],
        on_close: Callable[[], None],
    ) -> None:
        """Sends `heartbeat` every `heartbeat_seconds`."""
        self._on_close = on_close
        super().__init__(
            _with_error(frames, dialect, request_id),
            media_type=dialect.stream_media_type,
            ping=heartbeat_seconds,
            # Bytes are sent as they are, like those of the frames.
            ping_message_factory=heartbeat,  # type: ignore[arg-type]
            shutdown_grace_period=drain_seconds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream; returns when it ended or the client left."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Sends at once: there is no time-out here, and the scope for one costs more than the sending itself.

        How long a client may leave an answer unread is watched where its connection is (`server/connections.py`).
        """
        await send(message)


async def _with_error(frames: AsyncIterator[bytes], dialect: Dialect, request_id: str) -> AsyncIterator[bytes]:
    """Yields the frames, and after an error of any kind, encoding included, the frame that tells of it."""
    try:
        async for frame in frames:
            yield frame
    except Exception as error:  # the border of the process: the status was sent, so the stream must tell
        yield dialect.error_frame(explain(error, request_id))
