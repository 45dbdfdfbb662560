"""Answers from a model in this process, without HTTP."""

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console

from models.errors import ModelError
from models.names import installed, resolve, shorten
from models.output.pieces import OutputParser, Piece, Reasoning, Text
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from server.app.config import ServerConfig
from server.app.log import configure_logging
from server.app.service import open_service
from server.cli.repl import conversation
from server.cli.repl.conversation import AnswerCosts, Answerer, AnswerFailed, Manner, Said
from server.engine.messages import Generation
from server.engine.request import Delta, EngineError, Failed, Finished, FinishReason, GenerationRequest
from server.pool.served import EnginePort, ServedModel

MANNERS: Mapping[type, Manner] = {Text: Manner.ANSWER, Reasoning: Manner.REASONING}


@contextmanager
def local_model(config: ServerConfig) -> "Iterator[LocalModel]":
    """Ends the model's engine on exit. Raises ModelError."""
    configure_logging("warning")
    console = Console()
    with console.status(f"Loading {config.models[0]} …") if console.is_terminal else nullcontext():
        service = open_service(config)
        service.start()
    try:
        yield LocalModel(service.asked_for, service.engine)
    finally:
        service.engine.stop()


class LocalModel:
    """Used on one event loop at a time."""

    def __init__(self, model: ServedModel, engine: EnginePort) -> None:
        self._model = model
        self._engine = engine
        self._request_numbers = itertools.count(1)

    @property
    def name(self) -> str:
        return self._model.id

    async def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Said | AnswerCosts, None]:
        """As `Answerer.answer`."""
        try:
            defaults = self._model.defaults
            arguments = {**defaults.template_arguments, **conversation.template_arguments(parameters)}
            prompt = self._model.renderer.render(defaults.conversation(turns), template_kwargs=arguments or None)
            generation = self._engine.submit(self._request(prompt, number, parameters))
        except (ModelError, EngineError, ValueError) as error:
            raise AnswerFailed(str(error)) from error
        parser = self._model.output_parser((), prompt.text)
        try:
            async for part in _follow(generation, parser):
                yield part
        except asyncio.CancelledError:
            # Finished arrives within a step, with the costs.
            generation.cancel()
            async for part in _follow(generation, parser):
                yield part
            raise

    def _request(self, prompt: RenderedPrompt, number: int, parameters: Mapping[str, Any]) -> GenerationRequest:
        defaults = self._model.defaults
        max_tokens = self._model.context_tokens - len(prompt.tokens)
        if max_tokens < 1:
            raise ValueError(
                f"the conversation has {len(prompt.tokens)} tokens and the context {self._model.context_tokens}; "
                "/new starts another"
            )
        sampling = {name: value for name, value in parameters.items() if name in conversation.SAMPLING}
        return GenerationRequest(
            request_id=f"run-{next(self._request_numbers)}",
            tokens=prompt.tokens,
            max_tokens=min(max_tokens, parameters.get(conversation.MAX_TOKENS, defaults.max_tokens or max_tokens)),
            stop=defaults.stop,
            sampling=replace(self._model.sampling, **sampling),
            session_id=f"run-{number}",
            restore_points=prompt.restore_points,
            thinking=self._model.thinking(prompt.text),
        )


class LocalModels(ExitStack):
    """A change replaces the model, since memory may not hold two."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ModelError."""
        super().__init__()
        self._config = config
        self.current: Answerer = self.enter_context(local_model(config))

    def names(self) -> Sequence[str]:
        """The models of this machine."""
        return [shorten(model.name) for model in installed()]

    def change(self, name: str) -> None:
        """Raises ModelError, and loads the old model again then."""
        if name == self.current.name:
            return
        resolve(name)
        before = self._config
        try:
            self._load(replace(before, models=(name,)))
        except BaseException:
            # Ctrl-C during the loading means: keep the old model.
            self._load(before)
            raise

    def _load(self, config: ServerConfig) -> None:
        self.close()
        self.current = _Nobody()
        gc.collect()
        self.current = self.enter_context(local_model(config))
        self._config = config


class _Nobody:
    name = "none"

    def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Raises AnswerFailed."""
        raise AnswerFailed("no model is loaded; /model NAME loads one")


async def _follow(generation: Generation, parser: OutputParser) -> AsyncIterator[Said | AnswerCosts]:
    async for event in generation:
        if isinstance(event, Delta):
            for said in _said(parser.feed(event.text)):
                yield said
        elif isinstance(event, Finished):
            for said in _said(parser.finish(is_complete=event.reason is FinishReason.STOP)):
                yield said
            times = event.timings
            counts = (times.cache_tokens, times.evaluated_tokens, times.prompt_ms)
            yield AnswerCosts(*counts, times.predicted_tokens, times.predicted_ms)
        elif isinstance(event, Failed):
            raise AnswerFailed(str(event.error)) from event.error


def _said(pieces: Sequence[Piece]) -> list[Said]:
    return [
        Said(text, MANNERS[type(piece)])
        for piece in pieces
        if type(piece) in MANNERS and (text := getattr(piece, "text", ""))
    ]
