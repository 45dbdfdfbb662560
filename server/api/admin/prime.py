"""`POST /v1/cache/prime`: evaluates a prefix that requests will begin with, and generates nothing.

A conversation is rendered without a generation prompt and only as far as whatever follows cannot change its tokens:
behind a user's or tool's message comes an answer, behind any other a user's message.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from cache.snapshots import RestorePointKind
from server.api.auth import namespace_of
from server.api.context import ApiContext
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.errors import ApiError, Code
from server.api.next_turn import cut_at_last_point
from server.api.openai.chat import read_conversation
from server.api.openai.chat_types import ChatBody
from server.api.openai.completions import CompletionBody, text_prompt
from server.api.openai.fields import IN_CHAT_PRIME, IN_TEXT_PRIME
from server.api.openai.params import read_params
from server.api.params import Incoming, build_request
from server.api.typed_body import parse_body
from server.engine.request import Finished


class PrimedBody(TypedDict):
    """What priming cost."""

    id: str
    object: str
    model: str
    session_id: str | None
    tokens: int
    cached_tokens: int
    evaluated_tokens: int
    ms: float


async def prime_cache(request: Request) -> Response:
    """Evaluates a prefix. A client that leaves ends it; what was computed until then stays."""
    return await generate(request, "prime-", open_prime, may_stream=False)


def open_prime(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError and the renderer's errors."""
    is_chat = "messages" in incoming.fields
    if is_chat == ("prompt" in incoming.fields):
        raise ApiError(Code.MISSING_PARAMETER, "messages: send either messages or a prompt to prime", "messages")
    rules = IN_CHAT_PRIME if is_chat else IN_TEXT_PRIME
    kind: type[ChatBody | CompletionBody] = ChatBody if is_chat else CompletionBody
    body = parse_body(kind, dict(incoming.fields), rules)
    model = context.find_model(body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    if isinstance(body, ChatBody):
        prefix = read_conversation(body, incoming, model, context.config, namespace).stable_prefix()
    else:
        if len(body.prompt) != 1:
            raise ApiError(Code.INVALID_VALUE, "prompt: one prompt is primed at a time", "prompt")
        prefix = cut_at_last_point(text_prompt(body.prompt[0], model), (RestorePointKind.PROMPT_END,))
    request = build_request(
        incoming,
        replace(read_params(body, model), max_tokens=0),
        prefix,
        prompt_param="messages" if is_chat else "prompt",
        namespace=namespace,
        model=model,
        config=context.config,
    )
    return PrimeExchange(model, request, prefix)


class PrimeExchange(Exchange):
    """Says what priming cost."""

    def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """A prime is never streamed."""
        raise NotImplementedError

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of the answer."""
        async for event in events:
            if isinstance(event, Finished):
                return self._body(event)
        raise AssertionError("the events of a request end with Finished")

    def _body(self, finished: Finished) -> PrimedBody:
        return {
            "id": self.request.request_id,
            "object": "cache.prime",
            "model": self.model.id,
            "session_id": self.request.session_id,
            "tokens": finished.prompt_tokens,
            "cached_tokens": finished.timings.cache_tokens,
            "evaluated_tokens": finished.timings.evaluated_tokens,
            "ms": finished.timings.prompt_ms,
        }
