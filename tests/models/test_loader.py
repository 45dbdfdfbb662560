"""A model folder either loads whole, or one sentence says what is wrong with it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cache.layers.kinds import make_caches
from models.errors import ModelBroken, ModelError, ModelNotFound
from models.loader import DEFAULT_CONTEXT_TOKENS, load
from models.output.call_formats import HARMONY
from models.output.detokenizer import StreamDecoder
from models.weights import fingerprint
from tests.support import tiny_models


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A folder of one's own to damage."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_loaded_model_knows_itself(llama_folder: Path) -> None:
    loaded = load(llama_folder, "tiny")
    end = tiny_models.tokenizer().eos_token_id
    assert (loaded.name, loaded.path, loaded.config["model_type"]) == ("tiny", llama_folder, "llama")
    assert (loaded.context_tokens, loaded.vocab_size) == (tiny_models.CONTEXT, tiny_models.VOCAB)
    assert loaded.eos_token_ids == {end}
    assert loaded.tokenizer_wrapper.tool_call_start == "<tool_call>"
    assert StreamDecoder(loaded.detokenizer).push(loaded.tokenizer.convert_tokens_to_ids("<think>")) == "<think>"


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_every_architecture_comes_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    loaded = load(tiny_models.write(name, tmp_path / name), name)
    tokens = mx.array([[1, 2, 3, 4]])
    original: Any = tiny_models.build(name)
    reloaded: Any = loaded.model
    expected = original(tokens, cache=make_caches(original))
    assert mx.allclose(reloaded(tokens, cache=make_caches(reloaded)), expected, atol=1e-5)
    assert loaded.vocab_size == tiny_models.VOCAB
    assert loaded.context_tokens in (tiny_models.CONTEXT, DEFAULT_CONTEXT_TOKENS)


def test_the_tokens_that_end_an_answer_come_from_every_file(folder: Path) -> None:
    edit_config(folder, eos_token_id=[1, 2])
    assert load(folder, "x").eos_token_ids == {1, 2, tiny_models.tokenizer().eos_token_id}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert 7 in load(folder, "x").eos_token_ids


def test_loading_touches_no_network_and_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "evil.py").write_text("raise SystemExit('code of the folder was run')")
    load(folder, "x")
    edit_config(folder, model_file="evil.py")
    with pytest.raises(ModelBroken, match=r"evil\.py"):
        load(folder, "x")


Damage = Callable[[Path], object]


def truncate(num_bytes: int) -> Damage:
    """Cuts the weight file to `num_bytes`, or by so many if negative."""

    def cut(folder: Path) -> None:
        file = folder / "model.safetensors"
        os.truncate(file, num_bytes if num_bytes >= 0 else file.stat().st_size + num_bytes)

    return cut


def configure(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def write_file(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def normalize(num_doublings: int, pattern: dict[str, str], content: str = "aa") -> Damage:
    """Has the tokenizer replace so many times what is in texts, and in a token of its own too."""

    def change(folder: Path) -> None:
        contents = json.loads((folder / "tokenizer.json").read_text())
        double = {"type": "Replace", "pattern": pattern, "content": content}
        contents["normalizer"] = {"type": "Sequence", "normalizers": [double] * num_doublings}
        contents["added_tokens"][0]["normalized"] = True
        (folder / "tokenizer.json").write_text(json.dumps(contents))

    return change


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write_header(header: str) -> Damage:
    data = len(header).to_bytes(8, "little") + header.encode()
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


FAULTS: list[tuple[Damage, type[ModelError], str]] = [
    (shutil.rmtree, ModelNotFound, "no folder"),
    (remove("config.json"), ModelNotFound, r"config\.json"),
    (remove("model.safetensors"), ModelNotFound, "no weights"),
    (write_file("config.json", "{"), ModelBroken, r"config\.json is damaged"),
    (write_file("config.json", "[]"), ModelBroken, "no JSON object"),
    (write_file("config.json", '{"model_type": "llama"}'), ModelBroken, "hidden_size"),
    (configure(model_type=None), ModelBroken, "model_type"),
    (configure(model_type="../llama"), ModelBroken, "model_type"),
    (configure(model_type="lfm2-vl"), ModelBroken, "text_config"),
    (configure(model_type="llamma"), ModelBroken, "'llamma' is not known"),
    (configure(model_type="base"), ModelBroken, "base"),
    (configure(hidden_size=128), ModelBroken, r"shape \(320, 128\)"),
    (configure(num_hidden_layers=5), ModelBroken, r"Missing 27 parameters: model\.layers\.2"),
    (configure(num_hidden_layers=100_000_000), ModelBroken, "100000000 num_hidden_layers, but the files hold"),
    (truncate(-100), ModelBroken, r"model\.safetensors is incomplete"),
    (truncate(20), ModelBroken, r"model\.safetensors is damaged"),
    (truncate(0), ModelBroken, "header too small"),
    (write_file("model.safetensors", "not weights at all"), ModelBroken, "is damaged"),
    (write_header("[]"), ModelBroken, "invalid JSON in header"),
    (write_header('{"w": {"dtype": "F32", "shape": [1]}}'), ModelBroken, "missing field"),
    (write_header('{"w": 1}'), ModelBroken, "invalid type: integer"),
    (
        write_file("model.safetensors.index.json", '{"weight_map": {"w": "model-00002-of-00002.safetensors"}}'),
        ModelBroken,
        "1 weight files are missing, the first is model-00002-of-00002",
    ),
    (write_file("model.safetensors.index.json", '{"weight_map": 3}'), ModelBroken, "index.json is damaged"),
    (remove("tokenizer.json"), ModelBroken, "tokenizer"),
    (write_file("tokenizer.json", "{}"), ModelBroken, "tokenizer"),
    (normalize(26, {"String": "a"}), ModelBroken, r"tokenizer\.json makes texts more than 64 times as long"),
    (normalize(1, {"String": "a"}, "a" * 65), ModelBroken, "makes texts more than 64 times as long"),
    (normalize(26, {"Regex": "a?"}), ModelBroken, r"json makes texts more than 64 times"),
]


@pytest.mark.parametrize(("damage", "error", "message"), FAULTS, ids=[message for _, _, message in FAULTS])
def test_each_fault_is_one_sentence(folder: Path, damage: Damage, error: type[ModelError], message: str) -> None:
    damage(folder)
    with pytest.raises(error, match=message) as raised:
        load(folder, "x")
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


def test_a_normalizer_may_make_texts_somewhat_longer(folder: Path) -> None:
    normalize(2, {"String": "a"})(folder)
    assert len(load(folder, "x").tokenizer.encode("a", add_special_tokens=False)) == 4


def test_weights_in_another_format_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="mlx-serve convert"):
        load(folder, "x")
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    with pytest.raises(ModelNotFound, match="GGUF"):
        load(folder, "x")


def test_the_fingerprint_follows_what_state_depends_on(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder)
    assert fingerprint(Path(shutil.copytree(folder, tmp_path / "elsewhere"))) == before
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == before
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert fingerprint(folder) != before


def test_the_fingerprint_sees_one_changed_tensor(folder: Path) -> None:
    before = fingerprint(folder)
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    weights["model.layers.1.self_attn.q_proj.weight"] = weights["model.layers.1.self_attn.q_proj.weight"] + 1e-3
    mx.eval(weights)
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    assert fingerprint(folder) != before


def test_importing_leaves_the_process_as_it_was() -> None:
    script = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (777, hard))
import models.mlx_lm_import
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (777, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (778, hard))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (778, hard)
import mlx.core as mx
assert mx.set_wired_limit(1 << 60) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


def test_the_markers_of_harmony_are_text_and_close_a_thought(tmp_path: Path) -> None:
    folder = tiny_models.write("gpt_oss", tmp_path / "tiny")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens["added_tokens"] += [
        {"id": 320 + number, "content": text, **flags, "special": True} for number, text in enumerate(HARMONY_TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ tools }}{{ messages[0].content }}<|start|>assistant")
    model = load(folder, "tiny")
    assert model.call_format is HARMONY
    assert model.reasoning_format is not None
    decoder = StreamDecoder(model.detokenizer)
    assert "".join(map(decoder.push, model.reasoning_format.closing_ids)) == model.reasoning_format.closing
