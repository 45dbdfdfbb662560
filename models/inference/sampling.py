"""Per-request sampling, vectorised over the rows of a decode step.

The order: a grammar's mask, logit bias, bans and penalties (`sampling_state.py`), temperature, filters (top-n-sigma,
top-k, top-p, min-p, typical-p, XTC), one draw. A filter takes log-probabilities up to a constant, and keeps at least
one token per row and all that tie with the last kept. A draw adds Gumbel noise and takes the maximum (Maddison,
Tarlow, Minka, "A* Sampling", 2014, section 2). Noise depends on the request's seed and earlier draws, not on other
rows.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from models.inference.sampling_params import SamplingParams
from models.inference.sampling_state import Penalty, RowSampling, Stage, column, penalties_of
from models.output.grammar import MaskWords

ALL_MASS = 2.0
"""Never reached: rounding must not drop a row's tail."""


class BatchSampler:
    """Samples a token per row. Worker thread only.

    Parameters become arrays once, when the rows change.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[RowSampling] = []
        self._penalties: list[Stage] = []

    def sample(
        self, logits: mx.array, rows: Sequence[RowSampling], masks: Sequence[MaskWords | None] = ()
    ) -> mx.array:
        """Each row's token, uint32 `[num_rows]`, lazy, from logits `[num_rows, vocab_size]`.

        `masks` holds the tokens that each row may sample, None for all; may be empty.
        """
        if len(rows) != len(self._rows) or any(a is not b for a, b in zip(rows, self._rows, strict=True)):
            self.release()
            self._begin(list(rows))
        if any(mask is not None for mask in masks):
            logits = mx.where(_allowed(masks, self._vocab_size), logits, -math.inf)
        logits = logits.astype(mx.float32)
        for penalise in self._penalties:
            logits = penalise(logits)
        tokens = mx.argmax(logits, axis=-1)
        if self._is_greedy is not None:
            tokens = mx.where(self._is_greedy, tokens, self._draw(logits))
        for penalty in self._penalties:
            if isinstance(penalty, Penalty):
                penalty.count(tokens)
        for row in self._rows:
            row.position += 1
        return tokens

    def _begin(self, rows: list[RowSampling]) -> None:
        params = [row.params for row in rows]
        is_greedy = [p.is_greedy for p in params]
        self._is_greedy = None if all(is_greedy) else mx.array(is_greedy)
        self._temperature = column([1.0 if p.is_greedy else p.temperature for p in params])
        self._filters = [] if all(is_greedy) else filters_of(rows, self._vocab_size)
        self._rows, self._penalties = rows, penalties_of(rows, self._vocab_size)

    def _draw(self, logits: mx.array) -> mx.array:
        # The maximum becomes 0 before the division, so no temperature can overflow it.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / self._temperature
        for keep in self._filters:
            scaled = keep(scaled)
        keys = np.frombuffer(b"".join(row.key() for row in self._rows), np.uint32).reshape(-1, 2)
        noise = mx.vmap(lambda key: mx.random.gumbel((self._vocab_size,), key=key))(mx.array(keys))
        return mx.argmax(scaled + noise, axis=-1)

    def release(self) -> None:
        """Gives the penalties' state back to the rows."""
        for penalty in self._penalties:
            if isinstance(penalty, Penalty):
                penalty.give_back()
        self._rows, self._penalties = [], []


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


def filters_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Stage]:
    """Filters that a row uses, in the order of applying.

    They take and return float32 `[num_rows, vocab_size]`, each row's maximum 0 at first, -inf for dropped tokens.
    """
    params = [SamplingParams() if row.params.is_greedy else row.params for row in rows]
    found = [_near_maximum(params), _likeliest(params, vocab_size), _typical(params), _xtc(rows)]
    return [one for one in found if one is not None]


def _near_maximum(params: Sequence[SamplingParams]) -> Stage | None:
    """Top-n-sigma: keeps logits within n standard deviations of the largest, which must be 0, at any temperature.

    (Tang, Liu, Xu et al., "Top-nσ: Not All Logits Are You Need", 2024, section 3.)
    """
    if max([p.top_n_sigma for p in params]) == 0:
        return None
    num_deviations = column([p.top_n_sigma for p in params])

    def keep(scaled: mx.array) -> mx.array:
        is_there = scaled > -math.inf
        count = is_there.sum(axis=-1, keepdims=True)
        mean = mx.where(is_there, scaled, 0.0).sum(axis=-1, keepdims=True) / count
        variance = mx.where(is_there, (scaled - mean) ** 2, 0.0).sum(axis=-1, keepdims=True) / count
        floor = mx.where(num_deviations > 0, -num_deviations * mx.sqrt(variance), -math.inf)
        return mx.where(scaled >= floor, scaled, -math.inf)

    return keep


def _likeliest(params: Sequence[SamplingParams], vocab_size: int) -> Stage | None:
    """Top-k, top-p and min-p: from the likeliest `num_sorted` tokens. Each row's maximum must be 0."""
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_p = [p.top_p if p.top_p < 1 else ALL_MASS for p in params]
    is_uncut = [k == vocab_size and mass > 1 for k, mass in zip(top_k, top_p, strict=True)]
    num_sorted = max((k for k, whole in zip(top_k, is_uncut, strict=True) if not whole), default=0)
    has_least = max([p.min_p for p in params]) > 0
    if not num_sorted and not has_least:
        return None
    least = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
    ks, uncut, mass = mx.array(top_k)[:, None], mx.array(is_uncut)[:, None], column(top_p) if min(top_p) < 1 else None

    def keep(scaled: mx.array) -> mx.array:
        floor = mx.array(-math.inf)
        if num_sorted:
            floor = mx.where(uncut, floor, _floor_of_likeliest(_largest(scaled, num_sorted), ks, mass))
        if has_least:
            floor = mx.maximum(floor, least)
        return mx.where(scaled >= floor, scaled, -math.inf)

    return keep


def _floor_of_likeliest(descending: mx.array, top_k: mx.array, top_p: mx.array | None) -> mx.array:
    """The last token's value that top-k and top-p keep, `[num_rows, 1]`."""
    floor = mx.take_along_axis(descending, mx.minimum(top_k, descending.shape[-1]) - 1, axis=-1)
    if top_p is None:
        return floor
    num_kept = _num_within(mx.softmax(mx.where(descending >= floor, descending, -math.inf), axis=-1), top_p)
    return mx.maximum(floor, mx.take_along_axis(descending, num_kept - 1, axis=-1))


def _typical(params: Sequence[SamplingParams]) -> Stage | None:
    """Keeps tokens whose information is nearest to the expected, up to a share of the mass.

    Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2023, section 4.
    """
    if min([p.typical_p for p in params]) >= 1:
        return None
    mass = column([p.typical_p if p.typical_p < 1 else ALL_MASS for p in params])

    def keep(scaled: mx.array) -> mx.array:
        log_probs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        probs = mx.exp(log_probs)
        entropy = -mx.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1, keepdims=True)
        distance = mx.abs(log_probs + entropy)
        order = mx.argsort(distance, axis=-1)
        num_kept = _num_within(mx.take_along_axis(probs, order, axis=-1), mass)
        last = mx.take_along_axis(order, num_kept - 1, axis=-1)
        return mx.where(distance <= mx.take_along_axis(distance, last, axis=-1), scaled, -math.inf)

    return keep


def _xtc(rows: Sequence[RowSampling]) -> Stage | None:
    """Exclude top choices, as in llama.cpp: in draws that seed and position choose, only the least likely of the
    likely tokens is kept.
    """

    def threshold(row: RowSampling) -> float:
        is_struck = row.params.uses_xtc and row.chance() < row.params.xtc_probability
        return row.params.xtc_threshold if is_struck else ALL_MASS

    def keep(scaled: mx.array) -> mx.array:
        thresholds = [threshold(row) for row in rows]
        if min(thresholds) >= ALL_MASS:
            return scaled
        is_likely = (mx.softmax(scaled, axis=-1) >= column(thresholds)) & (scaled > -math.inf)
        ceiling = mx.where(is_likely, scaled, math.inf).min(axis=-1, keepdims=True)
        return mx.where(scaled <= ceiling, scaled, -math.inf)

    return keep if [row for row in rows if row.params.uses_xtc] else None


def _num_within(probs: mx.array, mass: mx.array) -> mx.array:
    """How many first `probs` add up to `mass`, at least 1: `[num_rows, 1]`."""
    return (mx.cumsum(probs, axis=-1) - probs < mass).sum(axis=-1, keepdims=True)


def _largest(values: mx.array, count: int) -> mx.array:
    negated = -values
    if count < values.shape[-1]:
        negated = mx.partition(negated, count - 1, axis=-1)[:, :count]
    return -mx.sort(negated, axis=-1)
