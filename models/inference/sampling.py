"""Per-request sampling, vectorised over the rows of a decode step.

The order is the usual one: the mask of a grammar, logit bias, ends that would come before `min_tokens`, penalties,
temperature, top-k, top-p, min-p, then one draw. Each filter applies to what the one before it kept. Tokens that tie
with the last one kept are kept too, so that the choice does not depend on the order of a sort.

A draw adds Gumbel noise and takes the maximum (Gumbel-max trick: Maddison, Tarlow, Minka, "A* Sampling", 2014,
section 2). The noise comes from a key made of the request's seed and the number of tokens drawn before, so it does
not depend on which rows share the step, and a small rounding difference in the logits seldom changes the token.
Kernels do round differently with the number of rows and with the chunks that a prompt was evaluated in.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]


class RowSampling:
    """The sampling state of one sequence: its parameters, its seed, and what it has drawn so far.

    Worker thread only. While the sequence decodes in a batch, `BatchSampler` holds the newest state of its penalties.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        seed: int | None = None,
        prompt: TokenIds = (),
        emitted: TokenIds = (),
    ) -> None:
        """`seed` serves where `params.seed` is None; with neither, it is random.

        `emitted` are the output tokens drawn before, of a sequence that is replayed: with the same seed it continues
        with the tokens that it would have had. `prompt` is what came before them.
        """
        chosen = params.seed if params.seed is not None else seed
        self.params = params
        self._vocab_size = vocab_size
        self.seed = secrets.randbits(63) if chosen is None else chosen
        self.position = len(emitted)
        """Draws made so far."""
        self.counts: mx.array | None = None
        """How often each token is in the output, float32 `[vocab_size]`; None where neither presence nor frequency is
        penalised."""
        self.divisors: mx.array | None = None
        """The penalty on repetition for tokens of the prompt and the output, 1 for the others, float32
        `[vocab_size]`; None without one."""
        if (params.presence_penalty, params.frequency_penalty) != (0.0, 0.0):
            self.counts = mx.array(np.bincount(np.asarray(emitted, np.int64), minlength=vocab_size), mx.float32)
        if params.repetition_penalty != 1.0:
            self.divisors = mx.array(_divisors(params.repetition_penalty, (prompt, emitted), vocab_size))

    def after(self, prompt: TokenIds, emitted: TokenIds) -> "RowSampling":
        """Returns the state after `emitted` was put out behind `prompt`, whatever was drawn."""
        return RowSampling(self.params, self._vocab_size, seed=self.seed, prompt=prompt, emitted=emitted)

    def key(self) -> bytes:
        """Returns the 8 bytes of randomness that belong to the next draw."""
        return hashlib.blake2b(f"{self.seed}:{self.position}".encode(), digest_size=8).digest()


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
        self._early_ends = _EarlyEnds.of(self._rows, vocab_size)
        penalties = (_Repetition.of(self._rows, vocab_size), _Occurrences.of(self._rows, vocab_size))
        self._penalties = [penalty for penalty in penalties if penalty is not None]
        self._is_greedy = None if all(p.is_greedy for p in params) else mx.array([p.is_greedy for p in params])
        self._temperature = _column(1.0 if p.is_greedy else p.temperature for p in params)
        self._filters = _Filters.of(params, vocab_size)

    def is_for(self, rows: Sequence[RowSampling]) -> bool:
        return len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))

    def sample(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = self._bias.add_to(logits)
        if self._early_ends is not None:
            logits = self._early_ends.exclude_from(logits)
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
        if self._filters is not None:
            scaled = mx.where(self._filters.keeps(scaled), scaled, -math.inf)
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


class _EarlyEnds:
    """Excludes the tokens that would end a row before its `min_tokens`. Which rows need it changes."""

    def __init__(self, rows: Sequence[RowSampling], vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._early: tuple[int, ...] = ()
        self._entries: tuple[mx.array, mx.array] | None = None

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_EarlyEnds | None":
        return cls(rows, vocab_size) if any(_is_early(row) for row in rows) else None

    def exclude_from(self, logits: mx.array) -> mx.array:
        early = tuple(index for index, row in enumerate(self._rows) if _is_early(row))
        if early != self._early:
            self._early, self._entries = early, self._entries_of(early)
        return logits if self._entries is None else logits.at[self._entries].add(-math.inf)

    def _entries_of(self, early: Iterable[int]) -> tuple[mx.array, mx.array] | None:
        ends = [(row, token) for row in early for token in self._rows[row].params.end_token_ids]
        known = [(row, token) for row, token in ends if token < self._vocab_size]
        return (mx.array([row for row, _ in known]), mx.array([token for _, token in known])) if known else None


def _is_early(row: RowSampling) -> bool:
    return row.position < row.params.min_tokens


@dataclass
class _Repetition:
    """Penalises tokens of the prompt or the output. Dividing every logit costs less than selecting those tokens."""

    divisors: mx.array
    penalties: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_Repetition | None":
        divisors = _stacked([row.divisors for row in rows], mx.ones(vocab_size))
        if divisors is None:
            return None
        return cls(
            divisors=divisors,
            penalties=mx.array([row.params.repetition_penalty for row in rows], dtype=mx.float32),
        )

    def apply_to(self, logits: mx.array) -> mx.array:
        return mx.where(logits > 0, logits / self.divisors, logits * self.divisors)

    def count(self, tokens: mx.array) -> None:
        self.divisors[mx.arange(tokens.size), tokens] = self.penalties

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        for index, row in enumerate(rows):
            if row.divisors is not None:
                row.divisors = self.divisors[index]


@dataclass
class _Occurrences:
    """Penalises tokens of the output: once for their presence, and once for each occurrence."""

    counts: mx.array
    presence: mx.array
    frequency: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_Occurrences | None":
        counts = _stacked([row.counts for row in rows], mx.zeros(vocab_size))
        if counts is None:
            return None
        return cls(
            counts=counts,
            presence=_column(row.params.presence_penalty for row in rows),
            frequency=_column(row.params.frequency_penalty for row in rows),
        )

    def apply_to(self, logits: mx.array) -> mx.array:
        return logits - self.presence * (self.counts > 0) - self.frequency * self.counts

    def count(self, tokens: mx.array) -> None:
        self.counts = self.counts.at[mx.arange(tokens.size), tokens].add(mx.array(1.0))

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        for index, row in enumerate(rows):
            if row.counts is not None:
                row.counts = self.counts[index]


@dataclass
class _Filters:
    """Which tokens may be drawn. The likeliest `num_sorted` tokens suffice to find the cut of every row."""

    top_k: mx.array
    top_p: mx.array | None
    is_uncut: mx.array
    num_sorted: int
    log_min_p: mx.array | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "_Filters | None":
        top_k = [p.top_k if 0 < p.top_k < vocab_size and not p.is_greedy else vocab_size for p in params]
        # A mass of 2 is never reached: rounding must not drop the tail of a row that wants all of it.
        top_p = [p.top_p if p.top_p < 1 and not p.is_greedy else 2.0 for p in params]
        log_min_p = [math.log(p.min_p) if p.min_p > 0 and not p.is_greedy else -math.inf for p in params]
        cuts = [k for k, mass in zip(top_k, top_p, strict=True) if k < vocab_size or mass < 1]
        if not cuts and max(log_min_p) == -math.inf:
            return None
        return cls(
            top_k=mx.array(top_k)[:, None],
            top_p=_column(top_p) if min(top_p) < 1 else None,
            is_uncut=mx.array([k == vocab_size and mass > 1 for k, mass in zip(top_k, top_p, strict=True)])[:, None],
            num_sorted=max(cuts, default=0),
            log_min_p=_column(log_min_p) if max(log_min_p) > -math.inf else None,
        )

    def keeps(self, scaled: mx.array) -> mx.array:
        """Which tokens stay, from log-probabilities up to a constant, whose maximum is 0 in each row."""
        floor = mx.array(-math.inf)
        if self.num_sorted:
            floor = mx.where(self.is_uncut, floor, self._floor_of_likeliest(scaled))
        if self.log_min_p is not None:
            floor = mx.maximum(floor, self.log_min_p)
        return scaled >= floor

    def _floor_of_likeliest(self, scaled: mx.array) -> mx.array:
        """The value `[num_rows, 1]` of the last token that top-k and then top-p keep."""
        descending = _largest(scaled, self.num_sorted)
        floor = mx.take_along_axis(descending, mx.minimum(self.top_k, self.num_sorted) - 1, axis=-1)
        if self.top_p is None:
            return floor
        probs = mx.softmax(mx.where(descending >= floor, descending, -math.inf), axis=-1)
        mass_before = mx.cumsum(probs, axis=-1) - probs
        num_kept = (mass_before < self.top_p).sum(axis=-1, keepdims=True)
        return mx.maximum(floor, mx.take_along_axis(descending, num_kept - 1, axis=-1))


def _largest(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, descending."""
    negated = -values
    if count < values.shape[-1]:
        negated = mx.partition(negated, count - 1, axis=-1)[:, :count]
    return -mx.sort(negated, axis=-1)


def _divisors(penalty: float, held: Iterable[TokenIds], vocab_size: int) -> NDArray[np.float32]:
    """Returns `penalty` for every token that is held, 1 for the others, `[vocab_size]`."""
    divisors = np.ones(vocab_size, np.float32)
    for token_ids in held:
        ids = np.asarray(token_ids, np.int64)
        # A prompt may hold ids beyond the model's logits: they are never drawn.
        divisors[ids[ids < vocab_size]] = penalty
    return divisors


def _stacked(rows: Sequence[mx.array | None], missing: mx.array) -> mx.array | None:
    """Returns the rows as one array, `missing` for those that are None; None if all are."""
    if all(row is None for row in rows):
        return None
    return mx.stack([missing if row is None else row for row in rows])


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
