"""How one sequence samples: its parameters, its seed, and what it has drawn so far."""

import hashlib
import secrets
from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from models.inference.recent_tokens import PenaltyWindow, RepeatedEnds, TokenIds, last_tokens
from models.inference.sampling_params import SamplingParams


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
        self.window: PenaltyWindow | None = None
        """The tokens that all penalties look at, in place of the two before; None where each looks at its own."""
        self.repeated: RepeatedEnds | None = None
        """Where the end of the sequence was there before; None where DRY is off."""
        self.output_end: mx.array | None = None
        """The last tokens of the output, int32; None where no bad word is longer than a token."""
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
        """Returns the state after `emitted` was put out behind `prompt`, whatever was drawn."""
        return RowSampling(self.params, self._vocab_size, seed=self.seed, prompt=prompt, emitted=emitted)

    def key(self) -> bytes:
        """Returns the 8 bytes of randomness that belong to the next draw."""
        return self._randomness("")

    def chance(self, label: str) -> float:
        """Returns a random number in [0, 1) that belongs to the next draw too, another one for each label."""
        return int.from_bytes(self._randomness(f":{label}"), "little") / 2**64

    def _randomness(self, suffix: str) -> bytes:
        return hashlib.blake2b(f"{self.seed}:{self.position}{suffix}".encode(), digest_size=8).digest()


def _divisors(penalty: float, held: Iterable[TokenIds], vocab_size: int) -> NDArray[np.float32]:
    """Returns `penalty` for every token that is held, 1 for the others, `[vocab_size]`."""
    divisors = np.ones(vocab_size, np.float32)
    for token_ids in held:
        ids = np.asarray(token_ids, np.int64)
        # A prompt may hold ids beyond the model's logits: they are never drawn.
        divisors[ids[ids < vocab_size]] = penalty
    return divisors
