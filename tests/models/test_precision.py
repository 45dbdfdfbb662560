"""Weights in other types: how large they become, that they say the same, and which are chosen."""

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from models.fast_blas import LIBRARIES, load_fast_blas
from models.loader import load
from models.precision import Precision, choose_precision, convert, float32_bytes, seconds_per_token
from tests.support.tiny_models import write

TOKENS = mx.array([[5, 9, 200, 31, 7, 7, 90]])


def packed_model(folder: Path, architecture: str = "qwen3", bits: int = 4) -> Any:
    """Loads a tiny model whose matrices are quantized and whose other weights are bfloat16."""
    model: Any = load(write(architecture, folder), architecture).model
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    quantize(model, group_size=32, bits=bits)
    return model


def arrays_of(model: Any) -> list[mx.array]:
    return [array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))]


def held_bytes(model: Any) -> int:
    return sum(array.nbytes for array in arrays_of(model))


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_float32_weights_take_what_was_foretold_and_say_the_same(
    architecture: str, bits: int, tmp_path: Path
) -> None:
    model = packed_model(tmp_path / "tiny", architecture, bits)
    foretold = float32_bytes(model)
    convert(model, Precision.FLOAT32_SCALES)
    assert {array.dtype for array in arrays_of(model)} == {mx.float32, mx.uint32}
    expected = np.array(model(TOKENS))
    convert(model, Precision.FLOAT32)
    assert held_bytes(model) == foretold
    assert {array.dtype for array in arrays_of(model)} == {mx.float32}
    np.testing.assert_allclose(np.array(model(TOKENS)), expected, rtol=1e-3, atol=1e-3)


def test_plain_half_precision_becomes_float32(tmp_path: Path) -> None:
    model: Any = load(write("qwen3", tmp_path / "tiny"), "tiny").model
    model.update(tree_map(lambda array: array.astype(mx.float16), model.parameters()))
    foretold = float32_bytes(model)
    assert foretold == 2 * held_bytes(model)
    convert(model, Precision.FLOAT32)
    assert held_bytes(model) == foretold


def test_the_fastest_that_fits_is_chosen(tmp_path: Path) -> None:
    model = packed_model(tmp_path / "tiny")
    fits = float32_bytes(model)
    chosen = [choose_precision(model, limit_bytes) for limit_bytes in (fits, fits - 1, 0)]
    assert chosen == [Precision.FLOAT32, Precision.FLOAT32_SCALES, Precision.FLOAT32_SCALES]


def test_what_is_float32_already_or_could_only_grow_in_vain_stays(tmp_path: Path) -> None:
    model: Any = load(write("qwen3", tmp_path / "tiny"), "tiny").model
    assert choose_precision(model, 10**9) is Precision.STORED
    model.update(tree_map(lambda array: array.astype(mx.float16), model.parameters()))
    assert choose_precision(model, float32_bytes(model) - 1) is Precision.STORED


def test_loading_converts_within_the_limit_and_keeps_other_state_apart(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "tiny")
    model = packed_model(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    steps: list[str] = []
    stored = load(folder, "tiny")
    converted = load(folder, "tiny", max_float32_bytes=10**9, tell=steps.append)
    assert (stored.precision, converted.precision) == (Precision.STORED, Precision.FLOAT32)
    assert stored.fingerprint == converted.fingerprint
    assert stored.state_fingerprint != converted.state_fingerprint
    assert steps[0] == "reading weights" and "making weights float32, 0 %" in steps


def test_the_pace_is_that_of_one_matrix_times_all_weights_in_use(tmp_path: Path) -> None:
    readings = iter([10.0, 12.0, 20.0, 22.0])
    model = packed_model(tmp_path / "dense")
    # The largest matrix is that of the logits, 320 x 64, and it took two seconds.
    num_weights = sum(array.size for array in arrays_of(load(tmp_path / "dense", "x").model))
    assert 2.0 < seconds_per_token(model, 1.0, lambda: next(readings)) < 2.0 * num_weights / (320 * 64)
    experts = packed_model(tmp_path / "experts", "gpt_oss")
    whole = seconds_per_token(experts, 1.0, iter([0.0, 1.0]).__next__)
    assert seconds_per_token(experts, 0.5, iter([0.0, 1.0]).__next__) < whole


class Library:
    """A library that has the names of a BLAS, or has none."""

    def __init__(self, *, is_blas: bool) -> None:
        if is_blas:
            self.cblas_sgemm = print


@pytest.mark.parametrize("found", [*LIBRARIES, None])
def test_the_first_library_with_the_right_names_is_loaded(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_library(name: str, mode: int) -> Library:
        if name == LIBRARIES[0] and found != name:
            return Library(is_blas=False)
        if name != found:
            raise OSError("cannot open shared object file")
        return Library(is_blas=True)

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delitem(__import__("sys").modules, "mlx.core")
    assert load_fast_blas(open_library) == found


def test_nothing_is_loaded_where_it_would_come_too_late() -> None:
    assert "mlx.core" in __import__("sys").modules
    assert load_fast_blas(lambda name, mode: Library(is_blas=True)) is None
