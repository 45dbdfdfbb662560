"""HTTP/1.1 as bytes, for requests that no HTTP client would send, and answers read strictly."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

ANSWER_SECONDS = 60.0
"""An answer that takes longer is taken for none."""
_CONNECT_SECONDS = 20.0
_MAX_LINE = 1 << 20
_WITHOUT_BODY = (204, 304)


class NoAnswer(Exception):
    """The connection ended, or time ran out, before an answer was complete; or it was no HTTP."""


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

    @classmethod
    async def open(cls, port: int) -> "Wire":
        """Connects; raises OSError or TimeoutError."""
        opened = asyncio.open_connection("127.0.0.1", port, limit=_MAX_LINE)
        return cls(*await asyncio.wait_for(opened, _CONNECT_SECONDS))

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

    async def receive(self, method: str = "GET") -> Reply:
        """Reads one answer to its end; raises NoAnswer."""
        try:
            return await asyncio.wait_for(self._receive(method), ANSWER_SECONDS)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.is_usable = False
            raise NoAnswer(f"{type(error).__name__}: {error}") from error

    async def _receive(self, method: str) -> Reply:
        status, headers = await self._head()
        while 100 <= status < 200:
            status, headers = await self._head()
        body = b"" if method == "HEAD" or status in _WITHOUT_BODY else await self._body(headers)
        if headers.get("connection", "").lower() == "close":
            self.is_usable = False
        return Reply(status, headers, body)

    async def _head(self) -> tuple[int, dict[str, str]]:
        version, _, rest = (await self._line()).partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise ValueError(f"{version[:100]!r} begins no answer")
        headers: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(rest[:3]), headers

    async def _line(self) -> str:
        return (await self._reader.readuntil(b"\r\n"))[:-2].decode("latin-1")

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return await self._chunks()
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        self.is_usable = False
        return await self._reader.read()

    async def _chunks(self) -> bytes:
        chunks: list[bytes] = []
        while size := int(await self._line(), 16):
            chunks.append((await self._reader.readexactly(size + 2))[:-2])
        await self._line()
        return b"".join(chunks)


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
