"""Benchmarks for a machine with an accelerator: a model of usual size in bfloat16, with random weights.

Usage: python -m scripts.bench.device [--model tiny|2b|8b] [--json FILE] [--only NAME]…

- decode: rows of equal and mixed lengths together, against mlx-lm's `BatchGenerator`, in turns within one process.
- prefill: tokens per second of a cold prompt, by chunk size.
- turns: time to the first token of a conversation's next turn, in place and paged in, against a cold prompt; and of
  moving its state out of its slot and back.

The weights are random, so tokens mean nothing; times and bytes are those of a real model of that shape. In half
precision the two sides round differently, so the share of equal tokens is shown, not asserted.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from server.measure import NEW_TOKENS, MeasuredConversation, Subject, compare, prefill_speed

# isort: split
import mlx.core as mx
from mlx_lm.models import qwen3

from models.inference.runner import Runner
from scripts.bench.common import Report, write_json
from scripts.bench.decode import VOCAB

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
    "400, 420 … 540": tuple(range(400, 541, 20)),
    "32 from 100 to 8000": tuple(round(100 * 80 ** (row / 31)) for row in range(32)),
}
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
PREFILL_TOKENS = 8192
WARM_TOKENS = (8192, 32_768, 131_072)
MAX_COLD_SECONDS = 90.0
"""A length whose cold prompt would take longer, by the one before, is left out."""


def build_model(size: str) -> Any:
    """Returns a model with random bfloat16 weights, evaluated."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**_COMMON, **MODELS[size]}))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode(subject: Subject, num_blocks: int) -> Report:
    """Compares both sides for each mix of lengths."""
    columns = ["lengths", "tokens/s", "BatchGenerator", "ratio", "equal tokens"]
    report = Report("Decoding together, greedy", columns)
    for name, lengths in MIXES.items():
        print(f"decode {name} …", file=sys.stderr, flush=True)
        result = compare(subject, lengths, num_blocks)
        speeds = [f"{speed:.0f}" for speed in result.speeds]
        report.rows.append([name, *speeds, f"{result.ratio:.2f}", f"{result.equal_share:.0%}"])
        report.figures[name] = {
            "tokens_per_second": result.speeds,
            "ratio": result.ratio,
            "equal": result.equal_share,
        }
    return report


def prefill(subject: Subject) -> Report:
    """Returns tokens per second of a cold prompt in chunks of each size, medians of three."""
    report = Report(f"Prefill of {PREFILL_TOKENS} tokens", ["chunk", "tokens/s"])
    for chunk in CHUNKS:
        speed = statistics.median(prefill_speed(subject, PREFILL_TOKENS, chunk) for _ in range(3))
        report.rows.append([str(chunk), f"{speed:.0f}"])
        report.figures[str(chunk)] = speed
    return report


def turns(subject: Subject) -> Report:
    """Returns times to the first token, cold and of next turns, and of moves of the state."""
    columns = ["tokens", "cold ms", "next turn, live", "paged in", "MB", "out GB/s", "in GB/s"]
    report = Report(f"First token, {NEW_TOKENS} new tokens", columns)
    cold_ms = 0.0
    for length in WARM_TOKENS:
        if cold_ms / 1e3 * (length / WARM_TOKENS[0]) > MAX_COLD_SECONDS:
            print(f"turns at {length}: left out, a cold prompt takes too long here", file=sys.stderr)
            break
        print(f"turns at {length} …", file=sys.stderr, flush=True)
        with closing(MeasuredConversation(subject, length)) as conversation:
            conversation.measure()
        figures, cold_ms = conversation.figures, conversation.figures["cold_ms"]
        rates = [figures["megabytes"] / figures[move] for move in ("page_out_ms", "page_in_ms")]
        times = [f"{figures[name]:.0f}" for name in ("cold_ms", "live_ms", "paged_in_ms")]
        report.rows.append([str(length), *times, f"{figures['megabytes']:.0f}", *(f"{rate:.1f}" for rate in rates)])
        report.figures[str(length)] = figures
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables; writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", action="append", help="run this part only (may be given several times)")
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each side and mix (default: 10)")
    options = parser.parse_args(arguments)
    model = build_model(options.model)
    subject = Subject(model, Runner(model, vocab_size=VOCAB), VOCAB)
    print(f"{mx.default_device()}, rows {subject.runner.abilities.form.value}", file=sys.stderr, flush=True)
    parts: dict[str, Callable[[], Report]] = {
        "decode": lambda: decode(subject, options.blocks),
        "prefill": lambda: prefill(subject),
        "turns": lambda: turns(subject),
    }
    reports = []
    for name in options.only or parts:
        reports.append(parts[name]())
        print(reports[-1].text(), flush=True)
    if options.json:
        write_json(options.json, f"python -m scripts.bench.device --model {options.model}", reports)


if __name__ == "__main__":
    main()
