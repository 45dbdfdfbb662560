"""State that is to stay in memory: its tokens are in no file of the disk folder, whatever happens to it in memory.

Each volatile request says tokens that no other request has said: its tags. A request that is not volatile and goes on
from them makes them public. Files are searched as bytes, the index and its log included, for tags that nobody made
public: as token ids, and as the fake model's rows and recurrent state hold them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from cache.budget import BudgetExceeded
from cache.disk import connector
from cache.disk.tier import DiskTier
from cache.prefix_cache import PrefixCache
from tests.support import cache_driver, fake_model
from tests.support.disk_driver import CountingFiles, open_tier

WINDOW = 6
FIRST_TAG = 5_000_000
"""Fits a float32 exactly, as the fake model's rows hold tokens."""
TAGS = 4
HEAD = [*range(1, 13)]


@pytest.fixture(autouse=True)
def shorter_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets disk matter for prompts as short as these."""
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 2)


def make(layout: str, tier: DiskTier, *, num_slots: int = 1, budget_bytes: int = 1 << 30) -> PrefixCache:
    return PrefixCache(
        lambda: fake_model.make_caches(layout, WINDOW), num_slots=num_slots, budget_bytes=budget_bytes, disk=tier
    )


def write_all(prefix_cache: PrefixCache) -> None:
    """Has everything written that may be, and memory forget it, which writes as well."""
    for _ in prefix_cache.save():
        prefix_cache.check()
    for slot in prefix_cache.slots:
        prefix_cache.pager.page_out(slot, 0)
    prefix_cache.memory.evict(0, ())
    assert prefix_cache.memory.disk is not None
    assert prefix_cache.memory.disk.tier.flush(120)


def found_tags(folder: Path, tags: Sequence[int]) -> list[int]:
    """Returns those of the tags that some file of a folder holds, with the one after it."""
    data = b"\0".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())
    return [tag for tag in tags if any(pattern in data for pattern in _patterns(tag))]


def _patterns(tag: int) -> list[bytes]:
    pair = [tag, tag + 1]
    return [
        np.array(pair, np.int32).tobytes(),
        np.array(pair, np.int64).tobytes(),
        np.full(4, tag, np.float32).tobytes(),
    ]


@pytest.mark.parametrize("layout", fake_model.MORE_LAYOUTS)
def test_what_is_searched_for_is_found_in_what_was_written(layout: str, tier: DiskTier, tmp_path: Path) -> None:
    prefix_cache = make(layout, tier)
    tags = [*range(FIRST_TAG, FIRST_TAG + TAGS)]
    cache_driver.run(prefix_cache, [*HEAD, *tags, 1])
    write_all(prefix_cache)
    assert found_tags(tmp_path, tags[:-1]) == tags[:-1]


@pytest.mark.parametrize("layout", fake_model.MORE_LAYOUTS)
def test_a_second_volatile_request_makes_nothing_public(layout: str, tier: DiskTier, tmp_path: Path) -> None:
    """What was stored, and could not be restored, is evaluated again; it used to count as public from then on."""
    prefix_cache = make(layout, tier)
    tags = [*range(FIRST_TAG, FIRST_TAG + 40)]
    cache_driver.run(prefix_cache, [*HEAD, *tags, 1, 2], is_volatile=True)
    prefix_cache.pager.page_out(prefix_cache.slots[0], 0)
    for cut in (10, 30):
        cache_driver.run(prefix_cache, [*HEAD, *tags[:cut], 3, 4], is_volatile=True)
    write_all(prefix_cache)
    assert found_tags(tmp_path, tags) == []
    assert tier.tree.num_bytes == 0


class VolatileMachine(RuleBasedStateMachine):
    """Requests of both kinds over one folder; memory, slots and processes come and go."""

    layout = "T"

    @initialize(num_slots=st.integers(1, 3), budget_bytes=st.sampled_from([12_000, 1 << 30]))
    def start(self, num_slots: int, budget_bytes: int) -> None:
        self._home = tempfile.TemporaryDirectory()
        self.folder = Path(self._home.name)
        self.num_slots, self.budget_bytes = num_slots, budget_bytes
        self.sent: list[list[int]] = [HEAD]
        self.secret: set[int] = set()
        """Tags that no ordinary request has had."""
        self.num_tags = 0
        self._open()

    def _open(self) -> None:
        self.tier = open_tier(self.folder, files=CountingFiles())
        self.prefix_cache = make(self.layout, self.tier, num_slots=self.num_slots, budget_bytes=self.budget_bytes)

    def _said(self, base: int, cut: int, num_new: int, is_volatile: bool) -> list[int]:
        """Returns tokens that go on from something said earlier; the tags on the way are public if these are."""
        earlier = self.sent[-1 - base % len(self.sent)]
        said = earlier[: max(1, len(earlier) - cut)]
        if is_volatile:
            first = FIRST_TAG + 100 * self.num_tags
            self.num_tags += 1
            said = [*said, *range(first, first + num_new)]
            # What is searched for is a tag with the one after it: the last by itself is not.
            self.secret |= set(said[-num_new:-1])
        else:
            said = [*said, *range(100, 100 + num_new)]
            self.secret -= set(said)
        self.sent.append(said)
        return said

    @rule(
        base=st.integers(0, 3),
        cut=st.integers(0, 12),
        num_new=st.integers(2, 14),
        num_generated=st.integers(0, 6),
        is_volatile=st.sampled_from([True, True, False]),
        session_id=st.sampled_from([None, "one", "two"]),
        explicit=st.lists(st.integers(1, 30), max_size=2),
        stop_at=st.sampled_from([None, None, None, 8, 20]),
    )
    def request(self, base: int, cut: int, num_new: int, num_generated: int, is_volatile: bool,
                session_id: str | None, explicit: list[int], stop_at: int | None) -> None:  # fmt: skip
        said = self._said(base, cut, num_new, is_volatile)
        num_generated = min(num_generated, len(said) - 1)
        prompt, generated = said[: len(said) - num_generated], said[len(said) - num_generated :]
        with_budget = BudgetExceeded if self.budget_bytes < 1 << 30 else ()
        try:
            cache_driver.run(
                self.prefix_cache, prompt, generated, explicit=explicit, session_id=session_id,
                is_volatile=is_volatile, stop_at=stop_at,
            )  # fmt: skip
        except with_budget:
            return

    @rule(num_pieces=st.integers(0, 12))
    def save(self, num_pieces: int) -> None:
        for _, _ in zip(range(num_pieces), self.prefix_cache.save(), strict=False):
            self.prefix_cache.check()
        self._look()

    @rule(index=st.integers(0, 2))
    def page_out(self, index: int) -> None:
        self.prefix_cache.pager.page_out(self.prefix_cache.slots[index % self.num_slots], 0)
        self.prefix_cache.check()

    @rule(share=st.sampled_from([0, 0.5, 0.8]))
    def forget(self, share: float) -> None:
        cache = self.prefix_cache
        cache.memory.evict(int(share * cache.ledger.charged_bytes), ())
        cache.check()
        self._look()

    @rule()
    def clear_disk(self) -> None:
        self.tier.clear()

    @rule(is_sudden=st.booleans())
    def restart(self, is_sudden: bool) -> None:
        if is_sudden:
            self.tier.close()
        else:
            self.prefix_cache.end(120)
        self._open()

    def _look(self) -> None:
        assert self.tier.flush(120)
        assert found_tags(self.folder, sorted(self.secret)) == []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            write_all(self.prefix_cache)
            self._look()
            self.tier.close()
            self._home.cleanup()


@pytest.mark.usual("T", "WR")
@pytest.mark.parametrize("layout", fake_model.MORE_LAYOUTS)
def test_no_history_brings_volatile_tokens_to_disk(layout: str) -> None:
    machine: Any = type(f"Machine{layout}", (VolatileMachine,), {"layout": layout})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
