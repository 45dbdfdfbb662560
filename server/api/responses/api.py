"""The paths of the Responses API, and its stored responses and conversations.

A conversation keeps items under one name, with or without responses that continue them.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from server.api.bodies import BodyModel
from server.api.call import AnswerStream, Change, planned
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, context_of, dialect_of, with_and_without_v1
from server.api.errors import ApiError, Code, wrong
from server.api.guard import namespace_of_query
from server.api.params import Incoming
from server.api.responses.conversation import UNFINISHED, Metadata, check_items, parse_known, with_ids
from server.api.responses.create import KEPT_SECONDS, ROUTES, BackgroundRun, BackgroundRuns, ResponseBody
from server.api.responses.output import Item
from server.api.responses.store import Kind, Page, PageWish, ResponseStore, StoredConversation, rows_of, store_of
from server.api.wire import MAX_MESSAGES, JsonBody, json_text, number_asked, sse_event

Ask: TypeAlias = Callable[[ResponseStore, str, str], Any]
Deletion: TypeAlias = dict[Literal["id", "object", "deleted"], str | bool]
MAX_LIMIT = 100
SLICE_BYTES = 1 << 17


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
    if request.query_params.get("stream") != "true":
        return _json(await _stored(request)) if run is None else await _now(request, run)
    if run is None:
        await _stored(request)
    number = number_asked(request, "starting_after", 999_999_999)
    if run is None:
        why = f"only responses in the background keep events, until {KEPT_SECONDS} s after their end; leave it out"
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
        return await _now(request, run)
    response = await _stored(request)
    if not json.loads(response)["background"]:
        message = "only a response in the background can be cancelled; to cancel another one, close its connection"
        raise ApiError(Code.INVALID_VALUE, message, "response_id")
    return _json(response)


def _run_of(request: Request) -> BackgroundRun | None:
    place = namespace_of_query(request), request.path_params["response_id"]
    return context_of(request).kept(BackgroundRuns).find(*place)


async def _now(request: Request, run: BackgroundRun) -> Response:
    """What is known of a run; it may be long, so another thread writes it."""
    context, now = context_of(request), run.now()
    return _json(await context.in_turn(context.reading, request, lambda: json_text(now).encode()))


async def _stored(request: Request) -> bytes:
    """A stored response; an unfinished one without a run has failed."""
    status, body = await _found(request, "response_id", ResponseStore.find)
    if status in UNFINISHED:
        error = {"code": "server_error", "message": "the server ended before the response did"}
        return json_text({**json.loads(body), "status": "failed", "error": error}).encode()
    return bytes(body)


async def list_input_items(request: Request) -> Response:
    """Returns the items before a response, newest first."""
    return await _page_of(request, "response")


async def get_conversation(request: Request) -> Response:
    """Returns a conversation, without its items."""
    return JsonBody(await _found(request, "conversation_id", ResponseStore.find_conversation))


async def delete_conversation(request: Request) -> Response:
    """Forgets a conversation and its items."""
    return await _deleted(request, "conversation_id", ResponseStore.delete_conversation, "conversation.deleted")


async def list_items(request: Request) -> Response:
    """Returns a conversation's items, newest first."""
    return await _page_of(request, "conversation")


async def get_item(request: Request) -> Response:
    """Returns one item of a conversation."""
    name = (await _found(request, "conversation_id", ResponseStore.find_conversation)).id
    return _json(await _found(request, "item_id", partial(ResponseStore.find_item, kind="conversation", name=name)))


async def delete_item(request: Request) -> Response:
    """Removes an item; returns the conversation."""
    conversation = await _found(request, "conversation_id", ResponseStore.find_conversation)
    delete = partial(ResponseStore.delete_item, conversation_id=conversation.id)
    await _found(request, "item_id", delete, is_change=True)
    return JsonBody(conversation)


@planned
def create_conversation(context: ApiContext, incoming: Incoming) -> Change:
    """Begins a conversation."""
    body = parse_known(NewConversation, incoming.fields, {})
    # A gateway finds a conversation's server by the request that created it.
    name = incoming.request_id.rpartition("_")[2]
    items = with_ids(_whole_items(body.items or []), name)
    conversation = StoredConversation(f"conv_{name}", int(time.time()), body.metadata or {})
    return Change(partial(_put, context, incoming, conversation, items))


@planned
def update_conversation(context: ApiContext, incoming: Incoming) -> Change:
    """Replaces a conversation's metadata."""
    body, name = parse_known(ConversationUpdate, incoming.fields, {}), incoming.http.path_params["conversation_id"]

    def update() -> Response:
        conversation = context.kept(store_of).find_conversation(namespace_of_query(incoming.http), name)
        known: StoredConversation = _known(conversation, incoming.http, "conversation_id")
        return _put(context, incoming, replace(known, metadata=body.metadata or {}))

    return Change(update)


def _put(context: ApiContext, incoming: Incoming, what: StoredConversation, items: Sequence[Item] = ()) -> Response:
    context.kept(store_of).put_conversation(namespace_of_query(incoming.http), what, items)
    return JsonBody(what)


@planned
def create_items(context: ApiContext, incoming: Incoming) -> Change:
    """Adds items to a conversation."""
    body = parse_known(NewItems, incoming.fields, {})
    items, name = with_ids(_whole_items(body.items), uuid.uuid4().hex), incoming.http.path_params["conversation_id"]

    def add() -> Response:
        added = context.kept(store_of).add_items(namespace_of_query(incoming.http), name, items)
        _known(added, incoming.http, "conversation_id")
        return _page(Page(rows_of(items), has_more=False))

    return Change(add)


def _whole_items(items: list[Any]) -> list[Item]:
    """Raises ApiError (400) for a reference, and for too many."""
    if len(items) > MAX_MESSAGES:
        raise wrong("items", f"at most {MAX_MESSAGES} items are taken at once")
    checked = check_items(items, "items")
    for index, item in enumerate(checked):
        if item["type"] == "item_reference":
            raise wrong(f"items[{index}].type", "a conversation holds items, not references")
    return checked


async def _found(request: Request, param: str, ask: Ask, *, is_change: bool = False) -> Any:
    """Raises ApiError (404)."""
    context, place = context_of(request), (namespace_of_query(request), request.path_params[param])
    threads = context.storing if is_change else context.reading
    stored = await context.in_turn(threads, request, lambda: ask(context.kept(store_of), *place))
    return _known(stored, request, param)


def _known(stored: Any, request: Request, param: str) -> Any:
    if stored is None or stored is False:
        name = request.path_params[param][:200]
        raise ApiError(Code.RESPONSE_NOT_FOUND, f"there is no {param.removesuffix('_id')} {name!r}", param)
    return stored


async def _deleted(request: Request, param: str, delete: Ask, kind: str) -> Response:
    await _found(request, param, delete, is_change=True)
    return JsonBody({"id": request.path_params[param], "object": kind, "deleted": True})


async def _page_of(request: Request, kind: Kind) -> Response:
    """The items of `limit`, `order` and `after`; raises ApiError (400)."""
    asked = request.query_params
    order, limit = asked.get("order", "desc"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise wrong("order", "Input should be asc or desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise wrong("limit", f"Input should be a number from 1 to {MAX_LIMIT}")
    wish = PageWish(int(limit), order == "asc", asked.get("after"))
    return _page(await _found(request, f"{kind}_id", partial(ResponseStore.page, kind=kind, wish=wish)))


def _page(page: Page) -> Response:
    """The JSON of an `ItemList`, without reading the items' own."""
    ids, more = [json_text(item_id) for item_id, _ in page.rows] or ["null"], json_text(page.has_more)
    data = [part for _, text in page.rows for part in (b",", text)][1:]
    end = f'],"first_id":{ids[0]},"last_id":{ids[-1]},"has_more":{more}}}'
    return _json(b'{"object":"list","data":[', *data, end.encode())


def _json(*parts: bytes) -> Response:
    """JSON, sent slice by slice if it is long: others have their turn in between."""
    num_bytes = sum(map(len, parts))
    if num_bytes <= SLICE_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return StreamingResponse(_slices(parts), 200, {"content-length": str(num_bytes)}, "application/json")


async def _slices(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        for start in range(0, len(part), SLICE_BYTES):
            yield part[start : start + SLICE_BYTES]
            await asyncio.sleep(0)


class ResponsesDialect(Dialect):
    """The endpoints of responses and conversations."""

    def error_frame(self, error: ApiError) -> bytes:
        """An `error` event, which clients raise."""
        fields = {"code": error.code.value, "message": error.message, "param": error.param}
        return sse_event({"type": "error", "sequence_number": 0, **fields, **self.error_body(error)}, "error")


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
