"""Segments and recurrent state through files: every bit comes back, whatever the type, the shape and the cuts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.disk import codec
from cache.disk.tier import DiskTier
from cache.disk.tree import Target
from cache.layers.state import RecurrentState, Segment
from cache.types import TokenArray
from tests.support import disk_driver, fake_model
from tests.support.disk_driver import (
    assert_rows,
    assert_span,
    find_span,
    open_tier,
    segment_of,
    stored_names,
    tokens_of,
    write,
    write_snapshot,
)

# isort: split
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

TYPES = [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.int8, mx.bool_, mx.uint8, mx.int64, mx.complex64]


def random_bits(shape: Sequence[int], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Returns an array of random bit patterns, not-a-numbers included."""
    random = np.random.default_rng(seed)
    if dtype == mx.bool_:
        return mx.array(random.integers(0, 2, shape).astype(bool))
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] * dtype.size), np.uint8)
    array = mx.array(raw).view(dtype)
    mx.eval(array)
    return array


def bits(array: mx.array) -> tuple[Any, ...]:
    """Returns an array's type, shape and bits, to compare."""
    flat = mx.contiguous(array)
    raw = flat if array.dtype == mx.bool_ else flat.reshape(-1).view(mx.uint8)
    return array.dtype, array.shape, np.array(raw).tobytes()


def assert_same(got: Segment, wanted: Segment) -> None:
    assert (got.start, got.stop) == (wanted.start, wanted.stop)
    assert [indices for indices, *_ in got.packs] == [indices for indices, *_ in wanted.packs]
    for (_, left, _), (_, right, _) in zip(got.packs, wanted.packs, strict=True):
        assert bits(left) == bits(right)


def through_disk(folder: Path, segment: Segment, tokens: TokenArray) -> Segment:
    """Returns what another process would read."""
    tier = open_tier(folder)
    tier.write_span(Target("", tokens), segment)
    assert tier.flush(120)
    tier.close()
    tier = open_tier(folder)
    span = find_span(tier, tokens, segment.start) if segment.start else disk_driver.entries(tier)[0].span
    assert span is not None
    loaded = tier.reader.load_rows(span.parts)
    tier.close()
    return loaded


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_comes_back_bit_by_bit(dtype: mx.Dtype, tmp_path: Path) -> None:
    rows = random_bits((3, 2, 20, 8), dtype)
    segment = Segment(0, 20, [((0, 1, 2), rows)])
    assert_same(through_disk(tmp_path, segment, tokens_of(range(20))), segment)


@pytest.mark.usefixtures("exact_buffers")
def test_loaded_state_owns_its_bytes_and_no_more(tmp_path: Path) -> None:
    segment = through_disk(tmp_path, segment_of(tokens_of(range(600)), 0), tokens_of(range(600)))
    assert segment.num_bytes == sum(rows.nbytes for _, rows, _ in segment.packs)
    part, _ = segment.split(100)
    assert part.num_bytes == sum(rows.nbytes for _, rows, _ in part.packs)


@pytest.fixture(scope="module")
def long_tier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sequence of 1000 tokens in three files."""
    tier = open_tier(tmp_path_factory.mktemp("long"))
    for start, stop in ((0, 300), (300, 310), (310, 1000)):
        write(tier, LONG[:stop], start)
    assert tier.flush(120)
    yield tier
    tier.close()


LONG = tokens_of(np.random.default_rng(1).integers(0, 1000, 1000))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 999), min_size=1, max_size=6, unique=True), data=st.data())
def test_any_cuts_and_joins_of_a_span_load_the_right_rows(
    long_tier: DiskTier, cuts: list[int], data: st.DataObject
) -> None:
    whole = find_span(long_tier, LONG)
    assert whole is not None
    spans, rest = [], whole
    for cut in sorted(cuts):
        left, rest = rest.clipped(rest.start, cut), rest.clipped(cut, rest.stop)
        spans.append(left)
    spans.append(rest)
    assert sum(span.num_bytes for span in spans) <= whole.num_bytes
    first = data.draw(st.integers(0, len(spans) - 1))
    last = data.draw(st.integers(first, len(spans) - 1))
    chosen = whole.clipped(spans[first].start, spans[last].stop)
    segment = long_tier.reader.load_rows(chosen.parts)
    assert (segment.start, segment.stop) == (chosen.start, chosen.stop)
    assert_rows(segment, LONG)


def test_only_the_blocks_around_a_range_are_read(tmp_path: Path) -> None:
    files, tokens = disk_driver.CountingFiles(), tokens_of(range(20 * codec.BLOCK_TOKENS))
    tier = open_tier(tmp_path, files=files)
    span = write(tier, tokens)
    assert span is not None
    assert tier.flush(120)
    files.read_bytes = 0
    assert_span(tier, span.clipped(0, codec.BLOCK_TOKENS), tokens)
    assert 0 < files.read_bytes < span.num_bytes / 10
    tier.close()


def test_files_are_safetensors_that_other_tools_read(tier: DiskTier, tmp_path: Path) -> None:
    tokens = tokens_of(range(300))
    write(tier, tokens)
    disk_driver.snap(tier, tokens)
    assert tier.flush(120)
    tier.close()
    for name in stored_names(tmp_path):
        with safetensors.safe_open(tmp_path / name, "numpy") as file:
            assert json.loads(file.metadata()["state"])
            assert all(file.get_tensor(key) is not None for key in file.keys())  # noqa: SIM118
        assert mx.load(str(tmp_path / name), format="safetensors")


# ------------------------------------------------------------------------------------------------- recurrent state


def points_through_disk(folder: Path, caches: list[Any]) -> RecurrentState:
    tier = open_tier(folder)
    snapshot = write_snapshot(tier, tokens_of([1, 2]), None, RecurrentState(caches))
    assert snapshot is not None
    assert tier.flush(120)
    window, points = tier.reader.load(snapshot.whole)
    tier.close()
    assert window is None and points is not None
    return points


def test_recurrent_state_comes_back_with_all_it_consists_of(tmp_path: Path) -> None:
    cache = ArraysCache(4, left_padding=[1, 2])
    cache[0] = random_bits((1, 3, 4), mx.bfloat16)
    cache[1] = mx.transpose(random_bits((2, 3, 4), mx.float32), (2, 0, 1))
    cache[3] = mx.zeros((0, 7), mx.float16)
    (held,) = points_through_disk(tmp_path, [cache]).caches
    assert type(held) is ArraysCache and held[2] is None and held.lengths is None
    for got, wanted in ((held[0], cache[0]), (held[1], cache[1]), (held.left_padding, cache.left_padding)):
        assert bits(got) == bits(wanted)
    assert held[3].shape == (0, 7) and held[3].dtype == mx.float16


def test_a_rotating_cache_taken_whole_goes_on_as_before(tmp_path: Path) -> None:
    cache = RotatingKVCache(max_size=8, keep=2)
    for value in range(11):
        cache.update_and_fetch(mx.full((1, 1, 1, 2), value), mx.full((1, 1, 1, 2), -value))
    live = RotatingKVCache(max_size=8, keep=2)
    points_through_disk(tmp_path, [cache, KVCache()]).put([live, KVCache()])
    for one in (cache, live):
        one.update_and_fetch(mx.full((1, 1, 1, 2), 99), mx.full((1, 1, 1, 2), -99))
    assert bits(live.keys) == bits(cache.keys) and live.offset == cache.offset == 12


@pytest.mark.parametrize(
    "cache", [fake_model.Opaque(), CacheList(fake_model.Opaque()), type("ArraysCache", (), {})()]
)
def test_state_of_unknown_classes_is_declined(cache: Any, tier: DiskTier, tmp_path: Path) -> None:
    assert write_snapshot(tier, tokens_of([1]), None, RecurrentState([cache])) is None
    assert tier.flush(120) and stored_names(tmp_path) == set()


def test_state_of_a_class_that_is_named_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.STORABLE, "Opaque", fake_model.Opaque)
    cache = fake_model.Opaque()
    cache.rows = random_bits((1, 3, 4), mx.bfloat16)
    (held,) = points_through_disk(tmp_path, [cache]).caches
    assert type(held) is fake_model.Opaque and vars(held).keys() == vars(cache).keys()
    assert bits(held.rows) == bits(cache.rows)
