"""The console: a page at `/`, and its static files.

The files hold no user data and need no key. A server without keys gives the page to this machine only, since anybody
could read along. The page's content policy allows no other server and no code outside these files.
"""

import mimetypes
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from server.api.dialect import context_of
from server.api.errors import ApiError, Code
from server.api.guard import CONSOLE, is_from_this_machine, wants_page

SOURCE = Path(__file__).resolve().parents[2] / "console"
_FILES = StaticFiles(directory=SOURCE)
mimetypes.add_type("text/javascript", ".js")  # which Python tells only from 3.12 on

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


class PageRoute(Route):
    """The page, only for browsers, which ask for HTML."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Matches only requests that ask for HTML."""
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


async def file(request: Request) -> Response:
    """Answers with the page, or the file of the path; raises ApiError (403, 404)."""
    name = request.path_params.get("name", "index.html")
    if not context_of(request).config.needs_key and not is_from_this_machine(request):
        message = "without a key the console is for the server's own machine; with --api-key others can use it too"
        raise ApiError(Code.OPERATOR_ONLY, message)
    try:
        response = await _FILES.get_response(name, request.scope)
    except HTTPException as error:
        raise ApiError(Code.UNKNOWN_PATH, f"the console has no file {name[:200]!r}") from error
    response.headers.update(HEADERS)
    return response


PAGE_ROUTES = (PageRoute("/", file, methods=["GET"]), Route(CONSOLE + "{name:path}", file, methods=["GET"]))
"""Must precede all other routes."""
