"""Responses that are kept: reading and forgetting them, and their input."""

import asyncio
from collections.abc import Sequence
from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.auth import namespace_of_query
from server.api.context import context_of
from server.api.errors import ApiError, Code
from server.api.json_body import JsonBody
from server.api.responses.items import Item
from server.api.responses.store import ResponseStore, StoredResponse, store_of

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
    return JsonBody((await _found(request)).body)


async def delete_response(request: Request) -> Response:
    """Forgets a response."""
    name = request.path_params["response_id"]
    if not await asyncio.wrap_future(store_for(request).delete(namespace_of_query(request), name)):
        raise _unknown(name)
    deleted: DeletedResponseBody = {"id": name, "object": "response", "deleted": True}
    return JsonBody(deleted)


async def cancel_response(request: Request) -> Response:
    """Says that there is nothing to be cancelled: a response is made while its client waits."""
    await _found(request)
    message = "the response has ended; one that is being made is cancelled by closing its connection"
    raise ApiError(Code.INVALID_VALUE, message, "response_id")


async def list_input_items(request: Request) -> Response:
    """Returns the items that a response answered, the newest first, and those that it goes on from."""
    response = await _found(request)
    chain = await asyncio.wrap_future(store_for(request).chain(namespace_of_query(request), response.id))
    before = [item for one in chain[:-1] for item in (*one.input, *one.body["output"])]
    return JsonBody(page_of([*before, *response.input], request))


def store_for(request: Request) -> ResponseStore:
    """Returns the store that a request is about."""
    return context_of(request).kept(store_of)


def page_of(items: Sequence[Item], request: Request) -> ItemList:
    """Returns the items that `limit`, `order` and `after` ask for; raises ApiError (400)."""
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


async def _found(request: Request) -> StoredResponse:
    name = request.path_params["response_id"]
    found = await asyncio.wrap_future(store_for(request).find(namespace_of_query(request), name))
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> ApiError:
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
