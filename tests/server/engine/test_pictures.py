"""Pictures in the engine: seen once, shared like words, and never taken for words."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.disk import connector
from cache.disk.tier import DiskTier
from cache.history import HistoryFollower
from cache.layers import layout as layout_module
from cache.lease import Tier
from cache.snapshots import RestorePoint, RestorePointKind
from cache.types import TokenArray
from models.errors import InvalidImage
from models.prompt.pictures import Picture
from models.vision.features import Features
from server.engine.request import Failed, StepFailed
from tests.server.engine.test_disk import save_and_forget
from tests.server.engine.test_drafts import Drafted
from tests.server.engine.test_preemption import GROWTH, Tight
from tests.support import fake_vision
from tests.support.disk_driver import open_tier
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_runner import EOS, FakeRunner, reference
from tests.support.fake_vision import BLOCKS, DAMAGED, FakeTower, Inline, picture_of
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("overlaps")
HEAD, MIDDLE, END = [*range(1, 21)], [*range(21, 31)], [*range(31, 40)]
A, B = b"a", b"b"
"""Files of one size."""


@pytest.fixture(autouse=True)
def small_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vision.use_small_ids(monkeypatch)
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 8)


def ask(harness: Harness, *parts: Picture | list[int], **fields: Any) -> tuple[Collected, list[int]]:
    """Submits a prompt with a restore point behind each picture, as the renderer makes them."""
    tokens, pictures = fake_vision.prompt_of(*parts)
    points = [RestorePoint(one.stop, RestorePointKind.BRANCH) for one in pictures.placed]
    return harness.submit(tokens, restore_points=tuple(points), pictures=pictures, **fields), tokens


def assert_answers(asked: Sequence[tuple[Collected, list[int]]], max_tokens: int = 8) -> None:
    for sink, tokens in asked:
        assert sink.tokens == [token for token in reference(tokens, max_tokens) if token != EOS]


def tower_of(harness: Any) -> FakeTower:
    tower = harness.runner.encoder.tower
    assert isinstance(tower, FakeTower)
    return tower


def num_blocks(harness: Harness) -> int:
    return tower_of(harness).num_blocks


@pytest.mark.parametrize("layout", ["T", "W", "R", "WR", "C"])
@pytest.mark.parametrize(("chunk_tokens", "whole"), [(1, False), (5, False), (5, True), (16, False), (512, True)])
def test_a_picture_is_seen_once_by_all_conversations(layout: str, chunk_tokens: int, whole: bool) -> None:
    harness = Harness(layout, chunk_tokens=chunk_tokens)
    one, other = (replace(picture_of(data), is_whole=whole, has_axes=not whole) for data in (A, B))
    for parts, restored in (
        ((HEAD, one, END), 0),
        ((HEAD, one, MIDDLE), 28),
        ((HEAD, one, END, other, MIDDLE), 28),
        ((HEAD, one, END, other, END), 45),
        ((HEAD, other, END), 0),
        ((HEAD, other, one, END), 28),
    ):
        asked = ask(harness, *parts)
        harness.run()
        assert_answers([asked])
        assert asked[0].started.hit_tokens >= restored
    assert num_blocks(harness) == 2 * BLOCKS


def alike(digest: bytes, count: int) -> TokenArray:
    """Ids of which the first two are those of every picture."""
    return np.array([-17, -18, *range(-19 - digest[0], -17 - digest[0] - count, -1)], np.int32)


def alike_steps(picture: Picture, pixels: Any) -> Generator[mx.array, None, Features]:
    """The tower's steps for such ids."""
    yield mx.array(0)
    return Features(mx.array(alike(picture.digest, picture.num_tokens))[:, None])


def test_a_match_inside_a_picture_ends_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vision, "ids_of", alike)
    harness = Harness()
    monkeypatch.setattr(tower_of(harness), "steps", alike_steps)
    ask(harness, HEAD, picture_of(A), END)
    harness.run()
    asked = ask(harness, HEAD, picture_of(B), END)
    harness.run()
    assert asked[0].started.match_tokens == len(HEAD)
    assert_answers([asked])


@pytest.mark.parametrize("layout", ["T", "R"])
def test_an_older_match_inside_a_picture_on_disk_ends_at_its_start(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_vision, "ids_of", alike)
    tier = open_tier(tmp_path)
    harness = Harness(layout, num_slots=1, disk=tier)
    monkeypatch.setattr(tower_of(harness), "steps", alike_steps)
    ask(harness, HEAD, picture_of(A), END)
    harness.run()
    save_and_forget(harness)
    asked = ask(harness, HEAD, picture_of(B), END)
    harness.run()
    assert asked[0].started.hit_tokens == (len(HEAD) if layout == "T" else 0)
    assert_answers([asked])
    tier.close()


def test_namespaces_share_neither_state_nor_features() -> None:
    harness, one = Harness(), picture_of(A)
    asked = [ask(harness, HEAD, one, END, namespace=name) for name in ("x", "y", "x")]
    harness.run()
    assert_answers(asked)
    assert num_blocks(harness) == 2 * BLOCKS


def test_a_failed_step_is_replayed_behind_pictures() -> None:
    faults = iter([None, "read", *[None] * 100])
    runner = FakeRunner("R", fault=lambda kind, rows: next(faults) if kind == "decode" else None)
    harness = Harness(runner=runner)
    asked = ask(harness, HEAD, picture_of(A), END)
    harness.run()
    assert_answers([asked])
    assert num_blocks(harness) == BLOCKS


def test_a_tower_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, broken = Harness(), [True]
    steps = tower_of(harness).steps

    def failing(picture: Picture, pixels: Any) -> Generator[mx.array, None, Features]:
        yield mx.array(0)
        if broken:
            broken.clear()
            raise RuntimeError("no memory for a block")
        return (yield from steps(picture, pixels))

    monkeypatch.setattr(tower_of(harness), "steps", failing)
    asked = ask(harness, HEAD, picture_of(A), END)
    harness.run()
    assert_answers([asked])


def test_preempted_sequences_see_again_what_they_saw(exact_buffers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "GROWTH_TOKENS", GROWTH)
    harness = Tight(115, num_slots=2)
    asked = [ask(harness, picture_of(file), HEAD, END, max_tokens=30, ignore_eos=True) for file in (A, B)]
    harness.run()
    for sink, tokens in asked:
        assert sink.tokens == reference(tokens, 30, ignore_eos=True)
    assert harness.worker.stats().num_preempted


@pytest.mark.parametrize("layout", ["T", "R", "WR"])
def test_pictures_are_restored_from_disk(layout: str, tmp_path: Path) -> None:
    tier, one = open_tier(tmp_path), picture_of(A)
    harness = Harness(layout, num_slots=1, disk=tier)
    first, _ = ask(harness, HEAD, one, END)
    harness.run()
    save_and_forget(harness)
    again = ask(harness, HEAD, one, END, [*first.tokens, 5])
    other = ask(harness, HEAD, picture_of(B), END)
    harness.run()
    assert_answers([again, other])
    assert again[0].started.tier is Tier.DISK and again[0].started.hit_tokens >= 28
    assert num_blocks(harness) == 2 * BLOCKS
    tier.close()


def test_nothing_is_drafted_into_a_picture(tier: DiskTier, tmp_path: Path) -> None:
    harness = Harness(num_slots=1, disk=tier)
    _, tokens = ask(harness, HEAD, picture_of(A), END)
    harness.run()
    for history in (harness.prefix_cache.history, reopened(harness, tier, tmp_path)):
        history.add("", np.array(tokens, np.int32))
        own = history.begin("")
        follower = HistoryFollower(history, own)
        for token in HEAD:
            own.push(token)
            follower.push(token)
            assert all(guess >= 0 for guess in follower.next_tokens(30))


def reopened(harness: Harness, tier: Any, folder: Path) -> Any:
    """The history of a new start, which reads the texts on disk."""
    for _ in harness.prefix_cache.save():
        pass
    assert tier.flush(120)
    tier.close()
    return Harness(num_slots=1, disk=open_tier(folder)).prefix_cache.history


@pytest.mark.parametrize("layout", ["T", "WR"])
@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_drafts_change_nothing_behind_pictures(layout: str, error_rate: float) -> None:
    harness = Drafted(layout, Oracle(error_rate=error_rate))
    asked = [ask(harness, HEAD, picture_of(file), END, max_tokens=30, ignore_eos=True) for file in (A, B, A)]
    harness.run()
    for sink, tokens in asked:
        assert sink.tokens == reference(tokens, 30, ignore_eos=True)


def test_a_damaged_picture_fails_its_own_request_only() -> None:
    harness = Harness()
    good = ask(harness, HEAD, picture_of(A), END)
    bad, _ = ask(harness, HEAD, picture_of(DAMAGED), END)
    harness.run()
    assert isinstance(bad.last, Failed) and isinstance(bad.last.error, InvalidImage)
    assert not isinstance(bad.last.error, StepFailed)
    assert_answers([good])


def test_others_go_on_while_pixels_are_decoded() -> None:
    harness = Harness()
    thread = harness.runner.encoder.thread
    assert isinstance(thread, Inline)
    thread.is_held = True
    waits, words = ask(harness, HEAD, picture_of(A), END), ask(harness, MIDDLE, END)
    harness.run(words[0])
    assert not waits[0].tokens
    thread.release()
    harness.run()
    assert_answers([waits, words])


@pytest.mark.parametrize("cost", [2.0, 1e9])
def test_others_decode_between_the_blocks_of_a_tower(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTower, "step_operations", lambda tower, picture: cost)
    harness = Harness(chunk_tokens=4)
    words, _ = ask(harness, END, max_tokens=60, ignore_eos=True)
    harness.step(8)
    before = len(words.tokens)
    ask(harness, picture_of(A, 4, 4), END)
    blocks = num_blocks(harness)
    while num_blocks(harness) < BLOCKS:
        harness.step()
        assert num_blocks(harness) - blocks <= 1, "a step evaluated more than one block of a tower"
        assert len(words.tokens) > before, "another stream waited for more than a step"
        blocks, before = num_blocks(harness), len(words.tokens)


def test_features_that_a_sequence_uses_are_not_evicted() -> None:
    harness = Harness(chunk_tokens=4)
    memory, most = harness.prefix_cache.memory, 0
    asked = [ask(harness, HEAD, picture_of(file, 8, 8), END) for file in (A, B)]
    while not all(sink.tokens for sink, _ in asked):
        harness.step()
        memory.evict(0, ())
        most = max(most, memory.features.num_bytes)
        harness.prefix_cache.check()
    harness.run()
    assert_answers(asked)
    assert num_blocks(harness) == 2 * BLOCKS and most == 64 * 4, "one prompt after the other"
    memory.evict(0, ())
    assert not memory.features.num_bytes


@pytest.mark.parametrize("tower_tokens", [1, 10**9])
def test_features_and_state_give_way_to_each_other_by_value(
    tower_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTower, "step_operations", lambda tower, picture: tower_tokens)
    harness = Tight(200, num_slots=2)
    features = harness.prefix_cache.memory.features
    ask(harness, HEAD, picture_of(A, 8, 8), END)
    harness.run()
    assert features.num_bytes == 64 * 4
    for token in HEAD[:4]:
        ask(harness, [token] * 60 + END)
        harness.run()
    assert bool(features.num_bytes) is (tower_tokens > 1)
    harness.prefix_cache.check()
    harness.prefix_cache.clear("")
    assert not features.num_bytes
