"""The paths of the Responses API, and the endpoints of stored responses and conversations.

A conversation keeps items under one name, with or without responses that continue them.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.call import inspect
from server.api.context import ApiContext, context_of
from server.api.dialect import Api, BodyModel, Endpoint, Payload, with_and_without_v1
from server.api.errors import ApiError, Code, wrong
from server.api.guard import namespace_of_query
from server.api.openai.dialect import ErrorBody, OpenAiDialect, error_body
from server.api.openapi import Operation
from server.api.params import Incoming
from server.api.responses.create import (
    ResponseBody,
    ResponseTokensBody,
    count_input_tokens,
    create_response,
    parse_known,
    with_ids,
)
from server.api.responses.items import Item, check_items
from server.api.responses.store import ResponseStore, StoredConversation, StoredResponse, store_of
from server.api.responses.types import InputBody, Metadata, ResponsesBody
from server.api.wire import JsonBody, sse_event

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
_NAMED = {
    "response_id": "stored response {}",
    "conversation_id": "conversation {}",
    "item_id": "item {} in the conversation",
}
"""What each parameter of a path names."""


class Deletion(TypedDict):
    """What a deletion is answered with."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Some items of a longer list."""

    object: Literal["list"]
    data: Sequence[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def get_response(request: Request) -> Response:
    """Returns a stored response."""
    if request.query_params.get("stream") == "true":
        message = "stream: a response that is kept is not streamed again; leave it out"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "stream")
    return JsonBody((await _found_response(request)).body)


async def delete_response(request: Request) -> Response:
    """Forgets a response."""
    name = request.path_params["response_id"]
    if not await asyncio.wrap_future(store_for(request).delete(namespace_of_query(request), name)):
        raise _unknown("response_id", name)
    deleted: Deletion = {"id": name, "object": "response", "deleted": True}
    return JsonBody(deleted)


async def cancel_response(request: Request) -> Response:
    """Says that nothing can be cancelled: a response is made while its client waits."""
    await _found_response(request)
    message = "the response has ended; one that is being made is cancelled by closing its connection"
    raise ApiError(Code.INVALID_VALUE, message, "response_id")


async def list_input_items(request: Request) -> Response:
    """Returns the items before a response, newest first."""
    response = await _found_response(request)
    chain = await asyncio.wrap_future(store_for(request).chain(namespace_of_query(request), response.id))
    before = [item for one in chain[:-1] for item in (*one.input, *one.body["output"])]
    return JsonBody(page_of([*before, *response.input], request))


def store_for(request: Request) -> ResponseStore:
    """Returns the store of the request's server."""
    return context_of(request).kept(store_of)


def page_of(items: Sequence[Item], request: Request) -> ItemList:
    """Returns the items of `limit`, `order` and `after`; raises ApiError (400)."""
    ordered = list(items) if _order_of(request) == "asc" else list(reversed(items))
    after = request.query_params.get("after")
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise wrong("after", f"there is no item {after[:200]!r} here")
        ordered = ordered[ids.index(after) + 1 :]
    limit = _limit_of(request)
    return _page(ordered[:limit], has_more=len(ordered) > limit)


def _page(items: Sequence[Item], *, has_more: bool = False) -> ItemList:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}


async def _found_response(request: Request) -> StoredResponse:
    name = request.path_params["response_id"]
    found = await asyncio.wrap_future(store_for(request).find(namespace_of_query(request), name))
    if found is None:
        raise _unknown("response_id", name)
    return found


def _order_of(request: Request) -> str:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", "Input should be asc or desc")
    return order


def _limit_of(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise wrong("limit", f"Input should be a number from 1 to {MAX_LIMIT}")
    return int(text)


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


class ConversationBody(TypedDict):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: Mapping[str, str]


async def create_conversation(request: Request) -> Response:
    """Begins a conversation."""
    return await inspect(request, _create)


async def get_conversation(request: Request) -> Response:
    """Returns a conversation, without its items."""
    return JsonBody(_body(await _found_conversation(request)))


async def update_conversation(request: Request) -> Response:
    """Replaces a conversation's metadata."""
    return await inspect(request, _update)


async def delete_conversation(request: Request) -> Response:
    """Forgets a conversation and its items."""
    name = request.path_params["conversation_id"]
    if not await asyncio.wrap_future(store_for(request).delete_conversation(namespace_of_query(request), name)):
        raise _unknown("conversation_id", name)
    deleted: Deletion = {"id": name, "object": "conversation.deleted", "deleted": True}
    return JsonBody(deleted)


async def list_items(request: Request) -> Response:
    """Returns a conversation's items, newest first."""
    return JsonBody(page_of(await _items(request), request))


async def create_items(request: Request) -> Response:
    """Adds items to a conversation."""
    return await inspect(request, _add_items)


async def get_item(request: Request) -> Response:
    """Returns one item of a conversation."""
    wanted = request.path_params["item_id"]
    for item in await _items(request):
        if item["id"] == wanted:
            return JsonBody(item)
    raise _unknown("item_id", wanted)


async def delete_item(request: Request) -> Response:
    """Removes an item; returns the conversation."""
    conversation, wanted = await _found_conversation(request), request.path_params["item_id"]
    deleted = store_for(request).delete_item(namespace_of_query(request), conversation.id, wanted)
    if not await asyncio.wrap_future(deleted):
        raise _unknown("item_id", wanted)
    return JsonBody(_body(conversation))


def _create(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(NewConversation, incoming.fields, {})
    # A gateway finds a conversation's server by the request that created it.
    name = incoming.request_id.rpartition("_")[2]
    items = with_ids(_whole_items(body.items or []), name)
    conversation = StoredConversation(f"conv_{name}", int(time.time()), body.metadata or {})
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    store.put_conversation(namespace, conversation).result()
    store.add_items(namespace, conversation.id, items).result()
    return _body(conversation)


def _update(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(ConversationUpdate, incoming.fields, {})
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    name = incoming.http.path_params["conversation_id"]
    found = store.find_conversation(namespace, name).result()
    if found is None:
        raise _unknown("conversation_id", name)
    changed = StoredConversation(found.id, found.created, body.metadata or {})
    store.put_conversation(namespace, changed).result()
    return _body(changed)


def _add_items(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(NewItems, incoming.fields, {})
    items = with_ids(_whole_items(body.items), uuid.uuid4().hex)
    name = incoming.http.path_params["conversation_id"]
    added = context.kept(store_of).add_items(namespace_of_query(incoming.http), name, items)
    if not added.result():
        raise _unknown("conversation_id", name)
    return _page(items)


def _whole_items(items: list[Any]) -> list[Item]:
    """Returns checked items; raises ApiError (400) for a reference."""
    checked = check_items(items, "items")
    for index, item in enumerate(checked):
        if item["type"] == "item_reference":
            place = f"items[{index}].type"
            raise wrong(place, "a conversation holds items, not references")
    return checked


async def _found_conversation(request: Request) -> StoredConversation:
    name = request.path_params["conversation_id"]
    found = await asyncio.wrap_future(store_for(request).find_conversation(namespace_of_query(request), name))
    if found is None:
        raise _unknown("conversation_id", name)
    return found


async def _items(request: Request) -> list[Item]:
    conversation = await _found_conversation(request)
    return await asyncio.wrap_future(store_for(request).items(namespace_of_query(request), conversation.id))


def _body(conversation: StoredConversation) -> ConversationBody:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }


def _unknown(param: str, name: str) -> ApiError:
    return ApiError(Code.RESPONSE_NOT_FOUND, f"there is no {_NAMED[param].format(repr(name[:200]))}", param)


class ResponsesDialect(OpenAiDialect):
    """The endpoints of responses and conversations."""

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an `error` event, which clients raise."""
        told = {"code": error.code.value, "message": error.message, "param": error.param}
        return sse_event({"type": "error", "sequence_number": 0, **told, **error_body(error)}, "error")


_RESPONSE, _CONVERSATION = "/responses/{response_id}", "/conversations/{conversation_id}"
_SALT, _PAGE = ("cache_salt",), ("limit", "order", "after", "cache_salt")
_ROUTES = (
    Endpoint("/responses", create_response, Operation(ResponsesBody, ResponseBody, dict[str, Any])),
    Endpoint("/responses/input_tokens", count_input_tokens, Operation(InputBody, ResponseTokensBody)),
    Endpoint(_RESPONSE, get_response, Operation(answer=ResponseBody, query=("stream", *_SALT))),
    Endpoint(_RESPONSE, delete_response, Operation(answer=Deletion, query=_SALT), ["DELETE"]),
    Endpoint(_RESPONSE + "/cancel", cancel_response, Operation(answer=ResponseBody, query=_SALT), ["POST"]),
    Endpoint(_RESPONSE + "/input_items", list_input_items, Operation(answer=ItemList, query=_PAGE)),
    Endpoint("/conversations", create_conversation, Operation(NewConversation, ConversationBody, query=_SALT)),
    Endpoint(_CONVERSATION, get_conversation, Operation(answer=ConversationBody, query=_SALT)),
    Endpoint(_CONVERSATION, update_conversation, Operation(ConversationUpdate, ConversationBody, query=_SALT)),
    Endpoint(_CONVERSATION, delete_conversation, Operation(answer=Deletion, query=_SALT), ["DELETE"]),
    Endpoint(_CONVERSATION + "/items", list_items, Operation(answer=ItemList, query=_PAGE)),
    Endpoint(_CONVERSATION + "/items", create_items, Operation(NewItems, ItemList, query=_SALT)),
    Endpoint(_CONVERSATION + "/items/{item_id}", get_item, Operation(answer=Item, query=_SALT)),
    Endpoint(
        _CONVERSATION + "/items/{item_id}", delete_item, Operation(answer=ConversationBody, query=_SALT), ["DELETE"]
    ),
)
RESPONSES = Api(ResponsesDialect(), with_and_without_v1(_ROUTES), ErrorBody)
