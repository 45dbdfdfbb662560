"""What a request goes on from: the response it names with all before it, a conversation, and items it refers to.

Used on a planning thread, which waits for the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.body import MAX_MESSAGES
from server.api.errors import ApiError, Code
from server.api.responses.body_types import InputBody
from server.api.responses.items import Item, check_items
from server.api.responses.store import ResponseStore

_ID_PREFIX = "in"
"""How ids begin that this server gives to items."""


@dataclass(frozen=True)
class History:
    """What stands before the new items of a request."""

    items: Sequence[Item] = ()
    session: str | None = None
    """What the chain of responses calls its conversation; None for a beginning."""


@dataclass(frozen=True)
class RequestItems:
    """All items of one request."""

    history: History
    new: Sequence[Item]
    """Checked, each with an id, without references."""


def read_request_items(body: InputBody, store: ResponseStore, namespace: str, name: str) -> RequestItems:
    """Returns the items of a body; `name` makes the ids of those without. Raises ApiError (400, 404)."""
    if body.previous_response_id is not None and body.conversation is not None:
        message = "conversation: it cannot be given with previous_response_id"
        raise ApiError(Code.INVALID_VALUE, message, "conversation")
    history = History()
    if body.previous_response_id is not None:
        history = _chain(store, namespace, body.previous_response_id)
    elif body.conversation is not None:
        history = _conversation(store, namespace, body.conversation)
    if len(history.items) + len(body.input) > MAX_MESSAGES:
        raise ApiError(Code.INVALID_VALUE, f"input: at most {MAX_MESSAGES} items make a prompt", "input")
    checked = check_items(body.input)
    found = [_resolved(item, index, history, store, namespace) for index, item in enumerate(checked)]
    return RequestItems(history, with_ids(found, name))


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Returns checked items as they are kept: each with an id, and a message's text as a part."""
    return [_as_kept(item, f"{_ID_PREFIX}_{name}_{index}") for index, item in enumerate(items)]


def _as_kept(item: Item, item_id: str) -> Item:
    given = item.get("id")
    kept = {**item, "id": given if isinstance(given, str) and given else item_id}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        return {"status": "completed", **kept, "content": [{**part, "annotations": []} if kind[0] == "o" else part]}
    return kept


def _chain(store: ResponseStore, namespace: str, response_id: str) -> History:
    chain = store.chain(namespace, response_id).result()
    if not chain:
        raise _not_found(f"there is no stored response {response_id[:200]!r}", "previous_response_id")
    if chain[0].parent is not None:
        message = f"the response {chain[0].parent!r}, which it goes on from, is not stored any more"
        raise _not_found(message, "previous_response_id")
    items = [item for response in chain for item in (*response.input, *response.body["output"])]
    return History(items, chain[0].session)


def _conversation(store: ResponseStore, namespace: str, conversation_id: str) -> History:
    if store.find_conversation(namespace, conversation_id).result() is None:
        raise _not_found(f"there is no conversation {conversation_id[:200]!r}", "conversation")
    return History(store.items(namespace, conversation_id).result(), conversation_id)


def _resolved(item: Item, index: int, history: History, store: ResponseStore, namespace: str) -> Item:
    """Returns the item that a reference stands for; others as they are."""
    if item["type"] != "item_reference":
        return item
    wanted = item["id"]
    of_history = (one for one in history.items if one.get("id") == wanted)
    found = next(of_history, None) or _kept_item(store, namespace, wanted)
    if found is None:
        place = f"input[{index}].id"
        raise _not_found(f"there is no stored item {wanted[:200]!r}", place)
    return found


def _kept_item(store: ResponseStore, namespace: str, item_id: str) -> Item | None:
    """Returns an item of a stored response, whose id holds that of the response."""
    response = store.find(namespace, f"resp_{item_id.split('_')[1]}").result() if item_id.count("_") == 2 else None
    kept = [*response.input, *response.body["output"]] if response is not None else []
    return next((item for item in kept if item.get("id") == item_id), None)


def _not_found(message: str, param: str) -> ApiError:
    return ApiError(Code.RESPONSE_NOT_FOUND, f"{param}: {message}", param)
