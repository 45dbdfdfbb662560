"""The console: a page at `/`, and its static files.

The files hold no user data and need no key. A server without keys gives the page to this machine only, since anybody
could read along. The page's content policy allows no other server and no code outside these files.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from server.api.dialect import context_of
from server.api.errors import ApiError, Code
from server.api.guard import is_from_this_machine

FOLDER = "/console/"
PAGE = "index.html"
_SOURCE = Path(__file__).resolve().parents[1] / "console"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A file changes only with the server, but then at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class ConsoleFile:
    """A file of the console."""

    content: bytes
    media_type: str
    etag: str


@cache
def console_files() -> dict[str, ConsoleFile]:
    """By path below `/console/`; no other file is served."""
    paths = (path for path in _SOURCE.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(_SOURCE).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> ConsoleFile:
    content = path.read_bytes()
    return ConsoleFile(content, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')


class PageRoute(Route):
    """The page, only for browsers, which ask for HTML."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches only requests that ask for HTML."""
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for a page."""
    return scope["type"] == "http" and any(
        name == b"accept" and b"text/html" in value for name, value in scope["headers"]
    )


def needs_no_key(scope: Scope) -> bool:
    """Whether a request is for a console file."""
    path: str = scope["path"]
    return path.startswith(FOLDER) or (path == "/" and wants_page(scope))


async def page(request: Request) -> Response:
    """Answers with the page; raises ApiError (403)."""
    return _answer(request, PAGE)


async def file(request: Request) -> Response:
    """Answers with one of its files; raises ApiError (403, 404)."""
    return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    if not context_of(request).config.needs_key and not is_from_this_machine(request):
        message = "without keys the console is for the server's own machine; --api-key makes it one for others"
        raise ApiError(Code.OPERATOR_ONLY, message)
    found = console_files().get(name)
    if found is None:
        raise ApiError(Code.UNKNOWN_PATH, f"the console has no file {name[:200]!r}")
    headers = {**HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


PAGE_ROUTES = (PageRoute("/", page, methods=["GET"]), Route(f"{FOLDER}{{name:path}}", file, methods=["GET"]))
"""Must precede all other routes."""
