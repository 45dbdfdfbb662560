"""Per-request sampling, vectorised over the rows of a decode step.

The order: a grammar's mask, logit bias, bans and penalties (`sampling_state.py`), temperature, filters (top-n-sigma,
top-k, top-p, min-p, typical-p, XTC), one draw. A filter takes log-probabilities up to a constant, and keeps at least
one token per row and all that tie with the last kept. A draw adds Gumbel noise and takes the maximum (Maddison,
Tarlow, Minka, "A* Sampling", 2014, section 2). Noise depends on the request's seed and earlier draws, not on other
rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from models.inference.sampling_params import SamplingParams
from models.inference.sampling_state import RowSampling, column, penalties_of
from models.output.grammar import MaskWords

ALL_MASS = 2.0
"""Never reached: rounding must not drop a row's tail."""


class Filter(Protocol):
    """One filter for all rows."""

    def apply_to(self, scaled: mx.array) -> mx.array:
        """`scaled`, float32 `[num_rows, vocab_size]`, with -inf for dropped tokens."""
        ...


def filters_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Filter]:
    """Filters that a row uses, in the order of applying."""
    params = [row.params for row in rows]
    found: list[Filter | None] = [
        _NearMaximum.of(params),
        _Likeliest.of(params, vocab_size),
        _Typical.of(params),
        _Xtc.of(rows),
    ]
    return [one for one in found if one is not None]


@dataclass
class _NearMaximum:
    """Top-n-sigma: keeps logits within n standard deviations of the largest, which must be 0, at any temperature.

    (Tang, Liu, Xu et al., "Top-nσ: Not All Logits Are You Need", 2024, section 3.)
    """

    num_deviations: mx.array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "_NearMaximum | None":
        wanted = [0.0 if p.is_greedy else p.top_n_sigma for p in params]
        return cls(column(wanted)) if max(wanted) > 0 else None

    def apply_to(self, scaled: mx.array) -> mx.array:
        is_there = scaled > -math.inf
        count = is_there.sum(axis=-1, keepdims=True)
        mean = mx.where(is_there, scaled, 0.0).sum(axis=-1, keepdims=True) / count
        variance = mx.where(is_there, (scaled - mean) ** 2, 0.0).sum(axis=-1, keepdims=True) / count
        floor = mx.where(self.num_deviations > 0, -self.num_deviations * mx.sqrt(variance), -math.inf)
        return mx.where(scaled >= floor, scaled, -math.inf)


@dataclass
class _Likeliest:
    """From the likeliest `num_sorted` tokens. Each row's maximum must be 0."""

    top_k: mx.array
    top_p: mx.array | None
    is_uncut: mx.array
    num_sorted: int
    log_min_p: mx.array | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "_Likeliest | None":
        top_k = [p.top_k if 0 < p.top_k < vocab_size and not p.is_greedy else vocab_size for p in params]
        top_p = [p.top_p if p.top_p < 1 and not p.is_greedy else ALL_MASS for p in params]
        log_min_p = [math.log(p.min_p) if p.min_p > 0 and not p.is_greedy else -math.inf for p in params]
        cuts = [k for k, mass in zip(top_k, top_p, strict=True) if k < vocab_size or mass < 1]
        if not cuts and max(log_min_p) == -math.inf:
            return None
        return cls(
            top_k=mx.array(top_k)[:, None],
            top_p=column(top_p) if min(top_p) < 1 else None,
            is_uncut=mx.array([k == vocab_size and mass > 1 for k, mass in zip(top_k, top_p, strict=True)])[:, None],
            num_sorted=max(cuts, default=0),
            log_min_p=column(log_min_p) if max(log_min_p) > -math.inf else None,
        )

    def apply_to(self, scaled: mx.array) -> mx.array:
        floor = mx.array(-math.inf)
        if self.num_sorted:
            floor = mx.where(self.is_uncut, floor, self._floor_of_likeliest(scaled))
        if self.log_min_p is not None:
            floor = mx.maximum(floor, self.log_min_p)
        return mx.where(scaled >= floor, scaled, -math.inf)

    def _floor_of_likeliest(self, scaled: mx.array) -> mx.array:
        """The last token's value that top-k and top-p keep, `[num_rows, 1]`."""
        descending = _largest(scaled, self.num_sorted)
        floor = mx.take_along_axis(descending, mx.minimum(self.top_k, self.num_sorted) - 1, axis=-1)
        if self.top_p is None:
            return floor
        probs = mx.softmax(mx.where(descending >= floor, descending, -math.inf), axis=-1)
        num_kept = _num_within(probs, self.top_p)
        return mx.maximum(floor, mx.take_along_axis(descending, num_kept - 1, axis=-1))


@dataclass
class _Typical:
    """Keeps tokens whose information is nearest to the expected, up to a share of the mass.

    Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2023, section 4.
    """

    mass: mx.array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "_Typical | None":
        mass = [p.typical_p if p.typical_p < 1 and not p.is_greedy else ALL_MASS for p in params]
        return cls(column(mass)) if min(mass) < 1 else None

    def apply_to(self, scaled: mx.array) -> mx.array:
        log_probs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        probs = mx.exp(log_probs)
        entropy = -mx.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1, keepdims=True)
        distance = mx.abs(log_probs + entropy)
        order = mx.argsort(distance, axis=-1)
        num_kept = _num_within(mx.take_along_axis(probs, order, axis=-1), self.mass)
        last = mx.take_along_axis(order, num_kept - 1, axis=-1)
        return mx.where(distance <= mx.take_along_axis(distance, last, axis=-1), scaled, -math.inf)


@dataclass
class _Xtc:
    """Exclude top choices, as in llama.cpp: in draws that seed and position choose, only the least likely of the
    likely tokens is kept.
    """

    rows: list[RowSampling]

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "_Xtc | None":
        return cls(list(rows)) if [row for row in rows if row.params.uses_xtc] else None

    def apply_to(self, scaled: mx.array) -> mx.array:
        thresholds = [_xtc_threshold(row) for row in self.rows]
        if min(thresholds) >= ALL_MASS:
            return scaled
        is_likely = (mx.softmax(scaled, axis=-1) >= column(thresholds)) & (scaled > -math.inf)
        ceiling = mx.where(is_likely, scaled, math.inf).min(axis=-1, keepdims=True)
        return mx.where(scaled <= ceiling, scaled, -math.inf)


def _xtc_threshold(row: RowSampling) -> float:
    is_struck = row.params.uses_xtc and row.chance() < row.params.xtc_probability
    return row.params.xtc_threshold if is_struck else ALL_MASS


def _num_within(probs: mx.array, mass: mx.array) -> mx.array:
    """How many first `probs` add up to `mass`, at least 1: `[num_rows, 1]`."""
    return (mx.cumsum(probs, axis=-1) - probs < mass).sum(axis=-1, keepdims=True)


def _largest(values: mx.array, count: int) -> mx.array:
    negated = -values
    if count < values.shape[-1]:
        negated = mx.partition(negated, count - 1, axis=-1)[:, :count]
    return -mx.sort(negated, axis=-1)


class BatchSampler:
    """Samples a token per row. Worker thread only.

    Parameters become arrays once, when the rows change.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batch: _Batch | None = None

    def sample(
        self, logits: mx.array, rows: Sequence[RowSampling], masks: Sequence[MaskWords | None] = ()
    ) -> mx.array:
        """Each row's token, uint32 `[num_rows]`, lazy, from logits `[num_rows, vocab_size]`.

        `masks` holds the tokens that each row may sample, None for all; may be empty.
        """
        if self._batch is None or not self._batch.is_for(rows):
            self.release()
            self._batch = _Batch(rows, self._vocab_size)
        if any(mask is not None for mask in masks):
            logits = mx.where(_allowed(masks, self._vocab_size), logits, -math.inf)
        return self._batch.sample(logits)

    def release(self) -> None:
        """Gives the penalties' state back to the rows."""
        if self._batch is not None:
            self._batch.release()
            self._batch = None


class _Batch:
    """None for what no row uses."""

    def __init__(self, rows: Sequence[RowSampling], vocab_size: int) -> None:
        self._rows = list(rows)
        self._vocab_size = vocab_size
        params = [row.params for row in rows]
        self._penalties = penalties_of(self._rows, vocab_size)
        is_greedy = [p.is_greedy for p in params]
        self._is_greedy = None if all(is_greedy) else mx.array(is_greedy)
        self._temperature = column([1.0 if p.is_greedy else p.temperature for p in params])
        self._filters = [] if all(is_greedy) else filters_of(self._rows, vocab_size)

    def is_for(self, rows: Sequence[RowSampling]) -> bool:
        return len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))

    def sample(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
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


def _allowed(masks: Sequence[MaskWords | None], vocab_size: int) -> mx.array:
    """Bool `[num_rows, vocab_size]`."""
    allowed = np.zeros((len(masks), vocab_size), np.bool_)
    for row, words in zip(allowed, masks, strict=True):
        if words is None:
            row[:] = True
            continue
        bits = np.unpackbits(words.view(np.uint8), count=min(words.size * 32, vocab_size), bitorder="little")
        row[: bits.size] = bits
    return mx.array(allowed)


def _gumbel_noise(keys: mx.array, vocab_size: int) -> mx.array:
    """`[num_rows, vocab_size]` from keys, uint32 `[num_rows, 2]`."""
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
