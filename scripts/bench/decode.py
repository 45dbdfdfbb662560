"""Decoding rows of mixed lengths: the runner against mlx-lm's `BatchGenerator`.

Usage: python -m scripts.bench.decode [--json FILE] [--blocks N]

Both sides decode the same prefilled sequences of one model in one process, in turns of a few steps, so that a busy
machine slows both alike; the tokens must be equal. The peer is used as a server uses it: caches inserted, greedy,
`next_generated`. Joining (the peer merges caches, we do not) is outside the measured time. The model
has Qwen3-0.6B's proportions at half its width, 8 layers and random float32 weights: at 4000 tokens a sequence's keys
and values weigh as much as the weights, as they do for a model of that kind in 4 to 16 bits.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.measure import BLOCK_STEPS, Comparison, Subject, compare

# isort: split
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import qwen3

from models.inference.runner import Runner
from scripts.bench.common import Report, Target, write_json

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


def build_model() -> Any:
    """Returns the model, evaluated; the same weights in every run."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    # Twice the usual gain, or the output would soon run in a circle.
    model.update(tree_map(lambda weight: weight * 2 if weight.ndim > 1 else weight, model.parameters()))
    mx.eval(model.parameters())
    return model


def add_to(report: Report, mix: Mix, found: Comparison) -> None:
    """Adds a mix to the table."""
    peaks = [side.peak_bytes for side in (found.ours, found.peer)]
    cells = [*(f"{speed:.1f}" for speed in found.speeds), f"{found.ratio:.2f}", *(f"{p / 2**20:.0f}" for p in peaks)]
    report.rows.append([mix.name, *cells])
    report.figures[mix.name] = {
        "ours_block_seconds": found.ours.block_seconds,
        "peer_block_seconds": found.peer.block_seconds,
        "steps_per_block": BLOCK_STEPS,
        "ratio": found.ratio,
        "peak_bytes": peaks,
        "num_distinct_tokens": len({token for row in found.ours.side.tokens() for token in row}),
    }
    report.add_verdict(mix.name, found.ratio, Target(mix.target, is_ceiling=False))


def main() -> None:
    """Prints the table; writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each side and mix (default: 10)")
    options = parser.parse_args()
    model = build_model()
    subject = Subject(model, Runner(model, vocab_size=VOCAB), VOCAB, PREFILL_CHUNK_TOKENS)
    columns = ["lengths", "tokens/s", "BatchGenerator", "ratio", "MiB", "BatchGenerator MiB"]
    report = Report("Decoding together, greedy, equal tokens", columns)
    for mix in MIXES:
        print(f"{mix.name} …", file=sys.stderr, flush=True)
        found = compare(subject, mix.lengths, options.blocks)
        if found.equal_share < 1:
            raise SystemExit(f"{mix.name}: the two sides say different tokens")
        add_to(report, mix, found)
    print(report.text())
    if options.json:
        write_json(options.json, "python -m scripts.bench.decode", [report])


if __name__ == "__main__":
    main()
