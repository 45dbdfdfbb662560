"""Asks for the key, where one is configured, before anything of a request is looked at; and whose request it is.

Any key makes a namespace of its own, whether or not one is asked for: whoever sends another sees nothing of it.
"""

import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, Code

OPEN_PATHS = frozenset({"/health"})


def is_authorised(headers: Mapping[str, str], api_key: str | None) -> bool:
    """Returns whether the headers hold the key, in a time that says nothing about it."""
    if api_key is None:
        return True
    return hmac.compare_digest(bearer_key(headers).encode(), api_key.encode())


def bearer_key(headers: Mapping[str, str]) -> str:
    """Returns the key that a request was sent with, or an empty text."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def namespace_of(headers: Mapping[str, str], cache_salt: str | None) -> str:
    """Returns the name under which a request shares state; empty for one without a key and a salt.

    It never holds the key itself, since names may be written out.
    """
    key = bearer_key(headers)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
    # The slash keeps a salt from being taken for a key's name.
    return f"{digest}/{cache_salt}" if cache_salt else digest


class BearerAuth:
    """ASGI layer that answers requests without the key with status 401."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass; raises ApiError for the rest."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if not is_open and not is_authorised(Headers(scope=scope), self._api_key):
            raise ApiError(
                Code.INVALID_API_KEY,
                "the key is missing or wrong; send it as 'Authorization: Bearer <key>'",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)
