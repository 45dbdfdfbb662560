"""Asks for the key, where one is configured, before anything of a request is looked at."""

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
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), api_key.encode())


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
