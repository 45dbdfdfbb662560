"""Answers from a model in this process, without HTTP."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console

from models.errors import ModelError
from models.output.pieces import OutputParser, Piece, Reasoning, Text
from models.prompt.chat_template import RenderedPrompt
from server.api.context import EnginePort, ServedModel
from server.cli.repl.speech import AnswerCosts, AnswerFailed, Manner, Said, Turn
from server.config import ServerConfig
from server.engine.errors import EngineError
from server.engine.events import Delta, Failed, Finished, FinishReason
from server.engine.generation import Generation
from server.engine.request import GenerationRequest
from server.log import configure_logging
from server.service import open_service

MANNERS: Mapping[type, Manner] = {Text: Manner.ANSWER, Reasoning: Manner.THOUGHT}
"""How each kind of piece is said; a kind that is not here is not shown."""


@contextmanager
def local_model(config: ServerConfig) -> "Iterator[LocalModel]":
    """Loads the model, and ends its engine in the end. Raises ModelError."""
    configure_logging("warning")
    console = Console()
    with console.status(f"Loading {config.models[0]} …") if console.is_terminal else nullcontext():
        service = open_service(config)
        service.engine.start()
    try:
        yield LocalModel(service.model, service.engine)
    finally:
        service.engine.stop()


class LocalModel:
    """A model and its engine. Used on one event loop at a time."""

    def __init__(self, model: ServedModel, engine: EnginePort) -> None:
        self._model = model
        self._engine = engine
        self._request_numbers = itertools.count(1)

    @property
    def name(self) -> str:
        """The model's id."""
        return self._model.id

    async def answer(self, turns: Sequence[Turn], conversation: int) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Yields an answer, and its costs last; raises AnswerFailed. When cancelled it stops the model first."""
        try:
            prompt = self._model.renderer.render(turns)
            generation = self._engine.submit(self._request(prompt, conversation))
        except (ModelError, EngineError, ValueError) as error:
            raise AnswerFailed(str(error)) from error
        parser = self._model.output_parser((), prompt.text)
        try:
            async for part in _follow(generation, parser):
                yield part
        except asyncio.CancelledError:
            # The end comes within a step, and with it the costs.
            generation.cancel()
            async for part in _follow(generation, parser):
                yield part
            raise

    def _request(self, prompt: RenderedPrompt, conversation: int) -> GenerationRequest:
        max_tokens = self._model.context_tokens - len(prompt.tokens)
        if max_tokens < 1:
            raise ValueError(
                f"the conversation has {len(prompt.tokens)} tokens and the context {self._model.context_tokens}; "
                "/new starts another"
            )
        return GenerationRequest(
            request_id=f"run-{next(self._request_numbers)}",
            tokens=prompt.tokens,
            max_tokens=max_tokens,
            sampling=self._model.sampling,
            session_id=f"run-{conversation}",
            restore_points=prompt.restore_points,
            thinking=self._model.thinking(prompt.text),
        )


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
