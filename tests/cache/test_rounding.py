"""Stored state in 8 bits: the same bits however often it is restored, in pieces, and before anything is evicted."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.disk.tier import DiskTier
from cache.layers import state as states
from cache.layers.layout import Layout, StoredForm
from cache.layers.state import Rounded, Segment, rounding
from cache.lease import Tier
from cache.memory_tier import ROUNDED_TOKENS
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from tests.support import cache_driver
from tests.support.disk_driver import open_tier

# isort: split
from mlx_lm.models.cache import ArraysCache, KVCache

pytestmark = pytest.mark.usefixtures("exact_buffers")

ROWS = StoredForm(rows=True)
ALL = StoredForm(rows=True, recurrent=True)
HEADS, WIDTH = 2, 64
TYPES = (mx.float32, mx.bfloat16, mx.float16)


def drawn(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    rng = np.random.default_rng(seed)
    sizes = scale * np.exp(2 * rng.normal(size=(*shape[:-1], 1)))
    return mx.array(rng.normal(size=shape) * sizes).astype(dtype)


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 10.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_restored_is_stored_again_as_the_same_bits(dtype: mx.Dtype, scale: float) -> None:
    array = drawn((1, HEADS, 500, WIDTH), dtype, scale=scale)
    first = Rounded.of(array)
    restored = first.exact()
    assert restored.dtype == dtype and restored.shape == array.shape
    again = Rounded.of(restored)
    assert all(mx.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert mx.array_equal(restored, again.exact())


@pytest.mark.parametrize("dtype", TYPES)
def test_an_error_is_half_of_a_step_and_the_peak_has_none(dtype: mx.Dtype) -> None:
    array = drawn((1, HEADS, 200, WIDTH), dtype)
    groups = array.astype(mx.float32).reshape(-1, states.GROUP)
    errors = mx.abs(Rounded.of(array).exact().astype(mx.float32).reshape(-1, states.GROUP) - groups)
    peaks = mx.abs(groups).max(axis=1, keepdims=True)
    half, own = peaks / 254, peaks * float(mx.finfo(dtype).eps)
    assert bool(mx.all(errors <= half + own))
    assert not mx.any(mx.where(mx.abs(groups) == peaks, errors, 0))


def test_only_whole_groups_of_numbers_are_rounded() -> None:
    fitting = mx.zeros((1, 2, 3, 64), mx.bfloat16)
    assert Rounded.fits(fitting) and Rounded.size_of(fitting) * 1.85 < fitting.nbytes
    for array in (mx.zeros((1, 2, 3, 80)), mx.zeros((1, 2, 3, 64), mx.uint32), mx.zeros((1, 3, 64))):
        assert not Rounded.fits(array) and Rounded.size_of(array) == array.nbytes


def segment_of(num_tokens: int, seed: int = 0) -> Segment:
    """Of two layers: one with whole groups, one without."""
    whole = drawn((2, HEADS, num_tokens, WIDTH), mx.bfloat16, seed)
    broken = drawn((1, 1, num_tokens, 80), mx.float32)
    mx.eval(whole, broken)
    return Segment(0, num_tokens, [((0, 1), whole), ((2,), broken)])


def test_rows_are_rounded_in_pieces_and_cut_and_joined_as_they_are() -> None:
    exact = segment_of(50)
    piece_bytes = exact.packs[0].rows.nbytes // 7
    steps = list(rounding(exact, piece_bytes))
    assert max(num_bytes for num_bytes, _ in steps) <= piece_bytes
    assert sum(num_bytes for num_bytes, _ in steps) == exact.packs[0].rows.nbytes, "rows of half groups stay exact"
    rounded = steps[-1][1]
    assert rounded.is_rounded and not rounded.can_round and rounded.num_bytes < 0.8 * exact.num_bytes
    joined = rounded.split(13)[0].join(rounded.split(13)[1])
    for index in range(3):
        wanted = Rounded.of(exact.component(index)).exact() if index < 2 else exact.component(index)
        assert mx.array_equal(joined.component(index), wanted)


class World:
    """A cache over one attention layer and one recurrent layer, whose rows are drawn for each token."""

    def __init__(
        self,
        form: StoredForm = ROWS,
        *,
        is_hybrid: bool = False,
        budget_tokens: int = 10**6,
        disk: DiskTier | None = None,
    ) -> None:
        self._is_hybrid = is_hybrid
        layout = Layout(self.make_caches(), form=form)
        self.cache = PrefixCache(self.make_caches, num_slots=1, budget_bytes=1 << 40, layout=layout, disk=disk)
        caches = self.make_caches()
        self.evaluate(caches, np.ones(8, np.int32))
        layout.calibrate(caches)
        self.cache.ledger.budget_bytes = int(budget_tokens * layout.bytes_per_token)

    def make_caches(self) -> list[Any]:
        return [KVCache(), *([ArraysCache(1)] if self._is_hybrid else [])]

    def evaluate(self, caches: Any, tokens: Any) -> None:
        rows = rows_of(tokens)
        caches[0].update_and_fetch(rows, 2 * rows)
        if self._is_hybrid:
            caches[1][0] = drawn((1, 4, 32, 32), mx.float32, int(tokens[-1]))
        mx.eval([cache.state for cache in caches])

    def ask(self, prompt: Any, **fields: Any) -> Any:
        lease = self.cache.begin(CacheRequest(Lookup(prompt), **fields))
        assert lease is not None
        arrays = [lease.caches[0].keys, lease.caches[0].values] if lease.offset else []
        live = [mx.array(array[..., : lease.offset, :]) for array in arrays]
        state = lease.caches[1][0] if self._is_hybrid else None
        cache_driver.prefill(lease, prompt, self.evaluate)
        lease.close()
        self.cache.check()
        return lease, live, state


def prompt_of(start: int, num_tokens: int) -> Any:
    return np.arange(start, start + num_tokens, dtype=np.int32)


def rows_of(prompt: Any) -> mx.array:
    angles = np.asarray(prompt)[None, :, None] * np.arange(1, 1 + HEADS * WIDTH).reshape(HEADS, 1, WIDTH)
    return mx.array(np.sin(angles)[None]).astype(mx.bfloat16)


def test_stored_rows_are_rounded_a_piece_at_a_time_and_restored_so() -> None:
    world, prompt = World(), prompt_of(1, 700)
    world.ask(prompt)
    world.ask(prompt_of(5000, 20))
    memory = world.cache.memory
    before, num_pieces = memory.ledger.stored_bytes, 0
    while memory.has_exact:
        memory.round_stored(ROUNDED_TOKENS)
        world.cache.check()
        num_pieces += 1
    assert num_pieces >= 700 // ROUNDED_TOKENS
    assert memory.ledger.stored_bytes * 1.85 < before
    lease, (keys, values), _ = world.ask(prompt)
    wanted = Rounded.of(rows_of(prompt[: lease.hit_tokens])).exact()
    assert mx.array_equal(keys, wanted) and mx.array_equal(values, 2 * wanted)
    assert lease.rounded_tokens == lease.hit_tokens == 699


def test_memory_holds_nearly_twice_the_conversations() -> None:
    hits = {}
    for form in (StoredForm(), ROWS):
        world = World(form, budget_tokens=4000)
        for number in range(6):
            world.ask(prompt_of(1000 * number, 900), session_id=str(number))
        found = [world.cache.peek(Lookup(prompt_of(1000 * number, 900))) for number in range(6)]
        hits[form] = sum(found)
    assert hits[ROWS] > 1.4 * hits[StoredForm()] and hits[ROWS] == 6 * 899


def test_rounded_state_comes_back_from_disk(tmp_path: Path) -> None:
    prompt, tiers = prompt_of(1, 600), list[DiskTier]()
    for _ in range(2):
        tiers.append(open_tier(tmp_path))
        world = World(ALL, is_hybrid=True, disk=tiers[-1])
        lease, live, state = world.ask(np.append(prompt, 601))
        world.cache.end(120)
    assert lease.tier is Tier.DISK and lease.rounded_tokens == lease.hit_tokens == 600
    assert mx.array_equal(live[0], Rounded.of(rows_of(prompt)).exact())
    assert mx.array_equal(state, Rounded.of(drawn((1, 4, 32, 32), mx.float32, 600)).exact())


def test_nothing_is_rounded_while_the_model_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.ask(prompt_of(1, 300))
    world.cache.park()
    before = world.cache.ledger.budget_bytes
    with monkeypatch.context() as patched:
        patched.setattr(Rounded, "of", lambda array: pytest.fail("it was rounded on another thread"))
        world.cache.try_resize(world.cache.ledger.stored_bytes // 2)
    world.cache.resume(world.make_caches, before)
    world.ask(prompt_of(1, 200))
    world.ask(prompt_of(5000, 20))
    assert world.cache.memory.has_exact


def test_an_error_leaves_what_is_stored_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = World(), prompt_of(1, 300)
    world.ask(prompt)
    world.ask(prompt_of(5000, 20))

    def fail(array: mx.array) -> Rounded:
        raise RuntimeError("the device lacks memory")

    with monkeypatch.context() as patched:
        patched.setattr(Rounded, "of", fail)
        world.cache.memory.round_stored(float("inf"))
    assert not world.cache.memory.has_exact
    lease, (keys, _), _ = world.ask(prompt)
    assert lease.hit_tokens == 299 and mx.array_equal(keys, rows_of(prompt[:299]))
