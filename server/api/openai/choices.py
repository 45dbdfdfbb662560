"""Writes OpenAI's answers of one choice or several, streamed or whole."""

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Self

from models.output.pieces import Piece, TokenLogprob
from server.api import PRODUCT
from server.api.answer import Answer, Exchange, Question
from server.api.dialect import Payload
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
from server.engine.request import Delta, Failed, Finished, GenerationRequest, Priority, Started

FAILED = "error"
"""Of a failed choice where others succeeded."""
MAX_SEED = 2**63


class ChoiceExchange(Exchange):
    """Writes one choice; the first writes the answer of all."""

    def __init__(self, body: GenerationBody, question: Question, index: int = 0) -> None:
        super().__init__(question, is_streamed=body.stream is True)
        self.index = index
        self.answer_id = self.request.request_id
        """The same for all choices."""
        self._others: Sequence[ChoiceExchange] = ()
        self.names = TokenNames(self.model.token_texts, body.return_tokens_as_token_ids is True)
        self.told: list[TokenLogprob] = []
        """Only if requested."""
        self._num_streamed_logprobs = 0
        self._token_ids: list[int] = []
        self._num_streamed_ids = 0
        self._tells_ids = body.return_token_ids is True
        self.wants_usage = body.wants_usage()
        self._wants_usage_always = body.wants_usage_always()
        self._says_tier = body.service_tier is not None
        self._created = int(time.time())
        self._started: Started | None = None

    def take_tokens(self, delta: Delta) -> None:
        """Keeps the tokens for the next chunk, or the answer.

        Tokens without text send log-probabilities only beside token ids: both lists have the same length.
        """
        self._token_ids.extend(delta.token_ids)
        if delta.text or self._tells_ids:
            self.told.extend(delta.logprobs)

    def untold(self) -> Sequence[TokenLogprob]:
        """Returns the log-probabilities since the last call."""
        since, self._num_streamed_logprobs = self._num_streamed_logprobs, len(self.told)
        return self.told[since:]

    def whole_ids(self) -> TokenIds:
        """Returns the choice's tokens, if requested."""
        return {"token_ids": self._token_ids} if self._tells_ids else {}

    def untold_ids(self) -> TokenIds:
        """Returns the tokens since the last call, if requested."""
        since, self._num_streamed_ids = self._num_streamed_ids, len(self._token_ids)
        return {"token_ids": self._token_ids[since:]} if self._tells_ids else {}

    def prompt_ids(self) -> PromptIds:
        """Returns the prompt's tokens, if requested."""
        return {"prompt_token_ids": self.request.tokens.tolist()} if self._tells_ids else {}

    @abstractmethod
    def opening(self) -> Sequence[Payload]:
        """Returns the stream's first chunks."""

    @abstractmethod
    def take(self, piece: Piece) -> Sequence[Payload]:
        """Keeps a piece; returns its chunks."""

    @abstractmethod
    def reason(self, finished: Finished) -> str:
        """Returns OpenAI's finish reason."""

    @abstractmethod
    def end_chunk(self, reason: str) -> Any:
        """Returns the choice's last chunk."""

    @abstractmethod
    def empty_chunk(self) -> Any:
        """Returns a chunk without choices."""

    @abstractmethod
    def choice(self, reason: str) -> Any:
        """Returns a whole answer's choice."""

    @abstractmethod
    def answer(self, choices: Any) -> Payload:
        """Returns a whole answer, without costs."""

    @property
    def choices(self) -> "Sequence[ChoiceExchange]":
        return (self, *self._others)

    def with_others(self, others: "Sequence[ChoiceExchange]") -> Self:
        """Makes itself the first choice; returns itself."""
        self._others = others
        for other in others:
            other.answer_id = self.answer_id
        return self

    async def frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yields all choices' chunks as they come, then the costs."""
        choices, end = self.choices, None
        for choice in choices:
            for chunk in choice.opening():
                yield sse_event(chunk)
        async for index, event in answer.choice_events():
            choice = choices[index]
            if isinstance(event, Finished | Failed):
                # The costs of all stand in the last choice's end.
                if end is not None:
                    yield sse_event(end)
                end = choice.ended_chunk(event)
            elif isinstance(event, Started):
                choice.note_start(event)
            else:
                for chunk in choice.take(event):
                    yield sse_event(chunk)
        for chunk in self._last_chunks(end, answer.finished):
            yield sse_event(chunk)
        yield DONE

    async def body(self, answer: Answer) -> Payload:
        """Returns a whole answer, its choices in order."""
        choices, ended = self.choices, dict[int, Any]()
        async for index, event in answer.choice_events():
            if isinstance(event, Finished | Failed):
                ended[index] = choices[index].ended_choice(event)
            elif not isinstance(event, Started):
                choices[index].take(event)
        return {
            **self.answer([ended[index] for index in sorted(ended)]),
            "usage": usage_of(answer.finished),
            **costs_of(answer.finished, self.request.session_id),
        }

    def ended_chunk(self, end: Finished | Failed) -> Any:
        """Returns the choice's last chunk."""
        if isinstance(end, Finished):
            chunk, told = self.end_chunk(self.reason(end)), dict[str, Any](stop_found(end, self.request))
        else:
            chunk, told = self.end_chunk(FAILED), {"error": self._error(end)}
        chunk["choices"][0].update(told)
        return chunk

    def ended_choice(self, end: Finished | Failed) -> Any:
        """Returns a whole answer's choice."""
        if isinstance(end, Finished):
            return {**self.choice(self.reason(end)), **stop_found(end, self.request)}
        return {**self.choice(FAILED), "error": self._error(end)}

    def _error(self, failed: Failed) -> ErrorObject:
        return error_body(explain(failed.error, self.request.request_id))["error"]

    def note_start(self, started: Started) -> None:
        """Keeps the reuse, for the usage so far."""
        self._started = started

    def usage_so_far(self) -> Usage | None:
        """Returns each chunk's usage; None if only the end counts."""
        if not self._wants_usage_always:
            return None
        return usage_so_far(len(self.request.tokens), self._started, len(self._token_ids))

    def head(self, kind: str) -> AnswerHead:
        """Returns the head; `kind` is its `object`."""
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

    def _last_chunks(self, end: Any, finished: Finished) -> list[Payload]:
        last = end
        if self.wants_usage:
            last = self.empty_chunk()
            last["usage"] = usage_of(finished)
        last.update(costs_of(finished, self.request.session_id))
        return [end] if last is end else [end, last]


def num_choices(body: GenerationBody, num_prompts: int, config: ServerConfig) -> int:
    """Returns the number of answers to each prompt; raises ApiError for more than may run and wait."""
    count, limit = body.n or 1, config.slots + config.max_waiting
    if count * num_prompts > limit:
        asked = f"{count} answers" if num_prompts == 1 else f"{num_prompts} prompts with {count} answers each"
        message = f"{asked} are more than the {limit} that may run (--slots) and wait (--max-waiting) here at once"
        param = "n" if count > 1 else "prompt"
        raise ApiError(Code.INVALID_VALUE, f"{param}: {message}", param)
    return count


def request_of_choice(request: GenerationRequest, index: int, number: int) -> GenerationRequest:
    """Returns the request for choice `index` of all, answer `number` to its prompt, both from 0.

    Seeds differ; the first answer is that of a single request. Only the first choice has the session.
    """
    if index == 0:
        return request
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % MAX_SEED)
    return replace(request, request_id=f"{request.request_id}-{index}", session_id=None, sampling=sampling)
