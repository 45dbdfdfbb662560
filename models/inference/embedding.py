"""Vectors of texts: the output of a model's last layer, before it becomes logits, pooled over the text's positions.

Short texts are evaluated together, padded behind their end: no position sees what follows it, so padding changes
nothing. A long text is evaluated alone, chunk by chunk, with layer caches of its own, which nothing else ever uses.

Worker thread only.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cache.types import LayerCache
from models.adapters.adapter import NO_ADAPTER
from models.adapters.switch import AdapterSet, selecting
from models.embedding_format import Pooling
from models.errors import EmbeddingUnsupported
from models.mlx_lm_import import make_prompt_cache

Vector: TypeAlias = NDArray[np.float32]
"""`[dimensions]`, of length 1."""
_TRUNKS = ("model", "backbone", "transformer", "language_model")


class Embedder:
    """Makes vectors with one model."""

    def __init__(self, model: Any, adapters: AdapterSet | None = None) -> None:
        """Evaluates nothing; `adapters` are on the model."""
        self._model = model
        self._adapters = adapters
        self._trunk: Callable[..., mx.array] | None = None

    def embed(self, texts: Sequence[NDArray[np.int32]], pooling: Pooling, adapter: int = NO_ADAPTER) -> list[Vector]:
        """Returns the vectors of texts of a token or more each, evaluated together; raises EmbeddingUnsupported."""
        trunk = self._find_trunk()
        padded = np.zeros((len(texts), max(len(text) for text in texts)), np.int32)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        with selecting(self._adapters, adapter):
            hidden = trunk(mx.array(padded))
        return [_finished(_pooled(hidden[row, : len(text)], pooling)) for row, text in enumerate(texts)]

    def begin(self, pooling: Pooling, adapter: int = NO_ADAPTER) -> "LongText":
        """Returns a text to be evaluated piece by piece; raises EmbeddingUnsupported."""
        trunk, adapters = self._find_trunk(), self._adapters

        def evaluate(tokens: mx.array, cache: list[LayerCache]) -> mx.array:
            with selecting(adapters, adapter):
                return trunk(tokens, cache=cache)

        return LongText(evaluate, list(make_prompt_cache(self._model)), pooling)

    def _find_trunk(self) -> Callable[..., mx.array]:
        """Returns the part of the model that ends before the logits; raises EmbeddingUnsupported for none."""
        if self._trunk is None:
            self._trunk = self._searched()
        return self._trunk

    def _searched(self) -> Callable[..., mx.array]:
        """Returns the innermost of the parts, each within the one before, that can be called by itself."""
        found: Any = None
        part = _next_part(self._model)
        while part is not None:
            found = part if _gives_states(part) else found
            part = _next_part(part)
        if found is None:
            raise EmbeddingUnsupported(
                "the layers of this model cannot be evaluated by themselves, so it makes no vectors"
            )
        return cast(Callable[..., mx.array], found)


class LongText:
    """One text, evaluated piece by piece."""

    def __init__(self, trunk: Callable[..., mx.array], caches: list[LayerCache], pooling: Pooling) -> None:
        self._trunk = trunk
        self._caches = caches
        self._pooling = pooling
        self._pooled: mx.array | None = None
        self._num_tokens = 0

    def feed(self, tokens: NDArray[np.int32]) -> None:
        """Evaluates the next tokens."""
        hidden = self._trunk(mx.array(tokens)[None], self._caches)[0]
        before, weight = self._pooled, self._num_tokens / (self._num_tokens + len(tokens))
        now = _pooled(hidden, self._pooling)
        if before is None or self._pooling is Pooling.LAST:
            self._pooled = now
        elif self._pooling is Pooling.MEAN:
            self._pooled = before * weight + now * (1 - weight)
        self._num_tokens += len(tokens)
        mx.eval(self._pooled, [cache.state for cache in self._caches])

    def vector(self) -> Vector:
        """Returns the vector of all that was fed, a token at least."""
        assert self._pooled is not None, "a text without tokens has no vector"
        return _finished(self._pooled)


def _next_part(part: Any) -> Any:
    return next((found for name in _TRUNKS if (found := getattr(part, name, None)) is not None), None)


def _gives_states(part: Any) -> bool:
    try:
        states = part(mx.zeros((1, 2), mx.int32))
    except Exception:  # whatever an architecture does with arguments that it does not expect
        return False
    return isinstance(states, mx.array) and states.ndim == 3 and states.shape[:2] == (1, 2)


def _pooled(hidden: mx.array, pooling: Pooling) -> mx.array:
    """Returns `[dimensions]` float32 of the states `[num_tokens, dimensions]` of one text."""
    states = hidden.astype(mx.float32)
    if pooling is Pooling.MEAN:
        return states.mean(axis=0)
    return states[0] if pooling is Pooling.FIRST else states[-1]


def _finished(pooled: mx.array) -> Vector:
    vector = np.array(pooled, np.float32)
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector
