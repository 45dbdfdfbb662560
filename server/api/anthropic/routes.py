"""The paths of Anthropic's dialect, with and without the `/v1` that its clients add by themselves."""

from typing import Any

from starlette.routing import Route

from server.api.anthropic.body_types import MessagesBody, PromptBody
from server.api.anthropic.count_tokens import TokenCountBody, count_tokens
from server.api.anthropic.dialect import VERSION_HEADER, AnthropicDialect
from server.api.anthropic.errors import MessagesErrorBody
from server.api.anthropic.messages import MessageAnswer, create_message
from server.api.anthropic.models import ModelInfoBody, ModelPage, get_model, list_models
from server.api.dialect import Api, HeaderRoute
from server.api.openapi import Operation, Operations
from server.api.versioned import with_and_without_v1

_ROUTES = (
    Route("/messages", create_message, methods=["POST"]),
    Route("/messages/count_tokens", count_tokens, methods=["POST"]),
)
_SHARED_PATHS = (
    HeaderRoute("/v1/models", list_models, header=VERSION_HEADER, methods=["GET"]),
    HeaderRoute("/v1/models/{model_id:path}", get_model, header=VERSION_HEADER, methods=["GET"]),
)
_OPERATIONS: Operations = {
    create_message: Operation(MessagesBody, MessageAnswer, dict[str, Any]),
    count_tokens: Operation(PromptBody, TokenCountBody),
    list_models: Operation(answer=ModelPage),
    get_model: Operation(answer=ModelInfoBody),
}
ANTHROPIC = Api(AnthropicDialect(), (*with_and_without_v1(_ROUTES), *_SHARED_PATHS), _OPERATIONS, MessagesErrorBody)
