"""What tells a model's state from another's: each file that decides about tokens or logits, each byte of weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import loader as module
from models.loader import checksum, load
from tests.support import tiny_models

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(file: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **changes}))

    return change


def add(file: str, text: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)

    return change


def set_weight(name: str, index: tuple[int, ...]) -> Change:
    def change(folder: Path) -> None:
        file = str(folder / "model.safetensors")
        weights: Any = mx.load(file)
        weights[name][index] = weights[name][index] + 0.5
        mx.eval(weights)
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})

    return change


def rename_token(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<think>", "<thunk>"))


def touch(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


CHANGES: dict[str, Change] = {
    "weights in the middle": set_weight("model.layers.1.mlp.up_proj.weight", (64, 32)),
    "weights at the start": set_weight("model.embed_tokens.weight", (0, 0)),
    "weights at the end, as those of added tokens": set_weight("model.embed_tokens.weight", (319, 63)),
    "config.json": edit("config.json", rope_theta=20000.0),
    "tokenizer.json": rename_token,
    "tokenizer_config.json": edit("tokenizer_config.json", add_prefix_space=True),
    "special_tokens_map.json": edit("special_tokens_map.json", unk_token="<|endoftext|>"),
    "added_tokens.json": edit("added_tokens.json", **{"<x>": 319}),
    "vocab.json": add("vocab.json", "{}"),
    "merges.txt": add("merges.txt", "a b"),
    "tokenizer.model": add("tokenizer.model", "x"),
    "qwen.tiktoken": add("qwen.tiktoken", "x"),
    "chat_template.jinja": add("chat_template.jinja", "{# changed #}"),
    "chat_template.json": add("chat_template.json", "{}"),
    "an additional template": add("additional_chat_templates/tool_use.jinja", "{{ messages }}"),
}

NO_CHANGES: dict[str, Change] = {
    "README.md": add("README.md", "changed"),
    "generation_config.json": edit("generation_config.json", temperature=0.3, eos_token_id=7),
    "preprocessor_config.json": add("preprocessor_config.json", "{}"),
    "code": add("modeling_x.py", "raise SystemExit"),
    "times": touch,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_state_is_another_model_s_after_a_change(whole: Path, folder: Path, change: Change) -> None:
    change(folder)
    assert load(folder, "x").state_fingerprint != load(whole, "x").state_fingerprint


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES)
def test_state_stays_the_model_s(whole: Path, folder: Path, change: Change) -> None:
    change(folder)
    before, after = load(whole, "x"), load(folder.rename(folder.with_name("moved")), "y")
    assert (after.fingerprint, after.state_fingerprint) == (before.fingerprint, before.state_fingerprint)


def test_a_name_that_moves_from_one_file_to_another_counts(folder: Path) -> None:
    add("vocab.json", "{}")(folder)
    before = load(folder, "x").fingerprint
    (folder / "vocab.json").rename(folder / "added_tokens.json")
    assert load(folder, "x").fingerprint != before


INTEGERS = (mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64)
DTYPES = (*INTEGERS, mx.bool_, mx.float16, mx.bfloat16, mx.float32, mx.complex64)


def weights(num_rows: int = 7) -> mx.array:
    return mx.array(np.random.default_rng(1).normal(size=(num_rows, 5)).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 0)], ids=str)
def test_arrays_of_every_type_and_size_have_one(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    assert checksum([("a", mx.zeros(shape, dtype))]) == checksum([("a", mx.zeros(shape, dtype))])
    if mx.zeros(shape).size:
        assert checksum([("a", mx.zeros(shape, dtype))]) != checksum([("a", mx.ones(shape, dtype))])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8], ids=str)
def test_any_one_element_counts(dtype: mx.Dtype) -> None:
    before = mx.arange(35).reshape(7, 5).astype(dtype)
    found = {checksum([("a", before)])}
    for index in range(35):
        changed = np.array(before.astype(mx.float32)).reshape(-1)
        changed[index] += 1
        found.add(checksum([("a", mx.array(changed).reshape(7, 5).astype(dtype))]))
    assert len(found) == 36


def test_names_types_and_shapes_count_but_not_the_order() -> None:
    array = weights()
    assert checksum([("a", array), ("b", array + 1)]) == checksum([("b", array + 1), ("a", array)])
    assert checksum([("a", array), ("b", array + 1)]) != checksum([("a", array + 1), ("b", array)])
    others = [("b", array), ("a", array.reshape(5, 7)), ("a", mx.view(array, mx.int32))]
    assert len({checksum([each]) for each in [("a", array), *others]}) == 4


def test_an_array_of_more_bytes_than_a_shape_can_count_is_seen_as_words() -> None:
    assert module._words(mx.zeros(2**30 + 8, mx.bfloat16)).shape == (2**29 + 4,)  # never evaluated


def test_a_view_counts_as_what_it_shows() -> None:
    array = weights()
    assert checksum([("a", array.T)]) == checksum([("a", mx.array(np.array(array).T.copy()))])
