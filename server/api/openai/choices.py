"""Writes one choice or several in the answer of OpenAI's generation endpoints, streamed or whole."""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from models.output.pieces import Piece, TokenLogprob
from models.prompt.chat_template import RenderedPrompt
from server.api import PRODUCT
from server.api.answer import AllEnded, ChoiceEvent, ChoiceFailed, Choices
from server.api.conversation import Conversation
from server.api.dialect import Exchange, OutputEvent, Payload
from server.api.errors import ApiError, Code, explain
from server.api.openai.dialect import DONE, ErrorObject, error_body
from server.api.openai.params import BACKGROUND_TIER, DEFAULT_TIER
from server.api.openai.types import GenerationBody
from server.api.openai.usage import (
    AnswerHead,
    PromptIds,
    TokenIds,
    TokenNames,
    Usage,
    stop_found,
    usage_of,
    usage_so_far,
)
from server.api.record import costs_of
from server.api.wire import sse_event
from server.app.config import ServerConfig
from server.engine.request import Delta, Finished, GenerationRequest, Priority, Started
from server.pool.served import ServedModel

FAILED = "error"
"""Finish reason of a choice that failed while others succeeded."""
MAX_SEED = 2**63


class ChoiceExchange(Exchange):
    """Writes one choice, and the whole answer if it is the only choice."""

    def __init__(
        self,
        body: GenerationBody,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        *,
        index: int = 0,
        conversation: Conversation | None = None,
    ) -> None:
        super().__init__(model, request, prompt, is_streamed=body.stream is True, conversation=conversation)
        self.index = index
        self.answer_id = request.request_id
        """The answer's id, the same for all choices."""
        self.names = TokenNames(model.token_texts, body.return_tokens_as_token_ids is True)
        self.told: list[TokenLogprob] = []
        """Log-probabilities of all output tokens, if the request asks for them."""
        self._num_streamed_logprobs = 0
        self._token_ids: list[int] = []
        """All output tokens so far."""
        self._num_streamed_ids = 0
        self._tells_ids = body.return_token_ids is True
        self.wants_usage = body.wants_usage()
        self._wants_usage_always = body.wants_usage_always()
        self._says_tier = body.service_tier is not None
        self._created = int(time.time())
        self._started: Started | None = None

    def take_tokens(self, delta: Delta) -> None:
        """Keeps the tokens for the next chunk, or for the answer.

        Tokens without text send log-probabilities only beside token ids, since then both lists have the same length.
        """
        self._token_ids.extend(delta.token_ids)
        if delta.text or self._tells_ids:
            self.told.extend(delta.logprobs)

    def untold(self) -> Sequence[TokenLogprob]:
        """Returns the log-probabilities added since the last call."""
        since, self._num_streamed_logprobs = self._num_streamed_logprobs, len(self.told)
        return self.told[since:]

    def whole_ids(self) -> TokenIds:
        """Returns the choice's tokens, if requested."""
        return {"token_ids": self._token_ids} if self._tells_ids else {}

    def untold_ids(self) -> TokenIds:
        """Returns the tokens added since the last call, if requested."""
        since, self._num_streamed_ids = self._num_streamed_ids, len(self._token_ids)
        return {"token_ids": self._token_ids[since:]} if self._tells_ids else {}

    def prompt_ids(self) -> PromptIds:
        """Returns the prompt's tokens, if requested."""
        return {"prompt_token_ids": self.request.tokens.tolist()} if self._tells_ids else {}

    @abstractmethod
    def opening(self) -> Sequence[Payload]:
        """Returns the first chunks of the choice's stream."""

    @abstractmethod
    def take(self, piece: Piece) -> Sequence[Payload]:
        """Keeps a piece of the output, and returns its chunks."""

    @abstractmethod
    def reason(self, finished: Finished) -> str:
        """Returns OpenAI's finish reason of the choice."""

    @abstractmethod
    def end_chunk(self, reason: str) -> Any:
        """Returns the last chunk of the choice."""

    @abstractmethod
    def empty_chunk(self) -> Any:
        """Returns a chunk without choices."""

    @abstractmethod
    def choice(self, reason: str) -> Any:
        """Returns the choice of a whole answer."""

    @abstractmethod
    def answer(self, choices: Any) -> Payload:
        """Returns a whole answer, without its costs."""

    async def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields the text, the finish reason, and the usage if requested."""
        for chunk in self.opening():
            yield sse_event(chunk)
        async for event in events:
            if isinstance(event, Finished):
                for chunk in self.last_chunks(self.ended_chunk(event), event):
                    yield sse_event(chunk)
            elif isinstance(event, Started):
                self.note_start(event)
            else:
                for chunk in self.take(event):
                    yield sse_event(chunk)
        yield DONE

    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""
        async for event in events:
            if isinstance(event, Finished):
                return self.whole([self.ended_choice(event)], event)
            if not isinstance(event, Started):
                self.take(event)
        raise AssertionError("the events of a request end with Finished")

    def ended_chunk(self, finished: Finished) -> Any:
        """Returns the last chunk of a successful choice."""
        chunk = self.end_chunk(self.reason(finished))
        chunk["choices"][0].update(stop_found(finished, self.request))
        return chunk

    def ended_choice(self, finished: Finished) -> Any:
        """Returns a successful choice of a whole answer."""
        return {**self.choice(self.reason(finished)), **stop_found(finished, self.request)}

    def note_start(self, started: Started) -> None:
        """Keeps the reuse at the start, for the usage so far."""
        self._started = started

    def usage_so_far(self) -> Usage | None:
        """Returns the usage for each chunk; None if only the stream's end counts tokens."""
        if not self._wants_usage_always:
            return None
        return usage_so_far(len(self.request.tokens), self._started, len(self._token_ids))

    def head(self, kind: str) -> AnswerHead:
        """Returns the head of an answer or chunk; `kind` is its `object`."""
        head: AnswerHead = {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self.model.id,
            "system_fingerprint": PRODUCT,
        }
        if self._says_tier:
            head["service_tier"] = BACKGROUND_TIER if self.request.priority is Priority.BACKGROUND else DEFAULT_TIER
        return head

    def last_chunks(self, end: Any, finished: Finished) -> list[Payload]:
        """Returns the end of a stream: the end of its last choice, and the costs of all."""
        last = end
        if self.wants_usage:
            last = self.empty_chunk()
            last["usage"] = usage_of(finished)
        last.update(costs_of(finished, self.request.session_id))
        return [end] if last is end else [end, last]

    def whole(self, choices: Sequence[Any], finished: Finished) -> Payload:
        """Returns a whole answer with the costs of all choices."""
        return {
            **self.answer(choices),
            "usage": usage_of(finished),
            **costs_of(finished, self.request.session_id),
        }


class SeveralChoices(Choices):
    """Writes an answer with several choices, interleaved in a stream, each named by its index."""

    exchanges: tuple[ChoiceExchange, ...]

    def __init__(self, exchanges: Sequence[ChoiceExchange]) -> None:
        super().__init__(exchanges)
        for exchange in exchanges:
            exchange.answer_id = exchanges[0].answer_id

    @property
    def _first(self) -> ChoiceExchange:
        return self.exchanges[0]

    async def frames(self, events: AsyncIterator[ChoiceEvent]) -> AsyncIterator[bytes]:
        """Yields each choice's text as it comes, its finish reason, and at last the usage of all, if requested."""
        for exchange in self.exchanges:
            for chunk in exchange.opening():
                yield sse_event(chunk)
        end: Any = None
        async for event in events:
            if isinstance(event, AllEnded):
                assert end is not None, "a choice ends before all have ended"
                for chunk in self._first.last_chunks(end, event.finished):
                    yield sse_event(chunk)
                continue
            exchange, output = self.exchanges[event[0]], event[1]
            if isinstance(output, Finished | ChoiceFailed):
                if end is not None:
                    yield sse_event(end)
                end = self._end_chunk(exchange, output)
            elif isinstance(output, Started):
                exchange.note_start(output)
            else:
                for chunk in exchange.take(output):
                    yield sse_event(chunk)
        yield DONE

    async def body(self, events: AsyncIterator[ChoiceEvent]) -> Payload:
        """Returns the body of an answer that is not streamed, with its choices in order."""
        ended: dict[int, Any] = {}
        async for event in events:
            if isinstance(event, AllEnded):
                return self._first.whole([choice for _, choice in sorted(ended.items())], event.finished)
            exchange, output = self.exchanges[event[0]], event[1]
            if isinstance(output, Finished):
                ended[event[0]] = exchange.ended_choice(output)
            elif isinstance(output, ChoiceFailed):
                ended[event[0]] = {**exchange.choice(FAILED), "error": _error(exchange, output)}
            elif not isinstance(output, Started):
                exchange.take(output)
        raise AssertionError("the events of a request end with AllEnded")

    @staticmethod
    def _end_chunk(exchange: ChoiceExchange, end: Finished | ChoiceFailed) -> Any:
        if isinstance(end, Finished):
            return exchange.ended_chunk(end)
        chunk = exchange.end_chunk(FAILED)
        chunk["choices"][0]["error"] = _error(exchange, end)
        return chunk


def num_choices(body: GenerationBody, num_prompts: int, config: ServerConfig) -> int:
    """Returns the number of answers to each prompt; raises ApiError if all together exceed the slots and the
    queue.
    """
    count, limit = body.n or 1, config.slots + config.max_waiting
    if count * num_prompts > limit:
        asked = f"{count} answers" if num_prompts == 1 else f"{num_prompts} prompts with {count} answers each"
        message = f"{asked} are more than the {limit} that may run (--slots) and wait (--max-waiting) here at once"
        param = "n" if count > 1 else "prompt"
        raise ApiError(Code.INVALID_VALUE, f"{param}: {message}", param)
    return count


def request_of_choice(request: GenerationRequest, index: int, number: int) -> GenerationRequest:
    """Returns the request for choice `index` of all, which is answer `number` to its prompt, both from 0.

    Seeds differ, so that answers to one prompt differ; the first answer is the one that a single request would get.
    Only the first choice of all belongs to the session.
    """
    if index == 0:
        return request
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % MAX_SEED)
    return replace(request, request_id=f"{request.request_id}-{index}", session_id=None, sampling=sampling)


def _error(exchange: ChoiceExchange, failed: ChoiceFailed) -> ErrorObject:
    return error_body(explain(failed.error, exchange.request.request_id))["error"]
