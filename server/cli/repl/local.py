"""Answers from a model in this process, without HTTP."""

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console

from models.names import installed, resolve
from models.output.pieces import OutputParser, Piece, Reasoning, Text
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from server.api.images import image_part, with_pictures
from server.app.config import ServerConfig
from server.app.service import Service, open_service
from server.cli.repl.conversation import MAX_TOKENS, SAMPLING, AnswerPart, ChatError, template_arguments
from server.engine.messages import Generation
from server.engine.request import Delta, Failed, Finished, FinishReason, GenerationRequest
from server.pool.served import ServedModel


class LocalModels:
    """A change replaces the model, since memory may not hold two. Used on one event loop at a time; to be closed."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ModelError."""
        self._request_numbers = itertools.count(1)
        self._service: Service | None = None
        self._load(config)

    @property
    def name(self) -> str:
        return self._service.asked_for.id if self._service is not None else "none"

    @property
    def sees(self) -> bool:
        """Whether the model sees images."""
        return self._service is not None and self._service.asked_for.vision is not None

    def names(self) -> Sequence[str]:
        """The models of this machine."""
        return [model.name for model in installed()]

    def change(self, name: str) -> None:
        """Raises ModelError, and loads the old model again then."""
        if name == self.name:
            return
        resolve(name)
        before = self._config
        try:
            self._load(replace(before, models=(name,)))
        except BaseException:
            # Ctrl-C during the loading means: keep the old model.
            self._load(before)
            raise

    def close(self) -> None:
        """Ends the model's engine."""
        if self._service is not None:
            self._service.engine.stop()
            self._service = None

    def _load(self, config: ServerConfig) -> None:
        self.close()
        gc.collect()
        console = Console()
        with console.status(f"Loading {config.models[0]} …") if console.is_terminal else nullcontext():
            service = open_service(config)
            service.start()
        self._service, self._config = service, config

    async def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """Yields an answer, which a cancel stops. Missing `parameters` are as the model recommends.

        Raises ChatError, ModelError and EngineError.
        """
        if self._service is None:
            raise ChatError("no model is loaded; /model NAME loads one")
        model = self._service.asked_for
        arguments = {**model.defaults.template_arguments, **template_arguments(parameters)}
        messages = model.defaults.conversation(with_pictures(list(map(_with_images, turns)), model.vision))
        prompt = model.renderer.render(messages, template_kwargs=arguments or None)
        generation = self._service.engine.submit(self._request(model, prompt, number, parameters))
        parser = model.output_parser((), prompt.text)
        try:
            async for part in _follow(generation, parser):
                yield part
        except asyncio.CancelledError:
            # Finished arrives within a step, with the timings.
            generation.cancel()
            async for part in _follow(generation, parser):
                yield part
            raise

    def _request(
        self, model: ServedModel, prompt: RenderedPrompt, number: int, parameters: Mapping[str, Any]
    ) -> GenerationRequest:
        num_prompt, left_tokens = len(prompt.tokens), model.context_tokens - len(prompt.tokens)
        if left_tokens < 1 or not num_prompt:
            reason = f"the conversation has {num_prompt} tokens and the context {model.context_tokens}"
            raise ChatError(f"{reason}; /new starts another")
        sampling = {name: value for name, value in parameters.items() if name in SAMPLING}
        return GenerationRequest(
            request_id=f"run-{next(self._request_numbers)}",
            tokens=prompt.tokens,
            pictures=prompt.pictures,
            max_tokens=min(left_tokens, parameters.get(MAX_TOKENS, model.defaults.max_tokens or left_tokens)),
            stop=model.defaults.stop,
            sampling=replace(model.sampling, **sampling),
            session_id=f"run-{number}",
            restore_points=prompt.restore_points,
            thinking=model.thinking(prompt.text),
        )


def _with_images(turn: Message) -> Message:
    """A message with its images, unread."""
    if isinstance(content := turn["content"], str):
        return turn
    return {**turn, "content": [image_part(part) if part["type"] == "image_url" else part for part in content]}


async def _follow(generation: Generation, parser: OutputParser) -> AsyncIterator[AnswerPart]:
    async for event in generation:
        pieces: Sequence[Piece] = ()
        if isinstance(event, Delta):
            pieces = parser.feed(event.text)
        elif isinstance(event, Finished):
            pieces = parser.finish(is_complete=event.reason is FinishReason.STOP)
        elif isinstance(event, Failed):
            raise event.error
        for piece in pieces:
            if isinstance(piece, Text | Reasoning):
                yield piece
        if isinstance(event, Finished):
            yield event.timings
