"""Vectors of texts: a model's last layer before the logits, pooled.

A judgement is a vector of one number: the probability of one token against another after the text. Short texts are
evaluated together, padded at the end, which changes nothing; a long one alone, in chunks. Worker thread only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cache.layers.kinds import make_caches
from models.adapter import NO_ADAPTER
from models.errors import EmbeddingUnsupported
from models.formats import Judgement, Pooling, Reading, Vector
from models.lora import AdapterSet, selecting

_Evaluate: TypeAlias = Callable[..., mx.array]
_TRUNKS = ("model", "backbone", "transformer", "language_model")


class Embedder:
    """Makes vectors with one model."""

    def __init__(self, model: Any, adapters: AdapterSet | None = None) -> None:
        self.model, self.adapters = model, adapters

    def embed(self, texts: Sequence[NDArray[np.int32]], reading: Reading, adapter: int = NO_ADAPTER) -> list[Vector]:
        """Vectors of texts of one token or more; raises EmbeddingUnsupported."""
        evaluate = self.evaluation(reading)
        padded = np.zeros((len(texts), max(len(text) for text in texts)), np.int32)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        with selecting(self.adapters, adapter):
            states = evaluate(mx.array(padded))
            rows = [_read(states[row, : len(text)], reading) for row, text in enumerate(texts)]
            return [self.finished(row, reading) for row in rows]

    def begin(self, reading: Reading, adapter: int = NO_ADAPTER) -> "LongText":
        """A text to evaluate chunk by chunk; raises EmbeddingUnsupported."""
        return LongText(self, reading, adapter)

    def evaluation(self, reading: Reading) -> _Evaluate:
        """What gives states, or logits, that are read; raises EmbeddingUnsupported."""
        if isinstance(reading, Pooling) or self._head is not None:
            return self._trunk
        return cast(_Evaluate, self.model)

    def finished(self, read: mx.array, reading: Reading) -> Vector:
        """The vector of what was read of a text."""
        if isinstance(reading, Pooling):
            vector = np.array(read, np.float32)
            length = float(np.linalg.norm(vector))
            return vector / length if length > 0 else vector
        logits = read if self._head is None else self._head(read[None, None])[0, 0]
        pair = logits[mx.array([reading.no_id, reading.yes_id])].astype(mx.float32)
        return np.array(mx.softmax(pair)[1:], np.float32)

    @cached_property
    def _head(self) -> _Evaluate | None:
        try:
            trunk = self._trunk
        except EmbeddingUnsupported:
            return None
        tokens = mx.array([[1, 2, 3]])
        wanted, states = self.model(tokens), trunk(tokens)
        return next((head for head in _heads(self.model) if _makes(head, states, wanted)), None)

    @cached_property
    def _trunk(self) -> _Evaluate:
        """The innermost part that gives states; raises EmbeddingUnsupported."""
        trunks = [part for part in _parts(self.model)[1:] if _gives_states(part)]
        if not trunks:
            raise EmbeddingUnsupported(
                "the layers of this model cannot be evaluated by themselves, so it makes no vectors"
            )
        return cast(_Evaluate, trunks[-1])


class LongText:
    """One text, evaluated chunk by chunk."""

    def __init__(self, embedder: Embedder, reading: Reading, adapter: int) -> None:
        self._embedder, self._reading, self._adapter = embedder, reading, adapter
        self._evaluate, self._caches = embedder.evaluation(reading), make_caches(embedder.model)
        self._pooled: mx.array | None = None

    def feed(self, tokens: NDArray[np.int32]) -> None:
        """Evaluates the next tokens."""
        with selecting(self._embedder.adapters, self._adapter):
            states = self._evaluate(mx.array(tokens)[None], cache=self._caches)[0]
        now = _read(states, self._reading)
        if self._pooled is None or self._reading not in (Pooling.MEAN, Pooling.FIRST):
            self._pooled = now
        elif self._reading is Pooling.MEAN:
            self._pooled = self._pooled + now
        mx.eval(self._pooled, [cache.state for cache in self._caches])

    def vector(self) -> Vector:
        """The vector of all tokens fed so far, at least one."""
        assert self._pooled is not None, "a text without tokens has no vector"
        with selecting(self._embedder.adapters, self._adapter):
            return self._embedder.finished(self._pooled, self._reading)


def _parts(model: Any) -> list[Any]:
    """A model, and its parts that are one in the other, down to the layers."""
    inner = next((found for name in _TRUNKS if (found := getattr(model, name, None)) is not None), None)
    return [model] if inner is None else [model, *_parts(inner)]


def _gives_states(part: Any) -> bool:
    with suppress(Exception):  # whatever an architecture does with arguments that it does not expect
        states = part(mx.zeros((1, 2), mx.int32))
        return isinstance(states, mx.array) and states.ndim == 3 and states.shape[:2] == (1, 2)
    return False


def _heads(model: Any) -> Iterator[_Evaluate]:
    for part in _parts(model):
        if callable(head := getattr(part, "lm_head", None)):
            yield head
        if callable(tied := getattr(getattr(part, "embed_tokens", None), "as_linear", None)):
            yield tied


def _makes(head: _Evaluate, states: mx.array, wanted: mx.array) -> bool:
    with suppress(Exception):  # as above
        made = head(states)
        return made.shape == wanted.shape and bool(mx.allclose(made, wanted, rtol=1e-2, atol=1e-2))
    return False


def _read(states: mx.array, reading: Reading) -> mx.array:
    """`[dimensions]` from one text's states `[num_tokens, dimensions]`; of a vector only the direction counts."""
    if isinstance(reading, Judgement):
        return states[-1]
    states = states.astype(mx.float32)
    if reading is Pooling.MEAN:
        return states.sum(axis=0)
    return states[0 if reading is Pooling.FIRST else -1]
