"""A model together with its MTP module, which drafts what the model may say next. Worker thread only.

The module is one layer more, whose cache is the last of a row's and is treated like the others. The cache has an
entry for each evaluated token, made of the token and the model's hidden state before it. Hidden states are not
stored: the first entry behind a restored prefix takes zeros.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from cache.layers.headed import tail_of
from cache.layers.layout import leaves_of
from cache.layers.state import owned
from cache.types import LayerCache
from models.inference.feeds import unchanged
from models.inference.ragged import RaggedLayer, ragged_attention
from models.mlx_lm_import import ArraysCache, RotatingKVCache, make_prompt_cache
from models.mtp import MtpModule, language_model

_TRIALS = 4
_TRIED_TOKENS = 3


class Evaluated(NamedTuple):
    """What a call gives for each of its tokens, in one line over all rows; lazy."""

    logits: mx.array
    """`[num_tokens, vocab_size]`."""
    before: mx.array
    """The model's hidden state before each token, `[num_tokens, width]`."""
    behind: mx.array
    """And behind it."""

    def states(self, start: int, stop: int) -> mx.array:
        """The states before each of some tokens of a row, and behind the last, `[stop - start + 1, width]`."""
        return mx.concatenate([self.before[start : start + 1], self.behind[start:stop]])


class Behind:
    """The hidden state behind rows' evaluated prompts; kept by the module's cache of each row."""

    def __init__(self) -> None:
        self._found = WeakKeyDictionary[LayerCache, tuple[int, mx.array]]()

    def set(self, caches: Sequence[LayerCache], state: mx.array) -> mx.array:
        """`state` is `[1, width]`; returns a copy of it, to be evaluated."""
        state = owned(state)
        self._found[caches[-1]] = _offset(caches[-1]), state
        return state

    def get(self, caches: Sequence[LayerCache]) -> mx.array | None:
        """None if it is not known, or the caches have changed since."""
        offset, state = self._found.get(caches[-1], (-1, None))
        return state if offset == _offset(caches[-1]) else None


class MtpModel:
    """A model whose MTP module takes part in each call."""

    def __init__(self, model: Module, module: MtpModule) -> None:
        self._model, self._text, self._module = model, language_model(model), module

    def make_cache(self) -> list[LayerCache]:
        """Empty layer caches for one row; the module's is like the last with such attention."""
        others = [cache for cache in make_prompt_cache(self._model) if not isinstance(cache, ArraysCache)]
        alike = [cache for cache in others if isinstance(cache, RotatingKVCache) == self._module.slides]
        return [*make_prompt_cache(self._model), alike[-1]]

    def __call__(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        """Logits `[1, num_tokens, vocab_size]` of one row, as a model gives them."""
        return self.evaluate(tokens, cache, [tokens.shape[1]], [None]).logits[None]

    def evaluate(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache],
        lengths: Sequence[int],
        before: Sequence[mx.array | None],
    ) -> Evaluated:
        """Evaluates `lengths` tokens of each row: `[1, num_tokens]` over a row's own caches, else `[num_tokens, 1]`.

        `before` holds the hidden state before each row's first token, `[1, width]`; None for one that is not known.
        """
        behind = self._text.model(tokens, cache=list(caches[:-1])).flatten(0, 1)
        states = _shifted(behind, lengths, before)
        # Nothing reads its output: of its layer only what makes the entries is computed.
        self._module(self._text.model.embed_tokens(tokens), states.reshape(*tokens.shape, -1), caches[-1])
        return Evaluated(self._logits(behind), states, behind)

    def _logits(self, hidden: mx.array) -> mx.array:
        if "lm_head" in self._text:
            return cast(mx.array, self._text.lm_head(hidden))
        return cast(mx.array, self._text.model.embed_tokens.as_linear(hidden))

    def draft(
        self, caches: Sequence[LayerCache], known: Sequence[int], before: mx.array, num_tokens: int
    ) -> mx.array:
        """Tokens that a row may say behind its known ones, which are not in `caches` yet, `[num_tokens]`; lazy.

        `before` holds the hidden states before each of `known`, `[num_known, width]`. The caches stay as they are.
        """
        with unchanged(leaves_of(caches[-1:])):
            return self._chain(caches[-1], mx.array([[*known]]), before[None], num_tokens)[0]

    def draft_together(
        self, layer: LayerCache, known: Sequence[int], before: mx.array, num_tokens: int, count: Callable[[], None]
    ) -> mx.array:
        """As `draft`, for rows of a batch with one known token each, `[num_rows, num_tokens]`.

        `layer` is the batch's of the module; `count` counts a token of each row, for the caller to take back.
        """
        with ragged_attention():
            return self._chain(layer, mx.array([*known])[:, None], before[:, None], num_tokens, count)

    def measure_draft_seconds(self, caches: Sequence[LayerCache]) -> float:
        """Of one token, for a row with a few in `caches`: the best of some."""
        before, found = mx.zeros((1, self._text.args.hidden_size), self._module.norm.weight.dtype), list[float]()
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            mx.eval(self.draft(caches, [0], before, _TRIED_TOKENS))
            found.append((time.perf_counter() - begun) / _TRIED_TOKENS)
        return min(found)

    def _chain(
        self,
        layer: LayerCache,
        tokens: mx.array,
        hidden: mx.array,
        num_tokens: int,
        count: Callable[[], None] = lambda: None,
    ) -> mx.array:
        """Each token is drafted from the module's state for the one before."""
        found = list[mx.array]()
        for _ in range(num_tokens):
            hidden = self._module(self._text.model.embed_tokens(tokens), hidden, layer)[:, -1:]
            count()
            tokens = mx.argmax(self._module.score(hidden, self._logits), axis=-1)
            found.append(tokens)
        return mx.concatenate(found, axis=1)


def _shifted(behind: mx.array, lengths: Sequence[int], before: Sequence[mx.array | None]) -> mx.array:
    """The states before each token, from those behind it."""
    parts, stops = list[mx.array](), itertools.accumulate(lengths)
    for first, length, stop in zip(before, lengths, stops, strict=True):
        parts.append(mx.zeros_like(behind[:1]) if first is None else first)
        if length > 1:
            parts.append(behind[stop - length : stop - 1])
    return mx.concatenate(parts)


def entries_of(layer: LayerCache) -> list[mx.array]:
    """The arrays of the module's entries, to be evaluated now and then: no logits depend on them."""
    found = list[mx.array]()
    for leaf in leaves_of([layer]):
        for member in leaf.members if isinstance(leaf, RaggedLayer) else [leaf]:
            found += [tail_of(member).keys, tail_of(member).values]
    return found


def _offset(cache: LayerCache) -> int:
    return int(leaves_of([cache])[0].offset)
