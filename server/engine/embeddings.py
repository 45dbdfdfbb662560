"""Vectors of texts, evaluated between the steps of answers. Worker thread only, but for the futures.

* One step evaluates one piece: short texts together, the oldest first, or a chunk of a long text.
* While answers are prefilled or decoded, a piece runs once in `STEPS_BEHIND_CHAT` steps, so both go on.
* Memory for a long text is set aside within the budget before anything of it is evaluated.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.reclaim import Reclaimer
from models.adapter import NO_ADAPTER
from models.errors import ModelError
from models.formats import Reading, Vector
from server.engine.request import (
    EngineError,
    OutOfMemory,
    PromptTooLarge,
    StepFailed,
    TokenArray,
    check_device,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from models.inference.embedding import Embedder, LongText

logger = logging.getLogger(__name__)

STEPS_BEHIND_CHAT = 8
MAX_TOGETHER = 256
MAX_FAULTS = 2
"""For lack of memory, after which texts are tried again."""


@dataclass(eq=False)
class EmbeddingJob:
    """One request's texts, each of one token or more, and the future of their vectors."""

    texts: Sequence[TokenArray]
    reading: Reading
    adapter: int = NO_ADAPTER
    vectors: "Future[list[Vector]]" = field(default_factory=Future)
    found: dict[int, Vector] = field(default_factory=dict)
    num_faults: int = 0

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


@dataclass(eq=False)
class _Text:
    job: EmbeddingJob
    place: int
    run: "LongText | None" = None
    """The state of a long text that is under way, the first of all; memory is set aside for it."""
    offset: int = 0

    @property
    def tokens(self) -> TokenArray:
        return self.job.texts[self.place]


class Embeddings:
    """Texts that have no vector yet."""

    def __init__(
        self,
        embedder: "Embedder",
        reclaimer: Reclaimer,
        chunk_tokens: int,
        check: Callable[[Exception], None] = check_device,
    ) -> None:
        """`check` raises DeviceLost for an error after which nothing can be evaluated."""
        self._embedder, self._check = embedder, check
        self._reclaimer = reclaimer
        self._chunk_tokens = chunk_tokens
        self._texts: list[_Text] = []
        self._num_passed = 0

    @property
    def has_work(self) -> bool:
        return bool(self._texts)

    @property
    def progress(self) -> list[tuple[int, int]]:
        """The place and offset of each text."""
        return [(text.place, text.offset) for text in self._texts]

    def add(self, job: EmbeddingJob) -> None:
        """Queues the texts."""
        self._texts += [_Text(job, place) for place in range(len(job.texts))]

    def fail_all(self, error: Exception) -> None:
        """Answers every request with an error."""
        for text in self._texts:
            text.job.settle(error)
        self._forget_settled()

    def give_way(self) -> bool:
        """Gives back the memory of a long text, which begins anew later; False if there is none."""
        if not self._texts or self._texts[0].run is None:
            return False
        self._texts[0].run, self._texts[0].offset = None, 0
        self._reclaimer.release_aside()
        return True

    def is_due(self, *, is_behind_chat: bool) -> bool:
        """Whether a piece is to be evaluated now: often answers go first."""
        self._forget_settled()
        self._num_passed += bool(self._texts)
        return bool(self._texts) and not (is_behind_chat and self._num_passed < STEPS_BEHIND_CHAT)

    def step(self, *, is_behind_chat: bool, may_take_memory: bool) -> bool:
        """Evaluates one piece; returns whether memory lacked. An error reaches only the requests of the piece.

        Without `may_take_memory` no long text begins: an answer may need the memory.
        """
        self._num_passed, first = 0, self._texts[0]
        is_long = first.run is not None or len(first.tokens) > self._chunk_tokens
        texts = [first] if is_long else self._next_texts()
        try:
            if is_long:
                self._embed_long(first, is_behind_chat=is_behind_chat, may_take_memory=may_take_memory)
            else:
                self._embed_together(texts)
        except Exception as error:  # of an architecture, or of the device: the other requests go on
            self._check(error)
            self.give_way()
            self._try_again(dict.fromkeys([text.job for text in texts]), error)
            return is_out_of_memory(error)
        return False

    def _try_again(self, jobs: Iterable[EmbeddingJob], error: Exception) -> None:
        is_told = isinstance(error, EngineError | ModelError)
        for job in jobs:
            job.num_faults += 1
            if is_told or job.num_faults > (MAX_FAULTS if is_out_of_memory(error) else 1):
                job.settle(error if is_told else _told(error))
        self._forget_settled()

    def _embed_together(self, texts: list[_Text]) -> None:
        vectors = self._embedder.embed([text.tokens for text in texts], texts[0].job.reading, texts[0].job.adapter)
        for text, vector in zip(texts, vectors, strict=True):
            self._texts.remove(text)
            text.job.take(text.place, vector)

    def _next_texts(self) -> list[_Text]:
        """The first text, and others read in the same way, as far as they fit into a chunk."""
        first, longest, chosen = self._texts[0].job, 0, list[_Text]()
        for text in self._texts[:MAX_TOGETHER]:
            padded = max(longest, len(text.tokens))
            is_alike = (text.job.reading, text.job.adapter) == (first.reading, first.adapter)
            if is_alike and padded * (len(chosen) + 1) <= self._chunk_tokens:
                chosen.append(text)
                longest = padded
        return chosen

    def _embed_long(self, text: _Text, *, is_behind_chat: bool, may_take_memory: bool) -> None:
        """Waits while answers hold the memory. Raises PromptTooLarge if the text can never fit."""
        num_tokens = len(text.tokens)
        if text.run is None and may_take_memory:
            if self._reclaimer.try_set_aside(num_tokens):
                text.run = self._embedder.begin(text.job.reading, text.job.adapter)
            elif not is_behind_chat:
                raise PromptTooLarge(f"a text of {num_tokens} tokens needs more memory than there is for all state")
        if text.run is None:
            return
        text.run.feed(text.tokens[text.offset : text.offset + self._chunk_tokens])
        text.offset += self._chunk_tokens
        if text.offset >= num_tokens:
            vector = text.run.vector()
            self._reclaimer.release_aside()
            self._texts.remove(text)
            text.job.take(text.place, vector)

    def _forget_settled(self) -> None:
        if any(text.job.vectors.done() for text in self._texts):
            if self._texts[0].job.vectors.done():
                self._reclaimer.release_aside()
            self._texts = [text for text in self._texts if not text.job.vectors.done()]


def _told(error: Exception) -> Exception:
    if is_out_of_memory(error):
        return OutOfMemory("there is not enough memory for these texts now")
    logger.warning("texts could not be embedded", exc_info=error)
    return StepFailed(f"the texts could not be evaluated: {error}")
