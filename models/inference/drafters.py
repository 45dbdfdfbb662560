"""A model and its drafter, an MTP module or a smaller model, which guesses what comes next. Worker thread only.

A drafter takes part in each call; its layer caches are the last of a row's and are treated like the others. An MTP
module's has an entry for each evaluated token, made of the token and of the model's hidden state before it. Hidden
states are not stored: the first entry after a restored prefix takes zeros.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from cache.layers.kinds import kind_of, leaves_of, make_caches, tail_of
from cache.types import LayerCache
from models.inference.ragged import Padding, RaggedLayer
from models.inference.rewind import unchanged
from models.loader import DraftModel, LoadedModel
from models.mtp import MtpModule, language_model

StatesBefore: TypeAlias = Sequence[mx.array | None]
"""The hidden state before each row's first token of a call, `[1, width]`; None if unknown."""


class Evaluated(NamedTuple):
    """What a call gives; lazy.

    Evaluating the logits evaluates the drafter's entries too, which nothing else may read.
    """

    logits: mx.array
    """`[num_tokens, vocab_size]`, in one line over all rows."""
    states: list[mx.array]
    """Each row's hidden states before its first token and after each, `[length + 1, width]`; width 0 if unneeded."""


class Drafter(ABC):
    """A model with its drafter."""

    name: str
    """A name for people."""
    num_layers = 1
    """The last so many of a row's layer caches are the drafter's."""
    probed: Any
    """The model that the probe tries."""

    @abstractmethod
    def make_cache(self) -> list[LayerCache]:
        """Empty layer caches for one row."""

    def __call__(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        """Logits, as a model gives them; with an MTP module only those of one row."""
        return self.evaluate(tokens, cache, [tokens.shape[1]], [None]).logits.reshape(*tokens.shape, -1)

    @abstractmethod
    def evaluate(
        self, tokens: mx.array, caches: Sequence[LayerCache], lengths: Sequence[int], before: StatesBefore
    ) -> Evaluated:
        """Evaluates `lengths` tokens of each row: `[1, num_tokens]` over its own caches, else `[num_tokens, 1]`."""

    @abstractmethod
    def _predict(
        self, tokens: mx.array, hidden: mx.array, layers: Sequence[LayerCache], lengths: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Logits after each row's last of `lengths` tokens, `[num_rows, 1, vocab_size]`, and the hidden state."""

    def draft(
        self,
        layers: Sequence[LayerCache],
        first: Sequence[LayerCache],
        known: Sequence[Sequence[int]],
        before: mx.array,
        num_tokens: int,
        count: Callable[[], None] = lambda: None,
    ) -> mx.array:
        """Tokens that rows may say after their known ones, which no cache holds yet, `[num_rows, num_tokens]`; lazy.

        `before` holds the hidden states before each known token, in one line. `layers` are the last of one row, or of
        a batch, and `first` those for known tokens; `count` counts a call's. The caller takes all tokens back.
        """
        drafted, lengths, fed = list[mx.array](), [len(tokens) for tokens in known], first
        places = Padding.of(tuple(lengths)).places
        tokens, hidden = mx.array([*itertools.chain(*known)])[places], before[places]
        for _ in range(num_tokens):
            logits, hidden = self._predict(tokens, hidden, fed, lengths)
            count()
            tokens = mx.argmax(logits, axis=-1)
            drafted.append(tokens)
            fed, lengths = layers, [1] * len(lengths)
        return mx.concatenate(drafted, axis=1)

    def draft_alone(
        self, caches: Sequence[LayerCache], known: Sequence[int], before: mx.array, num_tokens: int
    ) -> mx.array:
        """As `draft`, for one row, `[num_tokens]`; its caches stay as they are."""
        layers = caches[-self.num_layers :]
        with unchanged(leaves_of(layers)):
            return self.draft(layers, layers, [known], before, num_tokens)[0]


class MtpDrafter(Drafter):
    """Drafts with the model's MTP module, each token from the module's state for the one before."""

    name = "the model's MTP module"

    def __init__(self, model: Module, module: MtpModule) -> None:
        self._model, self._text, self._module = model, language_model(model), module
        self.probed = model

    def make_cache(self) -> list[LayerCache]:
        """The module's is like the last with such attention."""
        others = [cache for cache in make_caches(self._model) if not kind_of(cache).is_merged]
        alike = [cache for cache in others if bool(kind_of(cache).window) == self._module.slides]
        return [*make_caches(self._model), alike[-1]]

    def evaluate(
        self, tokens: mx.array, caches: Sequence[LayerCache], lengths: Sequence[int], before: StatesBefore
    ) -> Evaluated:
        """As `Drafter.evaluate`."""
        hidden = self._text.model(tokens, cache=list(caches[:-1]))
        states = _states(hidden.flatten(0, 1), lengths, before)
        earlier = mx.concatenate([row[:-1] for row in states]).reshape(*tokens.shape, -1)
        # Nothing reads its output: of its layer only what makes the entries is computed.
        self._module(self._text.model.embed_tokens(tokens), earlier, caches[-1])
        return Evaluated(_with_entries(self._logits(hidden).flatten(0, 1), caches[-1:]), states)

    def _logits(self, hidden: mx.array) -> mx.array:
        output = self._text.lm_head if "lm_head" in self._text else self._text.model.embed_tokens.as_linear
        return cast(mx.array, output(hidden))

    def _predict(
        self, tokens: mx.array, hidden: mx.array, layers: Sequence[LayerCache], lengths: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        hidden = _last(self._module(self._text.model.embed_tokens(tokens), hidden, layers[0]), lengths)
        return self._module.score(hidden, self._logits), hidden


class ModelDrafter(Drafter):
    """Drafts with a second model."""

    def __init__(self, model: Module, vocab_size: int, draft: DraftModel) -> None:
        self._model, self._draft, self.name = cast(Any, model), cast(Any, draft.model), draft.name
        self._vocab_size, self._last_token = vocab_size, draft.vocab_size - 1
        self.num_layers = len(make_caches(draft.model))
        self.probed = self

    def make_cache(self) -> list[LayerCache]:
        """The draft model's after the model's."""
        return [*make_caches(self._model), *make_caches(self._draft)]

    def evaluate(
        self, tokens: mx.array, caches: Sequence[LayerCache], lengths: Sequence[int], before: StatesBefore
    ) -> Evaluated:
        """As `Drafter.evaluate`."""
        logits, layers = self._model(tokens, cache=list(caches[: -self.num_layers])), caches[-self.num_layers :]
        # Nothing reads its output: only what makes the entries is computed.
        self._logits(tokens, layers)
        logits = _with_entries(logits.flatten(0, 1), layers)
        return Evaluated(logits, [mx.zeros((length + 1, 0)) for length in lengths])

    def _predict(
        self, tokens: mx.array, hidden: mx.array, layers: Sequence[LayerCache], lengths: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        return _last(self._logits(tokens, layers), lengths)[:, :, : self._vocab_size], hidden

    def _logits(self, tokens: mx.array, layers: Sequence[LayerCache]) -> mx.array:
        # The model's logits may be wider, for tokens that no text has; a place of a picture has a negative id.
        return cast(mx.array, self._draft(mx.clip(tokens, 0, self._last_token), cache=list(layers)))


def drafter_of(loaded: LoadedModel) -> Drafter | None:
    """What drafts for a loaded model, if anything."""
    if loaded.draft is not None:
        return ModelDrafter(loaded.model, loaded.vocab_size, loaded.draft)
    return None if loaded.mtp is None else MtpDrafter(loaded.model, loaded.mtp)


def _states(behind: mx.array, lengths: Sequence[int], before: StatesBefore) -> list[mx.array]:
    """As `Evaluated.states`, from the states after each token."""
    rows = zip(before, lengths, itertools.accumulate(lengths), strict=True)
    firsts = [(mx.zeros_like(behind[:1]) if first is None else first, stop - num, stop) for first, num, stop in rows]
    return [mx.concatenate([first, behind[start:stop]]) for first, start, stop in firsts]


def _last(rows: mx.array, lengths: Sequence[int]) -> mx.array:
    """After each row's last of `lengths` tokens, `[num_rows, 1, width]`."""
    if min(lengths) == rows.shape[1]:
        return rows[:, -1:]
    return rows[mx.arange(len(lengths)), mx.array([*lengths]) - 1][:, None]


def _with_entries(logits: mx.array, layers: Sequence[LayerCache]) -> mx.array:
    entries = list[mx.array | None]()
    for leaf in leaves_of(layers):
        for member in leaf.members if isinstance(leaf, RaggedLayer) else [leaf]:
            tail = tail_of(member)
            entries += tail.cache if kind_of(tail).is_merged else (tail.keys, tail.values)
    return cast(list[mx.array], mx.depends([logits], [one for one in entries if one is not None]))[0]
