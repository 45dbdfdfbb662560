"""Benchmarks finding, adding and giving up tokens among ten thousand stored conversations.

Usage: python -m scripts.bench.trie [--json FILE] [--conversations N]

Conversations share some twenty system prompts and have a turn's border every few hundred tokens, where models with
recurrent layers keep a snapshot. Layer state has sizes only, so that what is timed is the bookkeeping: it runs on the
thread that also evaluates the model, between two steps.
"""

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.trie import Node, PrefixTrie
from cache.types import TokenArray
from scripts.bench.common import Report, Target, median, write_json
from scripts.replay.layout import SizedLayout

VOCABULARY = 150_000
LONG_PROMPT = 100_000
CHUNK_TOKENS = 512
TARGET_MS = 2.0
NUM_ROUNDS = 30


@dataclass
class Rows:
    """A span that has a size and nothing else."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of so many tokens."""
        return (self.stop - self.start) * 1000

    def split(self, offset: int) -> "tuple[Rows, Rows]":
        """Returns the two parts."""
        return Rows(self.start, offset), Rows(offset, self.stop)

    def join(self, later: "Rows") -> "Rows":
        """Returns both as one."""
        return Rows(self.start, later.stop)


class Conversations:
    """Seeded conversations of realistic lengths: a shared system prompt, then turns."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(2026)
        self._systems = [self.tokens(int(length)) for length in self._random.integers(300, 6000, 20)]

    def tokens(self, num_tokens: int) -> TokenArray:
        """Returns tokens that were never seen before."""
        return self._random.integers(0, VOCABULARY, num_tokens).astype(np.int32)

    def system(self) -> TokenArray:
        """Returns one of the system prompts."""
        return self._systems[int(self._random.integers(len(self._systems)))]

    def turns(self) -> list[TokenArray]:
        """Returns a new conversation, cut where its turns begin; the first part is the system prompt."""
        num_turns = int(np.clip(self._random.geometric(0.2), 1, 40))
        lengths = np.clip(self._random.lognormal(5.5, 0.9, num_turns), 20, 8000).astype(int)
        return [self.system(), *(self.tokens(int(length)) for length in lengths)]


def insert(trie: PrefixTrie, start: Node, tokens: TokenArray) -> Node:
    """Adds tokens below a node, with stored spans, and returns where they end."""
    end = trie.extend(start, tokens)
    for node in end.path():
        if node.span is None:
            trie.store(node, cast(Any, Rows(node.start, node.stop)))
    return end


def fill(trie: PrefixTrie, conversations: Conversations, num_conversations: int) -> int:
    """Stores conversations turn by turn and returns how many different tokens they have."""
    num_tokens = 0
    for _ in range(num_conversations):
        node = trie.root
        for tokens in conversations.turns():
            node = insert(trie, node, tokens)
    for node in trie.nodes():
        num_tokens += len(node.tokens)
    return num_tokens


def timed_ms(do: Callable[[], object]) -> float:
    """Returns the milliseconds of CPU one call takes, so that a busy machine counts for nothing."""
    start = time.thread_time()
    do()
    return (time.thread_time() - start) * 1e3


class Table:
    """Rows of timings, each against the same target."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def add(self, name: str, times_ms: Sequence[float], target_ms: float = TARGET_MS) -> None:
        """Adds one operation's times."""
        p99 = float(np.percentile(times_ms, 99))
        self.report.rows.append([name, f"{median(times_ms):.3f}", f"{p99:.3f}", str(len(times_ms))])
        self.report.figures[name] = {"median_ms": median(times_ms), "p99_ms": p99}
        self.report.add_verdict(f"{name}, p99 in ms", p99, Target(target_ms))


def bench_trie(num_conversations: int) -> Report:
    """Times match and insert, and weighs the trie."""
    conversations, trie = Conversations(), PrefixTrie()
    tracemalloc.start()
    num_objects = len(gc.get_objects())
    num_tokens = fill(trie, conversations, num_conversations)
    traced_bytes = tracemalloc.get_traced_memory()[0]
    num_objects = len(gc.get_objects()) - num_objects
    tracemalloc.stop()
    report = Report(
        f"trie: {num_conversations} conversations, {num_tokens / 1e6:.0f} M tokens, {trie.num_nodes} nodes",
        ["operation on 100 000 tokens", "median ms", "p99 ms", "times"],
    )
    table = Table(report)
    _time_matches(table, trie, conversations)
    _time_inserts(table, trie, conversations)
    report.figures |= {"bytes_per_token": traced_bytes / num_tokens, "objects_per_token": num_objects / num_tokens}
    report.add_verdict("bytes per stored token, of them 4 the token", traced_bytes / num_tokens, Target(6))
    report.add_verdict("Python objects per stored token", num_objects / num_tokens, Target(0.1))
    return report


def _time_matches(table: Table, trie: PrefixTrie, conversations: Conversations) -> None:
    stored, parted, short = [], [], []
    for _ in range(NUM_ROUNDS):
        system = conversations.system()
        tokens = np.concatenate([system, conversations.tokens(LONG_PROMPT - len(system))])
        node = trie.root
        for part in np.array_split(tokens, 100):
            node = insert(trie, node, part)
        stored.append(timed_ms(partial(trie.match, tokens)))
        assert trie.match(tokens).length == LONG_PROMPT
        tokens[LONG_PROMPT // 2] += 1
        parted.append(timed_ms(partial(trie.match, tokens)))
        fresh = np.concatenate([system, conversations.tokens(LONG_PROMPT - len(system))])
        short.append(timed_ms(partial(trie.match, fresh)))
    table.add("match, all of it stored in 100 edges", stored)
    table.add("match, parted half-way", parted)
    table.add("match, only the system prompt stored", short)


def _time_inserts(table: Table, trie: PrefixTrie, conversations: Conversations) -> None:
    new, split, again = [], [], []
    for _ in range(NUM_ROUNDS):
        system = conversations.system()
        tokens = np.concatenate([system, conversations.tokens(LONG_PROMPT - len(system))])
        new.append(timed_ms(partial(insert, trie, trie.root, tokens)))
        again.append(timed_ms(partial(insert, trie, trie.root, tokens)))
        tokens[LONG_PROMPT // 2] += 1
        split.append(timed_ms(partial(insert, trie, trie.root, tokens)))
    table.add("insert after a system prompt", new)
    table.add("insert what is there", again)
    table.add("insert with a split half-way", split)


# ------------------------------------------------------------------------------------------- the whole prefix cache


class Cached:
    """A prefix cache over sizes, filled with conversations."""

    def __init__(self, num_conversations: int) -> None:
        self.layout = SizedLayout(100_000, 20_000_000)
        self.cache = PrefixCache(self.layout.make_caches, num_slots=4, budget_bytes=1 << 60, layout=self.layout)
        self.conversations = Conversations()
        self.ends: list[TokenArray] = []
        for _ in range(num_conversations):
            parts = self.conversations.turns()
            self.ends.append(np.concatenate(parts))
            self.run(self.ends[-1], np.cumsum([len(part) for part in parts]).tolist())

    def run(self, tokens: TokenArray, borders: Sequence[int]) -> None:
        """Runs one conversation's whole history as one request, with restore points at its turns."""
        lease = self.begin(tokens, borders)
        while lease.offset < len(tokens) - 1:
            self.advance(lease, tokens, 8192)
        lease.close()

    def begin(self, tokens: TokenArray, borders: Sequence[int] = ()) -> Lease:
        """Opens a lease; all slots are free here."""
        points = [RestorePoint(border, RestorePointKind.USER_START) for border in borders]
        lease = self.cache.begin(CacheRequest(Lookup(tokens), restore_points=points))
        assert lease is not None
        return lease

    def advance(self, lease: Lease, tokens: TokenArray, chunk_tokens: int) -> None:
        """Does what evaluating one chunk does to the books."""
        stop = lease.chunk_stop(chunk_tokens, len(tokens) - 1)
        lease.caches[0].num_tokens = stop
        lease.advance(tokens[lease.offset : stop])


def bench_cache(num_conversations: int) -> Report:
    """Times what a request costs besides evaluation."""
    cached = Cached(num_conversations)
    nodes = cached.cache.stats().num_nodes
    report = Report(
        f"prefix cache: {num_conversations} conversations, {nodes} nodes, recurrent and attention layers",
        ["operation", "median ms", "p99 ms", "times"],
    )
    table = Table(report)
    _time_prompts(table, cached)
    _time_returns(table, cached)
    _time_evictions(table, cached)
    return report


def _time_prompts(table: Table, cached: Cached) -> None:
    begins, chunks, closes, wholes = [], [], [], []
    for _ in range(10):
        system = cached.conversations.system()
        tokens = np.concatenate([system, cached.conversations.tokens(LONG_PROMPT - len(system))])
        start = time.thread_time()
        lease = cached.begin(tokens)
        begins.append((time.thread_time() - start) * 1e3)
        times = []
        while lease.offset < LONG_PROMPT - 1:
            times.append(timed_ms(partial(cached.advance, lease, tokens, CHUNK_TOKENS)))
        chunks += times
        wholes.append(sum(times))
        closes.append(timed_ms(lease.close))
    table.add("begin a prompt of 100 000 tokens", begins)
    table.add("record one of its chunks of 512", chunks)
    table.add("record all its 196 chunks", wholes, 50)
    table.add("close", closes)


def _time_returns(table: Table, cached: Cached) -> None:
    times = []
    for tokens in cached.ends[:: max(1, len(cached.ends) // 100)]:
        start = time.thread_time()
        lease = cached.begin(np.concatenate([tokens, cached.conversations.tokens(100)]))
        times.append((time.thread_time() - start) * 1e3)
        lease.close()
    table.add("begin a stored conversation's next turn", times)


def _time_evictions(table: Table, cached: Cached) -> None:
    cache, few, many = cached.cache, [], []
    for _ in range(NUM_ROUNDS):
        few.append(timed_ms(partial(cache.reclaimer.free, 50_000_000, protected=())))
        many.append(timed_ms(partial(cache.reclaimer.free, 5_000_000_000, protected=())))
    table.add("give up a little, once memory is full", few, 5)
    table.add("give up 5 GB", many, 20)


def main(arguments: Sequence[str]) -> int:
    """Runs both benchmarks and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--conversations", type=int, default=10_000)
    options = parser.parse_args(arguments)
    reports = [bench_trie(options.conversations), bench_cache(options.conversations)]
    for report in reports:
        print(report.text(), end="\n\n", flush=True)
    if options.json:
        write_json(options.json, "python -m scripts.bench.trie", reports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
