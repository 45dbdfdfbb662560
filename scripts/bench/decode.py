"""Decoding rows of mixed lengths: the runner against mlx-lm's `BatchGenerator`.

Usage: python -m scripts.bench.decode [--json FILE] [--blocks N]

Both sides decode the same prefilled sequences of one model in one process, in turns of a few steps, so that a busy
machine slows both alike; the tokens must be equal. The peer is used as a server uses it: caches inserted, greedy,
`next_generated`. Joining (the peer merges caches, we do not) is outside the measured time. The model
has Qwen3-0.6B's proportions at half its width, 8 layers and random float32 weights: at 4000 tokens a sequence's keys
and values weigh as much as the weights, as they do for a model of that kind in 4 to 16 bits.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.mlx_lm_import import KVCache

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3
from numpy.typing import NDArray

from models.inference.runner import DecodeStep, Runner
from models.inference.sampling_params import SamplingParams
from scripts.bench.common import Report, Target, median, write_json
from scripts.bench.decode_step import launch

VOCAB = 8192
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
PREFILL_CHUNK_TOKENS = 512
WARM_UP_STEPS = 3
BLOCK_STEPS = 4


@dataclass(frozen=True)
class Mix:
    """Lengths that decode together, and the least ratio to the peer's tokens per second that is wanted."""

    name: str
    lengths: tuple[int, ...]
    target: float


MIXES = (
    Mix("1 x 500", (500,), 1.0),
    Mix("4 x 500", (500,) * 4, 0.95),
    Mix("4000 + 3 x 100", (4000, 100, 100, 100), 2.0),
    Mix("8000 + 2000 + 500 + 5 x 100", (8000, 2000, 500, 100, 100, 100, 100, 100), 3.0),
)


@dataclass(frozen=True)
class Prefilled:
    """A sequence up to its last token, which is to be fed first: keys and values of each layer."""

    tokens: NDArray[np.int32]
    layers: list[tuple[mx.array, mx.array]]

    def caches(self, spare_tokens: int) -> list[KVCache]:
        """Returns caches of one's own with capacity for `spare_tokens` more, as the engine sizes them."""
        caches = []
        for keys, values in self.layers:
            cache = KVCache()
            cache.step = len(self.tokens) + spare_tokens
            cache.update_and_fetch(keys, values)
            caches.append(cache)
        mx.eval([cache.state for cache in caches])
        return caches


def build_model() -> Any:
    """Returns the model, evaluated; the same weights in every run."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    # Twice the usual gain, or the output would soon run in a circle.
    model.update(tree_map(lambda weight: weight * 2 if weight.ndim > 1 else weight, model.parameters()))
    mx.eval(model.parameters())
    return model


def prefill(runner: Runner, length: int, seed: int) -> Prefilled:
    """Returns a random sequence of `length` tokens, all but the last evaluated."""
    tokens = np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)
    caches = runner.make_caches()
    for start in range(0, length - 1, PREFILL_CHUNK_TOKENS):
        runner.prefill(caches, tokens[start : min(start + PREFILL_CHUNK_TOKENS, length - 1)])
    fetched = [cache.keys_and_values() for cache in caches]
    layers = [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in fetched]
    mx.eval(layers)
    return Prefilled(tokens, layers)


class OurSide:
    """Decodes with the double-buffered loop of the engine."""

    def __init__(self, runner: Runner, sequences: Sequence[Prefilled], num_steps: int) -> None:
        greedy = SamplingParams(temperature=0)
        self._runner = runner
        self._rows = [runner.make_row(s.caches(num_steps + 1), greedy, int(s.tokens[-1])) for s in sequences]
        self._current: DecodeStep = launch(runner, self._rows, None)
        self._steps: list[list[int]] = []

    def decode(self, num_steps: int) -> None:
        """Decodes `num_steps` tokens of each row; nothing is left running."""
        for _ in range(num_steps):
            following = launch(self._runner, self._rows, self._current)
            self._steps.append(self._current.tokens())
            self._current = following
        mx.synchronize()

    def tokens(self) -> list[list[int]]:
        """What each row has said."""
        return [list(row) for row in zip(*self._steps, strict=True)]


class PeerSide:
    """Decodes with mlx-lm's `BatchGenerator`."""

    def __init__(self, model: Any, sequences: Sequence[Prefilled], num_steps: int) -> None:
        self._generator = BatchGenerator(model, max_tokens=num_steps + 2, prefill_batch_size=len(sequences))
        uids = self._generator.insert(
            [[int(s.tokens[-1])] for s in sequences],
            caches=[s.caches(0) for s in sequences],
            all_tokens=[s.tokens[:-1].tolist() for s in sequences],
        )
        self._tokens: dict[int, list[int]] = {uid: [] for uid in uids}

    def decode(self, num_steps: int) -> None:
        """Decodes `num_steps` tokens of each row; nothing is left running."""
        for _ in range(num_steps):
            for response in self._generator.next_generated():
                self._tokens[response.uid].append(response.token)
        mx.synchronize(self._generator.stream)

    def tokens(self) -> list[list[int]]:
        """What each row has said."""
        return list(self._tokens.values())


class Timed:
    """One side with its times and its memory."""

    def __init__(self, make: Callable[[], OurSide | PeerSide]) -> None:
        gc.collect()
        mx.clear_cache()
        before_bytes = mx.get_active_memory()
        self.side = make()
        self.side.decode(WARM_UP_STEPS)
        self.block_seconds: list[float] = []
        self._resident_bytes = mx.get_active_memory() - before_bytes
        self._passing_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """What the sequences and the work on them take at most, beyond the model."""
        return self._resident_bytes + self._passing_bytes

    def decode_block(self) -> None:
        """Decodes one block and takes its time."""
        before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        self.side.decode(BLOCK_STEPS)
        self.block_seconds.append(time.perf_counter() - started)
        self._passing_bytes = max(self._passing_bytes, mx.get_peak_memory() - before_bytes)


def compare(model: Any, runner: Runner, mix: Mix, num_blocks: int) -> tuple[Timed, Timed]:
    """Returns both sides after `num_blocks` blocks in turns; raises `SystemExit` if their tokens differ."""
    sequences = [prefill(runner, length, seed) for seed, length in enumerate(mix.lengths)]
    ours, peer = take_turns(model, runner, sequences, num_blocks)
    if ours.side.tokens() != peer.side.tokens():
        raise SystemExit(f"{mix.name}: the two sides say different tokens")
    return ours, peer


def take_turns(model: Any, runner: Runner, sequences: Sequence[Prefilled], num_blocks: int) -> tuple[Timed, Timed]:
    """Returns both sides after each has decoded `num_blocks` blocks of the same sequences, one block at a time."""
    num_steps = WARM_UP_STEPS + num_blocks * BLOCK_STEPS
    ours = Timed(lambda: OurSide(runner, sequences, num_steps))
    peer = Timed(lambda: PeerSide(model, sequences, num_steps))
    for _ in range(num_blocks):
        ours.decode_block()
        peer.decode_block()
    return ours, peer


def add_to(report: Report, mix: Mix, ours: Timed, peer: Timed) -> None:
    """Adds a mix to the table: medians over blocks, and the median of the ratios of neighbouring blocks."""
    ratio = median([b / a for a, b in zip(ours.block_seconds, peer.block_seconds, strict=True)])
    speeds = [len(mix.lengths) * BLOCK_STEPS / median(side.block_seconds) for side in (ours, peer)]
    peaks = [side.peak_bytes for side in (ours, peer)]
    cells = [*(f"{speed:.1f}" for speed in speeds), f"{ratio:.2f}", *(f"{peak / 2**20:.0f}" for peak in peaks)]
    report.rows.append([mix.name, *cells])
    report.figures[mix.name] = {
        "ours_block_seconds": ours.block_seconds,
        "peer_block_seconds": peer.block_seconds,
        "steps_per_block": BLOCK_STEPS,
        "ratio": ratio,
        "peak_bytes": peaks,
        "num_distinct_tokens": len({token for row in ours.side.tokens() for token in row}),
    }
    report.add_verdict(mix.name, ratio, Target(mix.target, is_ceiling=False))


def main() -> None:
    """Prints the table; writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each side and mix (default: 10)")
    options = parser.parse_args()
    model = build_model()
    runner = Runner(model, vocab_size=VOCAB)
    columns = ["lengths", "tokens/s", "BatchGenerator", "ratio", "MiB", "BatchGenerator MiB"]
    report = Report("Decoding together, greedy, equal tokens", columns)
    for mix in MIXES:
        print(f"{mix.name} …", file=sys.stderr, flush=True)
        add_to(report, mix, *compare(model, runner, mix, options.blocks))
    print(report.text())
    if options.json:
        write_json(options.json, "python -m scripts.bench.decode", [report])


if __name__ == "__main__":
    main()
