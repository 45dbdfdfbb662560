"""Checks the key, where keys are configured, before anything else of a request is read; and derives the namespace.

Each key has a namespace of its own, even where the server requires none; no other key sees anything of it.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.context import context_of
from server.api.dialect import dialect_of
from server.api.web_access import is_same_server
from server.api_keys import ApiKey, namespace_of_key
from server.config import ServerConfig

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
OWN_NAMES = LOOPBACK | {"localhost"}
OF_OTHERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers that proxies add: somebody else is asking."""
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})


def key_of(request: Request) -> ApiKey | None:
    """Returns which of the server's keys a request holds, or None."""
    return context_of(request).keys.find(dialect_of(request).api_key(request.headers))


def known_key_of(request: Request) -> ApiKey | None:
    """Returns the key that `KeyCheck` found, or None where none is asked for."""
    key = request.scope["state"].get("key")
    return key if isinstance(key, ApiKey) else None


def key_name_of(scope: Scope) -> str | None:
    """Returns the name of the key that `KeyCheck` found, or None where it has none."""
    key = scope["state"].get("key")
    return key.name or None if isinstance(key, ApiKey) else None


def is_authorised(request: Request) -> bool:
    """Returns whether a request holds a key of the server, or the server asks for none."""
    return not context_of(request).config.needs_key or key_of(request) is not None


def namespace_of(request: Request, cache_salt: str | None) -> str:
    """Returns the name under which a request shares state; empty for one without a key and a salt.

    It never holds the key itself, since names may be written out.
    """
    key = dialect_of(request).api_key(request.headers)
    of_key = namespace_of_key(key) if key else ""
    # The slash keeps a salt from looking like the digest of a key.
    return f"{of_key}/{cache_salt}" if cache_salt else of_key


def namespace_of_query(request: Request) -> str:
    """Returns the namespace of a request without a body, from its key and `?cache_salt=`."""
    return namespace_of(request, request.query_params.get("cache_salt"))


def is_owner(request: Request, config: ServerConfig) -> bool:
    """Returns whether a request may see what all have: by an operator's key, or by hand on the server's own machine.

    The latter counts only where the server asks for no key, and not for a request that sends one all the same: that
    asks for its own state. Nor does it count behind a proxy, where everybody seems to be on this machine.
    """
    if config.needs_key:
        key = key_of(request)
        return key is not None and key.is_operator
    if dialect_of(request).api_key(request.headers):
        return False
    return is_from_this_machine(request)


def is_from_this_machine(request: Request) -> bool:
    """Whether a person on the server's own machine asks, by a program or by the console in a browser.

    A page of another origin, which `--cors` may have let in, and what comes through a proxy are somebody else's. So
    is what names the server otherwise than by the loopback address: it may come through a proxy that adds no header,
    or from a page whose own name was made to point here.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host", "127.0.0.1")
    is_forwarded = any(name in request.headers for name in OF_OTHERS)
    is_own_page = origin is None or is_same_server(origin, host)
    is_near = request.client is not None and request.client.host in LOOPBACK
    return is_near and _is_own_name(host) and is_own_page and not is_forwarded


def _is_own_name(host: str) -> bool:
    """Whether a `Host` header names the loopback address."""
    try:
        return urlsplit(f"//{host}").hostname in OWN_NAMES
    except ValueError:
        return False


def visible_namespace(request: Request, config: ServerConfig) -> str:
    """Returns the namespace that a request without a body is about: its own, or the one that the owner names."""
    named = request.query_params.get("namespace")
    return named if named is not None and is_owner(request, config) else namespace_of_query(request)


def listed_namespace(request: Request, config: ServerConfig) -> str | None:
    """Returns the namespace that a list is limited to; None, which is all, for an owner who names none."""
    if "cache_salt" in request.query_params or not is_owner(request, config):
        return namespace_of_query(request)
    return request.query_params.get("namespace")


class KeyCheck:
    """ASGI layer that raises the dialect's error for requests without a key; behind it `scope["state"]` has `key`."""

    def __init__(self, app: ASGIApp, is_open: Callable[[Scope], bool] = lambda scope: False) -> None:
        """`is_open` says which requests need no key besides those for `OPEN_PATHS`."""
        self._app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass; raises ApiError for the rest."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_open(scope):
            request = Request(scope)
            request.state.key = key_of(request)
            if request.state.key is None:
                raise dialect_of(request).wrong_key()
        await self._app(scope, receive, send)
