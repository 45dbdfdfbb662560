"""Benchmarks what a full disk costs the worker: a write for which something else must go, among many small files.

Usage: python -m scripts.bench.disk_full [--json FILE] [--files N]

Nothing is written, since files are remembered by their size: what is timed runs on the thread that also evaluates the
model, between two steps. The time that it computes is given beside the time that passes: the rest it waits, for a
processor or for Python's lock.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cache.disk import tree
from cache.disk.tier import DiskTier
from cache.types import TokenArray
from scripts.bench.common import Report, Target, median, write_json
from scripts.replay.disk import SizedStore, sized_tier
from scripts.replay.layout import SizedLayout, SizedSegment

BYTES_PER_TOKEN = 1000
TURN_TOKENS = 40
HEAD_TOKENS = 400
TURNS = 10
NUM_HEADS = 20
NUM_WRITES = 1_500
TARGET_MS = 2.0


class Conversations:
    """Conversations that go on at random, under some shared system prompts."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._random = random.Random(1)
        self._heads = [self._new_tokens(HEAD_TOKENS) for _ in range(NUM_HEADS)]
        self._open: list[TokenArray] = []

    def _new_tokens(self, count: int) -> TokenArray:
        return np.array([self._random.randrange(150_000) for _ in range(count)], np.int32)

    def write_turn(self) -> None:
        """Writes one more turn of one of them."""
        if len(self._open) < NUM_HEADS or self._random.random() < 1 / TURNS:
            self._open.append(self._random.choice(self._heads))
        index = self._random.randrange(len(self._open))
        tokens = np.concatenate([self._open[index], self._new_tokens(TURN_TOKENS)])
        self._open[index] = tokens
        del self._open[: len(self._open) - 200]
        segment: object = SizedSegment(0, len(tokens), BYTES_PER_TOKEN)
        self._tier.write_span(tree.Target("", tokens), segment)  # type: ignore[arg-type]


def bench(num_files: int) -> Report:
    """Fills a disk with `num_files` files, then times further writes."""
    file_bytes = TURN_TOKENS * BYTES_PER_TOKEN
    tier = sized_tier(SizedStore(SizedLayout(BYTES_PER_TOKEN, 0)), num_files * file_bytes)
    conversations = Conversations(tier)
    while tier.num_gone == 0:
        conversations.write_turn()
        tier.queue.wait(10)
    times, computing = list[float](), list[float]()
    gc.collect()
    gc.disable()
    for _ in range(NUM_WRITES):
        started, started_computing = time.perf_counter(), time.thread_time()
        conversations.write_turn()
        computing.append(1000 * (time.thread_time() - started_computing))
        times.append(1000 * (time.perf_counter() - started))
        tier.queue.wait(10)
    gc.enable()
    tier.close()
    report = Report(f"A full disk of about {num_files} files", ["one more write", "ms"])
    report.rows = [["median", f"{median(times):.2f}"], ["worst", f"{max(times):.2f}"]]
    report.rows.append(["most that one computes", f"{max(computing):.2f}"])
    report.figures = {"files": num_files, "median_ms": median(times), "worst_ms": max(times)}
    report.figures["worst_computing_ms"] = max(computing)
    report.add_verdict("worst write, ms", max(times), Target(TARGET_MS))
    return report


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--files", type=int, default=20_000)
    options = parser.parse_args(arguments)
    report = bench(options.files)
    print(report.text(), flush=True)
    if options.json:
        write_json(options.json, "python -m scripts.bench.disk_full", [report])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
