"""Checks and identifies weight files without loading them. Knows no MLX.

A safetensors file opens with the length of a JSON header, 8 bytes little-endian; the header gives each tensor's type,
shape and place. MLX trusts the header and reads lazily: a file cut short would fail in an evaluation.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.errors import ModelBroken, ModelNotFound, told_as

_OTHER_FORMATS = {
    "a GGUF file is": (".gguf",),
    "PyTorch weights are": (".bin", ".pt", ".pth", ".ckpt"),
    "a pickle is": (".pkl", ".pickle"),
    "NumPy arrays are": (".npz", ".npy"),
    "weights of another framework are": (".h5", ".msgpack", ".onnx"),
}
ADVICE = "pull MLX weights of the model, or make some from its safetensors: mlx-serve convert org/name --quantize 4"
MTP_FILE = "mtp.safetensors"
"""An MTP module beside the model's own files; its names may lack the prefix."""
_SAMPLE_BYTES = 1024
_IDENTITY_FILES = (
    *("config.json", "hf_quant_config.json", "tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "vocab*"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.json", "*.jinja"),
    "additional_chat_templates/*.jinja",
)
"""Files that decide tokens and results, not sampling."""


def find_weight_files(folder: Path) -> list[Path]:
    """A folder's weight files, sorted, each whole. Raises ModelNotFound and ModelBroken."""
    files = sorted(folder.glob("model*.safetensors"))
    missing = sorted(_files_of_index(folder) - {file.name for file in files})
    if missing:
        raise ModelBroken(f"{folder}: {len(missing)} weight files are missing, the first is {missing[0]}")
    if not files:
        raise ModelNotFound(f"{folder} holds no weights: no model*.safetensors{other_formats(folder.iterdir())}")
    for file in files:
        read_header(file)
    return files


def missing_files(folder: Path) -> list[str]:
    """What a model in `folder` lacks, so far as its index can be read."""
    shards: list[str] = []
    with suppress(ModelBroken):
        shards = sorted(_files_of_index(folder))
    if not shards and not any(folder.glob("model*.safetensors")):
        shards = ["model.safetensors"]
    return [name for name in ("config.json", *shards) if not (folder / name).is_file()]


def total_bytes(folder: Path) -> int:
    """Memory of the weights in stored types, with an MTP module's; raises like `find_weight_files`."""
    files = [*find_weight_files(folder), folder / MTP_FILE]
    return sum(file.stat().st_size for file in files if file.is_file())


def _files_of_index(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    with told_as(ModelBroken, f"{index} is damaged", KeyError, TypeError, AttributeError):
        return {Path(name).name for name in require_json(index, str(folder))["weight_map"].values()}


def other_formats(files: Iterable[Path | str]) -> str:
    """A message about unsupported weights, if any: a pickle runs its author's code."""
    names = [str(file).lower() for file in files]
    for what, suffixes in _OTHER_FORMATS.items():
        if any(name.endswith(suffixes) for name in names):
            return f"; {what} there, but only the safetensors format is read: {ADVICE}"
    return ""


def read_header(file: Path) -> dict[str, Any]:
    """The tensors of `file` by name; `data_offsets` count from the file's start.

    Raises ModelBroken for an unreadable or unsound file, or another length than declared.
    """
    # Not at the top: it imports numpy, which most commands start without.
    from safetensors import SafetensorError, safe_open

    try:
        with told_as(ModelBroken, f"{file} is not readable"), file.open("rb") as stream, safe_open(file, "numpy"):
            num_bytes = int.from_bytes(stream.read(8), "little")
            tensors: dict[str, Any] = json.loads(stream.read(num_bytes))
    except SafetensorError as error:
        fault = str(error).removeprefix("Error while deserializing header: ")
        kind = "incomplete" if "not fully covered" in fault else "damaged"
        raise ModelBroken(f"{file} is {kind}: {fault}") from error
    tensors.pop("__metadata__", None)
    for entry in tensors.values():
        entry["data_offsets"] = [8 + num_bytes + offset for offset in entry["data_offsets"]]
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty without a readable one."""
    try:
        return require_json(path, "")
    except ModelBroken:
        return {}


def require_json(path: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the model or adapter `name`; raises ModelBroken."""
    with told_as(ModelBroken, f"{path} is not readable"):
        text = path.read_bytes()
    with told_as(ModelBroken, f"{name}: {path} is damaged", ValueError, RecursionError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ModelBroken(f"{name}: {path} holds no JSON object")
    return value


def quantization_method(folder: Path) -> str | None:
    """Which tool's quantization a model's files name, MLX's own apart."""
    config, beside = read_json(folder / "config.json"), read_json(folder / "hf_quant_config.json")
    for one in (config, config.get("text_config"), {"quantization_config": beside.get("quantization")}):
        declared = one.get("quantization_config") if isinstance(one, dict) else None
        if isinstance(declared, dict):
            values = [declared.get(key) for key in ("quant_method", "quant_algo", "format", "fmt")]
            if named := [kind for kind in values if isinstance(kind, str)]:
                return " ".join(named)
    return None


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits that differ for different models, in any folder.

    The digits cover configuration, tokenizer, templates, and every tensor's name, type, shape and middle bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(folder):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    for path in sorted({path for pattern in _IDENTITY_FILES for path in folder.glob(pattern) if path.is_file()}):
        yield str(path.relative_to(folder)).encode()
        yield path.read_bytes()
    for file in find_weight_files(folder):
        with file.open("rb") as stream:
            for name, entry in sorted(read_header(file).items()):
                start, stop = entry["data_offsets"]
                stream.seek(max(start, (start + stop - _SAMPLE_BYTES) // 2))
                yield f"{name} {entry.get('dtype')} {entry.get('shape')}".encode()
                yield stream.read(min(_SAMPLE_BYTES, stop - start))
