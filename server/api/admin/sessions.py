"""`/v1/sessions`: sessions, what each turn cost, and why.

A request sees its own namespace; the server's owner all, or `?namespace=`.
"""

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.dialect import Endpoint, Operation, context_of
from server.api.errors import ApiError, Code
from server.api.guard import listed_namespace, visible_namespace
from server.api.sessions import Refusal, SessionDetail, SessionRecord
from server.api.wire import JsonBody
from server.app.keys import KeyRing
from server.engine.commands import forget_session
from server.engine.request import EngineStopped


class SessionList(TypedDict):
    """Sessions, the last used first, and refusals."""

    object: str
    data: list[SessionRecord]
    refused: list[Refusal]


class DeletedBody(TypedDict):
    """A session that was forgotten."""

    id: str
    object: str
    deleted: bool


async def list_sessions(request: Request) -> Response:
    """Lists the namespace's sessions, for the owner all."""
    context = context_of(request)
    namespace = listed_namespace(request)
    sessions = [_shown(session, context.keys) for session in context.sessions.of(namespace)]
    data = [{name: value for name, value in shown.items() if name != "turns"} for shown in sessions]
    return JsonBody({"object": "list", "data": data, "refused": context.refusals.of(namespace)})


async def get_session(request: Request) -> Response:
    """Describes one session with its last turns; raises ApiError (404)."""
    return JsonBody(_shown(_found(request), context_of(request).keys))


async def delete_session(request: Request) -> Response:
    """Forgets one session; raises ApiError (404)."""
    context, session = context_of(request), _found(request)
    namespace, session_id = session.namespace, session.id
    for model in context.pool.served:
        engine = context.pool.engines.get(model.base_id)
        if engine is None:
            continue
        # A stopped engine holds no state.
        with contextlib.suppress(EngineStopped):
            await engine.execute(forget_session, model.state_namespace(namespace), session_id)
    context.pool.forget_session_of_unloaded(namespace, session_id)
    context.sessions.forget(namespace, session_id)
    context.conversations.forget(namespace, session_id)
    context.refusals.forget_session(namespace, session_id)
    return JsonBody(DeletedBody(id=session_id, object="session.deleted", deleted=True))


def _found(request: Request) -> SessionDetail:
    session_id = request.path_params["session_id"]
    session = context_of(request).sessions.find(visible_namespace(request), session_id)
    if session is None:
        unnamed = "the path names no session; GET /v1/sessions lists them"
        message = f"there is no session {session_id[:256]!r}" if session_id else unnamed
        raise ApiError(Code.SESSION_NOT_FOUND, message, "session_id")
    return session


def _shown(session: SessionDetail, keys: KeyRing) -> dict[str, Any]:
    return {**vars(session), "key": keys.name_of(session.namespace)}


_QUERY = ("cache_salt", "namespace")
ROUTES = (
    Endpoint("/sessions", list_sessions, Operation(answer=SessionList, query=_QUERY)),
    Endpoint("/sessions/{session_id:path}", get_session, Operation(answer=SessionDetail, query=_QUERY)),
    Endpoint("/sessions/{session_id:path}", delete_session, Operation(answer=DeletedBody, query=_QUERY), ["DELETE"]),
)
