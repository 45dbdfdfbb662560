"""How one sequence samples.

Prompt and output are one row of tokens. A window has a fixed length, its newest token last. `NO_TOKEN` stands for
missing tokens and ids beyond the logits.
"""

import copy
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True)
class PenaltyWindow:
    """A sequence's last tokens, including the prompt's."""

    counts: mx.array
    """Of each token in the window, float32 `[vocab_size]`."""
    recent: mx.array
    """Int32 `[length]`; empty for an unbounded window, which no token leaves."""

    @classmethod
    def of(cls, length: int, held: Sequence[TokenIds], vocab_size: int) -> "PenaltyWindow":
        """The window at the end of the lists `held`."""
        found = last_tokens(held, length, vocab_size)
        counts = np.bincount(found[found != NO_TOKEN], minlength=vocab_size)
        return cls(mx.array(counts, mx.float32), mx.array([] if length == ALL_TOKENS else found, mx.int32))


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
        self.counts: mx.array | None = None
        """Of output tokens, float32 `[vocab_size]`, for presence and frequency penalties."""
        self.divisors: mx.array | None = None
        """`repetition_penalty` for seen tokens, else 1, float32 `[vocab_size]`."""
        self.window: PenaltyWindow | None = None
        """All penalties look at it, instead of the two above."""
        self.repeated: RepeatedEnds | None = None
        self.output_end: mx.array | None = None
        """Int32, for bad words of more than one token."""
        if params.longest_bad_word > 1:
            self.output_end = mx.array(last_tokens((emitted,), params.longest_bad_word - 1, vocab_size))
        if params.is_dry:
            self.repeated = RepeatedEnds.of(params, (prompt, emitted), vocab_size)
        if not params.is_penalised:
            return
        if params.repeat_last_n is not None:
            self.window = PenaltyWindow.of(params.repeat_last_n, (prompt, emitted), vocab_size)
            return
        if (params.presence_penalty, params.frequency_penalty) != (0.0, 0.0):
            self.counts = mx.array(np.bincount(np.asarray(emitted, np.int64), minlength=vocab_size), mx.float32)
        if params.repetition_penalty != 1.0:
            self.divisors = mx.array(_divisors(params.repetition_penalty, (prompt, emitted), vocab_size))

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
        moved = copy.copy(self)
        moved.position += num_draws
        return moved

    def key(self) -> bytes:
        """8 random bytes of the next draw."""
        return self._randomness("")

    def chance(self) -> float:
        """A random number in [0, 1), for XTC at the next draw."""
        return int.from_bytes(self._randomness(":xtc"), "little") / 2**64

    def _randomness(self, suffix: str) -> bytes:
        return hashlib.blake2b(f"{self.seed}:{self.position}{suffix}".encode(), digest_size=8).digest()


def _divisors(penalty: float, held: Iterable[TokenIds], vocab_size: int) -> NDArray[np.float32]:
    divisors = np.ones(vocab_size, np.float32)
    for token_ids in held:
        ids = np.asarray(token_ids, np.int64)
        # A prompt may hold ids beyond the model's logits: they are never drawn.
        divisors[ids[ids < vocab_size]] = penalty
    return divisors
