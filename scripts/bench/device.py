"""Benchmarks for a machine with an accelerator: a model of usual size in bfloat16, with random weights.

Usage: python -m scripts.bench.device [--model tiny|2b|8b] [--json FILE] [--only NAME]…

- decode: rows of equal and mixed lengths together, against mlx-lm's `BatchGenerator`, in turns within one process.
- prefill: tokens per second of a cold prompt, by chunk size.
- paging: a conversation's state out of its slot and back in, bytes per second.
- warm: time to the first token of a conversation's next turn, in place and paged in, against a cold prompt.

The weights are random, so tokens mean nothing; times and bytes are those of a real model of that shape. In half
precision the two sides round differently, so the share of equal tokens is shown, not asserted.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.inference.runner import Runner

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from numpy.typing import NDArray

from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from models.inference.sampling_params import SamplingParams
from scripts.bench.common import Report, median, write_json
from scripts.bench.decode import BLOCK_STEPS, VOCAB, prefill, take_turns

_COMMON = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 262_144,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1},
    "2b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8},
}
MIXES: dict[str, tuple[int, ...]] = {
    "1 x 500": (500,),
    "4 x 500": (500,) * 4,
    "8 x 500": (500,) * 8,
    "32 x 500": (500,) * 32,
    "4000 + 3 x 100": (4000, 100, 100, 100),
    "8000 + 2000 + 500 + 5 x 100": (8000, 2000, 500, 100, 100, 100, 100, 100),
    "8000 + 3 x 4000 + 4 x 2000 + 8 x 500 + 16 x 100": (8000, *(4000,) * 3, *(2000,) * 4, *(500,) * 8, *(100,) * 16),
}
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
PREFILL_TOKENS = 8192
WARM_TOKENS = (8192, 32_768, 131_072)
NEW_TOKENS = 64
MAX_COLD_SECONDS = 90.0
"""A length whose cold prompt would take longer, by the one before, is left out."""


def build_model(size: str) -> Any:
    """Returns a model with random bfloat16 weights, evaluated."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**_COMMON, **MODELS[size]}))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode(model: Any, runner: Runner, num_blocks: int) -> Report:
    """Compares both sides for each mix of lengths."""
    columns = ["lengths", "tokens/s", "BatchGenerator", "ratio", "equal tokens"]
    report = Report("Decoding together, greedy", columns)
    for name, lengths in MIXES.items():
        print(f"decode {name} …", file=sys.stderr, flush=True)
        sequences = [prefill(runner, length, seed) for seed, length in enumerate(lengths)]
        ours, peer = take_turns(model, runner, sequences, num_blocks)
        ratio = median([b / a for a, b in zip(ours.block_seconds, peer.block_seconds, strict=True)])
        speeds = [len(lengths) * BLOCK_STEPS / median(side.block_seconds) for side in (ours, peer)]
        equal = np.mean(np.array(ours.side.tokens()) == np.array(peer.side.tokens()))
        report.rows.append([name, *(f"{speed:.0f}" for speed in speeds), f"{ratio:.2f}", f"{equal:.0%}"])
        report.figures[name] = {"tokens_per_second": speeds, "ratio": ratio, "equal": float(equal)}
    return report


def prefill_speed(runner: Runner) -> Report:
    """Returns tokens per second of a cold prompt in chunks of each size, medians of three."""
    report = Report(f"Prefill of {PREFILL_TOKENS} tokens", ["chunk", "tokens/s"])
    tokens = _tokens(PREFILL_TOKENS, 1)
    for chunk in CHUNKS:
        seconds = [_timed(partial(_prefill, runner, tokens, chunk)) for _ in range(4)]
        speed = PREFILL_TOKENS / median(seconds[1:])
        report.rows.append([str(chunk), f"{speed:.0f}"])
        report.figures[str(chunk)] = speed
    return report


def paging(runner: Runner) -> Report:
    """Returns the bandwidth of moving one conversation's state out of its slot and back, medians of three."""
    report = Report("Paging of one conversation", ["tokens", "MB", "out GB/s", "in GB/s"])
    for length in WARM_TOKENS[:2]:
        conversation = _Conversation(runner, length)
        out, back = [], []
        for _ in range(4):
            out.append(_timed(conversation.page_out))
            back.append(_timed(conversation.page_in))
        size = conversation.cache.ledger.live_bytes
        rates = [size / median(seconds[1:]) / 1e9 for seconds in (out, back)]
        report.rows.append([str(length), f"{size / 1e6:.0f}", *(f"{rate:.1f}" for rate in rates)])
        report.figures[str(length)] = {"bytes": size, "out": out, "in": back}
    return report


def warm_turns(runner: Runner) -> Report:
    """Returns the times to the first token of a cold prompt and of the next turn, live and paged out before."""
    report = Report(f"First token, {NEW_TOKENS} new tokens", ["tokens", "cold ms", "next turn, live", "paged in"])
    cold = 0.0
    for length in WARM_TOKENS:
        if cold * (length / WARM_TOKENS[0]) > MAX_COLD_SECONDS:
            print(f"warm {length}: left out, a cold prompt takes too long here", file=sys.stderr)
            break
        print(f"warm {length} …", file=sys.stderr, flush=True)
        conversation = _Conversation(runner, length)
        cold, times = conversation.cold_seconds, []
        for is_paged in (False, False, True, True):
            if is_paged:
                conversation.page_out()
            times.append(_timed(conversation.next_turn))
        report.rows.append([str(length), *(f"{seconds * 1e3:.0f}" for seconds in (cold, times[1], times[3]))])
        report.figures[str(length)] = {"cold": cold, "live": times[:2], "paged_in": times[2:]}
    return report


class _Conversation:
    """One conversation in a cache of its own with one slot, evaluated once."""

    def __init__(self, runner: Runner, num_tokens: int) -> None:
        self._runner = runner
        self.tokens = _tokens(num_tokens, 2)
        self.cache = PrefixCache(runner.make_caches, num_slots=1, budget_bytes=1 << 50)
        sample = runner.make_caches()
        runner.prefill(sample, self.tokens[:8])
        self.cache.calibrate(sample)
        self.cold_seconds = _timed(self._turn)

    def page_out(self) -> None:
        """Moves the conversation out of its slot."""
        self.cache.pager.page_out(self.cache.slots[0], 0)

    def page_in(self) -> None:
        """Moves the conversation back into the slot."""
        self.begin().close()

    def begin(self) -> Lease:
        """Opens a lease on the conversation as it stands."""
        lease = self.cache.begin(self.tokens, expected_tokens=NEW_TOKENS)
        assert lease is not None
        return lease

    def next_turn(self) -> None:
        """Adds some tokens and evaluates up to the first one of the answer."""
        self.tokens = np.concatenate([self.tokens, _tokens(NEW_TOKENS, len(self.tokens))])
        self._turn()

    def _turn(self) -> None:
        lease = self.begin()
        while lease.offset < len(self.tokens) - 1:
            stop = lease.chunk_stop(2048, len(self.tokens) - 1)
            part = self.tokens[lease.offset : stop]
            self._runner.prefill(lease.caches, part)
            lease.advance(part)
        row = self._runner.make_row(lease.caches, SamplingParams(temperature=0), int(self.tokens[-1]))
        step = self._runner.prepare([row], None)
        self._runner.start(step)
        step.tokens()
        self._runner.detach(row)
        lease.append(int(self.tokens[-1]), is_evaluated=True)
        lease.close()


def _tokens(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)


def _prefill(runner: Runner, tokens: NDArray[np.int32], chunk: int) -> None:
    caches = runner.make_caches()
    for start in range(0, len(tokens), chunk):
        runner.prefill(caches, tokens[start : start + chunk])


def _timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    mx.synchronize()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables; writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", action="append", help="run this part only (may be given several times)")
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each side and mix (default: 10)")
    options = parser.parse_args(arguments)
    model = build_model(options.model)
    runner = Runner(model, vocab_size=VOCAB)
    print(f"{mx.default_device()}, ragged: {runner.is_ragged}", file=sys.stderr, flush=True)
    parts: dict[str, Callable[[], Report]] = {
        "decode": lambda: decode(model, runner, options.blocks),
        "prefill": lambda: prefill_speed(runner),
        "paging": lambda: paging(runner),
        "warm": lambda: warm_turns(runner),
    }
    reports = []
    for name in options.only or parts:
        reports.append(parts[name]())
        print(reports[-1].text(), flush=True)
    if options.json:
        write_json(options.json, f"python -m scripts.bench.device --model {options.model}", reports)


if __name__ == "__main__":
    main()
