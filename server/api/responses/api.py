"""The paths of the Responses API, and its stored responses and conversations.

A conversation keeps items under one name, with or without responses that continue them.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.bodies import BodyModel
from server.api.call import AnswerStream, inspect
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, context_of, dialect_of, with_and_without_v1
from server.api.errors import ApiError, Code, wrong
from server.api.guard import namespace_of_query
from server.api.params import Incoming
from server.api.responses.conversation import UNFINISHED, Metadata, check_items, parse_known, with_ids
from server.api.responses.create import KEPT_SECONDS, ROUTES, BackgroundRun, BackgroundRuns, ResponseBody
from server.api.responses.output import Item
from server.api.responses.store import ResponseStore, StoredConversation, StoredResponse, store_of
from server.api.wire import JsonBody, Payload, number_asked, sse_event

Ask: TypeAlias = Callable[[ResponseStore, str, str], Any]
Deletion: TypeAlias = dict[Literal["id", "object", "deleted"], str | bool]
MAX_LIMIT = 100


class ItemList(TypedDict):
    """Some items of a longer list."""

    object: Literal["list"]
    data: Sequence[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class NewConversation(BodyModel):
    """Body of `POST /v1/conversations`."""

    items: list[Any] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(BodyModel):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    metadata: Metadata | None


class NewItems(BodyModel):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: list[Any]


async def get_response(request: Request) -> Response:
    """Returns a stored response as it is, or with `stream` the events of one in the background, those to come too."""
    run, dialect = _run_of(request), dialect_of(request)
    body = await _stored(request) if run is None else run.now()
    if request.query_params.get("stream") != "true":
        return JsonBody(body)
    number = number_asked(request, "starting_after", 999_999_999)
    if run is None:
        why = f"events are kept of responses in the background, and {KEPT_SECONDS} s beyond their end; leave it out"
        raise wrong("stream", why, Code.UNSUPPORTED_PARAMETER)
    events = run.follow(0 if number is None else number + 1)
    return AnswerStream(request, events, lambda: dialect.heartbeat(run.progress()))


async def delete_response(request: Request) -> Response:
    """Forgets a response, cancelled if unfinished."""
    run = _run_of(request)
    if run is not None:
        await run.cancel()
        run.forget()
    return await _deleted(request, "response_id", ResponseStore.delete, "response")


async def cancel_response(request: Request) -> Response:
    """Cancels a response in the background, if it has not ended."""
    run = _run_of(request)
    if run is not None:
        await run.cancel()
        return JsonBody(run.now())
    body = await _stored(request)
    if not body["background"]:
        message = "only a response in the background is cancelled; another one is by closing its connection"
        raise ApiError(Code.INVALID_VALUE, message, "response_id")
    return JsonBody(body)


def _run_of(request: Request) -> BackgroundRun | None:
    place = namespace_of_query(request), request.path_params["response_id"]
    return context_of(request).kept(BackgroundRuns).find(*place)


async def _stored(request: Request) -> Mapping[str, Any]:
    """A stored response; an unfinished one without a run has failed."""
    found: StoredResponse = await _found(request, "response_id", ResponseStore.find)
    if found.body["status"] not in UNFINISHED:
        return found.body
    error = {"code": "server_error", "message": "the server ended before the response did"}
    return {**found.body, "status": "failed", "error": error}


async def list_input_items(request: Request) -> Response:
    """Returns the items before a response, newest first."""
    chain = await _found(request, "response_id", lambda *place: ResponseStore.chain(*place) or None)
    return JsonBody(_page_of([*(item for one in chain[:-1] for item in one.items), *chain[-1].input], request))


async def get_conversation(request: Request) -> Response:
    """Returns a conversation, without its items."""
    return JsonBody(await _found(request, "conversation_id", ResponseStore.find_conversation))


async def delete_conversation(request: Request) -> Response:
    """Forgets a conversation and its items."""
    return await _deleted(request, "conversation_id", ResponseStore.delete_conversation, "conversation.deleted")


async def list_items(request: Request) -> Response:
    """Returns a conversation's items, newest first."""
    return JsonBody(_page_of(await _found(request, "conversation_id", ResponseStore.items), request))


async def get_item(request: Request) -> Response:
    """Returns one item of a conversation."""
    wanted = request.path_params["item_id"]
    items = await _found(request, "conversation_id", ResponseStore.items)
    return JsonBody(_known(next((item for item in items if item["id"] == wanted), None), request, "item_id"))


async def delete_item(request: Request) -> Response:
    """Removes an item; returns the conversation."""
    conversation = await _found(request, "conversation_id", ResponseStore.find_conversation)
    await _found(request, "item_id", lambda store, *place: store.delete_item(*place, conversation.id))
    return JsonBody(conversation)


@inspect
def create_conversation(context: ApiContext, incoming: Incoming) -> Payload:
    """Begins a conversation."""
    body = parse_known(NewConversation, incoming.fields, {})
    # A gateway finds a conversation's server by the request that created it.
    name = incoming.request_id.rpartition("_")[2]
    items = with_ids(_whole_items(body.items or []), name)
    conversation = StoredConversation(f"conv_{name}", int(time.time()), body.metadata or {})
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    store.put_conversation(namespace, conversation)
    store.add_items(namespace, conversation.id, items)
    return vars(conversation)


@inspect
def update_conversation(context: ApiContext, incoming: Incoming) -> Payload:
    """Replaces a conversation's metadata."""
    body = parse_known(ConversationUpdate, incoming.fields, {})
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    found = store.find_conversation(namespace, incoming.http.path_params["conversation_id"])
    changed: StoredConversation = replace(
        _known(found, incoming.http, "conversation_id"), metadata=body.metadata or {}
    )
    store.put_conversation(namespace, changed)
    return vars(changed)


@inspect
def create_items(context: ApiContext, incoming: Incoming) -> Payload:
    """Adds items to a conversation."""
    body = parse_known(NewItems, incoming.fields, {})
    items = with_ids(_whole_items(body.items), uuid.uuid4().hex)
    name = incoming.http.path_params["conversation_id"]
    added = context.kept(store_of).add_items(namespace_of_query(incoming.http), name, items)
    _known(added, incoming.http, "conversation_id")
    return _page(items)


def _whole_items(items: list[Any]) -> list[Item]:
    """Raises ApiError (400) for a reference."""
    checked = check_items(items, "items")
    for index, item in enumerate(checked):
        if item["type"] == "item_reference":
            raise wrong(f"items[{index}].type", "a conversation holds items, not references")
    return checked


async def _found(request: Request, param: str, ask: Ask) -> Any:
    """Raises ApiError (404)."""
    place = (context_of(request).kept(store_of), namespace_of_query(request), request.path_params[param])
    return _known(await asyncio.to_thread(ask, *place), request, param)


def _known(found: Any, request: Request, param: str) -> Any:
    if found is None or found is False:
        name = request.path_params[param][:200]
        raise ApiError(Code.RESPONSE_NOT_FOUND, f"there is no {param.removesuffix('_id')} {name!r}", param)
    return found


async def _deleted(request: Request, param: str, delete: Ask, kind: str) -> Response:
    await _found(request, param, delete)
    return JsonBody({"id": request.path_params[param], "object": kind, "deleted": True})


def _page_of(items: Sequence[Item], request: Request) -> ItemList:
    """The items of `limit`, `order` and `after`; raises ApiError (400)."""
    asked = request.query_params
    order, after, limit = asked.get("order", "desc"), asked.get("after"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise wrong("order", "Input should be asc or desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise wrong("limit", f"Input should be a number from 1 to {MAX_LIMIT}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise wrong("after", f"there is no item {after[:200]!r} here")
        ordered = ordered[ids.index(after) + 1 :]
    return _page(ordered[: int(limit)], has_more=len(ordered) > int(limit))


def _page(items: Sequence[Item], *, has_more: bool = False) -> ItemList:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}


class ResponsesDialect(Dialect):
    """The endpoints of responses and conversations."""

    def error_frame(self, error: ApiError) -> bytes:
        """An `error` event, which clients raise."""
        told = {"code": error.code.value, "message": error.message, "param": error.param}
        return sse_event({"type": "error", "sequence_number": 0, **told, **self.error_body(error)}, "error")


_RESPONSE, _CONVERSATION = "/responses/{response_id}", "/conversations/{conversation_id}"
_SALT, _PAGE = ("cache_salt",), ("limit", "order", "after", "cache_salt")
_ROUTES = (
    *ROUTES,
    Endpoint(_RESPONSE, get_response, Operation(answer=ResponseBody, query=("stream", "starting_after", *_SALT))),
    Endpoint(_RESPONSE, delete_response, Operation(answer=Deletion, query=_SALT), ["DELETE"]),
    Endpoint(_RESPONSE + "/cancel", cancel_response, Operation(answer=ResponseBody, query=_SALT), ["POST"]),
    Endpoint(_RESPONSE + "/input_items", list_input_items, Operation(answer=ItemList, query=_PAGE)),
    Endpoint("/conversations", create_conversation, Operation(NewConversation, StoredConversation, query=_SALT)),
    Endpoint(_CONVERSATION, get_conversation, Operation(answer=StoredConversation, query=_SALT)),
    Endpoint(_CONVERSATION, update_conversation, Operation(ConversationUpdate, StoredConversation, query=_SALT)),
    Endpoint(_CONVERSATION, delete_conversation, Operation(answer=Deletion, query=_SALT), ["DELETE"]),
    Endpoint(_CONVERSATION + "/items", list_items, Operation(answer=ItemList, query=_PAGE)),
    Endpoint(_CONVERSATION + "/items", create_items, Operation(NewItems, ItemList, query=_SALT)),
    Endpoint(_CONVERSATION + "/items/{item_id}", get_item, Operation(answer=Item, query=_SALT)),
    Endpoint(
        _CONVERSATION + "/items/{item_id}", delete_item, Operation(answer=StoredConversation, query=_SALT), ["DELETE"]
    ),
)
RESPONSES = ResponsesDialect(with_and_without_v1(_ROUTES))
