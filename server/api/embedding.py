"""Reads texts and writes vectors, for all dialects."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from starlette.responses import Response

from models.errors import PromptTooLong
from models.formats import JUDGED_PREFIX, JUDGED_SUFFIX, Reading, Vector
from server.api.errors import ApiError, Code, ContextExceeded, wrong
from server.api.params import check_token_ids
from server.api.wire import json_text
from server.engine.engine import Engine
from server.engine.request import TokenArray
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)

MAX_TEXTS = 2048
MAX_TOKENS = 300_000
"""Most tokens of all texts of one request, as OpenAI has it."""


MAX_COMPARED_IDS = 256
MAX_OTHER_IDS = 2
"""Most ids that only the model's own tokenizer makes: the special ones around a text."""


@cache
def _warn_of_foreign_ids(model_id: str) -> None:
    """Once, since every text of such a client has them."""
    why = "as of LangChain, where check_embedding_ctx_length=False sends texts"
    logger.warning(
        "%s gets token ids that seem to be another tokenizer's, %s: its vectors mean nothing", model_id, why
    )


@dataclass(frozen=True, eq=False)
class EmbeddingWork:
    """One request's texts."""

    model: ServedModel
    texts: Sequence[TokenArray]
    write: Callable[[Sequence[Vector]], str]
    """Writes the body as JSON, on another thread; raises ApiError."""
    keep_alive_seconds: float | None = None
    reading: Reading | None = None
    """None for the model's own vectors."""

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    async def run(self, engine: Engine) -> Response:
        """The answer; raises ApiError and what the engine raises."""
        reading, own = self.reading, self.model.embedding
        if reading is None:
            assert own is not None, "texts were read for a model that makes no vectors"
            reading = own.pooling
        vectors = await engine.embed(self.texts, reading, self.model.adapter_index) if self.texts else []
        return Response(await asyncio.to_thread(self.write, vectors), media_type="application/json")


class TextReader:
    """Turns the texts of one request into tokens."""

    def __init__(self, model: ServedModel, *, cuts: bool = False, judges: bool = False) -> None:
        """`cuts`: long texts lose their ends. Unless `judges`, raises ApiError (400) for a model without vectors."""
        if model.embedding is None and not judges:
            reason = f"{model.id} makes no vectors: its kind of pooling is not supported"
            raise ApiError(Code.INVALID_VALUE, reason, "model")
        self.model = model
        self.num_tokens = 0
        self._cuts = cuts

    def read(self, text: str | Sequence[int], place: str) -> TokenArray:
        """Tokens of a text or as given; `place` is the field. Raises ApiError."""
        if isinstance(text, str):
            tokens = self._tokens(text, place, add_special=True)
        else:
            check_token_ids(text, self.model.vocab_size, place)
            tokens = list(text)
            if self._are_foreign(tokens[:MAX_COMPARED_IDS]):
                _warn_of_foreign_ids(self.model.id)
        if not tokens:
            raise wrong(place, "it is empty")
        return self._taken(tokens, place)

    def read_pair(self, text: str, place: str) -> TokenArray:
        """The tokens of a text to be judged. Raises ApiError."""
        tokenize = self.model.renderer.tokenize
        tokens = self._tokens(text, place, parse_special=False)
        return self._taken([*tokenize(JUDGED_PREFIX), *tokens, *tokenize(JUDGED_SUFFIX)], place)

    def _are_foreign(self, ids: list[int]) -> bool:
        """Whether the tokenizer makes other tokens of the text that the ids stand for."""
        own = self.model.renderer.tokenize(self.model.token_texts.text(ids))
        return (Counter(ids) - Counter(own)).total() > MAX_OTHER_IDS

    def _tokens(self, text: str, place: str, **options: bool) -> list[int]:
        limit = self.model.context_tokens
        try:
            return self.model.renderer.tokenize(text, **options, max_tokens=None if self._cuts else limit)
        except PromptTooLong as error:
            raise ContextExceeded(error.num_tokens, limit, place, is_exact=False) from error

    def _taken(self, tokens: list[int], place: str) -> TokenArray:
        limit = self.model.context_tokens
        if len(tokens) > limit and not self._cuts:
            raise ContextExceeded(len(tokens), limit, place)
        if self.model.embedding is not None:
            tokens = self.model.embedding.cut(tokens, limit)
        self.num_tokens += len(tokens)
        if self.num_tokens > MAX_TOKENS:
            raise wrong(place, f"all texts of a request may have {MAX_TOKENS} tokens")
        return np.array(tokens, np.int32)


def shortened(vectors: Sequence[Vector], dimensions: int | None) -> list[Vector]:
    """The first `dimensions` of each vector, scaled to length 1; raises ApiError."""
    if dimensions is None:
        return list(vectors)
    if vectors and dimensions > len(vectors[0]):
        raise wrong("dimensions", f"the vectors of this model have {len(vectors[0])}")
    short = [vector[:dimensions] for vector in vectors]
    return [vector / (float(np.linalg.norm(vector)) or 1.0) for vector in short]


def vector_json(vector: Vector) -> str:
    """One vector as JSON: thousands would hold Python's lock for a second."""
    return "[" + ",".join(["%.9g" % number for number in vector.tolist()]) + "]"  # noqa: UP031 (twice as fast)


def object_json(fields: Mapping[str, Any], name: str, values: Sequence[str]) -> str:
    """A JSON object of `fields`, not empty, and a list `name` of JSON texts."""
    return f'{json_text(fields)[:-1]},"{name}":[{",".join(values)}]}}'
