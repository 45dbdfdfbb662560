"""The paths of the Responses API, with and without the `/v1` that many base URLs lack.

Its clients are OpenAI's, except for errors within a stream.
"""

from typing import Any

from starlette.routing import Route

from server.api.dialect import Api
from server.api.errors import ApiError
from server.api.openai.dialect import ErrorBody, OpenAiDialect, error_body
from server.api.openapi import Operation, Operations
from server.api.responses.create import ResponseBody, ResponseTokensBody, count_input_tokens, create_response
from server.api.responses.items import Item
from server.api.responses.kept import (
    ConversationBody,
    ConversationUpdate,
    DeletedConversationBody,
    DeletedResponseBody,
    ItemList,
    NewConversation,
    NewItems,
    cancel_response,
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    delete_response,
    get_conversation,
    get_item,
    get_response,
    list_input_items,
    list_items,
    update_conversation,
)
from server.api.responses.types import InputBody, ResponsesBody
from server.api.wire import sse_event, with_and_without_v1


class ResponsesDialect(OpenAiDialect):
    """The endpoints of responses and conversations."""

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an `error` event with OpenAI's fields and the error object, which its clients raise."""
        told = {"code": error.code.value, "message": error.message, "param": error.param}
        return sse_event({"type": "error", "sequence_number": 0, **told, **error_body(error)}, "error")


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
