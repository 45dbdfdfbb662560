"""Which tokens a request itself rules out, for some rows of a decode step at once.

Where a grammar leaves only tokens that are ruled out, the grammar counts. Where no row asks for it, `of` returns None
and nothing is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from models.inference.recent_tokens import NO_TOKEN, padded, shifted
from models.inference.row_sampling import RowSampling
from models.inference.sampling_penalties import Penalty


def bans_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Penalty]:
    """Returns what rules out tokens of at least one of the rows."""
    found: list[Penalty | None] = [_AllowedTokens.of(rows, vocab_size), _BadWords.of(rows), _EarlyEnds.of(rows)]
    return [ban for ban in found if ban is not None]


@dataclass
class _AllowedTokens:
    """Nothing but some tokens may be sampled."""

    is_allowed: mx.array
    """`[num_rows, vocab_size]`."""

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_AllowedTokens | None":
        wanted = [row.params.allowed_token_ids for row in rows]
        if not any(wanted):
            return None
        is_allowed = np.ones((len(wanted), vocab_size), np.bool_)
        for row, token_ids in zip(is_allowed, wanted, strict=True):
            if token_ids:
                row[:] = False
                row[list(token_ids)] = True
        return cls(mx.array(is_allowed))

    def apply_to(self, logits: mx.array) -> mx.array:
        return _unless_empty(mx.where(self.is_allowed, logits, -math.inf), logits)

    def count(self, tokens: mx.array) -> None:
        """Does nothing: what is allowed never changes."""

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        """Does nothing."""


@dataclass
class _BadWords:
    """Sequences of tokens that the output may not hold: the last one is ruled out behind the others."""

    row_ids: mx.array
    """The row of each sequence, `[num_sequences]`."""
    before: mx.array
    """All but its last token, at the end of `[num_sequences, width]`; `NO_TOKEN` in front is any token."""
    last: mx.array
    """Its last token, `[num_sequences]`."""
    recent: mx.array
    """The end of each row's output, `[num_rows, width]`."""

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "_BadWords | None":
        found = [(index, ids) for index, row in enumerate(rows) for ids in row.params.bad_words]
        if not found:
            return None
        width = max(1, *(len(ids) - 1 for _, ids in found))
        before = [[NO_TOKEN] * (width + 1 - len(ids)) + list(ids[:-1]) for _, ids in found]
        return cls(
            row_ids=mx.array([index for index, _ in found]),
            before=mx.array(np.array(before, np.int32)),
            last=mx.array([ids[-1] for _, ids in found]),
            recent=mx.stack([padded(row.output_end, width) for row in rows]),
        )

    def apply_to(self, logits: mx.array) -> mx.array:
        is_met = ((self.before == NO_TOKEN) | (self.before == self.recent[self.row_ids])).all(axis=-1)
        ruled_out = logits.at[self.row_ids, self.last].minimum(mx.where(is_met, -math.inf, math.inf))
        return _unless_empty(ruled_out, logits)

    def count(self, tokens: mx.array) -> None:
        self.recent = shifted(self.recent, tokens)

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        for index, row in enumerate(rows):
            if row.output_end is not None:
                row.output_end = self.recent[index, self.recent.shape[1] - row.output_end.size :]


class _EarlyEnds:
    """Tokens that would end a row before its `min_tokens`. Which rows these are changes with each draw."""

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self._rows = rows
        self._early: tuple[int, ...] = ()
        self._entries: tuple[mx.array, mx.array] | None = None

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "_EarlyEnds | None":
        return cls(rows) if any(map(_is_early, rows)) else None

    def apply_to(self, logits: mx.array) -> mx.array:
        early = tuple(index for index, row in enumerate(self._rows) if _is_early(row))
        if early != self._early:
            self._early, self._entries = early, self._entries_of(early, logits.shape[-1])
        if self._entries is None:
            return logits
        return _unless_empty(logits.at[self._entries].add(-math.inf), logits)

    def count(self, tokens: mx.array) -> None:
        """Does nothing: the rows count their draws themselves."""

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        """Does nothing."""

    def _entries_of(self, early: Sequence[int], vocab_size: int) -> tuple[mx.array, mx.array] | None:
        ends = [(row, token) for row in early for token in self._rows[row].params.end_token_ids]
        known = [(row, token) for row, token in ends if token < vocab_size]
        return (mx.array([row for row, _ in known]), mx.array([token for _, token in known])) if known else None


def _is_early(row: RowSampling) -> bool:
    return row.position < row.params.min_tokens


def _unless_empty(ruled_out: mx.array, logits: mx.array) -> mx.array:
    """Returns `logits` for the rows of which nothing is left otherwise."""
    return mx.where(ruled_out.max(axis=-1, keepdims=True) > -math.inf, ruled_out, logits)
