"""What tells a model's state from another's: every file that decides about tokens or logits, and no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from models.loader import load
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
