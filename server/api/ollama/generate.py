"""`POST /api/generate`: Ollama's answer to one prompt, streamed unless the request says otherwise."""

import time
from collections.abc import AsyncIterator
from typing import NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from models.output.pieces import Reasoning, Text
from models.prompt.chat_template import Message, RenderedPrompt
from server.api.auth import namespace_of
from server.api.context import ApiContext, ServedModel
from server.api.conversation import Conversation, open_conversation
from server.api.dialect import Exchange, ModelReady, OutputEvent, Payload
from server.api.endpoint import generate
from server.api.errors import ApiError, Code
from server.api.ollama.answers import OllamaEnd, OllamaHead, end_of, head_of, loaded
from server.api.ollama.body import OllamaBody, answer_loading, find_model, read_params, template_arguments
from server.api.ollama.dialect import line
from server.api.ollama.fields import IN_GENERATE
from server.api.ollama.follow_up import follow_up
from server.api.params import Incoming, build_request
from server.api.typed_body import parse_body
from server.engine.request import Finished, GenerationRequest


class OllamaGenerateBody(OllamaBody):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Take the prompt as it is, without the model's template."""
    context: list[int] | None = None
    """What an earlier answer returned as its `context`."""


class OllamaGenerateAnswer(OllamaHead, OllamaEnd):
    """The answer, and each line of a stream."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class _Said(TypedDict):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


async def generate_text(request: Request) -> Response:
    """Answers one prompt."""
    return await generate(request, "ollama-", open_generate)


def open_generate(context: ApiContext, incoming: Incoming) -> Exchange | ModelReady | Payload:
    """Returns the checked request, or the answer to one without a prompt; raises what `generate` knows."""
    began = time.monotonic()
    body = parse_body(OllamaGenerateBody, dict(incoming.fields), IN_GENERATE)
    if not body.prompt:
        answer = _answer(body.model or "", {"response": ""}, loaded(body.keep_alive_seconds))
        return answer_loading(context, body, answer)
    model = find_model(context, body.model)
    namespace = namespace_of(incoming.http, None)
    conversation = None if body.raw else _conversation(body, model, namespace)
    prompt = _prompt(body, model, conversation)
    request = build_request(
        incoming,
        read_params(body, model),
        prompt,
        prompt_param="prompt",
        namespace=namespace,
        model=model,
        config=context.config,
    )
    # What goes on from tokens is no conversation whose next prompt could be foreseen.
    known = None if body.context else conversation
    return OllamaGenerateExchange(body, model, request, prompt, known, began)


def _conversation(body: OllamaGenerateBody, model: ServedModel, namespace: str) -> Conversation:
    said = (("system", body.system), ("user", body.prompt))
    messages: list[Message] = [{"role": role, "content": [{"text": text}]} for role, text in said if text]
    made_of = (messages, (), template_arguments(body, model), namespace)
    # What goes on from tokens has the model's system prompt among them.
    return Conversation(model.renderer, *made_of) if body.context else open_conversation(model, *made_of)


def _prompt(body: OllamaGenerateBody, model: ServedModel, conversation: Conversation | None) -> RenderedPrompt:
    if conversation is not None:
        return follow_up(model, body.context, conversation) if body.context else conversation.render()
    if body.system or body.context:
        message = "raw mode does not support template, system, or context"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "raw")
    return model.renderer.encode(body.prompt or "")


class OllamaGenerateExchange(Exchange):
    """Writes the answer to one prompt."""

    def __init__(
        self,
        body: OllamaGenerateBody,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        conversation: Conversation | None,
        began: float,
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.is_streamed, conversation=conversation)
        if not body.raw:
            self.parser = model.output_parser((), prompt.text)
        self.keep_alive_seconds = body.keep_alive_seconds
        self._name = body.model or model.id
        self._began = began
        self._is_raw = body.raw is True
        self._said = ""
        self._thought = ""

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields text and thoughts, and at the end why and what it cost."""
        async for event in events:
            match event:
                case Text(text):
                    yield line(_answer(self._name, {"response": text}, {"done": False}))
                case Reasoning(text):
                    yield line(_answer(self._name, {"response": "", "thinking": text}, {"done": False}))
                case Finished():
                    yield line(self._last(event, {"response": ""}))

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        async for event in events:
            match event:
                case Text(text):
                    self._said += text
                case Reasoning(text):
                    self._thought += text
                case Finished():
                    said: _Said = {"response": self._said}
                    if self._thought:
                        said["thinking"] = self._thought
                    return self._last(event, said)
        raise AssertionError("the events of a request end with Finished")

    def _last(self, finished: Finished, said: _Said) -> OllamaGenerateAnswer:
        if not self._is_raw:
            said["context"] = [*self.request.tokens.tolist(), *finished.token_ids]
        return _answer(self._name, said, end_of(finished, self._began, self.request.session_id))


def _answer(name: str, said: _Said, end: OllamaEnd) -> OllamaGenerateAnswer:
    return {**head_of(name), **said, **end}
