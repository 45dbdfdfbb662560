"""Decoding rows of mixed lengths, and rows on one head, against mlx-lm's `BatchGenerator`.

Usage: python -m scripts.bench.decode [--json FILE] [--blocks N] [--only NAME]

Both sides decode the same prefilled sequences of one model in one process, in turns of a few steps, so that a busy
machine slows both alike; the tokens must be equal. The peer is used as a server uses it: caches inserted, greedy,
`next_generated`. Joining (the peer merges caches, we do not) is outside the measured time. The model
has Qwen3-0.6B's proportions at half its width, 8 layers and random float32 weights: at 4000 tokens a sequence's keys
and values weigh as much as the weights, as they do for a model of that kind in 4 to 16 bits.

Rows that begin with one head come to it as in a server: our side is the engine's worker, whose cache restores the
head for each request, and our time is that of all that a step of the engine does.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.measure import (
    BLOCK_STEPS,
    WARM_UP_STEPS,
    Comparison,
    PeerSide,
    Prefilled,
    Subject,
    TimedSide,
    compare,
    take_turns,
)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import qwen3

from cache.prefix_cache import PrefixCache
from cache.types import TokenArray
from models.inference.embedding import Embedder
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from scripts.bench.common import Report, Target, write_json
from server.engine.request import Delta, Event, Failed, GenerationRequest
from server.engine.sequence import EngineState
from server.engine.worker import Worker
from tests.support import tiny_models

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
    Mix("8 x 500", (500,) * 8, 1.0),
    Mix("4000 + 3 x 100", (4000, 100, 100, 100), 2.3),
    Mix("8000 + 2000 + 500 + 5 x 100", (8000, 2000, 500, 100, 100, 100, 100, 100), 4.5),
)
TINY = Mix("tiny model, 4 x 50", (50,) * 4, 0.95)


@dataclass(frozen=True)
class OnHead:
    """Rows that begin with the same tokens, and go on with `TAIL_TOKENS` each of its own."""

    num_rows: int
    head_tokens: int
    target: float

    @property
    def name(self) -> str:
        return f"{self.num_rows} on {self.head_tokens}"


ON_HEAD = (OnHead(4, 2000, 1.5), OnHead(8, 2000, 1.9), OnHead(4, 8000, 2.6), OnHead(8, 8000, 3.5))
TAIL_TOKENS = 100
MAX_LIVE = 1.15
"""Live bytes of eight rows on one head, in bytes of their different tokens."""


def build_model() -> Any:
    """Returns the model, evaluated; the same weights in every run."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    # Twice the usual gain, or the output would soon run in a circle.
    model.update(tree_map(lambda weight: weight * 2 if weight.ndim > 1 else weight, model.parameters()))
    mx.eval(model.parameters())
    return model


class Spelled:
    """Decodes every token to a letter: each is told at once."""

    def push(self, token_id: int) -> str:
        """Returns the letter."""
        return "x"

    def finish(self) -> str:
        """Returns no text."""
        return ""


class Said:
    """The tokens that one request was answered with."""

    is_behind = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def post(self, events: list[Event]) -> None:
        """Takes a request's events; raises what it failed with."""
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                self.tokens += event.token_ids


class EngineSide:
    """Decodes with the engine's worker, and a cache that has a slot for each row."""

    def __init__(self, runner: Runner, prompts: list[TokenArray], num_steps: int) -> None:
        self.cache = PrefixCache(
            runner.make_caches, num_slots=len(prompts), budget_bytes=1 << 50, chunk_tokens=PREFILL_CHUNK_TOKENS
        )
        sample = runner.make_caches()
        runner.prefill(sample, prompts[0][:8])
        self.cache.layout.calibrate(sample)
        max_tokens = num_steps + 4 * len(prompts)
        self._worker = Worker(
            runner,
            EngineState(self.cache),
            Spelled,
            eos_token_ids=frozenset(),
            chunk_tokens=PREFILL_CHUNK_TOKENS,
            expected_tokens=max_tokens,
            clock=time.monotonic,
            embedder=Embedder(None),
        )
        self._said = [Said() for _ in prompts]
        self._num_steps = 0
        for number, (prompt, said) in enumerate(zip(prompts, self._said, strict=True)):
            greedy = SamplingParams(temperature=0)
            self._worker.submit(GenerationRequest(f"{number}", prompt, max_tokens, sampling=greedy), said)
        while not all(said.tokens for said in self._said):
            self._worker.step()

    def decode(self, num_steps: int) -> None:
        """Decodes `num_steps` tokens of each row."""
        for _ in range(num_steps):
            self._worker.step()
        self._num_steps += num_steps
        mx.synchronize()

    def tokens(self) -> list[list[int]]:
        """Returns what each row has said, as far as the peer has come: the first rows began before the last."""
        return [said.tokens[: self._num_steps] for said in self._said]

    @property
    def live_share(self) -> float:
        """Live bytes, in bytes of the rows' different tokens."""
        num_tokens = sum(len(node.tokens) for node in self.cache.memory.nodes())
        return self.cache.ledger.live_bytes / (num_tokens * self.cache.layout.bytes_per_token)


def compare_on_head(subject: Subject, rows: OnHead, num_blocks: int) -> Comparison:
    """Has both sides decode rows on one head, a block at a time."""
    head = subject.prefilled(rows.head_tokens + 1, 0)
    sequences = []
    for seed in range(rows.num_rows):
        tail, caches = subject.tokens(TAIL_TOKENS, seed + 1), head.copies()
        subject.prefill(caches, tail[:-1], PREFILL_CHUNK_TOKENS)
        sequences.append(Prefilled(np.concatenate([head.tokens[:-1], tail]), caches))
    num_steps = WARM_UP_STEPS + num_blocks * BLOCK_STEPS
    peer = TimedSide(lambda: PeerSide(subject.model, sequences, num_steps))
    prompts = [sequence.tokens for sequence in sequences]
    sequences.clear()
    ours = TimedSide(lambda: EngineSide(subject.runner, prompts, num_steps))
    return take_turns(subject, Comparison(rows.num_rows, ours, peer), num_blocks)


def add_to(report: Report, mix: Mix | OnHead, result: Comparison) -> None:
    """Adds rows to the table. Raises SystemExit where the two sides say different tokens."""
    if result.equal_share < 1:
        raise SystemExit(f"{mix.name}: the two sides say different tokens")
    peaks = [side.peak_bytes for side in (result.ours, result.peer)]
    cells = [
        *(f"{speed:.1f}" for speed in result.speeds),
        f"{result.ratio:.2f}",
        *(f"{p / 2**20:.0f}" for p in peaks),
    ]
    report.rows.append([mix.name, *cells])
    report.figures[mix.name] = {
        "ours_block_seconds": result.ours.block_seconds,
        "peer_block_seconds": result.peer.block_seconds,
        "steps_per_block": BLOCK_STEPS,
        "ratio": result.ratio,
        "peak_bytes": peaks,
        "num_distinct_tokens": len({token for row in result.ours.side.tokens() for token in row}),
    }
    report.add_verdict(mix.name, result.ratio, Target(mix.target, is_ceiling=False))
    if isinstance(result.ours.side, EngineSide):
        live = report.figures[mix.name]["live_share"] = result.ours.side.live_share
        report.add_verdict(f"{mix.name}, live bytes to those of different tokens", live, Target(MAX_LIVE))


def main() -> None:
    """Prints the table; writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--blocks", type=int, default=10, help="measured blocks of each side and mix (default: 10)")
    parser.add_argument("--only", choices=[mix.name for mix in (*MIXES, TINY, *ON_HEAD)], help="these rows alone")
    options = parser.parse_args()
    model, tiny = build_model(), tiny_models.build("llama")
    subject = Subject(model, Runner(model, vocab_size=VOCAB), VOCAB, PREFILL_CHUNK_TOKENS)
    small = Subject(tiny, Runner(tiny, vocab_size=tiny_models.VOCAB), tiny_models.VOCAB, PREFILL_CHUNK_TOKENS)
    columns = ["lengths", "tokens/s", "BatchGenerator", "ratio", "MiB", "BatchGenerator MiB"]
    report = Report("Decoding together, greedy, equal tokens", columns)
    for mix in (*MIXES, TINY, *ON_HEAD):
        if options.only in (None, mix.name):
            print(f"{mix.name} …", file=sys.stderr, flush=True)
            if isinstance(mix, OnHead):
                add_to(report, mix, compare_on_head(subject, mix, options.blocks))
            else:
                add_to(report, mix, compare(small if mix is TINY else subject, mix.lengths, options.blocks))
            subject.runner.separate_all()  # what these rows share is no memory of the next ones
    print(report.text())
    if options.json:
        write_json(options.json, "python -m scripts.bench.decode", [report])


if __name__ == "__main__":
    main()
