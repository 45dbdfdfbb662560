"""Reads a request's body: bounded while it arrives, strict JSON, an object."""

from collections.abc import AsyncIterator
from typing import Any

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from server.api.errors import ApiError, Code


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body; raises ApiError (413) as soon as it is known to exceed `max_bytes`."""
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


def not_finite() -> ApiError:
    """Returns the error for a body that holds NaN or Infinity anywhere."""
    return ApiError(Code.INVALID_JSON, "the body holds NaN or Infinity, which are not JSON")


def _parse_leniently(raw: bytes) -> Any:
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        raise ApiError(Code.INVALID_JSON, f"the body is not valid JSON: {error}") from error


def _too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot serve another request.
    message = f"the body is larger than the {max_bytes} bytes that this server accepts"
    return ApiError(Code.BODY_TOO_LARGE, message, headers={"Connection": "close"})


async def _arriving(request: Request) -> AsyncIterator[bytes]:
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect as error:
        raise ApiError(Code.INVALID_JSON, "the client left before its body was complete") from error
