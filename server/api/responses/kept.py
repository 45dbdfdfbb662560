"""Stored responses and `/v1/conversations`: reading, changing and forgetting them and their items.

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
from server.api.dialect import BodyModel, Payload
from server.api.errors import ApiError, Code
from server.api.guard import namespace_of_query
from server.api.params import Incoming
from server.api.responses.create import parse_known, with_ids
from server.api.responses.fields import IN_CONVERSATION, IN_ITEMS, IN_UPDATE
from server.api.responses.items import Item, check_items
from server.api.responses.store import ResponseStore, StoredConversation, StoredResponse, store_of
from server.api.responses.types import Metadata
from server.api.wire import JsonBody

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class DeletedResponseBody(TypedDict):
    """What a deletion is answered with."""

    id: str
    object: str
    deleted: Literal[True]


class ItemList(TypedDict):
    """Some items of a longer list."""

    object: Literal["list"]
    data: Sequence[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def get_response(request: Request) -> Response:
    """Returns a response as its client was given it."""
    if request.query_params.get("stream") == "true":
        message = "stream: a response that is kept is not streamed again; leave it out"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "stream")
    return JsonBody((await _found_response(request)).body)


async def delete_response(request: Request) -> Response:
    """Forgets a response."""
    name = request.path_params["response_id"]
    if not await asyncio.wrap_future(store_for(request).delete(namespace_of_query(request), name)):
        raise _unknown_response(name)
    deleted: DeletedResponseBody = {"id": name, "object": "response", "deleted": True}
    return JsonBody(deleted)


async def cancel_response(request: Request) -> Response:
    """Says that there is nothing to be cancelled: a response is made while its client waits."""
    await _found_response(request)
    message = "the response has ended; one that is being made is cancelled by closing its connection"
    raise ApiError(Code.INVALID_VALUE, message, "response_id")


async def list_input_items(request: Request) -> Response:
    """Returns the items that a response answered, the newest first, and those that it goes on from."""
    response = await _found_response(request)
    chain = await asyncio.wrap_future(store_for(request).chain(namespace_of_query(request), response.id))
    before = [item for one in chain[:-1] for item in (*one.input, *one.body["output"])]
    return JsonBody(page_of([*before, *response.input], request))


def store_for(request: Request) -> ResponseStore:
    """Returns the store of the request's server."""
    return context_of(request).kept(store_of)


def page_of(items: Sequence[Item], request: Request) -> ItemList:
    """Returns the items selected by `limit`, `order` and `after`; raises ApiError (400)."""
    ordered = list(items) if _order_of(request) == "asc" else list(reversed(items))
    after = request.query_params.get("after")
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ApiError(Code.INVALID_VALUE, f"after: there is no item {after[:200]!r} here", "after")
        ordered = ordered[ids.index(after) + 1 :]
    limit = _limit_of(request)
    data = ordered[:limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list",
        "data": data,
        "first_id": ends[0],
        "last_id": ends[1],
        "has_more": len(ordered) > limit,
    }


async def _found_response(request: Request) -> StoredResponse:
    name = request.path_params["response_id"]
    found = await asyncio.wrap_future(store_for(request).find(namespace_of_query(request), name))
    if found is None:
        raise _unknown_response(name)
    return found


def _unknown_response(name: str) -> ApiError:
    message = f"there is no stored response {name[:200]!r}"
    return ApiError(Code.RESPONSE_NOT_FOUND, message, "response_id")


def _order_of(request: Request) -> str:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(Code.INVALID_VALUE, "order: Input should be asc or desc", "order")
    return order


def _limit_of(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise ApiError(Code.INVALID_VALUE, f"limit: Input should be a number from 1 to {MAX_LIMIT}", "limit")
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


class DeletedConversationBody(TypedDict):
    """What a deletion is answered with."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


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
        raise _unknown_conversation(name)
    deleted: DeletedConversationBody = {"id": name, "object": "conversation.deleted", "deleted": True}
    return JsonBody(deleted)


async def list_items(request: Request) -> Response:
    """Returns items of a conversation, the newest first unless asked otherwise."""
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
    raise _unknown_item(wanted)


async def delete_item(request: Request) -> Response:
    """Takes an item out of a conversation, which is returned."""
    conversation, wanted = await _found_conversation(request), request.path_params["item_id"]
    deleted = store_for(request).delete_item(namespace_of_query(request), conversation.id, wanted)
    if not await asyncio.wrap_future(deleted):
        raise _unknown_item(wanted)
    return JsonBody(_body(conversation))


def _create(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(NewConversation, incoming.fields, IN_CONVERSATION)
    # A gateway finds a conversation's server by the request that created it.
    name = incoming.request_id.rpartition("_")[2]
    items = with_ids(_whole_items(body.items or []), name)
    conversation = StoredConversation(f"conv_{name}", int(time.time()), body.metadata or {})
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    store.put_conversation(namespace, conversation).result()
    store.add_items(namespace, conversation.id, items).result()
    return _body(conversation)


def _update(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(ConversationUpdate, incoming.fields, IN_UPDATE)
    store, namespace = context.kept(store_of), namespace_of_query(incoming.http)
    name = incoming.http.path_params["conversation_id"]
    found = store.find_conversation(namespace, name).result()
    if found is None:
        raise _unknown_conversation(name)
    changed = StoredConversation(found.id, found.created, body.metadata or {})
    store.put_conversation(namespace, changed).result()
    return _body(changed)


def _add_items(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_known(NewItems, incoming.fields, IN_ITEMS)
    items = with_ids(_whole_items(body.items), uuid.uuid4().hex)
    name = incoming.http.path_params["conversation_id"]
    added = context.kept(store_of).add_items(namespace_of_query(incoming.http), name, items)
    if not added.result():
        raise _unknown_conversation(name)
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    page: ItemList = {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}
    return page


def _whole_items(items: list[Any]) -> list[Item]:
    """Returns checked items; raises ApiError (400) for a reference to another item."""
    checked = check_items(items, "items")
    for index, item in enumerate(checked):
        if item["type"] == "item_reference":
            place = f"items[{index}].type"
            raise ApiError(Code.INVALID_VALUE, f"{place}: a conversation holds items, not references", place)
    return checked


async def _found_conversation(request: Request) -> StoredConversation:
    name = request.path_params["conversation_id"]
    found = await asyncio.wrap_future(store_for(request).find_conversation(namespace_of_query(request), name))
    if found is None:
        raise _unknown_conversation(name)
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


def _unknown_conversation(name: str) -> ApiError:
    return ApiError(Code.RESPONSE_NOT_FOUND, f"there is no conversation {name[:200]!r}", "conversation_id")


def _unknown_item(name: str) -> ApiError:
    return ApiError(Code.RESPONSE_NOT_FOUND, f"there is no item {name[:200]!r} in the conversation", "item_id")
