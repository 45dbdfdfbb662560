"""Benchmarks how much memory conversations take: what the allocator holds, against what must be held.

Usage: python -m scripts.bench.memory [--json FILE] [--scale N] [--only budget]

Eight conversations share a system prompt of 1 500 tokens. Paged out, they may take little more than the state of
their different tokens and restore points, and all running at once no more than that and what layers without rows per
token hold of each. During a turn that grows to 8 000 tokens, everything together may take
little more than what is live, here the rows and states that a model must see, and the restore points kept on the way
(the end of the system prompt and of the prompt: nothing for attention, a whole window or state elsewhere).

While answers grow, the budget must bind: one cold prompt with an answer longer than what was set aside for it, and
eight long answers together that need about twice the budget.

Layer caches are mlx-lm's own with the sizes of real models, one in `--scale` of the head's width, and filled with
ones: the bytes depend on nothing else.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from cache.layers.layout import Layout
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.types import LayerCache, TokenArray
from models.inference.abilities import Abilities
from models.inference.embedding import Embedder
from models.inference.probe import Form
from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from scripts.bench.common import Report, Target, median, write_json
from server.engine.request import Event, Finished, GenerationRequest
from server.engine.sequence import EngineState
from server.engine.worker import Worker
from tests.support.fake_runner import SharesNothing

# isort: split
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

NUM_CONVERSATIONS = 8
SYSTEM_TOKENS = 1500
OWN_TOKENS = (400, 2500)
LONG_TURN_TOKENS = 8000
CHUNK_TOKENS = 512
MAX_PAGED_OUT = 1.15
MAX_LIVE = 1.2
MAX_OVER_BUDGET = 1.05
EXPECTED_TOKENS = 512
GROWN_FROM = 4096
GROWN_BY = 512
STEPS = (64, 128, 256)
NEVER = 0
"""A token that no answer ends with."""


@dataclass(frozen=True)
class Shape:
    """What matters of a model: its layers and their sizes."""

    name: str
    num_attention: int
    num_heads: int
    head_dim: int
    num_window: int = 0
    window: int = 0
    num_recurrent: int = 0
    state_bytes: int = 0
    """Of one recurrent layer."""

    def make_caches(self) -> list[LayerCache]:
        """Returns the layer caches of an empty sequence."""
        return [
            *(KVCache() for _ in range(self.num_attention)),
            *(RotatingKVCache(max_size=self.window) for _ in range(self.num_window)),
            *(ArraysCache(1) for _ in range(self.num_recurrent)),
        ]

    def evaluate(self, caches: Sequence[LayerCache], num_tokens: int) -> None:
        """Does to caches what a model would do."""
        rows = mx.ones((1, self.num_heads, num_tokens, self.head_dim), mx.bfloat16)
        for cache in caches:
            if isinstance(cache, ArraysCache):
                cache[0] = mx.ones((self.state_bytes // 4,)) + 0
            else:
                cache.update_and_fetch(rows, rows)
        mx.eval([cache.state for cache in caches])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in the layers that keep all of them."""
        return self.num_attention * 2 * self.num_heads * self.head_dim * 2

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of everything else at one offset, once the window is full."""
        window = self.num_window * 2 * self.window * self.num_heads * self.head_dim * 2
        return window + self.num_recurrent * self.state_bytes


SHAPES = (
    Shape("llama 3.2 3B", num_attention=28, num_heads=8, head_dim=128),
    Shape("gemma 3 4B", num_attention=5, num_heads=4, head_dim=256, num_window=29, window=1024),
    Shape("qwen 3.5 4B", num_attention=8, num_heads=4, head_dim=256, num_recurrent=24, state_bytes=2_200_000),
)


def scaled(shape: Shape, scale: int) -> Shape:
    """Returns the shape with one in `scale` of its bytes."""
    return Shape(**{**vars(shape), "head_dim": shape.head_dim // scale, "state_bytes": shape.state_bytes // scale})


class Run:
    """One model's conversations, and the allocator's bytes above where it stood before."""

    def __init__(self, shape: Shape, num_slots: int) -> None:
        gc.collect()
        mx.clear_cache()
        self.shape = shape
        self.cache = PrefixCache(
            shape.make_caches, num_slots=num_slots, budget_bytes=1 << 50, chunk_tokens=CHUNK_TOKENS
        )
        self._before = mx.get_active_memory()
        self._random = np.random.default_rng(2026)
        self._system = self.tokens(SYSTEM_TOKENS)
        sample = shape.make_caches()
        shape.evaluate(sample, 8)
        self.cache.layout.calibrate(sample)

    @property
    def held_bytes(self) -> int:
        """What the allocator holds for all of it."""
        return mx.get_active_memory() - self._before

    @property
    def peak_bytes(self) -> int:
        """The most that was held since the peak was last reset."""
        return mx.get_peak_memory() - self._before

    def prompts(self) -> list[TokenArray]:
        """Returns one prompt per conversation: the system prompt and some hundred to thousand tokens of its own."""
        lengths = self._random.integers(*OWN_TOKENS, NUM_CONVERSATIONS)
        return [np.concatenate([self._system, self.tokens(int(length))]) for length in lengths]

    def turn(self, tokens: TokenArray) -> Lease:
        """Evaluates a prompt but for its last token and returns the open lease."""
        lease = self.begin(tokens)
        while lease.offset < len(tokens) - 1:
            self.chunk(lease, tokens)
        return lease

    def begin(self, tokens: TokenArray) -> Lease:
        """Opens a lease; there is always a free slot here."""
        points = [RestorePoint(SYSTEM_TOKENS, RestorePointKind.SYSTEM_END)]
        lease = self.cache.begin(CacheRequest(Lookup(tokens), restore_points=points))
        assert lease is not None
        return lease

    def chunk(self, lease: Lease, tokens: TokenArray) -> None:
        """Evaluates the next chunk of a prompt."""
        start, stop = lease.offset, lease.chunk_stop(CHUNK_TOKENS, len(tokens) - 1)
        self.shape.evaluate(lease.caches, stop - start)
        lease.advance(tokens[start:stop])

    def tokens(self, num_tokens: int) -> TokenArray:
        """Returns tokens that were never seen before."""
        return self._random.integers(0, 150_000, num_tokens).astype(np.int32)


def unique_bytes(run: Run) -> tuple[int, int]:
    """Returns the bytes of the state of all different tokens, and of all snapshots taken, by arithmetic."""
    nodes = list(run.cache.memory.nodes())
    num_tokens = sum(len(node.tokens) for node in nodes)
    num_snapshots = sum(node.snapshot is not None for node in nodes)
    return num_tokens * run.shape.bytes_per_token, num_snapshots * run.shape.snapshot_bytes


def bench_paged_out(shapes: Sequence[Shape]) -> Report:
    """Weighs eight conversations that are all paged out."""
    report = Report(
        f"{NUM_CONVERSATIONS} conversations on {SYSTEM_TOKENS} shared tokens, paged out",
        ["model", "tokens MB", "snapshots MB", "held MB", "held / needed", "ledger / held", "whole copies MB"],
    )
    for shape in shapes:
        run = Run(shape, num_slots=2)
        prompts = run.prompts()
        for tokens in prompts:
            run.turn(tokens).close()
        run.cache.pager.page_out_idle(0, None)
        needed, snapshots = unique_bytes(run)
        held_bytes = run.held_bytes
        copies = sum(len(tokens) * shape.bytes_per_token + shape.snapshot_bytes for tokens in prompts)
        ratio = held_bytes / (needed + snapshots)
        ledger = run.cache.ledger.charged_bytes / held_bytes
        report.rows.append(
            [shape.name, *map(_mb, (needed, snapshots, held_bytes)), f"{ratio:.3f}", f"{ledger:.3f}", _mb(copies)]
        )
        report.figures[shape.name] = {"needed_bytes": needed, "snapshot_bytes": snapshots, "held_bytes": held_bytes}
        report.add_verdict(f"{shape.name}, held / needed", ratio, Target(MAX_PAGED_OUT))
    return report


def bench_running(shapes: Sequence[Shape]) -> Report:
    """Weighs eight conversations that run at once, each with a copy of the system prompt, and on one head."""
    report = Report(
        f"{NUM_CONVERSATIONS} conversations on {SYSTEM_TOKENS} shared tokens, all running",
        ["model", "needed MB", "copies MB", "on a head MB", "copies / needed", "head / needed"],
    )
    for shape in shapes:
        sizes = []
        for head_tokens in (None, 0.0):
            run = Run(shape, num_slots=NUM_CONVERSATIONS)
            shared = run.cache.pager.shared = SharesNothing()
            shared.head_tokens = head_tokens
            leases = [run.turn(tokens) for tokens in run.prompts()]
            needed = sum(unique_bytes(run)) + len(leases) * shape.snapshot_bytes
            sizes.append(run.held_bytes)
        ratios = [num_bytes / needed for num_bytes in sizes]
        report.rows.append([shape.name, *map(_mb, (needed, *sizes)), *(f"{ratio:.3f}" for ratio in ratios)])
        report.figures[shape.name] = {
            "needed_bytes": needed,
            "copied_bytes": sizes[0],
            "headed_bytes": sizes[1],
        }
        report.add_verdict(f"{shape.name}, on a head / needed", ratios[1], Target(MAX_PAGED_OUT))
    return report


def bench_long_turn(shapes: Sequence[Shape]) -> Report:
    """Weighs one conversation while it grows to 8 000 tokens, and while it is paged out and in again."""
    report = Report(
        f"one conversation growing to {LONG_TURN_TOKENS} tokens",
        ["model", "live MB", "restore points MB", "held at most MB", "held / both", "paging takes MB more"],
    )
    for shape in shapes:
        run = Run(shape, num_slots=1)
        tokens = np.concatenate([run.prompts()[0], run.tokens(LONG_TURN_TOKENS)])[:LONG_TURN_TOKENS]
        lease, worst = run.begin(tokens), 0
        while lease.offset < len(tokens) - 1:
            run.chunk(lease, tokens)
            worst = max(worst, run.held_bytes)
        lease.close()
        live, snapshots = len(tokens) * shape.bytes_per_token + shape.snapshot_bytes, unique_bytes(run)[1]
        ratio, paging = worst / (live + snapshots), _paging_bytes(run, tokens)
        report.rows.append([shape.name, *map(_mb, (live, snapshots, worst)), f"{ratio:.3f}", _mb(paging)])
        report.figures[shape.name] = {
            "live_bytes": live,
            "snapshot_bytes": snapshots,
            "held_bytes": worst,
            "paging_extra_bytes": paging,
        }
        report.add_verdict(f"{shape.name}, held / (live + restore points)", ratio, Target(MAX_LIVE))
    return report


def _paging_bytes(run: Run, tokens: TokenArray) -> int:
    """Pages the conversation out and in again; returns how far memory rose meanwhile."""
    before = run.held_bytes
    mx.reset_peak_memory()
    run.cache.pager.page_out_idle(0, None)
    run.begin(tokens).close()
    return run.peak_bytes - before


@dataclass(frozen=True)
class Answers:
    """Some requests at once, and a budget of so many tokens and so many whole states for all of them."""

    name: str
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    budget_tokens: int

    def budget_bytes(self, shape: Shape) -> int:
        """Returns the budget; a window grows by a chunk in prefill, recurrent state is merged with others'."""
        return self.budget_tokens * shape.bytes_per_token + 2 * self.num_requests * shape.snapshot_bytes


ANSWERS = (
    Answers("one cold prompt of 3 072 tokens, 800 generated", 1, 3072, 800, 3900),
    Answers("eight prompts of 500 tokens, 1 500 generated by each", 8, 500, 1500, 8000),
)


@dataclass(eq=False)
class Row:
    """A decoding sequence without tokens that mean anything."""

    caches: list[LayerCache]
    known: list[int]


@dataclass(frozen=True)
class Sampled:
    """A step whose tokens are all the same."""

    num_rows: int

    def tokens(self) -> list[list[int]]:
        """Returns a token for each row."""
        return [[7]] * self.num_rows

    def logprob(self, index: int, token: int, place: int = 0) -> None:
        """Nobody asks."""


class ShapeRunner(SharesNothing):
    """Does to caches what a runner over a model of some shape would do."""

    abilities = Abilities(Form.HEADS, "together", "off")
    overlaps = False

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.num_prefilled = 0

    def score(self, *arguments: Any) -> list[TokenLogprob]:
        """Has no logits to tell of."""
        raise NotImplementedError

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int = 0) -> None:
        """Evaluates tokens of one sequence."""
        self.num_prefilled += len(tokens)
        self._shape.evaluate(caches, len(tokens))

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: SamplingParams,
        next_token: int,
        *,
        prompt: TokenArray,
        generated: Sequence[int],
        adapter: int = 0,
    ) -> Row:
        """Returns a row over caches."""
        return Row(caches, [next_token])

    def force(self, row: Row, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Nothing is ever forced here."""
        raise AssertionError("no request of this benchmark forces a token")

    def prepare(self, rows: Sequence[Row], *arguments: Any, **options: Any) -> Sampled:
        """Evaluates a token for each row."""
        for row in rows:
            self._shape.evaluate(row.caches, 1)
        return Sampled(len(rows))

    def sample(self, step: Sampled, masks: Sequence[MaskWords | None]) -> None:
        """Nothing is ever bound here."""
        raise AssertionError("no request of this benchmark is bound to a grammar")

    def start(self, step: Sampled) -> None:
        """Steps are done when they are prepared."""

    def drain(self, lost: list[Row]) -> None:
        """Nothing is under way."""

    def detach(self, row: Row) -> None:
        """A row's caches always hold all of its state."""

    def close(self) -> None:
        """There is nothing to close."""


class Ends:
    """Counts the answers that came to their last token."""

    is_behind = False

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def post(self, events: list[Event]) -> None:
        """Takes a request's events."""
        self.num_tokens += [event.timings.predicted_tokens for event in events if isinstance(event, Finished)]


class Silent:
    """Decodes every token to nothing."""

    def push(self, token_id: int) -> str:
        """Returns no text."""
        return ""

    def finish(self) -> str:
        """Returns no text."""
        return ""


def bench_budget(shapes: Sequence[Shape]) -> Report:
    """Weighs live and stored state while answers grow, after each step and within steps, against the budget."""
    columns = ["model", "requests", "budget MB", "held / budget", "peak / budget", "waited", "evaluated / needed"]
    report = Report("answers that grow, against the budget", columns)
    for shape in shapes:
        for answers in ANSWERS:
            figures = _answer(shape, answers)
            share, peak = (figures[name] / figures["budget_bytes"] for name in ("held_bytes", "peak_bytes"))
            evaluated = figures["evaluated_tokens"] / figures["needed_tokens"]
            report.rows.append(
                [
                    shape.name,
                    str(answers.num_requests),
                    _mb(figures["budget_bytes"]),
                    f"{share:.3f}",
                    f"{peak:.3f}",
                    str(figures["preemptions"]),
                    f"{evaluated:.2f}",
                ]
            )
            report.figures[f"{shape.name}, {answers.name}"] = figures
            report.add_verdict(f"{shape.name}, {answers.name}, held / budget", share, Target(MAX_OVER_BUDGET))
    return report


def _answer(shape: Shape, answers: Answers) -> dict[str, int]:
    """Runs requests to their ends in an engine's worker; returns what was held and evaluated."""
    gc.collect()
    mx.clear_cache()
    before, runner, ends, most_bytes = mx.get_active_memory(), ShapeRunner(shape), Ends(), 0
    worker = _worker(shape, runner, answers)
    for number in range(answers.num_requests):
        tokens = np.random.default_rng(number).integers(1, 150_000, answers.prompt_tokens).astype(np.int32)
        worker.submit(GenerationRequest(f"r{number}", tokens, answers.answer_tokens, ignore_eos=True), ends)
    mx.reset_peak_memory()
    while worker.has_work:
        worker.step()
        most_bytes = max(most_bytes, mx.get_active_memory() - before)
    assert ends.num_tokens == [answers.answer_tokens] * answers.num_requests, "an answer came to no end"
    generated = answers.num_requests * answers.answer_tokens
    return {
        "budget_bytes": answers.budget_bytes(shape),
        "held_bytes": most_bytes,
        "peak_bytes": mx.get_peak_memory() - before,
        "preemptions": worker.stats().num_preempted,
        "evaluated_tokens": runner.num_prefilled + generated,
        "needed_tokens": answers.num_requests * answers.prompt_tokens + generated,
    }


def _worker(shape: Shape, runner: ShapeRunner, answers: Answers) -> Worker:
    cache = PrefixCache(
        shape.make_caches, num_slots=8, budget_bytes=answers.budget_bytes(shape), chunk_tokens=CHUNK_TOKENS
    )
    sample = shape.make_caches()
    shape.evaluate(sample, 8)
    cache.layout.calibrate(sample)
    return Worker(
        cast(Any, runner),
        EngineState(cache),
        Silent,
        eos_token_ids=frozenset({NEVER}),
        chunk_tokens=CHUNK_TOKENS,
        expected_tokens=EXPECTED_TOKENS,
        clock=time.monotonic,
        embedder=Embedder(shape),
    )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"


def bench_growth(shapes: Sequence[Shape]) -> Report:
    """Times attention over a buffer that grows by steps of some size, against one that is large enough at once."""
    report = Report(
        f"buffers growing from {GROWN_FROM} tokens by {GROWN_BY}", ["step", "time / none", "unused rows in the mean"]
    )
    shape = replace(shapes[0], num_attention=2)
    _decode_growing(shape, GROWN_BY)  # warms up
    rounds = [{step: _decode_growing(shape, step) for step in (GROWN_BY, *STEPS)} for _ in range(5)]
    for step in STEPS:
        ratio = median([seconds[step] / seconds[GROWN_BY] for seconds in rounds])
        report.rows.append([str(step), f"{ratio:.3f}", str(step // 2)])
        report.figures[str(step)] = ratio
    return report


def _decode_growing(shape: Shape, step: int) -> float:
    """Decodes with buffers that grow by `step` tokens; returns the processor seconds that it took."""
    caches, layout = shape.make_caches(), Layout(shape.make_caches())
    shape.evaluate(caches, GROWN_FROM)
    row = mx.ones((1, shape.num_heads, 1, shape.head_dim), mx.bfloat16)
    capacity, begun = GROWN_FROM, time.process_time()
    for offset in range(GROWN_FROM, GROWN_FROM + GROWN_BY):
        if offset == capacity:
            capacity += step
            layout.resize(caches, capacity)
        mx.eval([mx.fast.scaled_dot_product_attention(row, *c.update_and_fetch(row, row), scale=1.0) for c in caches])
    return time.process_time() - begun


BENCHMARKS = {
    "paged-out": bench_paged_out,
    "running": bench_running,
    "long-turn": bench_long_turn,
    "budget": bench_budget,
    "growth": bench_growth,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmarks and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--scale", type=int, default=4, help="divide all sizes by this, for small machines")
    parser.add_argument("--only", choices=list(BENCHMARKS), help="run one of the benchmarks")
    options: Any = parser.parse_args(arguments)
    shapes = [scaled(shape, options.scale) for shape in SHAPES]
    chosen = [options.only] if options.only else list(BENCHMARKS)
    reports = [BENCHMARKS[name](shapes) for name in chosen]
    for report in reports:
        print(report.text(), end="\n\n", flush=True)
    if options.json:
        write_json(options.json, "python -m scripts.bench.memory", reports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
