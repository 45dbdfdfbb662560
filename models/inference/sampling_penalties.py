"""What makes tokens less likely that were there before, for some rows of a decode step at once.

A penalty takes the state of its rows over when the rows change, is told of every token that is sampled, unread, and
gives the state back. Where no row asks for one, `of` returns None and nothing is computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from models.inference.recent_tokens import NO_TOKEN, PenaltyWindow, RepeatedEnds, padded, shifted
from models.inference.row_sampling import RowSampling
from models.inference.sampling_params import MAX_REPEATED, SamplingParams

MAX_PENALTY = 1e9
"""Beyond it nothing becomes less likely, and an infinite one could leave a row without a token."""


class Penalty(Protocol):
    """One kind of penalty on all rows of a step; its arrays have one row for each."""

    def apply_to(self, logits: mx.array) -> mx.array:
        """Returns the penalised logits, float32 `[num_rows, vocab_size]`."""
        ...

    def count(self, tokens: mx.array) -> None:
        """Takes the sampled token of each row, `[num_rows]`."""
        ...

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        """Writes the state of each row back to where `of` took it from."""
        ...


def penalties_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Penalty]:
    """Returns the penalties that at least one of the rows asks for, in the order in which they apply."""
    found: list[Penalty | None] = [
        _Repetition.of(rows, vocab_size),
        _Occurrences.of(rows, vocab_size),
        _Windowed.of(rows, vocab_size),
        _Dry.of(rows, vocab_size),
    ]
    return [penalty for penalty in found if penalty is not None]


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
            penalties=mx.array([1.0 if row.divisors is None else row.params.repetition_penalty for row in rows]),
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
            presence=_column(0.0 if row.counts is None else row.params.presence_penalty for row in rows),
            frequency=_column(0.0 if row.counts is None else row.params.frequency_penalty for row in rows),
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
class _Windowed:
    """All three penalties on the last tokens of prompt and output, each row with a window of its own length."""

    counts: mx.array
    recent: mx.array
    """`[num_rows, longest window]`, each row's window at its end."""
    oldest: mx.array
    """Where the window of each row begins in `recent`, `[num_rows, 1]`."""
    forgets: mx.array
    """1 for rows whose window has a beginning, else 0."""
    repetition: mx.array
    presence: mx.array
    frequency: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_Windowed | None":
        windows = [row.window for row in rows]
        counts = _stacked([None if window is None else window.counts for window in windows], mx.zeros(vocab_size))
        if counts is None:
            return None
        params = [SamplingParams() if row.window is None else row.params for row in rows]
        lengths = [0 if window is None else window.recent.size for window in windows]
        longest = max(1, *lengths)
        return cls(
            counts=counts,
            recent=mx.stack([padded(None if one is None else one.recent, longest) for one in windows]),
            oldest=mx.array([min(longest - length, longest - 1) for length in lengths])[:, None],
            forgets=mx.array([float(length > 0) for length in lengths]),
            repetition=_column(one.repetition_penalty for one in params),
            presence=_column(one.presence_penalty for one in params),
            frequency=_column(one.frequency_penalty for one in params),
        )

    def apply_to(self, logits: mx.array) -> mx.array:
        is_held = self.counts > 0
        divisors = mx.where(is_held, self.repetition, 1.0)
        repeated = mx.where(logits > 0, logits / divisors, logits * divisors)
        return repeated - self.presence * is_held - self.frequency * self.counts

    def count(self, tokens: mx.array) -> None:
        rows = mx.arange(tokens.size)
        leaving = mx.take_along_axis(self.recent, self.oldest, axis=-1)[:, 0]
        has_left = self.forgets * (leaving != NO_TOKEN)
        counts = self.counts.at[rows, mx.maximum(leaving, 0)].add(-has_left)
        self.counts = counts.at[rows, tokens].add(mx.array(1.0))
        self.recent = shifted(self.recent, tokens)

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        for index, row in enumerate(rows):
            if row.window is not None:
                first = self.recent.shape[1] - row.window.recent.size
                row.window = PenaltyWindow(self.counts[index], self.recent[index, first:])


@dataclass
class _Dry:
    """Don't repeat yourself: penalises tokens that would go on with a repetition, the more the longer it is already.

    The method is that of llama.cpp and koboldcpp. How long the repetition in front of each token is follows from the
    step before: by one more where that token's forerunner is the token just sampled, else nothing. Windows move by
    one token in each step, so these lengths stay where they are.
    """

    recent: mx.array
    """`[num_rows, longest window]`, each row's window at its end."""
    lengths: mx.array
    """As `recent`: see `RepeatedEnds`."""
    is_breaker: mx.array
    """`[num_rows, vocab_size]`."""
    num_before: mx.array
    """As `recent`: how many tokens of the row's own window stand in front of each."""
    multiplier: mx.array
    base: mx.array
    allowed_length: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_Dry | None":
        states = [row.repeated for row in rows]
        nothing_breaks = mx.zeros(vocab_size, mx.bool_)
        is_breaker = _stacked([None if one is None else one.is_breaker for one in states], nothing_breaks)
        if is_breaker is None:
            return None
        params = [row.params if row.repeated is not None else SamplingParams() for row in rows]
        windows = [0 if one is None else one.recent.size for one in states]
        longest = max(windows)
        starts = mx.array([longest - window for window in windows])[:, None]
        return cls(
            recent=mx.stack([padded(None if one is None else one.recent, longest) for one in states]),
            lengths=mx.stack([padded(None if one is None else one.lengths, longest, 0) for one in states]),
            is_breaker=is_breaker,
            num_before=mx.maximum(mx.arange(longest) - starts, 0),
            multiplier=_column(one.dry_multiplier for one in params),
            base=_column(one.dry_base for one in params),
            allowed_length=mx.array([one.dry_allowed_length for one in params])[:, None],
        )

    def apply_to(self, logits: mx.array) -> mx.array:
        lengths = mx.where(self.recent == NO_TOKEN, 0, mx.minimum(self.lengths, self.num_before))
        rows = mx.arange(logits.shape[0])[:, None]
        longest = mx.zeros(logits.shape, mx.int32).at[rows, mx.maximum(self.recent, 0)].maximum(lengths)
        beyond = longest - self.allowed_length
        penalties = self.multiplier * mx.minimum(self.base**beyond, MAX_PENALTY)
        return logits - mx.where(beyond >= 0, penalties, 0.0)

    def count(self, tokens: mx.array) -> None:
        newest = tokens[:, None].astype(mx.int32)
        goes_on = (self.recent == newest) & ~mx.take_along_axis(self.is_breaker, newest, axis=-1)
        self.lengths = mx.where(goes_on, mx.minimum(self.lengths + 1, MAX_REPEATED), 0)
        self.recent = shifted(self.recent, tokens)

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        for index, row in enumerate(rows):
            if row.repeated is not None:
                first = self.recent.shape[1] - row.repeated.recent.size
                recent, lengths = self.recent[index, first:], self.lengths[index, first:]
                row.repeated = RepeatedEnds(recent, lengths, row.repeated.is_breaker)


def _stacked(rows: Sequence[mx.array | None], missing: mx.array) -> mx.array | None:
    """Returns the rows as one array, `missing` for those that are None; None if all are."""
    if all(row is None for row in rows):
        return None
    return mx.stack([missing if row is None else row for row in rows])


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
