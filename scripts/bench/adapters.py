"""Decoding with LoRA adapters, against the same model without any.

Usage: python -m scripts.bench.adapters [--json FILE] [--blocks N]

The model of `scripts.bench.decode`, twice in one process: as it is, and with four random adapters of rank 8 on the
layers that mlx-lm trains by default. Four rows decode in turns of a few steps: with the bare model, with the adapters
loaded but unused, with one adapter for all rows, with an adapter each in common calls, and with an adapter each in
turn, as where rows cannot be mixed.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from models.inference.row import DecodeRow
from models.inference.runner import DecodeStep, Runner
from models.inference.sampling_params import SamplingParams
from models.lora_files import attach
from scripts.bench.common import Report, median, write_json
from scripts.bench.decode import VOCAB, build_model
from server.measure import launch
from tests.support.adapters import random_adapter

NUM_ROWS = 4
PROMPT_TOKENS = 500
RANK = 8
WARM_UP_STEPS = 3
BLOCK_STEPS = 8


class Side:
    """Four rows that decode with one runner."""

    def __init__(self, runner: Runner, adapters: Sequence[int]) -> None:
        greedy, self.block_seconds = SamplingParams(temperature=0), list[float]()
        self._runner = runner
        self._rows: list[DecodeRow] = []
        for seed, adapter in enumerate(adapters):
            tokens = np.random.default_rng(seed).integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32)
            caches = runner.make_caches()
            runner.prefill(caches, tokens[:-1], adapter)
            self._rows.append(runner.make_row(caches, greedy, int(tokens[-1]), adapter=adapter))
        self._current: DecodeStep = launch(runner, self._rows, None)
        self._decode(WARM_UP_STEPS)

    def decode_block(self) -> None:
        """Decodes one block and takes its time."""
        started = time.perf_counter()
        self._decode(BLOCK_STEPS)
        self.block_seconds.append(time.perf_counter() - started)

    def _decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            following = launch(self._runner, self._rows, self._current)
            self._current.tokens()
            self._current = following
        mx.synchronize()


def make_sides(folder: Path) -> dict[str, Side]:
    """Returns what is compared, the bare model first."""
    adapted: Any = build_model()
    places = [
        (f"a{seed}", str(random_adapter(build_model(), folder / str(seed), seed=seed, rank=RANK)))
        for seed in range(NUM_ROWS)
    ]
    adapters = attach(adapted, places)
    together = Runner(adapted, vocab_size=VOCAB, adapters=adapters)
    in_turn = Runner(adapted, vocab_size=VOCAB, adapters=adapters)
    assert together.abilities.mixes, "rows of this model can be mixed"
    in_turn.abilities.mixes = False
    each = range(1, NUM_ROWS + 1)
    return {
        "no adapters": Side(Runner(build_model(), vocab_size=VOCAB), [0] * NUM_ROWS),
        "four loaded, none used": Side(together, [0] * NUM_ROWS),
        "one for all rows": Side(together, [1] * NUM_ROWS),
        "one each, together": Side(together, each),
        "one each, in turn": Side(in_turn, each),
    }


def main() -> None:
    """Prints the table; writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--blocks", type=int, default=20, help="measured blocks of each (default: 20)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = make_sides(Path(folder))
    for _ in range(options.blocks):
        for side in sides.values():
            side.decode_block()
    report = Report(f"Decoding {NUM_ROWS} rows with adapters", ["adapters", "tokens/s", "ratio"])
    bare = sides["no adapters"].block_seconds
    for name, side in sides.items():
        speed = NUM_ROWS * BLOCK_STEPS / median(side.block_seconds)
        ratio = median([a / b for a, b in zip(bare, side.block_seconds, strict=True)])
        report.rows.append([name, f"{speed:.1f}", f"{ratio:.2f}"])
        report.figures[name] = {"block_seconds": side.block_seconds, "ratio": ratio}
    print(report.text())
    if options.json:
        write_json(options.json, "python -m scripts.bench.adapters", [report])


if __name__ == "__main__":
    main()
