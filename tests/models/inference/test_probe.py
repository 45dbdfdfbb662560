"""The probe passes every healthy model in every precision, and finds faults that show only together with others.

The faults are planted in what a model is given in place of its layer caches when rows decode together, or in what it
returns, so each row alone is right: as with a model whose own code takes a batch for rows of one length.

Usually each model and precision is tried with one seed, but float32 by the runner's tests, and each fault and other
roundings on each model in one precision or two; with `--all-faults` with all seeds, and in all precisions.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from cache.layers.kinds import make_caches
from models.inference import probe
from models.inference.probe import Form, Probe
from models.inference.ragged import Parts, RaggedLayer
from models.mlx_lm_import import CacheList, RotatingKVCache
from tests.support import tiny_models
from tests.support.tiny_models import VOCAB, WINDOW, Precision

SEEDS = range(3)
RAGGED = (
    *(name for name in tiny_models.NAMES if name not in {"gemma2", "deepseek_v32", "llama4", "llama_4bit"}),
    *("deepseek_v3", "gemma4", "gemma3n"),
)
ROUNDED = ("llama", "gemma3", "qwen3_next", "falcon_h1")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "4bit")
MIXTURES = {"qwen3_next", "gpt_oss", "deepseek_v3"}
"""Mixtures of experts, which MLX's CPU backend evaluates in float32 or quantized only."""


def is_ragged(model: Any, seed: int = 0) -> bool:
    """Whether rows may share a call at all; heads, which come last, are not tried."""
    return form_of(model, seed, shares_heads=False) is not Form.ALONE


def form_of(model: Any, seed: int = 0, *, shares_heads: bool = True) -> Form:
    return Probe(model, VOCAB, max_seconds=float("inf"), seed=seed).find_form(shares_heads=shares_heads)[0]


@functools.cache
def build(name: str, precision: Precision) -> Any:
    if precision == "bfloat16" and name in MIXTURES and mx.default_device() == mx.Device(mx.cpu):
        pytest.skip("MLX's CPU backend has no experts in half precision")
    return tiny_models.build(name, precision)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spreads seeds over healthy models, and precisions over faults, or takes all of them."""
    tries_all = metafunc.config.getoption("all_faults")
    if "seeds" in metafunc.fixturenames:
        is_healthy = metafunc.function is test_a_healthy_model_passes
        every = list(product(RAGGED if is_healthy else ROUNDED, PRECISIONS))
        if not tries_all:
            # In float32 the tests of the runner probe each model.
            every = (
                [(name, _half_precision_of(name, number)) for number, name in enumerate(RAGGED)]
                if is_healthy
                else every[::2]
            )
        cases = [
            (name, precision, SEEDS if tries_all else [SEEDS[number % len(SEEDS)]])
            for number, (name, precision) in enumerate(every)
        ]
        metafunc.parametrize(("name", "precision", "seeds"), cases)
    elif "fault" in metafunc.fixturenames and "precision" in metafunc.fixturenames:
        planted = [
            (fault, name, precision)
            for number, (fault, name) in enumerate(PLANTED)
            for precision in (PRECISIONS if tries_all else [_precision_of(name, number)])
        ]
        metafunc.parametrize(("fault", "name", "precision"), planted)


def _half_precision_of(name: str, number: int) -> Precision:
    return "4bit" if name in MIXTURES or number % 2 else "bfloat16"


def _precision_of(name: str, number: int) -> Precision:
    """A precision that the CPU has for the model, another one for the next."""
    possible = [one for one in PRECISIONS if one != "bfloat16" or name not in MIXTURES]
    return possible[number % len(possible)]


@pytest.mark.usual("llama-*", "gpt_oss-*", "gemma3n-*", "nemotron_h-*")
def test_a_healthy_model_passes(name: str, precision: Precision, seeds: Sequence[int]) -> None:
    model = build(name, precision)
    assert all(is_ragged(model, seed) for seed in seeds)


# -------------------------------------------------------------------------------------------- planted faults


class FaultyLayer:
    """A layer of rows that decode together with something wrong in what it tells the model."""

    def __init__(self, layer: RaggedLayer) -> None:
        self._layer = layer
        self._caches, self._cuts = layer.members, layer._cuts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def offset(self) -> mx.array:
        return self._layer.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        return self._layer.update_and_fetch(keys, values)

    def make_mask(self, num_tokens: int, **options: Any) -> Any:
        return self._layer.make_mask(num_tokens, **options)


class OffsetOffByOne(FaultyLayer):
    @property
    def offset(self) -> mx.array:
        return self._layer.offset + 1


class OffsetOffByOneInOneRow(FaultyLayer):
    """Wrong in the last row only."""

    @property
    def offset(self) -> mx.array:
        *offsets, last = [cache.offset for cache in self._caches]
        return mx.array([*offsets, last + 1], mx.int32)


class OffsetOffByOneBeyond64(FaultyLayer):
    @property
    def offset(self) -> mx.array:
        offsets = self._layer.offset
        return mx.where(offsets > 64, offsets + 1, offsets)


class MaskOffByOne(FaultyLayer):
    """Beyond the window, or beyond 64 tokens without one, a row does not see the oldest token that it should."""

    num_hidden = 1

    def make_mask(self, num_tokens: int, **options: Any) -> Any:
        return Parts([self._mask(cache) for cache in self._caches], self._cuts)

    def _mask(self, cache: Any) -> mx.array | None:
        size = min(cache.offset + 1, getattr(cache, "max_size", cache.offset + 1))
        if cache.offset < (size if isinstance(cache, RotatingKVCache) else 64):
            return None
        age = np.arange(size, 0, -1)
        if isinstance(cache, RotatingKVCache):
            age = np.roll(age, cache._idx % size + 1)
        return mx.array(age <= size - self.num_hidden)


class HalfTheWindow(MaskOffByOne):
    @property
    def num_hidden(self) -> int:  # type: ignore[override]
        return WINDOW // 2


class WindowTooLong(FaultyLayer):
    """Beyond the window a row sees one token more than it should."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        oldest = [self._oldest(cache) for cache in self._caches]
        found = self._layer.update_and_fetch(keys, values)
        return tuple(
            Parts(
                [
                    item if old is None else mx.concatenate([old[part], item], axis=2)
                    for item, old in zip(rows.items, oldest, strict=True)
                ],
                self._cuts,
            )
            for part, rows in enumerate(found)
        )  # type: ignore[return-value]

    def _oldest(self, cache: Any) -> list[mx.array] | None:
        if not isinstance(cache, RotatingKVCache) or cache.offset < cache.max_size:
            return None
        return [
            mx.array(cache._temporal_order(rows)[..., -cache.max_size :, :][..., :1, :])
            for rows in (cache.keys, cache.values)
        ]


class RowsSwappedBeyond64(FaultyLayer):
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        found = self._layer.update_and_fetch(keys, values)
        long = [index for index, cache in enumerate(self._caches) if cache.offset > 64]
        for rows in found:
            for index, other in zip(long[:1], long[-1:], strict=True):
                rows.items[index], rows.items[other] = rows.items[other], rows.items[index]
        return found


class FaultyModel:
    """A model that is right for one row and wrong for several."""

    def __init__(self, model: Any, fault: Callable[[RaggedLayer], Any], **sizes: int) -> None:
        self._model = model
        self._fault = fault
        vars(self).update(sizes)

    def make_cache(self) -> list[Any]:
        return list(make_caches(self._model))

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=[self._faulty(one) for one in cache])
        return logits

    def _faulty(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(self._faulty(part) for part in cache.caches))
        return self._fault(cache) if isinstance(cache, RaggedLayer) else cache


PLANTED = [
    *((OffsetOffByOne, name) for name in ("llama", "falcon_h1", "deepseek_v3", "gemma3")),
    *((OffsetOffByOneInOneRow, name) for name in ("llama", "falcon_h1", "deepseek_v3", "gpt_oss")),
    *((OffsetOffByOneBeyond64, name) for name in ("llama", "qwen3_5", "gemma3")),
    *((RowsSwappedBeyond64, name) for name in ("llama", "qwen3_5", "gpt_oss")),
    *((fault, name) for fault in (MaskOffByOne, HalfTheWindow) for name in ("llama", "llama_swa", "gemma3")),
    *((WindowTooLong, name) for name in ("llama_swa", "gemma3", "gpt_oss")),
]


def test_a_planted_fault_is_found(fault: type[FaultyLayer], name: str, precision: Precision) -> None:
    assert not is_ragged(FaultyModel(build(name, precision), fault))


class OffsetOffByOneBeyondIndexer(FaultyLayer):
    @property
    def offset(self) -> mx.array:
        return mx.where(self._layer.offset > 700, self._layer.offset + 1, self._layer.offset)


@pytest.mark.parametrize(
    "sizes", [{"index_topk": 700}, {"attention_chunk_size": 700}, {"index_block_size": 70, "index_topk_blocks": 10}]
)
def test_what_changes_beyond_a_size_of_the_configuration_is_found(sizes: dict[str, int]) -> None:
    assert not is_ragged(FaultyModel(build("llama", "float32"), OffsetOffByOneBeyondIndexer, **sizes))


def test_what_changes_beyond_a_window_that_the_model_only_asks_masks_for_is_found() -> None:
    model = build("llama", "float32")

    class Asking(FaultyModel):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            cache[0].make_mask(tokens.shape[1], window_size=700)
            return super().__call__(tokens, cache)

    assert not is_ragged(Asking(model, OffsetOffByOneBeyondIndexer))


# ---------------------------------------------------------------------------------------------- other roundings


@pytest.fixture
def _rounds_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers round otherwise for each number of rows, by up to half a unit in the last place."""
    for kind in (Linear, QuantizedLinear):
        monkeypatch.setattr(kind, "__call__", _rounding(kind.__call__))


def _rounding(evaluate: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
    def call(layer: Any, rows: mx.array) -> mx.array:
        found = evaluate(layer, rows)
        width, half = found.shape[-1], mx.finfo(found.dtype).eps / 2
        parts = np.random.default_rng([rows.size // rows.shape[-1], width]).uniform(-half, half, width)
        return (found.astype(mx.float32) * mx.array(1 + parts).astype(mx.float32)).astype(found.dtype)

    return call


@pytest.mark.usefixtures("_rounds_as_a_gpu_does")
def test_other_roundings_are_no_fault_and_hide_none(name: str, precision: Precision, seeds: Sequence[int]) -> None:
    model = build(name, precision)
    assert all(is_ragged(model, seed) for seed in seeds)
    assert not is_ragged(FaultyModel(model, OffsetOffByOne))


# --------------------------------------------------------------------------------------------------- bounds


class SlowModel:
    """A model on a clock of its own, which passes by `seconds_per_token`."""

    def __init__(self, seconds_per_token: float) -> None:
        self._model: Any = build("llama", "float32")
        self._seconds_per_token = seconds_per_token
        self.now = 0.0

    def make_cache(self) -> list[Any]:
        return list(make_caches(self._model))

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.now += tokens.size * self._seconds_per_token
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


@pytest.mark.parametrize("seconds_per_token", [0.5, 1.0, 9.0, 1000.0])
def test_a_slow_machine_decodes_row_by_row_soon_and_says_why(
    seconds_per_token: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = SlowModel(seconds_per_token)
    assert Probe(model, VOCAB, clock=lambda: model.now, max_seconds=20).find_form()[0] is Form.ALONE
    assert model.now <= 20 or model.now <= 2 * seconds_per_token
    (record,) = [record for record in caplog.records if record.name == "models.inference.probe"]
    assert record.levelno == logging.WARNING
    assert "could not be tested" in record.message


def test_time_in_which_a_gpu_compiles_kernels_does_not_count() -> None:
    compiled, model = set[int](), SlowModel(0.01)

    def compiling(tokens: mx.array, cache: list[Any]) -> mx.array:
        if tokens.size not in compiled:
            compiled.add(tokens.size)
            model.now += 30.0
        return model(tokens, cache)

    compiling.make_cache = model.make_cache  # type: ignore[attr-defined]
    assert Probe(compiling, VOCAB, clock=lambda: model.now, max_seconds=5).find_form()[0] is Form.HEADS
    assert model.now > 60


def test_a_call_that_is_faster_than_its_tokens_one_by_one_counts_as_what_it_takes() -> None:
    model = SlowModel(0.0)

    def together(tokens: mx.array, cache: list[Any]) -> mx.array:
        model.now += 0.1
        return model(tokens, cache)

    together.make_cache = model.make_cache  # type: ignore[attr-defined]
    probe = Probe(together, VOCAB, clock=lambda: model.now, max_seconds=13)
    assert probe.find_form()[0] is Form.HEADS
    assert probe.left_seconds == pytest.approx(13 - model.now)


def test_the_time_is_kept_while_trials_are_repeated() -> None:
    slow = SlowModel(0.1)
    faulty = FaultyModel(slow, OffsetOffByOne)
    assert Probe(faulty, VOCAB, clock=lambda: slow.now, max_seconds=8).find_form()[0] is Form.ALONE
    assert slow.now <= 8


def test_rows_too_large_to_make_up_are_not_proven(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "MAX_STATE_BYTES", 1 << 10)
    assert not is_ragged(build("llama", "float32"))
    assert "could not be tested" in caplog.text


def test_a_class_without_ragged_form_costs_no_evaluation() -> None:
    calls = list[int]()
    model = build("llama4", "float32")

    def counting(tokens: mx.array, cache: list[Any]) -> mx.array:
        calls.append(tokens.size)
        logits: mx.array = model(tokens, cache=cache)
        return logits

    counting.make_cache = lambda: make_caches(model)  # type: ignore[attr-defined]
    assert not is_ragged(counting)
    assert not calls
