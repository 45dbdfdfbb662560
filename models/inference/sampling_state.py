"""How one sequence samples, and what its earlier tokens change: penalties and bans for all rows of a decode step.

Prompt and output are one row of tokens. A window has a fixed length, its newest token last. `NO_TOKEN` stands for
missing tokens and ids beyond the logits. A penalty takes over its rows' state when the rows change, counts sampled
tokens unread, and gives the state back. A grammar wins over tokens ruled out. Without a row that uses a kind, its
`of` returns None.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from models.inference.sampling_params import ALL_TOKENS, MAX_REPEATED, SamplingParams

NO_TOKEN = -1

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Draft:
    """A guess at a row's next tokens; `prompt` and `generated` come before it."""

    tokens: Sequence[int]
    prompt: TokenIds
    generated: TokenIds


class Penalties(NamedTuple):
    """What a window's tokens cost; the defaults are nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True)
class PenaltyWindow:
    """The last tokens of a sequence, and their penalties."""

    penalties: Penalties
    counts: mx.array
    """Of each token in the window, float32 `[vocab_size]`."""
    recent: mx.array
    """Int32 `[length]`; empty for an unbounded window, which no token leaves."""

    @classmethod
    def of(cls, penalties: Penalties, length: int, held: Sequence[TokenIds], vocab_size: int) -> "PenaltyWindow":
        """The window at the end of the lists `held`."""
        found = last_tokens(held, length, vocab_size)
        counts = np.bincount(found[found != NO_TOKEN], minlength=vocab_size)
        return cls(penalties, mx.array(counts, mx.float32), mx.array([] if length == ALL_TOKENS else found, mx.int32))


def _windows_of(params: SamplingParams, prompt: TokenIds, emitted: TokenIds, vocab_size: int) -> list[PenaltyWindow]:
    """Without `repeat_last_n`, repetition counts in prompt and output, the others in the output."""
    if not params.is_penalised:
        return []
    others = Penalties(presence=params.presence_penalty, frequency=params.frequency_penalty)
    repetition, everything = Penalties(params.repetition_penalty), (prompt, emitted)
    if params.repeat_last_n is not None:
        penalties = others._replace(repetition=params.repetition_penalty)
        return [PenaltyWindow.of(penalties, params.repeat_last_n, everything, vocab_size)]
    wanted = [(one, held) for one, held in ((repetition, everything), (others, (emitted,))) if one != Penalties()]
    return [PenaltyWindow.of(one, ALL_TOKENS, held, vocab_size) for one, held in wanted]


def last_tokens(held: Sequence[TokenIds], length: int, vocab_size: int) -> NDArray[np.int32]:
    """The last `length` tokens of the lists `held`, filled up in front, or all for `ALL_TOKENS`."""
    ids = np.concatenate([np.asarray(token_ids, np.int32) for token_ids in held])
    known = np.where(ids < vocab_size, ids, NO_TOKEN).astype(np.int32)
    if length == ALL_TOKENS:
        return known
    found = np.full(length, NO_TOKEN, np.int32)
    last = known[-length:]
    found[length - last.size :] = last
    return found


@dataclass(frozen=True)
class RepeatedEnds:
    """A sequence's last tokens, and where its end occurred before."""

    recent: mx.array
    """Int32 `[length]`."""
    lengths: mx.array
    """Tokens before each that equal the last ones, at most `MAX_REPEATED`; int32 `[length]`."""
    is_breaker: mx.array
    """No repetition reaches across, bool `[vocab_size]`."""

    @classmethod
    def of(cls, params: SamplingParams, held: Sequence[TokenIds], vocab_size: int) -> "RepeatedEnds":
        """The state at the end of the lists `held`."""
        assert params.dry_penalty_last_n != ALL_TOKENS, "`within` says how many all of them can become"
        recent = last_tokens(held, params.dry_penalty_last_n, vocab_size)
        is_breaker = np.zeros(vocab_size, np.bool_)
        is_breaker[np.array(params.dry_breakers, np.int64)] = True
        breaks = (recent == NO_TOKEN) | is_breaker[recent]
        return cls(mx.array(recent), mx.array(_repeated_lengths(recent, breaks)), mx.array(is_breaker))


def _repeated_lengths(recent: NDArray[np.int32], breaks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Tokens before each that equal the last ones, none of which `breaks`."""
    lengths = np.zeros(recent.size, np.int32)
    places = np.arange(recent.size)
    for length in range(1, min(MAX_REPEATED, recent.size - 1) + 1):
        places = places[places >= length]
        places = places[recent[places - length] == recent[-length]]
        if breaks[-length] or not places.size:
            break
        lengths[places] = length
    return lengths


def padded(window: mx.array | None, length: int, filler: int = NO_TOKEN) -> mx.array:
    """Values with `filler` in front, `[length]`."""
    held = mx.array([], mx.int32) if window is None else window
    return mx.pad(held, (length - held.size, 0), constant_values=filler)


def column(values: Iterable[float]) -> mx.array:
    """One number per row, float32 `[num_rows, 1]`."""
    return mx.array(list(values), dtype=mx.float32)[:, None]


def shifted(recent: mx.array, tokens: mx.array) -> mx.array:
    """Windows `[num_rows, length]`, each with its next token at the end."""
    return mx.concatenate([recent[:, 1:], tokens[:, None].astype(mx.int32)], axis=1)


class RowSampling:
    """One sequence's sampling state. Worker thread only.

    While the sequence decodes in a batch, `BatchSampler` holds its penalties' newest state.
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
        """Without `params.seed` and `seed`, the seed is random. A replay with `prompt` and `emitted` continues as
        without the break.
        """
        chosen = params.seed if params.seed is not None else seed
        self.params = params
        self._vocab_size = vocab_size
        self.seed = secrets.randbits(63) if chosen is None else chosen
        self.position = len(emitted)
        self.windows = _windows_of(params, prompt, emitted, vocab_size)
        """In the order of applying."""
        self.repeated: RepeatedEnds | None = None
        self.output_end: mx.array | None = None
        """Int32, for bad words of more than one token."""
        if params.longest_bad_word > 1:
            self.output_end = mx.array(last_tokens((emitted,), params.longest_bad_word - 1, vocab_size))
        if params.is_dry:
            self.repeated = RepeatedEnds.of(params, (prompt, emitted), vocab_size)

    def after(self, prompt: TokenIds, emitted: TokenIds) -> "RowSampling":
        """The state after the output `emitted`."""
        return RowSampling(self.params, self._vocab_size, seed=self.seed, prompt=prompt, emitted=emitted)

    def ahead(self, draft: Draft) -> list["RowSampling"]:
        """The states that draw behind the last known token, and behind each one of the draft's.

        This state does not change where there is a draft: `accept` follows.
        """
        if not draft.tokens:
            return [self]
        if not self.params.looks_back:
            return [self._moved(count) for count in range(len(draft.tokens) + 1)]
        output = np.concatenate([np.asarray(part, np.int32) for part in (draft.generated, draft.tokens)])
        first = len(draft.generated)
        return [self.after(draft.prompt, output[:stop]) for stop in range(first, output.size + 1)]

    def accept(self, draft: Draft, num_accepted: int, token: int) -> "RowSampling":
        """The state once the first tokens of a draft, and `token` behind them, were sampled."""
        if self.params.looks_back:
            return self.after(draft.prompt, [*draft.generated, *draft.tokens[:num_accepted], token])
        return self._moved(num_accepted + 1)

    def _moved(self, num_draws: int) -> "RowSampling":
        moved = object.__new__(RowSampling)
        vars(moved).update(vars(self), position=self.position + num_draws)
        return moved

    def key(self) -> bytes:
        """8 random bytes of the next draw."""
        return self._randomness("")

    def chance(self) -> float:
        """A random number in [0, 1), for XTC at the next draw."""
        return int.from_bytes(self._randomness(":xtc"), "little") / 2**64

    def _randomness(self, suffix: str) -> bytes:
        return hashlib.blake2b(f"{self.seed}:{self.position}{suffix}".encode(), digest_size=8).digest()


MAX_PENALTY = 1e9
"""Nothing gets less likely above; infinity could leave a row without a token."""


class Penalty(Protocol):
    """One kind; its arrays have one row per row of the step."""

    def apply_to(self, logits: mx.array) -> mx.array:
        """Penalised logits, float32 `[num_rows, vocab_size]`."""
        ...

    def count(self, tokens: mx.array) -> None:
        """Counts the sampled tokens, `[num_rows]`."""

    def give_back(self, rows: Sequence[RowSampling]) -> None:
        """Writes each row's state back to its `RowSampling`."""


def penalties_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Penalty]:
    """What a row uses, in the order of applying: bias, bans, penalties."""
    found: list[Penalty | None] = [
        _Bias.of(rows),
        _AllowedTokens.of(rows, vocab_size),
        _BadWords.of(rows),
        _EarlyEnds.of(rows),
    ]
    if any(row.params.looks_back for row in rows):
        places = range(max(len(row.windows) for row in rows))
        found += [*(_Windowed.of(rows, place, vocab_size) for place in places), _Dry.of(rows, vocab_size)]
    return [penalty for penalty in found if penalty is not None]


@dataclass
class _Bias(Penalty):
    row_ids: mx.array
    token_ids: mx.array
    biases: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "_Bias | None":
        entries = [(index, *entry) for index, row in enumerate(rows) for entry in row.params.logit_bias]
        if not entries:
            return None
        row_ids, token_ids, biases = zip(*entries, strict=True)
        return cls(mx.array(row_ids), mx.array(token_ids), mx.array(biases, dtype=mx.float32))

    def apply_to(self, logits: mx.array) -> mx.array:
        return logits.at[self.row_ids, self.token_ids].add(self.biases)


@dataclass
class _Windowed(Penalty):
    """One window of each row, by `place` among the row's."""

    place: int
    counts: mx.array
    recent: mx.array
    oldest: mx.array
    """Where windows begin, `[num_rows, 1]`."""
    forgets: mx.array
    repetition: mx.array
    presence: mx.array
    frequency: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], place: int, vocab_size: int) -> "_Windowed":
        windows = [row.windows[place] if place < len(row.windows) else None for row in rows]
        penalties = [Penalties() if one is None else one.penalties for one in windows]
        lengths = [0 if one is None else one.recent.size for one in windows]
        longest = max(1, *lengths)
        return cls(
            place=place,
            counts=mx.stack([mx.zeros(vocab_size) if one is None else one.counts for one in windows]),
            recent=mx.stack([padded(None if one is None else one.recent, longest) for one in windows]),
            oldest=mx.array([min(longest - length, longest - 1) for length in lengths])[:, None],
            forgets=mx.array([float(length > 0) for length in lengths]),
            repetition=column(one.repetition for one in penalties),
            presence=column(one.presence for one in penalties),
            frequency=column(one.frequency for one in penalties),
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
            for window in row.windows[self.place : self.place + 1]:
                first = self.recent.shape[1] - window.recent.size
                row.windows[self.place] = PenaltyWindow(
                    window.penalties, self.counts[index], self.recent[index, first:]
                )


@dataclass
class _Dry(Penalty):
    """Don't repeat yourself, as in llama.cpp: penalises continuing a repetition, more for longer ones.

    Windows move by one token a step, so lengths keep their places.
    """

    recent: mx.array
    lengths: mx.array
    is_breaker: mx.array
    num_before: mx.array
    """Tokens of the row's window before each token."""
    multiplier: mx.array
    base: mx.array
    allowed_length: mx.array

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "_Dry | None":
        states = [row.repeated for row in rows]
        if not any(states):
            return None
        nothing_breaks = mx.zeros(vocab_size, mx.bool_)
        params = [row.params if row.repeated is not None else SamplingParams() for row in rows]
        windows = [0 if one is None else one.recent.size for one in states]
        longest = max(windows)
        starts = mx.array([longest - window for window in windows])[:, None]
        return cls(
            recent=mx.stack([padded(None if one is None else one.recent, longest) for one in states]),
            lengths=mx.stack([padded(None if one is None else one.lengths, longest, 0) for one in states]),
            is_breaker=mx.stack([nothing_breaks if one is None else one.is_breaker for one in states]),
            num_before=mx.maximum(mx.arange(longest) - starts, 0),
            multiplier=column(one.dry_multiplier for one in params),
            base=column(one.dry_base for one in params),
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


@dataclass
class _AllowedTokens(Penalty):
    is_allowed: mx.array

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


@dataclass
class _BadWords(Penalty):
    """Excludes a forbidden sequence's last token."""

    row_ids: mx.array
    before: mx.array
    """Each sequence without its last token, right-aligned; `NO_TOKEN` is any token."""
    last: mx.array
    recent: mx.array
    """`[num_rows, width]`."""

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


class _EarlyEnds(Penalty):
    """The affected rows change with each draw."""

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self._rows = rows
        self._early = list[int]()
        self._entries: tuple[mx.array, mx.array] | None = None

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> "_EarlyEnds | None":
        return cls(rows) if _early(rows) else None

    def apply_to(self, logits: mx.array) -> mx.array:
        early = _early(self._rows)
        if early != self._early:
            self._early, self._entries = early, self._entries_of(early, logits.shape[-1])
        if self._entries is None:
            return logits
        return _unless_empty(logits.at[self._entries].add(-math.inf), logits)

    def _entries_of(self, early: Sequence[int], vocab_size: int) -> tuple[mx.array, mx.array] | None:
        ends = [(row, token) for row in early for token in self._rows[row].params.end_token_ids]
        known = [(row, token) for row, token in ends if token < vocab_size]
        return (mx.array([row for row, _ in known]), mx.array([token for _, token in known])) if known else None


def _early(rows: Sequence[RowSampling]) -> list[int]:
    return [index for index, row in enumerate(rows) if row.position < row.params.min_tokens]


def _unless_empty(ruled_out: mx.array, logits: mx.array) -> mx.array:
    """`logits` for rows left without a token."""
    return mx.where(ruled_out.max(axis=-1, keepdims=True) > -math.inf, ruled_out, logits)
