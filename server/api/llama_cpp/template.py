"""`POST /apply-template` and `/v1/chat/completions/input_tokens`: a conversation's prompt, without an answer to it.

Both take the body of a chat completion.
"""

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from models.prompt.chat_template import RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext
from server.api.dialect import Payload
from server.api.endpoint import inspect
from server.api.openai.chat import read_conversation
from server.api.openai.chat_types import ChatBody
from server.api.openai.fields import IN_CHAT
from server.api.params import Incoming
from server.api.typed_body import parse_body


class TemplateText(TypedDict):
    """The text of a prompt."""

    prompt: str


class InputTokensBody(TypedDict):
    """How many tokens a prompt has."""

    input_tokens: int


async def apply_template(request: Request) -> Response:
    """Answers with the prompt that a conversation becomes."""
    return await inspect(request, prompt_of)


async def count_input_tokens(request: Request) -> Response:
    """Answers with the number of tokens that a conversation becomes."""
    return await inspect(request, input_tokens_of)


def prompt_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the text of the prompt; raises ApiError and the renderer's errors."""
    answer: TemplateText = {"prompt": rendered(context, incoming).text}
    return answer


def input_tokens_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the number of the prompt's tokens; raises ApiError and the renderer's errors."""
    answer: InputTokensBody = {"input_tokens": len(rendered(context, incoming).tokens)}
    return answer


def rendered(context: ApiContext, incoming: Incoming) -> RenderedPrompt:
    """Returns the prompt that a conversation becomes; raises ApiError and the renderer's errors."""
    body = parse_body(ChatBody, dict(incoming.fields), IN_CHAT)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    return read_conversation(body, incoming, model, context.config, namespace).render()
