"""Reads a request's body: a JSON object, bounded in bytes while it arrives and in the number of its values.

The parser holds Python's lock until it has read everything, so the values are counted first, block by block.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from server.api.content_encoding import expand, find_encoding
from server.api.errors import ApiError, Code

MAX_MESSAGES: Final = 10_000
"""Messages of one conversation; one with several parts or tool calls counts as so many."""
MAX_TEXTS: Final = 200_000
"""Texts, names of fields, objects and lists in one body, all together."""
MAX_VALUES: Final = 2_000_000
"""Values of any kind in one body; a prompt may be a list of token ids."""

_BLOCK_BYTES: Final = 1 << 16
_NO_BACKSLASH: Final = re.compile(rb"[^\\]")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body, expanded where it is compressed.

    Raises ApiError: 413 as soon as it is known to exceed `max_bytes`, 415 for a compression that is not known.
    """
    encoding = find_encoding(request.headers.get("content-encoding", ""))
    raw = await _read_as_sent(request, max_bytes)
    if encoding is None:
        return raw
    # Off the event loop: the time it takes is bounded, as its length is, but longer than others should wait.
    body = await asyncio.to_thread(expand, raw, encoding, max_bytes)
    if body is None:
        raise _too_large(max_bytes)
    return body


async def _read_as_sent(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in _arriving(request):
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def parse_object(raw: bytes) -> tuple[dict[str, Any], bool]:
    """Returns the JSON object and whether all its numbers are finite; raises ApiError (400).

    NaN and Infinity are not JSON, but some clients send them: they are read, so that the check of the
    field they stand in can name it, and the caller refuses what no check has refused.
    """
    try:
        value, is_finite = pydantic_core.from_json(raw, allow_inf_nan=False), True
    except ValueError:
        value, is_finite = _parse_leniently(raw), False
    if not isinstance(value, dict):
        raise ApiError(Code.INVALID_JSON, "the body must be a JSON object")
    return value, is_finite


def check_amount(raw: bytes) -> None:
    """Raises ApiError (400) for a body that holds more than may be parsed at once."""
    num_texts = num_values = 0
    for texts, values in _count_by_block(raw):
        num_texts += texts
        num_values += values
        if num_texts > MAX_TEXTS:
            message = f"the body holds more than {MAX_TEXTS} texts, names, objects and lists"
            raise ApiError(Code.INVALID_VALUE, message)
        if num_values > MAX_VALUES:
            raise ApiError(Code.INVALID_VALUE, f"the body holds more than {MAX_VALUES} values")


def check_messages(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for a conversation of too many messages; a field of another type is checked elsewhere."""
    messages = fields.get("messages")
    if isinstance(messages, list) and sum(map(_num_entries, messages)) > MAX_MESSAGES:
        message = (
            f"messages: at most {MAX_MESSAGES} messages are taken, several parts or calls in one counting as such"
        )
        raise ApiError(Code.INVALID_VALUE, message, "messages")


def _num_entries(message: Any) -> int:
    if not isinstance(message, dict):
        return 1
    return max(1, sum(len(value) for value in message.values() if isinstance(value, list)))


def _count_by_block(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yields, block by block, how many texts and containers begin there, and how many values end with a comma."""
    start, is_in_text = 0, False
    while start < len(raw):
        # A block never ends with a backslash, so that an escaped character is in the block of its backslash.
        found = _NO_BACKSLASH.search(raw, start + _BLOCK_BYTES - 1)
        stop = found.end() if found else len(raw)
        parts = raw[start:stop].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        between = b"".join(parts[is_in_text::2])
        num_quotes = len(parts) - 1
        num_begun = (num_quotes + (not is_in_text)) // 2
        yield num_begun + between.count(b"{") + between.count(b"["), between.count(b",")
        start, is_in_text = stop, is_in_text ^ (num_quotes % 2 == 1)


def not_finite() -> ApiError:
    """Returns the error for a body that holds NaN or Infinity anywhere."""
    return ApiError(Code.INVALID_JSON, "the body holds NaN or Infinity, which are not JSON")


def _parse_leniently(raw: bytes) -> Any:
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        raise ApiError(Code.INVALID_JSON, f"the body is not valid JSON: {error}") from error


def _too_large(max_bytes: int) -> ApiError:
    # The connection stays open: closed, a client that sends all before it reads would be cut off from the answer.
    # The rest of the body is read and dropped, for as long as a request may take to arrive.
    return ApiError(Code.BODY_TOO_LARGE, f"the body is larger than the {max_bytes} bytes that this server accepts")


async def _arriving(request: Request) -> AsyncIterator[bytes]:
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect as error:
        raise ApiError(Code.INVALID_JSON, "the client left before its body was complete") from error
