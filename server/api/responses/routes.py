"""The paths of the Responses API, with and without the `/v1` that many clients' base URLs lack."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.responses.conversations import (
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from server.api.responses.create import count_input_tokens, create_response
from server.api.responses.dialect import ResponsesDialect
from server.api.responses.stored import cancel_response, delete_response, get_response, list_input_items
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
RESPONSES = Api(ResponsesDialect(), with_and_without_v1(_ROUTES))
