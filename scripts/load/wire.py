"""HTTP/1.1 as bytes, for requests that no HTTP client would send, and answers read strictly."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

ANSWER_SECONDS = 60.0
"""An answer that takes longer is taken for none."""
_CONNECT_SECONDS = 20.0
_MAX_LINE = 1 << 20
_LITTLE_BYTES = 4096
_WITHOUT_BODY = (204, 304)


class NoAnswer(Exception):
    """The connection ended, or time ran out, before an answer was complete; or it was no HTTP."""


class ClosedUnanswered(NoAnswer):
    """The connection ended before the first byte of an answer."""


@dataclass(frozen=True)
class Reply:
    """One complete answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Returns the body as JSON; raises ValueError."""
        return json.loads(self.body)


class Wire:
    """One connection to 127.0.0.1. A context manager that closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.is_usable = True
        """Whether another request may follow."""
        self._has_begun = False

    @classmethod
    async def open(cls, port: int, *, holds_little: bool = False) -> "Wire":
        """Connects; raises OSError or TimeoutError. One that holds little takes no more than is read from it."""
        limit = _LITTLE_BYTES if holds_little else _MAX_LINE
        opened = asyncio.open_connection("127.0.0.1", port, limit=limit)
        wire = cls(*await asyncio.wait_for(opened, _CONNECT_SECONDS))
        if holds_little:
            wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE_BYTES)
        return wire

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes it, whatever is under way."""
        self.is_usable = False
        self.writer.close()

    def reset(self) -> None:
        """Leaves as a process that is killed does: what the server still sends is refused."""
        self.is_usable = False
        self.writer.transport.abort()

    async def send(self, raw: bytes) -> None:
        """Sends bytes; that the server has closed the connection shows in the answer."""
        try:
            self.writer.write(raw)
            await asyncio.wait_for(self.writer.drain(), ANSWER_SECONDS)
        except (OSError, TimeoutError):
            self.is_usable = False

    async def read(self, num_bytes: int) -> bytes:
        """Returns at most so many bytes of whatever comes; none at the end."""
        return await asyncio.wait_for(self._reader.read(num_bytes), ANSWER_SECONDS)

    async def read_to_end(self) -> bytes:
        """Returns all that comes until the server closes, however long that takes; none where it resets."""
        try:
            return await self._reader.read()
        except OSError:
            return b""

    async def receive(self, method: str = "GET") -> Reply:
        """Reads one answer to its end; raises NoAnswer."""
        status, headers = await self.receive_head()
        if method == "HEAD" or status in _WITHOUT_BODY:
            return Reply(status, headers, b"")
        return Reply(status, headers, b"".join([part async for part in self.parts(headers)]))

    async def receive_head(self) -> tuple[int, Mapping[str, str]]:
        """Reads an answer's status and headers; raises NoAnswer."""
        self._has_begun = False
        with self._as_no_answer():
            status, headers = await asyncio.wait_for(self._head(), ANSWER_SECONDS)
            while 100 <= status < 200:
                status, headers = await asyncio.wait_for(self._head(), ANSWER_SECONDS)
        if headers.get("connection", "").lower() == "close":
            self.is_usable = False
        return status, headers

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yields an answer's body as it comes; raises NoAnswer."""
        with self._as_no_answer():
            while part := await asyncio.wait_for(self._part(headers), ANSWER_SECONDS):
                yield part
                if headers.get("transfer-encoding") != "chunked":
                    return

    @contextmanager
    def _as_no_answer(self) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, ValueError) as error:
            self.is_usable = False
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        except (OSError, EOFError) as error:
            self.is_usable = False
            kind = NoAnswer if self._has_begun else ClosedUnanswered
            raise kind(f"{type(error).__name__}: {error}") from error

    async def _head(self) -> tuple[int, dict[str, str]]:
        version, _, rest = (await self._line()).partition(" ")
        self._has_begun = True
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise ValueError(f"{version[:100]!r} begins no answer")
        headers: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(rest[:3]), headers

    async def _line(self) -> str:
        return (await self._reader.readuntil(b"\r\n"))[:-2].decode("latin-1")

    async def _part(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            size = int(await self._line(), 16)
            return (await self._reader.readexactly(size + 2))[:-2]
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        self.is_usable = False
        return await self._reader.read()


Headers = Sequence[tuple[str, str]]


def request_bytes(method: str, target: str, headers: Headers = (), body: bytes | None = None) -> bytes:
    """Returns a request as bytes, with the headers that it must have unless they are given."""
    given = {name.lower() for name, _ in headers}
    lines = [f"{method} {target} HTTP/1.1"]
    if "host" not in given:
        lines.append("Host: 127.0.0.1")
    if body is not None and not given & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + (body or b"")


def json_request(path: str, body: Mapping[str, Any], headers: Headers = ()) -> bytes:
    """Returns a proper POST of JSON as bytes."""
    raw = json.dumps(body).encode()
    return request_bytes("POST", path, [("Content-Type", "application/json"), *headers], raw)


async def ask(port: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
    """Sends one proper request on a connection of its own; raises NoAnswer, OSError."""
    async with await Wire.open(port) as wire:
        await wire.send(request_bytes(method, path) if body is None else json_request(path, body))
        return await wire.receive(method)
