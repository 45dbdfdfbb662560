"""A model together with its MTP module, which drafts what the model may say next. Worker thread only.

The module is one layer more, whose cache is the last of a row's. Its entry for a token is made of the token and of
the model's hidden state before it: each evaluated token has one, and the cache is restored, stored, shared and
rewound as the others are. Hidden states are nowhere stored: the first entry behind a restored prefix takes zeros.
What is drafted changes speed, never output.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from cache.types import LayerCache
from models.inference.ragged import ragged_attention
from models.mlx_lm_import import ArraysCache, make_prompt_cache
from models.mtp import MtpModule, language_model


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


class MtpModel:
    """A model whose MTP module takes part in each call."""

    def __init__(self, model: Module, module: MtpModule) -> None:
        self._model, self._text, self._module = model, language_model(model), module

    def make_caches(self) -> list[LayerCache]:
        """Empty layer caches for one row; the module's is like that of the model's last layer with attention."""
        last = [cache for cache in make_prompt_cache(self._model) if not isinstance(cache, ArraysCache)][-1]
        return [*make_prompt_cache(self._model), last]

    def evaluate(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache],
        lengths: Sequence[int],
        before: Sequence[mx.array | None],
    ) -> Evaluated:
        """Evaluates `lengths` tokens of each row, all in one line: one row's own caches, or those of a batch.

        `before` holds the hidden state before each row's first token, `[1, width]`; None for one that is not known.
        """
        inputs = tokens[None] if len(lengths) == 1 else tokens[:, None]
        behind = self._text.model(inputs, cache=list(caches[:-1])).flatten(0, 1)
        states = _shifted(behind, lengths, before)
        # Nothing reads its output: of its layer only what makes the entries is computed.
        self._module(self._text.model.embed_tokens(inputs), states.reshape(*inputs.shape, -1), caches[-1])
        return Evaluated(self._logits(behind), states, behind)

    def _logits(self, hidden: mx.array) -> mx.array:
        if "lm_head" in self._text:
            return cast(mx.array, self._text.lm_head(hidden))
        return cast(mx.array, self._text.model.embed_tokens.as_linear(hidden))

    def draft(self, cache: LayerCache, known: Sequence[int], before: mx.array, num_tokens: int) -> mx.array:
        """Tokens that a row may say behind its known ones, which the model has yet to evaluate, `[num_tokens]`; lazy.

        `before` holds the hidden states before each of `known`, `[num_known, width]`; `cache` is the module's.
        """
        drafted = self._chain(cache, mx.array([[*known]]), before[None], num_tokens)
        cache.trim(len(known) + num_tokens - 1)
        return drafted[0]

    def draft_together(
        self, layer: LayerCache, known: Sequence[int], before: mx.array, num_tokens: int, advance: Callable[[], None]
    ) -> mx.array:
        """As `draft`, for each row of a batch and its one known token, `[num_rows, num_tokens]`.

        `layer` is the batch's of the module, for the caller to rewind; `advance` counts an entry of each row.
        """
        with ragged_attention():
            return self._chain(layer, mx.array([*known])[:, None], before[:, None], num_tokens, advance)

    def _chain(
        self,
        layer: LayerCache,
        tokens: mx.array,
        hidden: mx.array,
        num_tokens: int,
        advance: Callable[[], None] = lambda: None,
    ) -> mx.array:
        """Each token is drafted from the state that the module gave for the one before it."""
        found = list[mx.array]()
        for _ in range(num_tokens):
            hidden = self._module(self._text.model.embed_tokens(tokens), hidden, layer)[:, -1:]
            advance()
            tokens = mx.argmax(self._logits(hidden), axis=-1)
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
