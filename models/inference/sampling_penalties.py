"""What makes tokens less likely that were there before, for some rows of a decode step at once.

A penalty takes the state of its rows over when the rows change, is told of every token that is sampled, unread, and
gives the state back. Where no row asks for one, `of` returns None and nothing is computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from models.inference.row_sampling import RowSampling


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
    found: list[Penalty | None] = [_Repetition.of(rows, vocab_size), _Occurrences.of(rows, vocab_size)]
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


def _stacked(rows: Sequence[mx.array | None], missing: mx.array) -> mx.array | None:
    """Returns the rows as one array, `missing` for those that are None; None if all are."""
    if all(row is None for row in rows):
        return None
    return mx.stack([missing if row is None else row for row in rows])


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
