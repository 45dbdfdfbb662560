"""Measures one model: decoding beside mlx-lm's `BatchGenerator`, prefill, and what the cache saves.

Knows no HTTP. Prompts are random tokens. Two sides take turns of a few steps in one process, so that other programs
slow both alike. All of it belongs to one thread.
"""

import copy
import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from numpy.typing import NDArray

from cache.budget import FolderError
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier
from cache.layers.layout import Layout
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.types import LayerCache
from models.errors import brief
from models.inference.row import DecodeRow
from models.inference.runner import DecodeStep, Runner
from models.inference.sampling_params import SamplingParams
from models.texts import size_text

WARM_UP_STEPS = 3
BLOCK_STEPS = 4
MIN_BLOCKS = 3
NEW_TOKENS = 64
GROWN_TOKENS = 9 * NEW_TOKENS
"""Tokens by which a conversation grows during its measurement."""
SAVE_SECONDS = 10.0
UNBOUNDED = 1 << 50

DECODE_ROWS = ((500,), (500,) * 4, (500,) * 8, (4000, *(100,) * 3), (8000, 2000, 500, *(100,) * 5))
NUM_BLOCKS = 10
CHUNKS = (256, 512, 1024, 2048)
PREFILL_TOKENS = (4096, 2048, 1024, 512)
PREFILL_SHARE = 0.3
"""Part of the time for prefill."""
LOOK_TOKENS = 512
TURN_TOKENS = (2000, 8000, 32_000)
SHARE = 0.5
"""Part of the time left; a longer measurement comes last, and may take all."""
MAX_REASON = 200


class TimeUp(Exception):
    """The time for a measurement is over."""


@dataclass(frozen=True)
class Prefilled:
    """A sequence up to its last token, to be fed first."""

    tokens: NDArray[np.int32]
    caches: list[LayerCache]

    def copies(self, spare_tokens: int | None = None) -> list[LayerCache]:
        """Own caches, with capacity for `spare_tokens` more as the engine sizes them."""
        caches = copy.deepcopy(self.caches)
        if spare_tokens is not None:
            Layout(caches).resize(caches, len(self.tokens) + spare_tokens)
        mx.eval([cache.state for cache in caches])
        return caches


@dataclass(eq=False)
class Subject:
    """The model that is measured. What takes long raises TimeUp once `until` has passed."""

    model: Any
    runner: Runner
    vocab_size: int
    chunk_tokens: int = 2048
    until: float = math.inf
    """A reading of `time.perf_counter`."""

    @property
    def left_seconds(self) -> float:
        return max(self.until - time.perf_counter(), 0.0)

    def tokens(self, length: int, seed: int) -> NDArray[np.int32]:
        """The same random tokens each time."""
        return np.random.default_rng([length, seed]).integers(0, self.vocab_size, length).astype(np.int32)

    def prefill(self, caches: list[LayerCache], tokens: NDArray[np.int32], chunk_tokens: int) -> None:
        """Evaluates tokens; raises TimeUp between two chunks."""
        for start in range(0, len(tokens), chunk_tokens):
            self.check_time()
            self.runner.prefill(caches, tokens[start : start + chunk_tokens])

    def check_time(self) -> None:
        """Raises TimeUp."""
        if not self.left_seconds:
            raise TimeUp

    def prefilled(self, length: int, seed: int) -> Prefilled:
        """A random sequence, all but its last token evaluated."""
        made = Prefilled(self.tokens(length, seed), self.runner.make_caches())
        self.prefill(made.caches, made.tokens[:-1], self.chunk_tokens)
        return made


def timed(act: Callable[[], object]) -> float:
    """The seconds until all is computed."""
    started = time.perf_counter()
    act()
    mx.synchronize()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------- decoding, two sides


def launch(runner: Runner, rows: Sequence[DecodeRow], previous: DecodeStep | None) -> DecodeStep:
    """Prepares a step of the bare runner, and starts it."""
    step = runner.prepare(rows, previous)
    runner.start(step)
    return step


class _OurSide:
    """Decodes with the double-buffered loop of the engine."""

    def __init__(self, runner: Runner, sequences: Sequence[Prefilled], num_steps: int) -> None:
        greedy = SamplingParams(temperature=0)
        self._runner = runner
        self._rows = [runner.make_row(s.copies(num_steps + 1), greedy, int(s.tokens[-1])) for s in sequences]
        self._current = launch(runner, self._rows, None)
        self._steps: list[list[int]] = []

    def decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            following = launch(self._runner, self._rows, self._current)
            self._steps.append([token for (token,) in self._current.tokens()])
            self._current = following
        mx.synchronize()

    def tokens(self) -> list[list[int]]:
        return [list(row) for row in zip(*self._steps, strict=True)]


class PeerSide:
    """Decodes with mlx-lm's `BatchGenerator` as a server uses it: caches inserted, greedy, `next_generated`."""

    def __init__(self, model: Any, sequences: Sequence[Prefilled], num_steps: int) -> None:
        """Raises ValueError for layer caches that the peer cannot merge."""
        self._generator = BatchGenerator(model, max_tokens=num_steps + 2, prefill_batch_size=len(sequences))
        uids = self._generator.insert(
            [[int(s.tokens[-1])] for s in sequences],
            caches=[s.copies() for s in sequences],
            all_tokens=[s.tokens[:-1].tolist() for s in sequences],
        )
        self._tokens: dict[int, list[int]] = {uid: [] for uid in uids}

    def decode(self, num_steps: int) -> None:
        """As `Side.decode`."""
        for _ in range(num_steps):
            for response in self._generator.next_generated():
                self._tokens[response.uid].append(response.token)
        mx.synchronize(self._generator.stream)

    def tokens(self) -> list[list[int]]:
        """What each row has said."""
        return list(self._tokens.values())


class Side(Protocol):
    """Who decodes rows."""

    def decode(self, num_steps: int) -> None:
        """Decodes `num_steps` tokens of each row; nothing is left running."""

    def tokens(self) -> list[list[int]]:
        """What each row has said."""


class TimedSide:
    """One side's times and memory. Joining rows is not timed."""

    def __init__(self, make: Callable[[], Side]) -> None:
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
        """Peak bytes of sequences and the work on them, beyond the model."""
        return self._resident_bytes + self._passing_bytes

    def decode_block(self) -> None:
        """Decodes one block and takes its time."""
        before_bytes = mx.get_active_memory()
        mx.reset_peak_memory()
        self.block_seconds.append(timed(partial(self.side.decode, BLOCK_STEPS)))
        self._passing_bytes = max(self._passing_bytes, mx.get_peak_memory() - before_bytes)


@dataclass(frozen=True)
class Comparison:
    """Rows that both sides have decoded together."""

    num_rows: int
    ours: TimedSide
    peer: TimedSide

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second of all rows, ours first: medians over blocks."""
        num_tokens = self.num_rows * BLOCK_STEPS
        ours, peer = (num_tokens / statistics.median(side.block_seconds) for side in (self.ours, self.peer))
        return ours, peer

    @property
    def ratio(self) -> float:
        """Our speed divided by the peer's: the median over neighbouring blocks."""
        pairs = zip(self.ours.block_seconds, self.peer.block_seconds, strict=True)
        return statistics.median(theirs / own for own, theirs in pairs)

    @property
    def equal_share(self) -> float:
        """Share of equal tokens; in half precision the sides round differently."""
        return float(np.mean(np.array(self.ours.side.tokens()) == np.array(self.peer.side.tokens())))


def compare(subject: Subject, lengths: Sequence[int], num_blocks: int) -> Comparison:
    """Has both sides decode rows of these lengths. Raises TimeUp, and ValueError where the peer cannot batch them."""
    sequences = [subject.prefilled(length, seed) for seed, length in enumerate(lengths)]
    num_steps = WARM_UP_STEPS + num_blocks * BLOCK_STEPS
    ours = TimedSide(lambda: _OurSide(subject.runner, sequences, num_steps))
    peer = TimedSide(lambda: PeerSide(subject.model, sequences, num_steps))
    return take_turns(subject, Comparison(len(lengths), ours, peer), num_blocks)


def take_turns(subject: Subject, sides: Comparison, num_blocks: int) -> Comparison:
    """Has both sides decode, a block at a time; fewer blocks where time ends. Raises TimeUp."""
    for number in range(num_blocks):
        if number < MIN_BLOCKS:
            subject.check_time()
        elif not subject.left_seconds:
            break
        sides.ours.decode_block()
        sides.peer.decode_block()
    return sides


# --------------------------------------------------------------------------------------------- prefill and the cache


def prefill_speed(subject: Subject, num_tokens: int, chunk_tokens: int) -> float:
    """Tokens per second of a cold prompt in chunks, after a chunk that is not timed. Raises TimeUp."""
    tokens = subject.tokens(num_tokens, 1)
    subject.prefill(subject.runner.make_caches(), tokens[:chunk_tokens], chunk_tokens)
    return num_tokens / timed(lambda: subject.prefill(subject.runner.make_caches(), tokens, chunk_tokens))


class MeasuredConversation:
    """A conversation in a prefix cache of its own with one slot; with a folder, also on disk. To be closed."""

    def __init__(self, subject: Subject, num_tokens: int, folder: Path | None = None) -> None:
        """Raises FolderError."""
        self._subject = subject
        self._folder = folder
        self._tokens = subject.tokens(num_tokens, 2)
        self._hit_tokens = 0
        self._cache = self._open()
        self.figures: dict[str, float] = {"tokens": num_tokens}

    @property
    def bytes_per_token(self) -> float:
        return self._cache.stats().bytes_per_token

    def measure(self) -> None:
        """Times a cold prompt, next turns and moves of the state. Raises TimeUp; `figures` has what came before."""
        figures, cache = self.figures, self._cache
        figures["cold_ms"] = 1e3 * timed(self._turn)
        figures["live_ms"] = self._next_turn()
        figures["paged_in_ms"] = self._next_turn(self._page_out)
        # The first of each kind allocates.
        moves = [(timed(self._page_out), timed(self._page_in)) for _ in range(3)][1:]
        figures["page_out_ms"], figures["page_in_ms"] = (1e3 * min(times) for times in zip(*moves, strict=True))
        figures["megabytes"] = cache.ledger.live_bytes / 1e6
        if self._folder is not None:
            restarted = self._next_turn(self._restart, num_times=1)
            # Some of it is missing if it was not written in time.
            if self._hit_tokens >= len(self._tokens) - 2 * NEW_TOKENS:
                figures["restarted_ms"] = restarted

    def close(self) -> None:
        """Ends the threads of the disk tier."""
        if self._cache.memory.disk is not None:
            self._cache.memory.disk.tier.close()

    def _open(self) -> PrefixCache:
        subject, disk = self._subject, None
        if self._folder is not None:
            disk = DiskTier(DiskStore(self._folder, "bench"), budget_bytes=UNBOUNDED)
        cache = PrefixCache(
            subject.runner.make_caches,
            num_slots=1,
            budget_bytes=UNBOUNDED,
            chunk_tokens=subject.chunk_tokens,
            disk=disk,
        )
        sample = subject.runner.make_caches()
        subject.runner.prefill(sample, self._tokens[:8])
        cache.layout.calibrate(sample)
        return cache

    def _page_out(self) -> None:
        self._cache.pager.page_out(self._cache.slots[0], 0)

    def _page_in(self) -> None:
        # Recurrent state is restored only where a token follows.
        self._begin(np.append(self._tokens, np.int32(0))).close()

    def _begin(self, tokens: NDArray[np.int32]) -> Lease:
        lease = self._cache.begin(CacheRequest(Lookup(tokens), expected_tokens=NEW_TOKENS))
        assert lease is not None, "its only slot is free"
        self._hit_tokens = lease.hit_tokens
        return lease

    def _next_turn(self, before: Callable[[], object] = lambda: None, num_times: int = 4) -> float:
        """Median milliseconds of turns after `before`, without the first: it may compile."""
        times = []
        for _ in range(num_times):
            before()
            self._tokens = np.concatenate([self._tokens, self._subject.tokens(NEW_TOKENS, len(self._tokens))])
            times.append(1e3 * timed(self._turn))
        return statistics.median(times[1:] or times)

    def _restart(self) -> None:
        self._cache.end(min(SAVE_SECONDS, self._subject.left_seconds))
        self._cache = self._open()

    def _turn(self) -> None:
        subject, lease, last = self._subject, self._begin(self._tokens), len(self._tokens) - 1
        while lease.offset < last:
            subject.check_time()
            part = self._tokens[lease.offset : lease.chunk_stop(subject.chunk_tokens, last)]
            subject.runner.prefill(lease.caches, part)
            lease.advance(part)
        row = subject.runner.make_row(lease.caches, SamplingParams(temperature=0), int(self._tokens[-1]))
        launch(subject.runner, [row], None).tokens()
        subject.runner.detach(row)
        lease.append(int(self._tokens[-1]))
        lease.close()


# ------------------------------------------------------------------------------------------------ all within a time


@dataclass(frozen=True)
class _Measurement:
    name: str
    prompts: Sequence[int]
    context_tokens: int
    held_tokens: int
    act: Callable[[], None]


@dataclass(eq=False)
class Bench:
    """Measures what time, context and memory allow, the most telling first."""

    subject: Subject
    """Its `until` is set for each measurement."""
    until: float
    """A reading of `time.perf_counter`."""
    context_tokens: int
    budget_bytes: int
    folder: Path | None
    """For state on disk; None for none."""
    rows: dict[str, list[Any]] = field(
        default_factory=lambda: {"decode": [], "prefill": [], "turns": [], "left_out": []}
    )
    """Results so far, and why others are missing."""
    _cold: list[tuple[int, float]] = field(default_factory=list)
    """Lengths of prompts, and seconds for each token of a prompt."""
    _bytes_per_token: float = 0.0

    def run(self) -> Iterator[str]:
        """Measures; yields each measurement's name before it begins."""
        yield "a quick first look"
        try:
            self._look()
        except TimeUp:
            self.rows["left_out"].append("everything: no time was left once the model was loaded and tried")
            return
        chances = [(SHARE, measurement) for measurement in self._plan()]
        for share, measurement in chances:
            seconds = max(share * (self.until - time.perf_counter()), 0.0)
            expected, reason = sum(map(self._expected_seconds, measurement.prompts)), self._find_obstacle(measurement)
            if reason is None and expected > seconds:
                if share < 1:
                    chances.append((1.0, measurement))
                    continue
                reason = f"its prompts alone would take {expected:.0f} s, and {seconds:.0f} s were left"
            if reason is None:
                yield measurement.name
                reason = self._try(measurement, seconds)
            if reason is not None:
                self.rows["left_out"].append(f"{measurement.name}: {reason}")

    def _look(self) -> None:
        """Learns prompts' speed and size."""
        self.subject.until = self.until
        num_tokens = max(min(LOOK_TOKENS, self.context_tokens - GROWN_TOKENS), NEW_TOKENS)
        for _ in range(2):  # the first may compile
            with closing(MeasuredConversation(self.subject, num_tokens)) as talk:
                talk.measure()
                self._cold = [(num_tokens, talk.figures["cold_ms"] / num_tokens / 1e3)]
                self._bytes_per_token = talk.bytes_per_token

    def _expected_seconds(self, num_tokens: int) -> float:
        """What a prompt takes: a token's time is linear in those before it, as attention's is."""
        (before, slower), (last, slowest) = self._cold[-2:] if len(self._cold) > 1 else 2 * self._cold
        slope = max(slowest - slower, 0.0) / max(last - before, 1)
        return num_tokens * (slowest + slope * max(num_tokens - last, 0))

    def _plan(self) -> list[_Measurement]:
        equal, mixed = [[self._decoding(rows) for rows in group] for group in (DECODE_ROWS[:3], DECODE_ROWS[3:])]
        turns = [self._turns(num_tokens) for num_tokens in TURN_TOKENS]
        prefill = _Measurement("prefill", (PREFILL_TOKENS[-1],) * len(CHUNKS), 0, 0, self._measure_prefill)
        return [*equal, turns[0], prefill, mixed[0], turns[1], mixed[1], turns[2]]

    def _decoding(self, lengths: tuple[int, ...]) -> _Measurement:
        longest = max(lengths)
        num_tokens = 3 * sum(lengths) + len(lengths) * longest  # a copy for each side, and the peer's padded batch
        name, num_steps = f"decoding {rows_text(lengths)}", WARM_UP_STEPS + NUM_BLOCKS * BLOCK_STEPS
        return _Measurement(name, lengths, longest + num_steps, num_tokens, partial(self._decode, lengths))

    def _turns(self, num_tokens: int) -> _Measurement:
        act, context_tokens = partial(self._measure_turns, num_tokens), num_tokens + GROWN_TOKENS
        return _Measurement(f"turns at {num_tokens} tokens", (num_tokens,), context_tokens, 2 * context_tokens, act)

    def _find_obstacle(self, measurement: _Measurement) -> str | None:
        held_bytes = int(measurement.held_tokens * self._bytes_per_token)
        if measurement.context_tokens > self.context_tokens:
            return f"longer than the context of {self.context_tokens} tokens"
        if held_bytes > self.budget_bytes:
            return f"takes {size_text(held_bytes)} of memory, and there is {size_text(self.budget_bytes)}"
        return None

    def _try(self, measurement: _Measurement, seconds: float) -> str | None:
        """Returns why a measurement did not end, if so."""
        self.subject.until = time.perf_counter() + seconds
        try:
            measurement.act()
        except TimeUp:
            return f"stopped after the {seconds:.0f} s that it had"
        except (RuntimeError, ValueError, OSError, FolderError) as error:  # of MLX, the peer, the disk
            return brief(str(error), MAX_REASON)
        return None

    def _decode(self, lengths: tuple[int, ...]) -> None:
        comparison = compare(self.subject, lengths, NUM_BLOCKS)
        ours, peer = comparison.speeds
        row = {"rows": rows_text(lengths), "mlx-serve": ours, "BatchGenerator": peer, "ratio": comparison.ratio}
        self.rows["decode"].append(row)

    def _measure_prefill(self) -> None:
        limit = PREFILL_SHARE * self.subject.left_seconds
        fits = (num for num in PREFILL_TOKENS if len(CHUNKS) * self._expected_seconds(num) < limit)
        num_tokens = min(next(fits, PREFILL_TOKENS[-1]), self.context_tokens)
        for chunk in (chunk for chunk in CHUNKS if chunk <= num_tokens):
            speed = prefill_speed(self.subject, num_tokens, chunk)
            self.rows["prefill"].append({"chunk": chunk, "prompt": num_tokens, "tokens_per_second": speed})

    def _measure_turns(self, num_tokens: int) -> None:
        parent, folder = self.folder, None
        if parent is not None and shutil.disk_usage(parent).free > 2 * num_tokens * self._bytes_per_token:
            folder = parent / str(num_tokens)
        with closing(MeasuredConversation(self.subject, num_tokens, folder)) as talk:
            try:
                talk.measure()
            finally:
                if "live_ms" in talk.figures:
                    self.rows["turns"].append(talk.figures)
                    self._cold.append((num_tokens, talk.figures["cold_ms"] / num_tokens / 1e3))
        if "restarted_ms" not in talk.figures:
            reason = "no folder or no space on the disk" if folder is None else f"not written in {SAVE_SECONDS:.0f} s"
            self.rows["left_out"].append(f"restart at {num_tokens} tokens: {reason}")


def rows_text(lengths: Sequence[int]) -> str:
    """Lengths such as `4000 + 3 × 100`."""
    texts = [f"{lengths.count(length)} × {length}" for length in dict.fromkeys(lengths)]
    return texts[0] if len(texts) == 1 else " + ".join(text.removeprefix("1 × ") for text in texts)
