"""Checks the key, where one is configured, before anything else of a request is read; and derives the namespace.

Each key has a namespace of its own, even where the server requires none; no other key sees anything of it.
"""

import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.dialect import dialect_of
from server.config import ServerConfig

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
OF_OTHERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via", "origin")
"""Headers that proxies and browsers add: somebody else is asking."""
OPEN_PATHS = frozenset({"/health", "/ready"})


def is_authorised(request: Request, api_key: str | None) -> bool:
    """Returns whether a request holds the key, in a time that says nothing about it."""
    if api_key is None:
        return True
    return hmac.compare_digest(dialect_of(request).api_key(request.headers).encode(), api_key.encode())


def namespace_of(request: Request, cache_salt: str | None) -> str:
    """Returns the name under which a request shares state; empty for one without a key and a salt.

    It never holds the key itself, since names may be written out.
    """
    key = dialect_of(request).api_key(request.headers)
    digest = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
    # The slash keeps a salt from looking like the digest of a key.
    return f"{digest}/{cache_salt}" if cache_salt else digest


def namespace_of_query(request: Request) -> str:
    """Returns the namespace of a request without a body, from its key and `?cache_salt=`."""
    return namespace_of(request, request.query_params.get("cache_salt"))


def is_owner(request: Request, config: ServerConfig) -> bool:
    """Returns whether a request is made on the server's own machine, by hand, where the server asks for no key.

    Who sends a key or a salt asks for what is theirs. Behind a proxy everybody would seem to be here.
    """
    if config.api_key is not None or dialect_of(request).api_key(request.headers):
        return False
    is_forwarded = any(name in request.headers for name in OF_OTHERS)
    return not is_forwarded and request.client is not None and request.client.host in LOOPBACK


def visible_namespace(request: Request, config: ServerConfig) -> str:
    """Returns the namespace that a request without a body is about: its own, or the one that the owner names."""
    named = request.query_params.get("namespace")
    return named if named is not None and is_owner(request, config) else namespace_of_query(request)


class KeyCheck:
    """ASGI layer that raises the dialect's error for requests without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass; raises ApiError for the rest."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if not is_open and not is_authorised(request := Request(scope), self._api_key):
            raise dialect_of(request).wrong_key()
        await self._app(scope, receive, send)
