"""Limits a connection's descriptors, and the time without progress.

uvicorn limits neither. A client without progress for `client_seconds` loses its connection and request. Beyond
`max_connections` a newcomer replaces the connection longest without a whole request, and is refused only if all are
at work. Knows sockets and HTTP/1.1, not the application.
"""

import asyncio
import contextlib
import errno
import logging
import math
import re
import resource
import socket
import struct
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api.dialect import Dialect
from server.api.errors import ApiError, Code, retry_later
from server.app.config import StartError

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts at once."""
RESERVED_FILES = 4 * ACCEPTED_AT_ONCE
"""Descriptors for the disk tier, and for connections being accepted or closed."""
MIN_CONNECTIONS = 8
MAX_CONNECTIONS = 4096
MIN_BODY_BYTES = 4096
"""Bytes of a body that must arrive per `client_seconds`."""
UNSENT_BYTES = 1 << 16
"""Bytes that the kernel may hold unsent; more would hide a client that reads nothing."""
CHECKS = 4
"""Checks of a connection per `client_seconds`."""
RESET_SECONDS = 0.1
"""Time between checks of a client that sends no more."""
REPORT_SECONDS = 60.0
RETRY_SECONDS = 5
MAX_LINGERING = ACCEPTED_AT_ONCE
LINGER_SECONDS = 1.0
CLOSE = (b"connection", b"close")
MAX_HEAD_BYTES = 1 << 16
"""Most bytes of a request's first line and headers, as they are sent."""
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)((?:[/?#].*)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """What clients may take."""

    client_seconds: float = 10.0
    max_connections: int = MAX_CONNECTIONS


class HttpConfig(uvicorn.Config):
    """uvicorn's settings for `Connection`, and ours."""

    def __init__(self, app: ASGIApp, limits: Limits, **settings: Any) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            # uvicorn warns about clients in one line each time; `report` does so once a minute.
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            # `Connection` closes idle connections itself; uvicorn would after five seconds.
            timeout_keep_alive=math.ceil(limits.client_seconds) + 1,
            **settings,
        )
        # It warns of each write to a client that has left, as those of a step with drafts are.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.limits = limits
        self.num_lingering = 0
        self._reported: dict[str, tuple[float, int]] = {}
        """By text: when it may be logged again, and how often it has been held back."""

    def report(self, text: str) -> None:
        """Warns about a client, of each kind of event at most once a minute."""
        (due, count), now = self._reported.get(text, (0.0, 0)), time.monotonic()
        self._reported[text] = due, count + 1
        if now >= due:
            logger.warning("%s%s", text, f" ({count + 1} times since this was logged last)" if count else "")
            self._reported[text] = now + REPORT_SECONDS, 0

    def handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles a loop's errors: asyncio would report a lack of descriptors each time."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self.report(f"connections wait to be accepted: {error.strerror}")
        else:
            loop.default_exception_handler(context)


class _Parser(h11.Connection):
    """Also refuses long heads that come at once, and other versions; reads whole addresses as paths."""

    has_long_head = False
    num_sent = 0
    """Bytes handed to the transport: what is unsent of them may be one size each time, an event of a stream."""

    def send(self, event: h11.Event) -> Any:
        """Counts the bytes."""
        data = super().send(event)
        self.num_sent += len(data or b"")
        return data

    def next_event(self) -> Any:
        """As h11; raises RemoteProtocolError."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        num_bytes = len(self.trailing_data[0])
        self.has_long_head = num_bytes > MAX_HEAD_BYTES  # holds where h11 raises
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        self.has_long_head = num_bytes - len(self.trailing_data[0]) > MAX_HEAD_BYTES
        if self.has_long_head or not event.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("a long head, or another version")
        match = _ABSOLUTE.fullmatch(event.target)
        return event if match is None else _with_target(event, *match.groups())


def _with_target(request: h11.Request, host: bytes, rest: bytes) -> h11.Request:
    """A request for a whole address: its host counts, not that of the header (RFC 9112, 3.2.2)."""
    headers = [(b"host", host), *(one for one in request.headers if one[0] != b"host")]
    target = rest if rest.startswith(b"/") else b"/" + rest
    return h11.Request(method=request.method, target=target, headers=headers, http_version=request.http_version)


class Connection(H11Protocol):
    """One connection. Event loop only."""

    config: HttpConfig
    conn: _Parser
    _is_lingering = False
    _num_received = 0
    _awaited: tuple[str, int] | None = None
    _since = 0.0
    """When what is awaited began to be, or made progress, by the loop's clock."""
    _timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------- asyncio's protocol

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Joins, if needed in place of an idle connection."""
        super().connection_made(transport)
        # All that is unsent counts, or a small rest of an answer would wait for its client for ever.
        transport.set_write_buffer_limits(high=0)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > self.config.limits.max_connections:
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_lingering:
            self.config.num_lingering -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts arriving bytes; drops those after the last answer."""
        if self._is_lingering:
            return
        self._num_received += len(data)
        super().data_received(data)

    def shutdown(self) -> None:
        """Closes at the server's end, after an answer under way; of our own answers h11 does not know."""
        if self._is_between_requests:
            self.transport.close()
        else:
            super().shutdown()

    def handle_events(self) -> None:
        """Closes after a request with two lengths: a proxy may have seen another end (RFC 9112, 6.1)."""
        super().handle_events()
        headers = self.headers or []
        if {b"transfer-encoding", b"content-length"} <= {name for name, _ in headers} and CLOSE not in headers:
            headers.append(CLOSE)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether a client that sends no more may still read: it has sent all its requests.

        A client that has left looks the same until something is written, before an answer an interim one. After an
        answer's begin, the end of sending counts as leaving.
        """
        has_all = not (self._is_lingering or self._is_between_requests or self.cycle.more_body)
        if not has_all or self.scope["http_version"] != "1.1" or self.conn.our_state is not h11.SEND_RESPONSE:
            return False
        self.transport.write(
            self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
        )
        self.cycle.keep_alive = False
        self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.drop()
        else:
            self.loop.call_later(RESET_SECONDS, self._look_for_reset)

    # --------------------------------------------------------------------------------------- time that passes

    def _watch(self) -> None:
        awaited, now = self._find_awaited(), self.loop.time()
        if awaited is None or awaited != self._awaited:
            self._awaited, self._since = awaited, now
        elif now - self._since >= self.config.limits.client_seconds:
            self._give_up(awaited[0])
        self._timer = self.loop.call_later(self.config.limits.client_seconds / CHECKS, self._watch)

    def _find_awaited(self) -> tuple[str, int] | None:
        """What the client must do, if anything, and its progress."""
        unsent = self.transport.get_write_buffer_size()
        if self._is_lingering:
            return None
        if unsent:
            return "taking an answer", self.conn.num_sent - unsent
        if self._is_between_requests:
            return "sending a request", id(self.cycle)
        if self.cycle.more_body and not self.flow.read_paused:
            return "sending a body", self._num_received // MIN_BODY_BYTES
        return None

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self, what: str) -> None:
        self.config.report(
            f"closed a connection: its client stopped {what} for {self.config.limits.client_seconds:g} s"
        )
        if self.transport.is_closing() or not self._may_answer:
            self.drop()
        elif self._is_between_requests and not self.conn.trailing_data[0]:
            self.transport.close()
        else:
            self._answer(ApiError(Code.REQUEST_TIMEOUT, "the request did not arrive in time"))

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP; uvicorn would use plain text, and fail after an earlier answer."""
        long = f"the first line and the headers of a request have more than {MAX_HEAD_BYTES} bytes"
        why = long if self.conn.has_long_head else "what was sent is no HTTP/1.1 request"
        self.config.report(f"closed a connection: {why}")
        if self._may_answer:
            self._answer(ApiError(Code.INVALID_HTTP, why))
        else:
            self.drop()

    # ------------------------------------------------------------------------------------------ too many of them

    def _make_place(self) -> None:
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        # By time alone: if idle ones went first, newcomers would replace only each other, and slow bodies would stay.
        unfinished = [one for one in others if one.is_idle or one.is_sending]
        if unfinished:
            self.config.report("closed a connection without a whole request for a new one: there are too many")
            min(unfinished, key=lambda one: one._since).drop()
        else:
            self.config.report("refused a connection: there are too many")
            self._answer(retry_later(Code.TOO_MANY_CONNECTIONS, "too many connections are at work", RETRY_SECONDS))
            self.connections.discard(self)

    @property
    def is_idle(self) -> bool:
        return self._is_between_requests and not self.transport.get_write_buffer_size()

    @property
    def is_sending(self) -> bool:
        return not self._is_between_requests and self.cycle.more_body and not self.cycle.response_started

    def drop(self) -> None:
        """Closes the connection at once."""
        self.connections.discard(self)
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # ------------------------------------------------------------------------------ answers of the server itself

    @property
    def _may_answer(self) -> bool:
        """Whether no answer has begun: a second one would be taken for the rest of the first."""
        is_unsent = self.transport.get_write_buffer_size() > 0
        return not is_unsent and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def _answer(self, error: ApiError) -> None:
        # No path is certain, hence no dialect: the error has the commonest one.
        response = Dialect().error_response(error)
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._linger()

    def _linger(self) -> None:
        """Gives the client time to read: closing with unread bytes takes the answer back."""
        if self._is_lingering or self.config.num_lingering >= MAX_LINGERING:
            self.transport.close()
            return
        self._is_lingering = True
        self.config.num_lingering += 1
        if not self._is_between_requests:
            # The application sees a closed connection; nothing may follow the answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # The client may have left just now.
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def find_max_connections() -> int:
    """How many connections there are descriptors for; raises StartError for too few."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    num_open = len(list(Path("/dev/fd").iterdir()))
    num_free = limit - num_open - RESERVED_FILES
    if num_free < MIN_CONNECTIONS:
        needed = num_open + RESERVED_FILES + MIN_CONNECTIONS
        raise StartError(
            f"this process may open only {limit} files; allow it {needed} or more with `ulimit -n {needed}`"
        )
    return min(num_free, MAX_CONNECTIONS)
