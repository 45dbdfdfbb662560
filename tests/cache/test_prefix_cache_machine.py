"""Random histories of requests against a model beside the cache: what was sent, and what each slot stands for.

Several requests run interleaved on few slots with small budgets. After every step the invariants hold, every live
slot and every stored array stands for its tokens, and no memory is held that the ledger does not know.
"""

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache import reclaim
from cache.budget import BudgetExceeded
from cache.disk import connector
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier
from cache.layers import layout
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from tests.support import fake_model
from tests.support.disk_driver import CountingFiles
from tests.support.fake_runner import SharesNothing

WINDOW = 6
MAX_CHUNK_TOKENS = 16
SLACK_BYTES = 4096
"""Small arrays that fakes and mlx-lm's caches hold besides their rows."""

some_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=14)


@dataclass
class Running:
    """An open lease and what the model knows of it."""

    lease: Lease
    prompt: list[int]
    namespace: str
    is_private: bool
    evaluated: list[int] = field(default_factory=list)
    committed: int = 0

    @property
    def limit(self) -> int:
        return len(self.prompt) - 1


class PrefixCacheMachine(RuleBasedStateMachine):
    layout = "T"

    @initialize(num_slots=st.integers(1, 3), budget_bytes=st.sampled_from([6_000, 20_000, 60_000, 10_000_000]))
    def start(self, num_slots: int, budget_bytes: int) -> None:
        self._start(num_slots, budget_bytes)

    def _start(self, num_slots: int, budget_bytes: int) -> None:
        mx.clear_cache()
        self.base_bytes = mx.get_active_memory()
        self.tier = self.open_tier()
        self.prefix_cache = PrefixCache(
            lambda: fake_model.make_caches(self.layout, WINDOW),
            num_slots=num_slots,
            budget_bytes=budget_bytes,
            chunk_tokens=MAX_CHUNK_TOKENS,
            disk=self.tier,
        )
        sample = fake_model.make_caches(self.layout, WINDOW)
        fake_model.evaluate(sample, fake_model.tokens_of(1, 2, 3))
        self.prefix_cache.layout.calibrate(sample)
        self.running: list[Running] = []
        self.sent: list[tuple[str, list[int]]] = []
        """Everything evaluated so far, by namespace; a private request's tokens are never here."""
        self.has_lost = False
        """Whether anything was dropped on purpose, so that a match may be shorter than what was sent."""

    def open_tier(self) -> DiskTier | None:
        return None

    # ---------------------------------------------------------------------------------------------- requests

    @precondition(lambda self: not self.running)
    @rule(
        head=st.integers(1, 8),
        edge=st.integers(WINDOW - 1, WINDOW + 1),
        num_edges=st.integers(1, 3),
        inside=st.integers(1, WINDOW),
        percent=st.integers(0, 100),
        data=st.data(),
    )
    def part_inside_edge(
        self, head: int, edge: int, num_edges: int, inside: int, percent: int, data: st.DataObject
    ) -> None:
        """Edges just as long as the window, or by one shorter or longer, and a prompt that parts inside the last."""
        borders = [head + edge * number for number in range(num_edges + 1)]
        story = data.draw(st.lists(st.integers(1, 3), min_size=borders[-1] + 1, max_size=borders[-1] + 1))
        self._run(story, borders)
        self._run_within([*story[: borders[-2] + inside], 4], percent)

    @precondition(lambda self: self.sent and not self.running)
    @rule(base=st.integers(0, 30), length=st.integers(1, 60), percent=st.integers(0, 100))
    def part_anywhere(self, base: int, length: int, percent: int) -> None:
        earlier = self.sent[-1 - base % len(self.sent)][1]
        self._run_within([*earlier[: length % len(earlier) + 1], 4], percent)

    def _run_within(self, prompt: list[int], percent: int) -> None:
        """Runs a request for which memory holds what it needs, and so much of all that is there."""
        cache = self.prefix_cache
        before, needed = cache.ledger.budget_bytes, int(len(prompt) * cache.layout.bytes_per_token) + 1
        cache.ledger.budget_bytes = needed + cache.ledger.charged_bytes * percent // 100
        try:
            self._run(prompt, [])
        finally:
            cache.ledger.budget_bytes = before

    def _run(self, prompt: list[int], explicit: list[int]) -> None:
        self._begin(prompt, "", None, explicit, None, True, 0)
        if self.running:
            if self.running[0].lease.offset < self.running[0].limit:
                self.prefill_all(0)
            self.invariants_hold()
            self.close(0)

    @rule(
        base=st.integers(0, 30),
        cut=st.integers(0, 40),
        tail=some_tokens,
        namespace=st.sampled_from(["", "", "", "salted"]),
        session_id=st.sampled_from([None, "one", "two"]),
        explicit=st.lists(st.integers(1, 20), max_size=2),
        user_start=st.none() | st.integers(1, 20),
        reuse=st.sampled_from([True, True, True, True, False]),
        expected_tokens=st.integers(0, 20),
    )
    def begin(self, base: int, cut: int, tail: list[int], namespace: str, session_id: str | None, explicit: list[int],
              user_start: int | None, reuse: bool, expected_tokens: int) -> None:  # fmt: skip
        earlier = self.sent[-1 - base % len(self.sent)][1] if self.sent else []
        self._begin([*earlier[: len(earlier) - cut % 8 if cut < 32 else cut - 32], *tail][:60], namespace, session_id,
                    explicit, user_start, reuse, expected_tokens)  # fmt: skip

    @precondition(lambda self: self.sent)
    @rule(base=st.integers(0, 30), session_id=st.sampled_from([None, "one", "two"]))
    def repeat(self, base: int, session_id: str | None) -> None:
        namespace, tokens = self.sent[-1 - base % len(self.sent)]
        self._begin(tokens, namespace, session_id, [], None, True, 4)

    def _begin(self, prompt: list[int], namespace: str, session_id: str | None, explicit: list[int],
               user_start: int | None, reuse: bool, expected_tokens: int) -> None:  # fmt: skip
        points = [RestorePoint(offset, RestorePointKind.EXPLICIT) for offset in explicit]
        if user_start is not None:
            points.append(RestorePoint(user_start, RestorePointKind.USER_START))
        tokens, cache = np.array(prompt, np.int32), self.prefix_cache
        promised, num_evictions = cache.peek(Lookup(tokens, namespace=namespace)), cache.memory.num_evictions
        try:
            lookup = Lookup(tokens, namespace=namespace, reuse=reuse)
            lease = cache.begin(CacheRequest(lookup, session_id, points, expected_tokens))
        except BudgetExceeded:
            return
        if lease is None:
            assert self.running, "nothing runs, yet the request must wait"
            return
        found = Running(lease, prompt, namespace, not reuse, prompt[: lease.hit_tokens], lease.hit_tokens)
        self._judge(found, promised, has_evicted=cache.memory.num_evictions != num_evictions)
        self.running.append(found)

    def _judge(self, found: Running, promised: int, *, has_evicted: bool) -> None:
        lease, prompt = found.lease, found.prompt
        assert lease.offset == lease.hit_tokens <= lease.match_tokens <= len(prompt) - 1
        if found.is_private:
            assert lease.match_tokens == 0
            return
        known = max((_common(prompt, tokens) for name, tokens in self.sent if name == found.namespace), default=0)
        assert lease.match_tokens <= known, "matched what was never sent in this namespace"
        if not self._may_have_lost():
            committed = [r.evaluated[: r.committed] for r in self.running if self._shares(r, found)]
            closed = [tokens for name, tokens in self.closed if name == found.namespace]
            lower = max((_common(prompt, tokens) for tokens in committed + closed), default=0)
            assert lease.match_tokens >= min(lower, len(prompt) - 1), "something sent was not found"
        # What is on disk is promised even where memory then cannot hold it.
        if not has_evicted and self.tier is None:
            # A head that admission makes may hold one more place at which the prompt can go on.
            may_gain = self.prefix_cache.pager.shared is not None
            assert lease.hit_tokens == promised or (may_gain and lease.hit_tokens > promised), (
                "peek promised otherwise"
            )
            if self.layout == "T":
                assert lease.hit_tokens == lease.match_tokens, "attention state restores anywhere"

    @staticmethod
    def _shares(run: Running, other: Running) -> bool:
        return run.namespace == other.namespace and not run.is_private

    @property
    def closed(self) -> list[tuple[str, list[int]]]:
        live = {id(r.evaluated) for r in self.running}
        return [(name, tokens) for name, tokens in self.sent if id(tokens) not in live]

    def _may_have_lost(self) -> bool:
        return self.has_lost or self.prefix_cache.memory.num_evictions > 0

    # ----------------------------------------------------------------------------------------------- running

    @precondition(lambda self: any(r.lease.offset < r.limit for r in self.running))
    @rule(which=st.integers(0, 3), chunk_tokens=st.integers(1, MAX_CHUNK_TOKENS))
    def prefill(self, which: int, chunk_tokens: int) -> None:
        waiting = [r for r in self.running if r.lease.offset < r.limit]
        run = waiting[which % len(waiting)]
        start, stop = run.lease.offset, run.lease.chunk_stop(chunk_tokens, run.limit)
        assert start < stop <= run.limit and stop - start <= chunk_tokens
        tokens = np.array(run.prompt[start:stop], np.int32)
        fake_model.evaluate(run.lease.caches, tokens)
        run.lease.advance(tokens)
        self._record(run, run.prompt[start:stop])
        run.committed = len(run.evaluated)

    @precondition(lambda self: any(r.lease.offset < r.limit for r in self.running))
    @rule(which=st.integers(0, 3))
    def prefill_all(self, which: int) -> None:
        waiting = [r for r in self.running if r.lease.offset < r.limit]
        run = waiting[which % len(waiting)]
        while run.lease.offset < run.limit:
            self.prefill(self._index(run), 16)

    def _index(self, run: Running) -> int:
        return [r for r in self.running if r.lease.offset < r.limit].index(run)

    @precondition(lambda self: any(r.lease.offset >= r.limit for r in self.running))
    @rule(which=st.integers(0, 3), generated=some_tokens, is_early=st.booleans())
    def decode(self, which: int, generated: list[int], is_early: bool) -> None:
        ready = [r for r in self.running if r.lease.offset >= r.limit]
        run = ready[which % len(ready)]
        tokens = run.prompt[-1:] + generated if len(run.evaluated) == run.limit else generated
        for token in tokens:
            if is_early:
                fake_model.evaluate(run.lease.caches, np.array([token], np.int32))
            run.lease.append(token)
            if not is_early:
                fake_model.evaluate(run.lease.caches, np.array([token], np.int32))
        self._record(run, tokens)

    def _record(self, run: Running, tokens: list[int]) -> None:
        run.evaluated += tokens
        if not run.is_private and not any(held is run.evaluated for _, held in self.sent):
            self.sent.append((run.namespace, run.evaluated))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), offset=st.integers(1, 60))
    def want(self, which: int, offset: int) -> None:
        lease = self.running[which % len(self.running)].lease
        lease.want(RestorePoint(offset, RestorePointKind.BRANCH))
        assert all(point <= lease.num_prompt_tokens for point in lease._points)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        run = self.running.pop(which % len(self.running))
        run.lease.close()
        if not self.running:
            ledger = self.prefix_cache.ledger
            assert ledger.charged_bytes <= ledger.budget_bytes, "more is kept than the budget allows"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), is_damaged=st.booleans())
    def discard(self, which: int, is_damaged: bool) -> None:
        run = self.running.pop(which % len(self.running))
        if is_damaged:
            fake_model.evaluate(run.lease.caches[:1], fake_model.tokens_of(3, 3))
        run.lease.discard()
        self.has_lost = True

    @rule()
    def clear(self) -> None:
        self.prefix_cache.clear()
        self.has_lost = True

    # -------------------------------------------------------------------------------------------- invariants

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "prefix_cache"):
            return
        self.prefix_cache.check()
        fake_model.assert_stored_right(self.prefix_cache)
        for head in self.prefix_cache.pager.heads:
            spans = [layer for layer in fake_model.contents(head.caches, head.offset) if layer]
            assert spans and all(layer == head.log.view().tolist() for layer in spans), "a head holds other tokens"
        for slot in self.prefix_cache.slots:
            fake_model.assert_holds(slot.caches, slot.log.view().tolist(), WINDOW)
        for run in self.running:
            slot = self.prefix_cache.slots[run.lease.slot_index]
            assert slot.log.view().tolist() == run.evaluated, "a running sequence changed under its owner"

    @invariant()
    def bytes_are_known(self) -> None:
        if not hasattr(self, "prefix_cache"):
            return
        cache = self.prefix_cache
        assert cache.ledger.stored_bytes == fake_model.stored_bytes(cache)
        if self.tier is not None:
            return  # what is on its way to the disk is held as well
        live = sum(cache.layout.live_bytes(slot.caches) for slot in cache.pager.all_live)
        held = mx.get_active_memory() - self.base_bytes
        assert held <= cache.ledger.stored_bytes + live + SLACK_BYTES, "memory is held behind the ledger's back"

    def teardown(self) -> None:
        if not hasattr(self, "prefix_cache"):
            return
        for run in self.running:
            run.lease.close()
        self.running.clear()
        self.prefix_cache.clear()
        self.invariants_hold()
        if self.tier is not None:
            self.tier.close()
            return
        assert self.prefix_cache.stats().num_nodes == 0
        assert self.prefix_cache.ledger.stored_bytes == 0
        assert mx.get_active_memory() - self.base_bytes <= SLACK_BYTES, "memory leaked"


class WrittenAtOnce(DiskTier):
    """What is on its way to disk would be found or not as its thread gets on: one history, several outcomes."""

    def _write(self, *args: Any) -> bool:
        is_written = super()._write(*args)
        assert self.queue.wait(120)
        return is_written


class DiskMachine(PrefixCacheMachine):
    """The same with a disk below: what is read from there overlaps what memory knows."""

    def open_tier(self) -> DiskTier | None:
        self.folder = tempfile.TemporaryDirectory(prefix="machine-")
        return WrittenAtOnce(DiskStore(Path(self.folder.name), "model", CountingFiles()), budget_bytes=1 << 20)

    @invariant()
    def everything_is_written(self) -> None:
        assert not hasattr(self, "tier") or self.tier is None or self.tier.flush(120)

    @rule()
    def save(self) -> None:
        for _ in self.prefix_cache.save():
            self.prefix_cache.check()
        assert self.tier is not None and self.tier.flush(120)

    @precondition(lambda self: not self.running)
    @rule(percent=st.integers(0, 100))
    def forget(self, percent: int) -> None:
        """Memory loses this much of what it holds, all of it pieces that disk may have."""
        cache = self.prefix_cache
        cache.pager.page_out_idle(0, None)
        cache.memory.evict(cache.ledger.charged_bytes * (100 - percent) // 100, ())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


class HeadsMachine(PrefixCacheMachine):
    """The same with sequences that share heads, wherever that is possible or where memory is short."""

    @initialize(
        num_slots=st.integers(2, 4),
        budget_bytes=st.sampled_from([20_000, 60_000, 10_000_000]),
        head_tokens=st.sampled_from([2.0, math.inf]),
    )
    def start(self, num_slots: int, budget_bytes: int, head_tokens: float) -> None:
        self._start(num_slots, budget_bytes)
        self.prefix_cache.pager.shared = SharesHeads(head_tokens)

    @rule(
        story=st.lists(st.integers(1, 3), min_size=3, max_size=20),
        tails=st.lists(some_tokens, min_size=2, max_size=3),
        expected_tokens=st.integers(0, 20),
    )
    def run_side_by_side(self, story: list[int], tails: list[list[int]], expected_tokens: int) -> None:
        """Requests with the same first tokens, the second once the first was evaluated."""
        for tail in tails:
            num_running = len(self.running)
            self._begin([*story, *tail, 4], "", None, [len(story)], None, True, expected_tokens)
            while len(self.running) > num_running and self.running[-1].lease.offset < self.running[-1].limit:
                self.prefill(self._index(self.running[-1]), MAX_CHUNK_TOKENS)
            self.invariants_hold()
            self.bytes_are_known()


class SharesHeads(SharesNothing):
    def __init__(self, head_tokens: float) -> None:
        self.head_tokens = head_tokens


def _common(left: list[int], right: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
                min(len(left), len(right)))  # fmt: skip


@pytest.fixture(autouse=True)
def _small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow by few rows, so that small budgets mean something."""
    monkeypatch.setattr(layout, "GROWTH_TOKENS", 8)


@pytest.mark.parametrize("kind", [PrefixCacheMachine, DiskMachine, HeadsMachine])
@pytest.mark.parametrize("layout", fake_model.MORE_LAYOUTS)
def test_random_histories(layout: str, kind: type[PrefixCacheMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 2)
    monkeypatch.setattr(reclaim, "MIN_HEAD_TOKENS", 2)
    machine: Any = type(f"Machine{layout}", (kind,), {"layout": layout})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
