"""`POST /v1/messages/count_tokens`: how long a prompt would be, exactly. Nothing is evaluated."""

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.anthropic.body_types import PromptBody
from server.api.anthropic.conversation import read_conversation
from server.api.anthropic.fields import IN_COUNT
from server.api.anthropic.params import find_model
from server.api.auth import namespace_of
from server.api.context import ApiContext
from server.api.dialect import Payload
from server.api.endpoint import inspect
from server.api.params import Incoming
from server.api.typed_body import parse_body


class TokenCountBody(TypedDict):
    """The length of a prompt."""

    input_tokens: int


async def count_tokens(request: Request) -> Response:
    """Counts the tokens of a prompt, those of the template included."""
    return await inspect(request, _count)


def _count(context: ApiContext, incoming: Incoming) -> Payload:
    body = parse_body(PromptBody, dict(incoming.fields), IN_COUNT)
    model = find_model(context, body.model)
    conversation = read_conversation(body, model, context.config, namespace_of(incoming.http, None))
    count: TokenCountBody = {"input_tokens": len(conversation.render().tokens)}
    return count
