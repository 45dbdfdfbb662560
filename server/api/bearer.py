"""Keys that are sent as `Authorization: Bearer …`, as the clients of most dialects do."""

from collections.abc import Mapping

from server.api.errors import ApiError, Code
from server.api.header_text import header_text


def bearer_key(headers: Mapping[str, str]) -> str:
    """Returns the bearer token of a request, or an empty text."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return header_text(given) if scheme.lower() == "bearer" else ""


def wrong_bearer_key() -> ApiError:
    """Returns the error that asks for a bearer token."""
    message = "the key is missing or wrong; send it as 'Authorization: Bearer <key>'"
    return ApiError(Code.INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})
