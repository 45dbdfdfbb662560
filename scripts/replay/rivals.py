"""Simple caches to compare with: what other servers do, each as small a model of it as tells the difference.

All three know the same requests, sizes and budget as the real cache, and have no slots: what they hold is stored.

* `TreeRival`: one prefix tree, a snapshot at the end of every prompt and reply, least recently used goes first;
  with `keeps_last_only`, a conversation has one snapshot, where its last prompt ended; with `keeps_points`, also one
  at each restore point that the real cache is asked for. Where snapshots weigh nothing, none are needed;
* `CopyRival`: each conversation whole in a copy of its own, with snapshots at its last prompt's end and its own
  end; a request goes on with the copy that serves it best, and takes it with it.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cache.trie import Node, PrefixTrie
from cache.types import TokenArray, common_prefix_length
from scripts.replay.drive import Outcome, Request, Sample
from scripts.replay.layout import SizedRecurrent, SizedSegment


@dataclass(frozen=True)
class Sizes:
    """What state weighs, and how much of it may be held; `memory_bytes` may be infinite."""

    bytes_per_token: int
    snapshot_bytes: int
    memory_bytes: float


@dataclass(frozen=True)
class _Snapshot(SizedRecurrent):
    window = None

    def split(self, offset: int) -> "tuple[None, _Snapshot]":
        """Returns nothing for `offset`, and all for the old stop."""
        return None, self


def _sample(request: Request, match: int, hit: int, started: float) -> Sample:
    spent = time.thread_time() - started
    is_one_shot = request.session_id is None
    return Sample(
        request.name, is_one_shot, request.is_extension, len(request.prompt), match, hit, policy_seconds=spent
    )


class TreeRival:
    """A prefix tree with snapshots at prompt ends and reply ends, least recently used first out."""

    def __init__(self, sizes: Sizes, *, keeps_last_only: bool = False, keeps_points: bool = False) -> None:
        self._sizes = sizes
        self._keeps_points = keeps_points
        self._keeps_last_only = keeps_last_only
        self._num_bytes = 0
        self.running_bytes = 0.0
        """Of the budget, for what else runs needs."""
        self._trie = PrefixTrie(self._count)
        self._clock = 0
        self._num_evictions = self._num_captured = 0

    def run(self, request: Request) -> Sample:
        """Takes one request from its arrival to its end."""
        started = time.thread_time()
        self._clock += 1
        match = self._trie.match(request.prompt[:-1])
        usable = [node for node in match.node.path() if node.snapshot is not None and node.stop <= match.length]
        restorable = match.length if not self._sizes.snapshot_bytes else usable[-1].stop if usable else 0
        sample = _sample(request, match.length, restorable, started)
        if self._keeps_last_only:
            for node in usable:
                if len(node.children) < 2:
                    self._trie.snap(node, None)
        start = self._trie.root
        for point in sorted(request.points, key=lambda point: point.offset) if self._keeps_points else ():
            start = self._keep(start, request.prompt[start.stop : point.offset], is_end=True)
        prompt_end = self._keep(start, request.prompt[start.stop : -1], is_end=True)
        self._keep(
            prompt_end, np.concatenate([request.prompt[-1:], request.output[:-1]]), is_end=not self._keeps_last_only
        )
        self._evict()
        return sample

    def outcome(self, samples: list[Sample]) -> Outcome:
        """Returns what the tree holds now."""
        num_snapshots = sum(node.snapshot is not None for node in self._trie.nodes())
        return Outcome(samples, num_snapshots, self._num_captured, self._num_evictions, 0, self._num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def _keep(self, node: Node, tokens: TokenArray, *, is_end: bool) -> Node:
        tip = self._trie.extend(node, tokens)
        for part in tip.path():
            part.last_used = self._clock
            if part.span is None:
                self._trie.store(part, cast(Any, SizedSegment(part.start, part.stop, self._sizes.bytes_per_token)))
        if is_end and tip.snapshot is None and tip.parent is not None:
            self._num_captured += 1
            self._trie.snap(tip, cast(Any, _Snapshot(tip.stop, self._sizes.snapshot_bytes)))
        return tip

    def _evict(self) -> None:
        left = max(0.0, self._sizes.memory_bytes - self.running_bytes)
        while self._num_bytes > left:
            candidates = [n for n in self._trie.nodes() if not n.children or n.snapshot is not None]
            candidates.sort(key=lambda node: (node.last_used, -node.stop))
            for node in candidates:
                if self._num_bytes <= left:
                    return
                self._drop(node)

    def _drop(self, node: Node) -> None:
        self._num_evictions += 1
        if node.children:
            self._trie.snap(node, None)
        else:
            self._trie.remove(node)


@dataclass
class _Copy:
    tokens: TokenArray
    offsets: tuple[int, ...]
    """Where it can be restored."""


class CopyRival:
    """Whole conversations in copies of their own, least recently used first out."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._copies: OrderedDict[int, _Copy] = OrderedDict()
        self._num_bytes = 0
        self._clock = self._num_evictions = self._num_captured = 0

    def run(self, request: Request) -> Sample:
        """Takes one request from its arrival to its end."""
        started = time.thread_time()
        self._clock += 1
        best, match, hit = self._best(request.prompt[:-1])
        sample = _sample(request, match, hit, started)
        if best is not None and hit * 2 >= len(self._copies[best].tokens):
            self._forget(best)
        tokens = np.concatenate([request.prompt, request.output[:-1]])
        self._copies[self._clock] = _Copy(tokens, (len(request.prompt) - 1, len(tokens)))
        self._num_bytes += self._size(self._copies[self._clock])
        self._num_captured += 2
        while self._num_bytes > self._sizes.memory_bytes:
            self._num_evictions += 1
            self._forget(next(iter(self._copies)))
        return sample

    def outcome(self, samples: list[Sample]) -> Outcome:
        """Returns what the copies hold now."""
        num_snapshots = sum(len(copy.offsets) for copy in self._copies.values())
        return Outcome(samples, num_snapshots, self._num_captured, self._num_evictions, 0, self._num_bytes)

    def _best(self, prompt: TokenArray) -> tuple[int | None, int, int]:
        """Returns the copy that restores most of a prompt, the longest match of all, and what that copy restores."""
        best, match, hit = None, 0, 0
        for key, copy in self._copies.items():
            common = common_prefix_length(copy.tokens, prompt)
            match = max(match, common)
            usable = max((offset for offset in copy.offsets if offset <= common), default=0)
            if usable > hit:
                best, hit = key, usable
        return best, match, hit

    def _forget(self, key: int) -> None:
        self._num_bytes -= self._size(self._copies.pop(key))

    def _size(self, copy: _Copy) -> int:
        return len(copy.tokens) * self._sizes.bytes_per_token + len(copy.offsets) * self._sizes.snapshot_bytes
