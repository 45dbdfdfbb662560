"""Every class of layer cache comes apart and together again, and nothing holds more memory than it says."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.layers import state as arrays
from cache.layers import state as segments_module
from cache.layers.layout import GROWTH_TOKENS, Layout
from cache.layers.state import RecurrentState, Segment, arrays_in
from cache.types import LayerCache
from tests.support import fake_model

# isort: split
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

WINDOW = 8
WIDTH = 32
LENGTH = 21
"""Tokens in the longest test sequence: windows wrap more than twice."""

MakeCaches = Callable[[], list[LayerCache]]

CLASSES: dict[str, MakeCaches] = {
    "attention": lambda: [KVCache(), KVCache()],
    "concatenating": lambda: [ConcatenateKVCache()],
    "quantized": lambda: [QuantizedKVCache(group_size=32, bits=8)],
    "window": lambda: [RotatingKVCache(max_size=WINDOW), KVCache()],
    "window that keeps its first 4": lambda: [RotatingKVCache(max_size=WINDOW, keep=4)],
    "two windows": lambda: [RotatingKVCache(max_size=WINDOW), RotatingKVCache(max_size=5), KVCache()],
    "chunked": lambda: [ChunkedKVCache(WINDOW), KVCache()],
    "recurrent": lambda: [ArraysCache(2), KVCache()],
    "list": lambda: [CacheList(ArraysCache(2), KVCache()), CacheList(KVCache(), RotatingKVCache(max_size=WINDOW))],
    "list in a list": lambda: [CacheList(CacheList(KVCache()), ArraysCache(1))],
    "unknown": lambda: [fake_model.Opaque(), KVCache()],
}


# ---------------------------------------------------------------------------------------------- a tiny "model"


def rows(first: int, num: int, width: int = WIDTH) -> mx.array:
    """Different numbers for every position, head and column, exact in float32 and under 8-bit quantization."""
    position = np.arange(first, first + num)[None, None, :, None]
    head, column = np.arange(2)[None, :, None, None], np.arange(width)[None, None, None, :]
    return mx.array(((position * 37 + head * 101 + column * 11) % 256).astype(np.float32))


def evaluate(caches: Sequence[LayerCache], first: int, num: int) -> None:
    for cache in caches:
        _evaluate_one(cache, first, num)
    mx.eval([arrays_in(cache) for cache in caches])


def _evaluate_one(cache: LayerCache, first: int, num: int) -> None:
    if isinstance(cache, CacheList):
        evaluate(cache.caches, first, num)
    elif isinstance(cache, ArraysCache):
        for index in range(len(cache.cache)):
            state = mx.zeros((1, 4)) if cache[index] is None else cache[index]
            for position in range(first, first + num):
                state = state * 0.5 + position + index
            cache[index] = state
    elif isinstance(cache, fake_model.Opaque):
        cache.update(np.arange(first, first + num, dtype=np.int32))
    else:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        cache.update_and_fetch(rows(first, num), rows(first, num) + 1)


def evaluate_in(caches: Sequence[LayerCache], start: int, stop: int, chunk_tokens: int) -> None:
    for first in range(start, stop, chunk_tokens):
        evaluate(caches, first, min(chunk_tokens, stop - first))


def visible(cache: LayerCache) -> list[Any]:
    """What the next token can see of a cache: everything that must survive a round trip."""
    if isinstance(cache, CacheList):
        return [visible(member) for member in cache.caches]
    if isinstance(cache, ArraysCache):
        return [array if array is None else array.tolist() for array in cache.cache]
    if isinstance(cache, fake_model.Opaque):
        return [list(cache.seen), cache.last]
    if isinstance(cache, QuantizedKVCache):
        return [cache.offset, [array[..., : cache.offset, :].tolist() for array in (*cache.keys, *cache.values)]]
    if isinstance(cache, RotatingKVCache):
        size = min(cache.offset, cache.max_size)
        ordered = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
        kept = [array[..., : cache.keep, :].tolist() for array in ordered]
        return [cache.offset, kept, [array[..., min(cache.keep, size) - size :, :].tolist() for array in ordered]]
    keys, values = cache.keys_and_values()
    size = min(cache.offset, getattr(cache, "chunk_size", cache.offset))
    start = getattr(cache, "start_position", 0)
    assert start + keys.shape[2] == cache.offset
    return [cache.offset, keys[..., -size:, :].tolist(), values[..., -size:, :].tolist()]


def take(layout: Layout, caches: Sequence[LayerCache], offset: int) -> tuple[Segment, Segment | None, Any]:
    window = None
    if layout.window:
        start = max(0, offset - layout.window)
        assert layout.window_start(caches, offset) <= start, "window rows are missing"
        window = layout.cut_window(caches, start, offset)
    points = layout.take_recurrent(caches) if layout.has_recurrent else None
    return layout.cut_spans(caches, [(0, offset)])[0], window, points


def restore(
    layout: Layout, fresh: list[LayerCache], state: tuple[Any, Any, Any], offset: int, spare_tokens: int = 0
) -> None:
    spans, window, points = state
    layout.load_spans(fresh, [spans], keep=0, offset=offset, capacity=offset + spare_tokens)
    if window is not None:
        layout.load_windows(fresh, [window], offset)
    if points is not None:
        layout.put_recurrent(fresh, points)


def all_visible(caches: Sequence[LayerCache]) -> list[Any]:
    return [visible(cache) for cache in caches]


# ----------------------------------------------------------------------------------------- the conformance suite


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("chunk_tokens", [1, 5, LENGTH])
def test_restored_caches_go_on_as_if_never_interrupted(name: str, chunk_tokens: int) -> None:
    make = CLASSES[name]
    layout = Layout(make())
    for offset in range(1, LENGTH):
        original = make()
        evaluate_in(original, 0, offset, chunk_tokens)
        copies = make(), make()
        restore(layout, copies[0], state := take(layout, original, offset), offset)
        assert all_visible(copies[0]) == all_visible(original), f"restored at {offset}"
        evaluate_in(copies[0], offset, LENGTH, 1)  # which must not write into the stored state
        spans = layout.cut_spans(original, [(0, offset)])[0]
        restore(layout, copies[1], (spans, *state[1:]), offset, spare_tokens=LENGTH)
        for caches in (original, copies[1]):
            evaluate_in(caches, offset, LENGTH, 2)
        assert all_visible(copies[1]) == all_visible(original), f"went on from {offset}"


@pytest.mark.parametrize("name", CLASSES)
def test_segments_split_and_join_at_every_offset(name: str) -> None:
    make = CLASSES[name]
    layout, original = Layout(make()), make()
    evaluate(original, 0, LENGTH)
    whole = layout.cut_spans(original, [(0, LENGTH)])[0]
    for offset in range(1, LENGTH):
        parts = whole.split(offset)
        assert [(part.start, part.stop) for part in parts] == [(0, offset), (offset, LENGTH)]
        joined = parts[0].join(parts[1])
        for index in whole._where:
            assert mx.array_equal(joined.component(index), whole.component(index))
        cut = layout.cut_spans(original, [(0, offset), (offset, LENGTH)])
        for index in whole._where:
            assert all(
                mx.array_equal(left.component(index), right.component(index))
                for left, right in zip(cut, parts, strict=True)
            )


@pytest.mark.parametrize("name", ["attention", "concatenating", "quantized"])
def test_rows_are_kept_and_added_to(name: str) -> None:
    """A slot that holds the first part keeps it, forgets what follows, and takes the rest from several sources."""
    make = CLASSES[name]
    layout, original = Layout(make()), make()
    evaluate(original, 0, LENGTH)
    for keep in range(1, LENGTH - 2):
        live = make()
        evaluate(live, 0, keep)
        evaluate(live, 100, 4)
        layout.truncate_spans(live, keep)
        sources = layout.cut_spans(original, [(keep, keep + 1), (keep + 1, LENGTH)])
        layout.load_spans(live, sources, keep=keep, offset=LENGTH, capacity=LENGTH + 4)
        evaluate(live, LENGTH, 2)
        expected = make()
        evaluate(expected, 0, LENGTH + 2)
        assert all_visible(live) == all_visible(expected)


def test_state_of_other_layers_does_not_fit() -> None:
    caches, others = CLASSES["window"](), CLASSES["attention"]()
    for layers in (caches, others):
        evaluate(layers, 0, 5)
    layout, other = Layout(CLASSES["window"]()), Layout(CLASSES["attention"]())
    layout.calibrate(caches)
    rows, foreign = layout.live_rows(caches, 0, 5), other.live_rows(others, 0, 5)
    assert layout.fits(rows, None, is_snapshot=False) and not layout.fits(foreign, None, is_snapshot=False)
    narrow = Segment(0, 5, [pack.of_each(lambda array: arrays.owned(array[..., :1])) for pack in rows.packs])
    assert not layout.fits(narrow, None, is_snapshot=False) and not layout.fits(None, None, is_snapshot=False)
    window = layout.cut_window(caches, 0, 5)
    assert layout.fits(window, None, is_snapshot=True)
    assert not layout.fits(window, RecurrentState([KVCache()]), is_snapshot=True)


# -------------------------------------------------------------------------------------------------------- memory


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("name", CLASSES)
def test_state_owns_exactly_its_bytes(name: str) -> None:
    make = CLASSES[name]
    layout, caches = Layout(make()), make()
    before = mx.get_active_memory()
    evaluate(caches, 0, LENGTH)
    state = take(layout, caches, LENGTH)
    parts = list(state[0].split(7))
    del caches
    known = sum(part.num_bytes for part in (*state, *parts) if part is not None)
    assert abs(mx.get_active_memory() - before - known) <= 64
    del state
    assert abs(mx.get_active_memory() - before - sum(part.num_bytes for part in parts)) <= 64


@pytest.mark.parametrize("make", [lambda: ArraysCache(1), fake_model.Opaque])
def test_a_model_that_writes_into_its_state_does_not_reach_the_stored_one(make: Callable[[], LayerCache]) -> None:
    def array_of(cache: LayerCache) -> Any:
        return cache[0] if isinstance(cache, ArraysCache) else cache.rows

    cache, other = make(), make()
    if isinstance(cache, ArraysCache):
        cache[0] = mx.zeros((1, 1, 4, 1))
    layout = Layout([make()])
    state = layout.take_recurrent([cache])
    array_of(cache)[:, :, 0] = 7.0
    layout.put_recurrent([other], state)
    assert array_of(other).sum().item() == 0
    array_of(other)[:, :, 1] = 8.0
    layout.put_recurrent([cache], state)
    assert array_of(cache).sum().item() == 0


BIG_ROWS = 2048
BIG_LAYER_BYTES = 2 * 2 * BIG_ROWS * WIDTH * 4
NUM_BIG_LAYERS = 12


def big_caches() -> list[LayerCache]:
    caches = [KVCache() for _ in range(NUM_BIG_LAYERS)]
    for cache in caches:
        cache.step = BIG_ROWS
        cache.update_and_fetch(mx.zeros((1, 2, BIG_ROWS, WIDTH)), mx.ones((1, 2, BIG_ROWS, WIDTH)))
        mx.eval(cache.keys, cache.values)
    return caches


@pytest.fixture
def _packs_of_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "PACK_BYTES", 2 * BIG_LAYER_BYTES)


def extra_bytes(do: Callable[[], Any]) -> tuple[Any, int]:
    """Returns a call's result and how far memory rose above where it was during the call."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = do()
    return result, mx.get_peak_memory() - before


@pytest.mark.usefixtures("exact_buffers", "_packs_of_two_layers")
def test_paging_out_needs_one_pack_more() -> None:
    caches, layout = big_caches(), Layout([KVCache() for _ in range(NUM_BIG_LAYERS)])
    before = mx.get_active_memory()
    ranges = [(0, 700), (700, BIG_ROWS)]
    segments, extra = extra_bytes(lambda: layout.cut_spans(caches, ranges, consume=True))
    assert extra <= 1.05 * segments_module.PACK_BYTES
    assert mx.get_active_memory() == before
    assert sum(segment.num_bytes for segment in segments) == NUM_BIG_LAYERS * BIG_LAYER_BYTES


@pytest.mark.usefixtures("exact_buffers", "_packs_of_two_layers")
def test_paging_in_releases_what_it_has_copied() -> None:
    caches, layout = big_caches(), Layout([KVCache() for _ in range(NUM_BIG_LAYERS)])
    segments = layout.cut_spans(caches, [(0, 700), (700, BIG_ROWS)], consume=True)
    before = mx.get_active_memory()
    fresh = [KVCache() for _ in range(NUM_BIG_LAYERS)]
    _, extra = extra_bytes(lambda: layout.load_spans(fresh, segments, keep=0, offset=BIG_ROWS, capacity=BIG_ROWS))
    assert extra <= segments_module.PACK_BYTES * len(segments) + BIG_LAYER_BYTES * 1.05
    assert mx.get_active_memory() == before


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("name", ["attention", "quantized"])
def test_capacity_that_was_asked_for_is_there(name: str) -> None:
    make = CLASSES[name]
    layout, caches = Layout(make()), make()
    evaluate(caches, 0, 5)
    segment = layout.cut_spans(caches, [(0, 5)])[0]
    fresh = make()
    layout.load_spans(fresh, [segment], keep=0, offset=5, capacity=600)
    held = layout.live_bytes(fresh)
    evaluate(fresh, 5, 1)
    evaluate(fresh, 6, 594)
    assert layout.live_bytes(fresh) == held
    layout.calibrate(fresh)
    assert held == 600 * layout.bytes_per_token


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("make", [KVCache, lambda: QuantizedKVCache(group_size=32)])
def test_buffers_have_the_capacity_asked_for_and_grow_by_a_step_behind_it(make: Callable[[], LayerCache]) -> None:
    caches, layout = [make()], Layout([make()])
    layout.resize(caches, 1000)
    rows = set()
    for first in range(0, 1000, 50):
        evaluate(caches, first, 50)
        layout.bound_growth(caches)
        rows.add(layout.capacity(caches))
    assert rows == {1000}
    evaluate(caches, 1000, 1)
    assert layout.capacity(caches) == 1000 + GROWTH_TOKENS


@pytest.mark.parametrize("make", [KVCache, lambda: QuantizedKVCache(group_size=32)])
def test_resized_buffers_hold_the_same_rows(make: Callable[[], LayerCache]) -> None:
    caches, layout = [make()], Layout([make()])
    evaluate(caches, 0, 600)
    before = [np.array(rows) for rows in _rows_of(layout, caches, 600)]
    for capacity, allocated in ((2000, 2000), (1900, 2000), (700, 700), (600, 700), (100_000, 100_000), (600, 600)):
        layout.resize(caches, capacity)
        assert layout.capacity(caches) == allocated
        for now, then in zip(_rows_of(layout, caches, 600), before, strict=True):
            assert np.array_equal(np.array(now), then)


def _rows_of(layout: Layout, caches: list[Any], num_tokens: int) -> list[mx.array]:
    rows = layout.live_rows(caches, 0, num_tokens)
    num_components = 6 if isinstance(caches[0], QuantizedKVCache) else 2
    return [rows.component(number) for number in range(num_components)]


@pytest.mark.parametrize(
    ("granule", "num_bytes", "allocated"),
    [
        pytest.param(1, 5000, 5000, id="the CPU allocates what is asked for"),
        pytest.param(16_384, 16_384, 16_384, id="a page"),
        pytest.param(16_384, 57_600, 65_536, id="whole pages"),
        pytest.param(16_384, 3_000, 4_096, id="less than a page"),
        pytest.param(16_384, 0, 8, id="nothing"),
    ],
)
def test_an_array_is_no_view_for_what_an_allocator_rounds_up(
    granule: int, num_bytes: int, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_granule_bytes", lambda: granule)
    array = mx.zeros((num_bytes,), mx.uint8)
    mx.eval(array)
    for size, expected in ((allocated, False), (allocated + granule, True)):
        monkeypatch.setattr(mx, "get_array_buffer_size", lambda _, size=size: size)
        assert (arrays.owned(array) is not array) == expected, "only a view is copied"
