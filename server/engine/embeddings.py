"""Vectors of texts, evaluated between the steps of answers. Worker thread only, but for the futures.

* One step evaluates one piece: short texts together, the oldest first, or a chunk of a long text.
* While answers are prefilled or decoded, a piece runs once in `STEPS_BEHIND_CHAT` steps, so both go on.
* Memory for a long text is set aside within the budget before anything of it is evaluated.
"""

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.reclaim import SetAside
from models.adapter import NO_ADAPTER
from models.errors import ModelError
from models.formats import Reading, Vector
from server.engine.request import EngineError, PromptTooLarge, StepFailed, TokenArray, check_device

if TYPE_CHECKING:
    from models.inference.embedding import Embedder, LongText

logger = logging.getLogger(__name__)

STEPS_BEHIND_CHAT = 8
MAX_TOGETHER = 256


@dataclass(eq=False)
class EmbeddingJob:
    """One request's texts, each of one token or more, and the future of their vectors."""

    texts: Sequence[TokenArray]
    reading: Reading
    adapter: int = NO_ADAPTER
    vectors: "Future[list[Vector]]" = field(default_factory=Future)
    found: dict[int, Vector] = field(default_factory=dict)
    """By the index of the text."""

    def is_like(self, other: "EmbeddingJob") -> bool:
        """Whether texts of both jobs may be evaluated together."""
        return (self.reading, self.adapter) == (other.reading, other.adapter)

    def take(self, place: int, vector: Vector) -> None:
        """The last vector answers the request."""
        self.found[place] = vector
        if len(self.found) == len(self.texts):
            self.settle(None)

    def settle(self, error: Exception | None) -> None:
        """Answers the request, unless it is answered or its client has left."""
        if self.vectors.done() or not self.vectors.set_running_or_notify_cancel():
            return
        if error is not None:
            self.vectors.set_exception(error)
        else:
            self.vectors.set_result([self.found[place] for place in range(len(self.texts))])


@dataclass(frozen=True, eq=False)
class _Text:
    job: EmbeddingJob
    place: int

    @property
    def tokens(self) -> TokenArray:
        return self.job.texts[self.place]


@dataclass(eq=False)
class _Running:
    text: _Text
    run: "LongText"
    offset: int = 0


class Embeddings:
    """Waiting texts, and the long text being evaluated."""

    def __init__(self, embedder: "Embedder", aside: SetAside, chunk_tokens: int) -> None:
        self._embedder = embedder
        self._aside = aside
        self._chunk_tokens = chunk_tokens
        self._texts: deque[_Text] = deque()
        self._running: _Running | None = None
        self._num_passed = 0

    @property
    def has_work(self) -> bool:
        return bool(self._texts) or self._running is not None

    def add(self, job: EmbeddingJob) -> None:
        """Queues the texts."""
        self._texts.extend(_Text(job, place) for place in range(len(job.texts)))

    def fail_all(self, error: Exception) -> None:
        """Answers every request with an error."""
        running = [] if self._running is None else [self._running.text]
        for text in (*running, *self._texts):
            text.job.settle(error)
        self._forget_settled()

    def give_way(self) -> bool:
        """Gives back the memory of a long text, which begins anew later; False if there is none."""
        if self._running is None:
            return False
        self._texts.appendleft(self._running.text)
        self._end_running()
        return True

    def step(self, *, is_behind_chat: bool, may_take_memory: bool) -> None:
        """Evaluates one piece, unless answers go first. An error reaches only the requests of the piece.

        Without `may_take_memory` no long text begins: an answer may need the memory.
        """
        self._forget_settled()
        if not self.has_work:
            return
        self._num_passed += 1
        if is_behind_chat and self._num_passed < STEPS_BEHIND_CHAT:
            return
        self._num_passed = 0
        if self._running is None and len(self._texts[0].tokens) <= self._chunk_tokens:
            self._embed_together()
        else:
            self._embed_long(is_behind_chat=is_behind_chat, may_take_memory=may_take_memory)

    def _embed_together(self) -> None:
        texts = self._next_texts()
        try:
            tokens, job = [text.tokens for text in texts], texts[0].job
            vectors = self._embedder.embed(tokens, job.reading, job.adapter)
        except Exception as error:  # of an architecture, or of the device: the other requests go on
            for text in texts:
                text.job.settle(_told(error))
            return
        for text in texts:
            self._texts.remove(text)
        for text, vector in zip(texts, vectors, strict=True):
            text.job.take(text.place, vector)

    def _next_texts(self) -> list[_Text]:
        chosen: list[_Text] = []
        longest = 0
        for text in itertools.islice(self._texts, MAX_TOGETHER):
            padded = max(longest, len(text.tokens))
            if padded * (len(chosen) + 1) <= self._chunk_tokens and text.job.is_like(self._texts[0].job):
                chosen.append(text)
                longest = padded
        return chosen

    def _embed_long(self, *, is_behind_chat: bool, may_take_memory: bool) -> None:
        text = self._texts[0] if self._running is None else self._running.text
        try:
            if self._running is None and may_take_memory:
                self._running = self._begin(text, is_behind_chat=is_behind_chat)
            if self._running is not None:
                self._feed(self._running)
        except Exception as error:  # see above
            text.job.settle(_told(error))
            self._forget_settled()

    def _begin(self, text: _Text, *, is_behind_chat: bool) -> _Running | None:
        """None while answers hold the memory. Raises PromptTooLarge if the text can never fit."""
        if not self._aside.try_take(len(text.tokens)):
            if is_behind_chat:
                return None
            raise PromptTooLarge(f"a text of {len(text.tokens)} tokens needs more memory than there is for all state")
        try:
            run = self._embedder.begin(text.job.reading, text.job.adapter)
        except BaseException:
            self._aside.give_back()
            raise
        self._texts.popleft()
        return _Running(text, run)

    def _feed(self, running: _Running) -> None:
        tokens = running.text.tokens
        running.run.feed(tokens[running.offset : running.offset + self._chunk_tokens])
        running.offset += self._chunk_tokens
        if running.offset >= len(tokens):
            vector = running.run.vector()
            self._end_running()
            running.text.job.take(running.text.place, vector)

    def _end_running(self) -> None:
        self._running = None
        self._aside.give_back()

    def _forget_settled(self) -> None:
        if self._running is not None and self._running.text.job.vectors.done():
            self._end_running()
        if any(text.job.vectors.done() for text in self._texts):
            self._texts = deque(text for text in self._texts if not text.job.vectors.done())


def _told(error: Exception) -> Exception:
    check_device(error)
    if isinstance(error, EngineError | ModelError):
        return error
    logger.warning("texts could not be embedded", exc_info=error)
    return StepFailed(f"the texts could not be evaluated: {error}")
