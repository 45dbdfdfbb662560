"""`POST /v1/messages`: the answer to a conversation, streamed or whole."""

from collections.abc import AsyncIterator
from typing import Any, Literal, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from models.prompt.chat_template import Message, RenderedPrompt
from server.api.anthropic.body_types import InputMessage, MessagesBody
from server.api.anthropic.content import AnswerContent, BlockBody
from server.api.anthropic.conversation import read_conversation, template_messages
from server.api.anthropic.fields import IN_MESSAGES
from server.api.anthropic.params import find_model, read_params
from server.api.anthropic.usage import (
    DiagnosticsBody,
    MessagesUsage,
    diagnostics_of,
    stop_reason,
    usage_at_end,
    usage_at_start,
)
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.conversation import Conversation
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.params import Incoming, build_request
from server.api.sse import sse_event
from server.api.typed_body import parse_body
from server.engine.events import Finished, Started
from server.engine.request import GenerationRequest


class ContextManagementBody(TypedDict):
    """What was removed from the conversation: nothing."""

    applied_edits: list[Any]


class MessageAnswer(TypedDict):
    """The body of an answer, and in a stream how it begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockBody]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    diagnostics: DiagnosticsBody
    context_management: NotRequired[ContextManagementBody]
    """Only where the request holds `context_management`."""


async def create_message(request: Request) -> Response:
    """Answers the last message of a conversation."""
    return await generate(request, "msg_", open_message)


def open_message(context: ApiContext, incoming: Incoming) -> Exchange:
    """Returns the checked request; raises ApiError and the renderer's errors."""
    body = parse_body(MessagesBody, dict(incoming.fields), IN_MESSAGES)
    model = find_model(context, body.model)
    namespace = namespace_of(incoming.http, body.cache_salt)
    conversation = read_conversation(body, model, context.config, namespace)
    prompt = conversation.render()
    request = build_request(
        incoming,
        read_params(body, conversation, model),
        prompt,
        prompt_param="messages",
        namespace=namespace,
        model=model,
        config=context.config,
    )
    return MessageExchange(body, model, request, prompt, conversation)


class MessageExchange(Exchange):
    """Writes the answer to one request for a message."""

    def __init__(
        self,
        body: MessagesBody,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        conversation: Conversation,
    ) -> None:
        # A prompt that is only evaluated has no answer that a next turn could hold.
        held = None if request.is_prime else conversation
        super().__init__(model, request, prompt, is_streamed=body.stream is True, conversation=held)
        self._body = body
        self._content = AnswerContent(shows_thoughts=body.shows_thoughts)

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields the start, each block's start, growth and end, why the answer ended, and its proper end."""
        started: Started | None = None
        async for event in events:
            for payload in self._told(event, started):
                yield sse_event(payload, payload["type"])
            if isinstance(event, Started):
                started = event

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        started: Started | None = None
        async for event in events:
            match event:
                case Started():
                    started = event
                case Finished():
                    assert started is not None
                    return self._whole(started, event)
                case _:
                    self._content.add(event)
        raise AssertionError("the events of a request end with Finished")

    def reply_messages(self) -> list[Message]:
        """Returns the answer as clients send it back."""
        reply = InputMessage.model_validate({"role": "assistant", "content": self._content.blocks})
        (said,) = template_messages([reply])
        return [said if self.conversation is None else self.conversation.whole(said)]

    def _told(self, event: OutputEvent, started: Started | None) -> list[dict[str, Any]]:
        """Returns the events of the stream that tell of one of the engine's."""
        match event:
            case Started():
                return [{"type": "message_start", "message": self._message(event)}, {"type": "ping"}]
            case Finished():
                assert started is not None, "a request starts before it finishes"
                return [*self._content.close(), self._last_delta(started, event), {"type": "message_stop"}]
            case _:
                return self._content.add(event)

    def _message(self, started: Started) -> MessageAnswer:
        """Returns the answer before its first token."""
        message: MessageAnswer = {
            "id": self.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model.id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(started),
            "diagnostics": diagnostics_of(started, self.request.session_id),
        }
        if self._body.context_management is not None:
            message["context_management"] = {"applied_edits": []}
        return message

    def _whole(self, started: Started, finished: Finished) -> MessageAnswer:
        return {
            **self._message(started),
            "content": self._content.blocks,
            "stop_reason": self._stop_reason(finished),
            "stop_sequence": finished.stop_text,
            "usage": usage_at_end(self._usage(started), finished),
            "diagnostics": diagnostics_of(started, self.request.session_id, finished),
        }

    def _last_delta(self, started: Started, finished: Finished) -> dict[str, Any]:
        delta: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason(finished), "stop_sequence": finished.stop_text},
            "usage": usage_at_end(self._usage(started), finished),
            "diagnostics": diagnostics_of(started, self.request.session_id, finished),
        }
        if self._body.context_management is not None:
            delta["context_management"] = {"applied_edits": []}
        return delta

    def _usage(self, started: Started) -> MessagesUsage:
        return usage_at_start(self.request, started, caches_all=self._body.cache_control is not None)

    def _stop_reason(self, finished: Finished) -> str:
        return stop_reason(finished, made_calls=self.parser.made_calls, max_tokens=self._body.max_tokens)
