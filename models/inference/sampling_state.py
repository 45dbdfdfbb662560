"""How one sequence samples: its parameters, its seed, its draws so far, and the last tokens that penalties need.

The prompt's and the output's tokens are one row. A window has a fixed length and its newest token last. `NO_TOKEN`
stands for missing tokens and for ids beyond the model's logits.
"""

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
class PenaltyWindow:
    """The last tokens of one sequence, including the prompt's."""

    counts: mx.array
    """How often each token occurs in the window, float32 `[vocab_size]`."""
    recent: mx.array
    """The tokens, int32 `[length]`; empty for an unbounded window, which no token leaves."""

    @classmethod
    def of(cls, length: int, held: Sequence[TokenIds], vocab_size: int) -> "PenaltyWindow":
        """Returns the window at the end of the concatenated lists `held`."""
        found = last_tokens(held, length, vocab_size)
        counts = np.bincount(found[found != NO_TOKEN], minlength=vocab_size)
        return cls(mx.array(counts, mx.float32), mx.array([] if length == ALL_TOKENS else found, mx.int32))


def last_tokens(held: Sequence[TokenIds], length: int, vocab_size: int) -> NDArray[np.int32]:
    """Returns the last `length` tokens of the lists `held`, `[length]`, filled up in front, or all for
    `ALL_TOKENS`.
    """
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
    """The last tokens of one sequence, and where its end occurred before among them."""

    recent: mx.array
    """The tokens, int32 `[length]`."""
    lengths: mx.array
    """How many tokens before each equal the last ones, at most `MAX_REPEATED`; int32 `[length]`."""
    is_breaker: mx.array
    """Which tokens no repetition reaches across, bool `[vocab_size]`."""

    @classmethod
    def of(cls, params: SamplingParams, held: Sequence[TokenIds], vocab_size: int) -> "RepeatedEnds":
        """Returns the state at the end of the concatenated lists `held`."""
        assert params.dry_penalty_last_n != ALL_TOKENS, "`within` says how many all of them can become"
        recent = last_tokens(held, params.dry_penalty_last_n, vocab_size)
        is_breaker = np.zeros(vocab_size, np.bool_)
        is_breaker[np.array(params.dry_breakers, np.int64)] = True
        breaks = (recent == NO_TOKEN) | is_breaker[recent]
        return cls(mx.array(recent), mx.array(_repeated_lengths(recent, breaks)), mx.array(is_breaker))


def _repeated_lengths(recent: NDArray[np.int32], breaks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Returns for each place how many tokens before it equal the last ones, none of which `breaks`."""
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
    """Returns a window's values with `filler` in front, `[length]`."""
    held = mx.array([], mx.int32) if window is None else window
    return mx.pad(held, (length - held.size, 0), constant_values=filler)


def column(values: Iterable[float]) -> mx.array:
    """Returns one number per row, float32 `[num_rows, 1]`."""
    return mx.array(list(values), dtype=mx.float32)[:, None]


def shifted(recent: mx.array, tokens: mx.array) -> mx.array:
    """Returns windows `[num_rows, length]` with the next token of each row at their end."""
    return mx.concatenate([recent[:, 1:], tokens[:, None].astype(mx.int32)], axis=1)


class RowSampling:
    """The sampling state of one sequence. Worker thread only.

    While the sequence decodes in a batch, `BatchSampler` holds the newest state of its penalties.
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
        """Without `params.seed` and `seed`, the seed is random. A row that is replayed with `prompt` and the tokens
        `emitted` continues as without the break.
        """
        chosen = params.seed if params.seed is not None else seed
        self.params = params
        self._vocab_size = vocab_size
        self.seed = secrets.randbits(63) if chosen is None else chosen
        self.position = len(emitted)
        """Draws made so far."""
        self.counts: mx.array | None = None
        """How often each token is in the output, float32 `[vocab_size]`, for presence and frequency penalties."""
        self.divisors: mx.array | None = None
        """The repetition penalty for tokens of prompt and output, 1 for others, float32 `[vocab_size]`."""
        self.window: PenaltyWindow | None = None
        """The tokens that all penalties look at, in place of the two before."""
        self.repeated: RepeatedEnds | None = None
        self.output_end: mx.array | None = None
        """The last tokens of the output, int32, for bad words of more than one token."""
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
        """Returns the state after the output `emitted` of `prompt`, whatever was drawn."""
        return RowSampling(self.params, self._vocab_size, seed=self.seed, prompt=prompt, emitted=emitted)

    def key(self) -> bytes:
        """Returns the 8 random bytes of the next draw."""
        return self._randomness("")

    def chance(self, label: str) -> float:
        """Returns a random number in [0, 1) for the next draw, a different one for each label."""
        return int.from_bytes(self._randomness(f":{label}"), "little") / 2**64

    def _randomness(self, suffix: str) -> bytes:
        return hashlib.blake2b(f"{self.seed}:{self.position}{suffix}".encode(), digest_size=8).digest()


def _divisors(penalty: float, held: Iterable[TokenIds], vocab_size: int) -> NDArray[np.float32]:
    """Returns `penalty` for every token in the lists `held`, 1 for the others, `[vocab_size]`."""
    divisors = np.ones(vocab_size, np.float32)
    for token_ids in held:
        ids = np.asarray(token_ids, np.int64)
        # A prompt may hold ids beyond the model's logits: they are never drawn.
        divisors[ids[ids < vocab_size]] = penalty
    return divisors
