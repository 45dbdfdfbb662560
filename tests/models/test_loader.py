"""A model folder either loads whole, or one sentence says what is wrong with it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from cache.layers.kinds import make_caches
from models.errors import ModelBroken, ModelError, ModelNotFound
from models.fast_blas import LIBRARIES, load_fast_blas
from models.loader import DEFAULT_CONTEXT_TOKENS, convert_weights, load
from models.names import resolve
from models.output.call_formats import HARMONY
from models.output.detokenizer import StreamDecoder
from models.precision import Precision, choose_precision, convert, float32_bytes, seconds_per_token
from tests.support import tiny_models
from tests.support.tiny_models import write


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
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=300)


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


def packed(kind: str, **settings: Any) -> Damage:
    """Weights quantized by another tool, as far as names and types go: each matrix as bytes, with scales."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        arrays: dict[str, Any] = mx.load(str(file))  # type: ignore[assignment]
        for name in [name for name in arrays if "proj" in name]:
            matrix = arrays.pop(name)
            arrays[name if kind == "fp8" else f"{name}_packed"] = mx.zeros(matrix.shape, mx.uint8)
            arrays[f"{name}_scale_inv"] = mx.ones((1, 1))
        mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
        edit_config(folder, quantization_config={"quant_method": kind, **settings})

    return damage


def modelopt(folder: Path) -> None:
    packed("modelopt")(folder)
    edit_config(folder, quantization_config=None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}'
    )


OF_OTHER_TOOLS: dict[str, tuple[Damage, str]] = {
    "fp8 in blocks": (packed("fp8", fmt="e4m3", weight_block_size=[128, 128]), "fp8 e4m3"),
    "compressed tensors": (
        packed("compressed-tensors", format="pack-quantized"),
        "compressed-tensors pack-quantized",
    ),
    "bitsandbytes": (packed("bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    "ModelOpt": (modelopt, "FP8"),
}


@pytest.mark.parametrize(("damage", "method"), OF_OTHER_TOOLS.values(), ids=OF_OTHER_TOOLS)
def test_weights_that_another_tool_quantized_name_its_method(folder: Path, damage: Damage, method: str) -> None:
    damage(folder)
    told = (
        rf"x: cannot be loaded, since not every form of {method} is read; choose MLX weights, or unquantized ones: ."
    )
    with pytest.raises(ModelBroken, match=told):
        load(folder, "x")
    with pytest.raises(ModelBroken, match=told):
        convert_weights(folder, "x", folder / "converted", 4, lambda done, total: None)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU multiplies quantized activations")
def test_quantized_activations_are_refused_at_load_where_the_device_lacks_them(folder: Path) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["llama"])
    quantize(model, group_size=16, bits=4, mode="nvfp4", class_predicate=lambda path, layer: "proj" in path)
    quantization = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    tiny_models.write_model(
        model, {**tiny_models.CONFIGS["llama"], "quantization": quantization, "quantize_activations": True}, folder
    )
    with pytest.raises(ModelBroken, match=r"x: the model does not run: .*QQMatmul"):
        load(folder, "x")


NOBODY = 65534


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A model in a folder that any user may enter."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        yield write("qwen3", Path(parent) / "tiny")


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything, so while this lasts it is somebody else."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read(name: str, guarded: Path) -> None:
    (guarded / name).chmod(0)
    with without_privileges(), pytest.raises(ModelBroken, match=f"{name} is not readable: permission denied"):
        load(guarded, "tiny")


def test_a_folder_that_may_not_be_entered(guarded: Path) -> None:
    guarded.chmod(0)
    try:
        with without_privileges(), pytest.raises(ModelBroken, match="tiny is not readable: permission denied"):
            resolve(str(guarded))
        with without_privileges(), pytest.raises(ModelBroken, match="tiny is not readable: permission denied"):
            load(guarded, "tiny")
    finally:
        guarded.chmod(0o700)


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
