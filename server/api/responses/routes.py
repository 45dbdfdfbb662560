"""The paths of the Responses API, with and without the `/v1` that many clients' base URLs lack."""

from typing import Any

from starlette.routing import Route

from server.api.dialect import Api
from server.api.openai.errors import ErrorBody
from server.api.openapi import Operation, Operations
from server.api.responses.body_types import InputBody, ResponsesBody
from server.api.responses.conversations import (
    ConversationBody,
    ConversationUpdate,
    DeletedConversationBody,
    NewConversation,
    NewItems,
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from server.api.responses.create import ResponseTokensBody, count_input_tokens, create_response
from server.api.responses.dialect import ResponsesDialect
from server.api.responses.items import Item
from server.api.responses.response_body import ResponseBody
from server.api.responses.stored import (
    DeletedResponseBody,
    ItemList,
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
)
from server.api.versioned import with_and_without_v1

_ROUTES = (
    Route("/responses", create_response, methods=["POST"]),
    Route("/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/responses/{response_id}", get_response, methods=["GET"]),
    Route("/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/responses/{response_id}/cancel", cancel_response, methods=["POST"]),
    Route("/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
    Route("/conversations", create_conversation, methods=["POST"]),
    Route("/conversations/{conversation_id}", get_conversation, methods=["GET"]),
    Route("/conversations/{conversation_id}", update_conversation, methods=["POST"]),
    Route("/conversations/{conversation_id}", delete_conversation, methods=["DELETE"]),
    Route("/conversations/{conversation_id}/items", list_items, methods=["GET"]),
    Route("/conversations/{conversation_id}/items", create_items, methods=["POST"]),
    Route("/conversations/{conversation_id}/items/{item_id}", get_item, methods=["GET"]),
    Route("/conversations/{conversation_id}/items/{item_id}", delete_item, methods=["DELETE"]),
)
_SALT, _PAGE = ("cache_salt",), ("limit", "order", "after", "cache_salt")
_OPERATIONS: Operations = {
    create_response: Operation(ResponsesBody, ResponseBody, dict[str, Any]),
    count_input_tokens: Operation(InputBody, ResponseTokensBody),
    get_response: Operation(answer=ResponseBody, query=("stream", *_SALT)),
    delete_response: Operation(answer=DeletedResponseBody, query=_SALT),
    cancel_response: Operation(answer=ResponseBody, query=_SALT),
    list_input_items: Operation(answer=ItemList, query=_PAGE),
    create_conversation: Operation(NewConversation, ConversationBody, query=_SALT),
    get_conversation: Operation(answer=ConversationBody, query=_SALT),
    update_conversation: Operation(ConversationUpdate, ConversationBody, query=_SALT),
    delete_conversation: Operation(answer=DeletedConversationBody, query=_SALT),
    list_items: Operation(answer=ItemList, query=_PAGE),
    create_items: Operation(NewItems, ItemList, query=_SALT),
    get_item: Operation(answer=Item, query=_SALT),
    delete_item: Operation(answer=ConversationBody, query=_SALT),
}
RESPONSES = Api(ResponsesDialect(), with_and_without_v1(_ROUTES), _OPERATIONS, ErrorBody)
