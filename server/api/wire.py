"""Reads bodies, writes JSON and server-sent events, for all dialects.

A body is one JSON object, bounded in bytes as it arrives, also when decompressed, and in its number of values: the
parser holds Python's lock, so values are counted first. JSON is compact UTF-8 without NaN; half a character, which
UTF-8 cannot encode, is replaced.
"""

import json
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from models.texts import well_formed
from server.api.errors import ApiError, Code, wrong

Answer = TypeVar("Answer")
Payload: TypeAlias = Mapping[str, Any]
"""A JSON object to be written."""


def number_asked(request: Request, name: str, most: int) -> int | None:
    """A number of the query, if any; raises ApiError (400)."""
    given = request.query_params.get(name)
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > len(str(most)) or int(given) > most:
        raise wrong(name, f"must be a whole number from 0 to {most}")
    return int(given)


_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
MAX_MEMBERS: Final = 64
"""Parts of one gzip body; each costs a copy of all that follow it."""


def expand(raw: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """The decompressed body; None if it exceeds `max_bytes`. Raises ApiError (400)."""
    body, window = bytearray(), _window(raw, encoding)
    for _ in range(MAX_MEMBERS):
        stream = zlib.decompressobj(window)
        try:
            body += stream.decompress(raw, max_bytes + 1 - len(body))
        except zlib.error as error:
            raise _broken(encoding) from error
        if len(body) > max_bytes:
            return None
        raw = stream.unused_data
        if stream.eof and not raw:
            return bytes(body)
        if not stream.eof:
            break
    raise _broken(encoding)


def _window(raw: bytes, encoding: str) -> int:
    """zlib's parameter: that finds the head by itself; some clients send "deflate" without any."""
    has_head = len(raw) > 1 and raw[0] & 0xF == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return -zlib.MAX_WBITS if encoding == "deflate" and not has_head else 32 + zlib.MAX_WBITS


def _broken(encoding: str) -> ApiError:
    return ApiError(Code.INVALID_VALUE, f"the body is not what Content-Encoding says: {encoding}", "Content-Encoding")


MAX_MESSAGES: Final = 10_000
"""Parts and tool calls count too."""
MAX_TEXTS: Final = 200_000
"""Texts, field names, objects and lists of one body."""
MAX_VALUES: Final = 2_000_000
"""Values of any kind; a prompt may be a list of token ids."""

_BLOCK_BYTES: Final = 1 << 16
_NO_BACKSLASH: Final = re.compile(rb"[^\\]")


async def read_body(request: Request, max_bytes: int, run: Callable[..., Awaitable[bytes | None]]) -> bytes:
    """The body, decompressed on a thread of `run`; raises ApiError (413, 415)."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in (*_ENCODINGS, "", "identity"):
        message = f"Content-Encoding: {encoding[:40]!r} is not understood; send gzip, deflate or no encoding"
        known = {"Accept-Encoding": "gzip, deflate"}
        raise ApiError(Code.UNSUPPORTED_ENCODING, message, "Content-Encoding", headers=known)
    raw = await _read_as_sent(request, max_bytes)
    if encoding not in _ENCODINGS:
        return raw
    # Off the event loop: the work is bounded, but other requests should not wait for it.
    body = await run(partial(expand, raw, encoding, max_bytes))
    if body is None:
        raise _too_large(max_bytes)
    return body


async def _read_as_sent(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(Code.INVALID_JSON, "the client left before its body was complete") from error
    return b"".join(parts)


def parse_object(raw: bytes) -> tuple[dict[str, Any], bool]:
    """The JSON object and whether all its numbers are finite; raises ApiError (400).

    Some clients send NaN and Infinity: a field's check can name the field, the caller refuses the rest.
    """
    try:
        value, is_finite = pydantic_core.from_json(raw, allow_inf_nan=False), True
    except ValueError:
        try:
            value, is_finite = pydantic_core.from_json(raw, allow_inf_nan=True), False
        except ValueError as error:
            raise ApiError(Code.INVALID_JSON, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(Code.INVALID_JSON, "the body must be a JSON object")
    return value, is_finite and not _overflows(raw, value)


_LARGE_NUMBER: Final = re.compile(rb"[eE]\+?\d{3}|\d{300}")


def _overflows(raw: bytes, value: dict[str, Any]) -> bool:
    """Whether a number is too large for a float, as 1e400, which is read as infinite."""
    if _LARGE_NUMBER.search(raw):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return True
    return False


def check_amount(raw: bytes) -> None:
    """Raises ApiError (400) for a body with too many values."""
    num_texts, num_values = _amounts(raw)
    if num_texts > MAX_TEXTS or num_values > MAX_VALUES:
        message = f"the body holds more than {MAX_TEXTS} texts, names, objects and lists, or {MAX_VALUES} values"
        raise ApiError(Code.INVALID_VALUE, message)


def check_messages(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for too many messages."""
    messages = fields.get("messages")
    if isinstance(messages, list) and sum(map(_num_entries, messages)) > MAX_MESSAGES:
        why = f"at most {MAX_MESSAGES} messages are taken, several parts or calls in one counting as such"
        raise wrong("messages", why)


def _num_entries(message: Any) -> int:
    if not isinstance(message, dict):
        return 1
    return max(1, sum(len(value) for value in message.values() if isinstance(value, list)))


def _amounts(raw: bytes) -> tuple[int, int]:
    """Texts and containers that begin, and values that end with a comma."""
    start = num_texts = num_values = 0
    is_in_text = False
    while start < len(raw):
        # A block never ends with a backslash, so an escaped character is in its backslash's block.
        match = _NO_BACKSLASH.search(raw, start + _BLOCK_BYTES - 1)
        stop = match.end() if match else len(raw)
        parts = raw[start:stop].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        between, num_quotes = b"".join(parts[is_in_text::2]), len(parts) - 1
        num_texts += (num_quotes + (not is_in_text)) // 2 + between.count(b"{") + between.count(b"[")
        num_values += between.count(b",")
        start, is_in_text = stop, is_in_text ^ (num_quotes % 2 == 1)
    return num_texts, num_values


def _too_large(max_bytes: int) -> ApiError:
    # The connection stays open: a client that sends everything before it reads would lose the answer. The rest of the
    # body is dropped for as long as a request may take to arrive.
    return ApiError(Code.BODY_TOO_LARGE, f"the body is larger than the {max_bytes} bytes that this server accepts")


# One encoder for all: building one per chunk of a stream costs more than encoding the chunk.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=vars).encode


def json_text(value: Any) -> str:
    """`value` as JSON, a record as its fields, without half characters; raises ValueError or TypeError."""
    return well_formed(_encode(value))


class JsonBody(JSONResponse):
    """An answer of one JSON value."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json_text(content).encode()


def body_of(kind: type[Answer], source: object, **others: Any) -> Answer:
    """A TypedDict of `others`, and for required fields without one the attributes of `source` of their names.

    Counts and flags go by their names without `num_`, `is_` and `has_`.
    """
    fields = getattr(kind, "__annotations__", {})
    assert others.keys() <= fields.keys(), "every value is of a field"
    names = (name for name in fields if name in others or name in getattr(kind, "__required_keys__", ()))
    return cast(Answer, {name: others[name] if name in others else _read(source, name) for name in names})


def _read(source: object, name: str) -> Any:
    spelled = (prefix + name for prefix in ("num_", "is_", "has_") if hasattr(source, prefix + name))
    return getattr(source, name if hasattr(source, name) else next(spelled, name))


def sse_event(payload: Any, name: str | None = None) -> bytes:
    """An event; raises ValueError or TypeError."""
    # JSON is one line; a library's frames, made for any text, cost more than its encoding.
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json_text(payload)}\n\n".encode()


def sse_comment(text: str) -> bytes:
    """A comment of one line."""
    return f": {text}\n\n".encode()
