"""What web pages may do here: nothing, unless they come from this server or from an origin that `--cors` names.

A server on the loopback address is reached by every page that its user's browser shows. Three checks keep pages out,
each by what a page cannot change:

* *Host*. A page can have its own name point to 127.0.0.1 (DNS rebinding), and for the browser it is this server's own
  page then. But the browser still sends that name. Addresses and names that nobody can register on the internet are
  taken; others only if `--allowed-host` has them, or if a key is required, which such a page does not have.
* *Origin*. Browsers send it with all that may change something. One that is not this server's own is refused. What a
  page embeds, as a script or an image, has none, and is told by `Sec-Fetch-Site`; only links are followed.
* *Content type*. A body must be JSON: without asking first (a CORS preflight), a page can send text and forms only.
  A dialect may take other types from programs: browsers send `Origin` or `Sec-Fetch-…` with every body.

Programs that are no browsers send no origin and notice nothing but the content type.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.dialect import dialect_of
from server.api.errors import ApiError, Code

ANY = "*"
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
PREFLIGHT_SECONDS = 600

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal")
"""Reserved: no such name can be registered on the internet (RFC 6761, RFC 6762, and ICANN's reservation of 2024)."""
_READING = frozenset({"GET", "HEAD"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class WebAccess:
    """Which hosts and origins are served. Pure."""

    hosts: frozenset[str] | None
    """Names by which this server is reached besides those that are always taken; None: any name."""
    origins: frozenset[str]
    """Origins, besides its own, whose pages may use this server; `*` stands for all."""

    @classmethod
    def of(cls, *, hosts: Iterable[str], origins: Iterable[str], needs_key: bool) -> "WebAccess":
        """Returns what was configured. `hosts` may hold `*`; where a key is required, any host is taken."""
        names = frozenset(name.lower().rstrip(".") for name in hosts)
        return cls(None if needs_key or ANY in names else names, frozenset(origin.lower() for origin in origins))

    def takes_host(self, host: str | None) -> bool:
        """Whether a request that names this host is served; one without a host comes from no browser."""
        if self.hosts is None or host is None:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().rstrip(".")
        return name in self.hosts or _is_private(name)

    def takes_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether a page of `origin` may use the server that its browser calls `host`."""
        if origin is None or ANY in self.origins or origin.lower() in self.origins:
            return True
        return host is not None and is_same_server(origin, host)

    def refusal(self, method: str, headers: Headers, *, takes_any_type: bool = False) -> ApiError | None:
        """Returns why a request is refused because of the page it comes from, or None.

        `takes_any_type` says that a program's body may have any content type.
        """
        host, origin = headers.get("host"), headers.get("origin")
        if not self.takes_host(host):
            return _wrong_host(host or "")
        is_foreign = origin is None and _is_cross_site(headers) and not _follows_link(method, headers)
        if is_foreign or not self.takes_origin(origin, host):
            return _wrong_origin(origin or "another page")
        may_be_any = takes_any_type and not _is_from_browser(headers)
        if _has_body(headers) and not may_be_any and not _is_json(headers.get("content-type", "")):
            return _wrong_type(headers.get("content-type", ""))
        return None


class WebAccessCheck:
    """ASGI layer that refuses requests of foreign web pages, before their key or body is looked at."""

    def __init__(self, app: ASGIApp, access: WebAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass; raises ApiError (403, 415) for the rest."""
        if scope["type"] == "http":
            takes_any_type = dialect_of(Request(scope)).takes_any_content_type
            error = self._access.refusal(scope["method"], Headers(scope=scope), takes_any_type=takes_any_type)
            if error is not None:
                raise error
        await self._app(scope, receive, send)


def cross_origin_layer(origins: Iterable[str]) -> Middleware:
    """Returns the layer that tells browsers which pages may use this server, errors included; it stands outermost."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=CORS_METHODS,
        allow_headers=[ANY],
        expose_headers=[ANY],
        max_age=PREFLIGHT_SECONDS,
        allow_private_network=True,
    )


def _is_private(name: str) -> bool:
    """Whether a name is an address, or one that cannot be registered on the internet."""
    last = name.rpartition(".")[2]
    is_address = name.startswith("[") or last.isdecimal()
    return is_address or last == name or name.endswith(_PRIVATE_ENDINGS)


def is_same_server(origin: str, host: str) -> bool:
    """Whether a page's origin is the server that it calls `host`, with or without a proxy that ends TLS."""
    try:
        page, server = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        if default is None or page.hostname is None:
            return False
        return (page.hostname, page.port or default) == (server.hostname, server.port or default)
    except ValueError:
        return False


def _is_cross_site(headers: Headers) -> bool:
    """Whether a browser says that another page asks; some requests without an origin are told from others so."""
    return headers.get("sec-fetch-site", "none").lower() in ("cross-site", "same-site")


def _follows_link(method: str, headers: Headers) -> bool:
    """Whether a browser asks in order to show the answer as a page, where no other page can read it."""
    return method in _READING and headers.get("sec-fetch-mode", "").lower() == "navigate"


def _is_from_browser(headers: Headers) -> bool:
    return "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _wrong_host(host: str) -> ApiError:
    message = (
        f"this server is not known as {host[:100]!r}, and a web page could have led a browser here by that name; "
        "start it with --allowed-host NAME if the name is right"
    )
    return ApiError(Code.HOST_NOT_ALLOWED, message)


def _wrong_origin(origin: str) -> ApiError:
    message = (
        f"web pages of {origin[:100]!r} may not use this server; start it with --cors ORIGIN to let those of an "
        "origin use it"
    )
    return ApiError(Code.ORIGIN_NOT_ALLOWED, message)


def _wrong_type(content_type: str) -> ApiError:
    given = f"not {content_type[:100]!r}" if content_type else "but none was sent"
    cure = "with curl: -H 'Content-Type: application/json'"
    message = f"the content type of a body must be application/json, {given}; {cure}"
    return ApiError(Code.UNSUPPORTED_MEDIA_TYPE, message)
