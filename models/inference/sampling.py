"""Per-request sampling, vectorised over the rows of a decode step.

The order is the usual one: the mask of a grammar, logit bias, what the request rules out (`sampling_bans.py`),
penalties (`sampling_penalties.py`), temperature, filters (`sampling_filters.py`), then one draw. Each filter applies
to what the one before it kept. Tokens that tie with the last one kept are kept too, so that no choice depends on the
order of a sort.

A draw adds Gumbel noise and takes the maximum (Gumbel-max trick: Maddison, Tarlow, Minka, "A* Sampling", 2014,
section 2). The noise comes from a key made of the request's seed and the number of tokens drawn before, so it does
not depend on which rows share the step, and a small rounding difference in the logits seldom changes the token.
Kernels do round differently with the number of rows and with the chunks that a prompt was evaluated in.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from models.inference.row_sampling import RowSampling
from models.inference.sampling_bans import bans_of
from models.inference.sampling_filters import filters_of
from models.inference.sampling_params import SamplingParams
from models.inference.sampling_penalties import penalties_of
from models.output.grammar import MaskWords


class BatchSampler:
    """Samples one token for each row of a decode step, in a handful of operations for all rows together.

    Worker thread only. The rows' parameters become arrays once, when the rows change, not in each step.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batch: _Batch | None = None

    def sample(
        self, logits: mx.array, rows: Sequence[RowSampling], masks: Sequence[MaskWords | None] = ()
    ) -> mx.array:
        """Returns the token of each row, uint32 `[num_rows]`, lazy, from logits `[num_rows, vocab_size]`.

        `masks` are the tokens that each row may sample, None for all of them; empty where that holds for every row.
        """
        if self._batch is None or not self._batch.is_for(rows):
            self.release()
            self._batch = _Batch(rows, self._vocab_size)
        if any(mask is not None for mask in masks):
            logits = mx.where(_allowed(masks, self._vocab_size), logits, -math.inf)
        return self._batch.sample(logits)

    def release(self) -> None:
        """Gives the rows of the last step their penalties' state back and forgets them."""
        if self._batch is not None:
            self._batch.release()
            self._batch = None


class _Batch:
    """The parameters of some rows as arrays. A parameter that no row uses is None and costs nothing."""

    def __init__(self, rows: Sequence[RowSampling], vocab_size: int) -> None:
        self._rows = list(rows)
        self._vocab_size = vocab_size
        params = [row.params for row in rows]
        self._bias = _BiasEntries.of(params)
        self._penalties = [*bans_of(self._rows, vocab_size), *penalties_of(self._rows, vocab_size)]
        self._is_greedy = None if all(p.is_greedy for p in params) else mx.array([p.is_greedy for p in params])
        self._temperature = _column(1.0 if p.is_greedy else p.temperature for p in params)
        self._filters = filters_of(self._rows, vocab_size)

    def is_for(self, rows: Sequence[RowSampling]) -> bool:
        return len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))

    def sample(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = self._bias.add_to(logits)
        for penalty in self._penalties:
            logits = penalty.apply_to(logits)
        tokens = mx.argmax(logits, axis=-1)
        if self._is_greedy is not None:
            tokens = mx.where(self._is_greedy, tokens, self._draw(logits))
        for penalty in self._penalties:
            penalty.count(tokens)
        for row in self._rows:
            row.position += 1
        return tokens

    def release(self) -> None:
        for penalty in self._penalties:
            penalty.give_back(self._rows)

    def _draw(self, logits: mx.array) -> mx.array:
        # The maximum becomes 0 before the division, so no temperature can overflow it.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / self._temperature
        for one in self._filters:
            scaled = one.apply_to(scaled)
        keys = np.frombuffer(b"".join(row.key() for row in self._rows), np.uint32).reshape(-1, 2)
        return mx.argmax(scaled + _gumbel_noise(mx.array(keys), self._vocab_size), axis=-1)


@dataclass
class _BiasEntries:
    row_ids: mx.array
    token_ids: mx.array
    biases: mx.array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "_BiasEntries | None":
        entries = [(row, token_id, bias) for row, p in enumerate(params) for token_id, bias in p.logit_bias]
        if not entries:
            return None
        row_ids, token_ids, biases = zip(*entries, strict=True)
        return cls(mx.array(row_ids), mx.array(token_ids), mx.array(biases, dtype=mx.float32))

    def add_to(self, logits: mx.array) -> mx.array:
        return logits.at[self.row_ids, self.token_ids].add(self.biases)


def _allowed(masks: Sequence[MaskWords | None], vocab_size: int) -> mx.array:
    """Returns which tokens each row may sample, bool `[num_rows, vocab_size]`. Those beyond a mask it may not."""
    allowed = np.zeros((len(masks), vocab_size), np.bool_)
    for row, words in zip(allowed, masks, strict=True):
        if words is None:
            row[:] = True
            continue
        bits = np.unpackbits(words.view(np.uint8), count=min(words.size * 32, vocab_size), bitorder="little")
        row[: bits.size] = bits
    return mx.array(allowed)


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _gumbel_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Noise `[num_rows, vocab_size]`, each row from its own key: `keys` is uint32 `[num_rows, 2]`."""
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
