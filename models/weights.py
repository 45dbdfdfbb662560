"""Looks at a model folder's weight files without loading them: are they whole, and which weights are they?

A safetensors file opens with the length of a JSON header, 8 bytes little-endian; the header gives each tensor's
dtype, shape and place behind it (safetensors format, "Format"). MLX reads tensors lazily, so a file that was cut
short would only fail in the middle of an evaluation: it is found here first. Knows no MLX.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from models.errors import ModelBroken, ModelNotFound, reason

_MAX_HEADER_BYTES = 100_000_000
_SAMPLE_BYTES = 1024
_TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def find_weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a model folder, sorted, each whole.

    Raises `ModelNotFound` where there are none and `ModelBroken` for a missing, cut or damaged file, by name.
    """
    files = sorted(folder.glob("model*.safetensors"))
    missing = sorted(_files_of_index(folder) - {file.name for file in files})
    if missing:
        raise ModelBroken(f"{folder}: {len(missing)} weight files are missing, the first is {missing[0]}")
    if not files:
        raise ModelNotFound(f"{folder} holds no weights: no model*.safetensors{_hint(folder)}")
    for file in files:
        read_header(file)
    return files


def total_bytes(folder: Path) -> int:
    """Returns how much memory the weights take as they are stored; raises as `find_weight_files` does."""
    return sum(file.stat().st_size for file in find_weight_files(folder))


def _files_of_index(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {Path(name).name for name in names}
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelBroken(f"{index} is damaged: {error}") from error


def _hint(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "; a GGUF file is there, but only the safetensors format is read"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "; PyTorch weights are there, which mlx_lm.convert can turn into safetensors"
    return ""


def read_header(file: Path) -> dict[str, Any]:
    """Returns the tensors that `file` declares, by name; `data_offsets` count from the file's start.

    Raises `ModelBroken` if the file cannot be read, has no sound header, or is shorter or longer than declared.
    """
    try:
        with file.open("rb") as stream:
            header, data_start = _parse_header(stream)
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise ModelBroken(f"{file} is damaged: {error}") from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        for entry in tensors.values():
            entry["data_offsets"] = [data_start + offset for offset in entry["data_offsets"]]
        declared = max((entry["data_offsets"][1] for entry in tensors.values()), default=data_start)
    except (TypeError, KeyError, IndexError) as error:
        raise ModelBroken(f"{file} is damaged: its header does not say where its tensors are") from error
    if declared != (held := file.stat().st_size):
        raise ModelBroken(f"{file} is incomplete: it holds {held} bytes of {declared}")
    return tensors


def unreadable(path: Path, error: OSError) -> ModelBroken:
    """Returns the error for a file or folder that is there but may not, or cannot, be read."""
    return ModelBroken(f"{path} is not readable: {reason(error)}")


def _parse_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    num_bytes = int.from_bytes(stream.read(8), "little")
    if num_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"its header would be {num_bytes} bytes long")
    text = stream.read(num_bytes)
    if not text or len(text) < num_bytes:
        raise ValueError("it ends within its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + num_bytes


def fingerprint(folder: Path) -> str:
    """Returns 32 hexadecimal digits that differ for different models.

    They cover configuration, tokenizer and template whole. Of the weights they cover every tensor's name,
    type and shape and `_SAMPLE_BYTES` from its middle: a model that was trained further differs there, and reading
    tens of gigabytes at each start to be certain is not worth it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(folder):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    for name in (*_TEXT_FILES, *_TEMPLATE_FILES):
        path = folder / name
        yield path.read_bytes() if path.is_file() else b""
    for file in find_weight_files(folder):
        yield from _samples(file)


def _samples(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for name, entry in sorted(read_header(file).items()):
            start, stop = entry["data_offsets"]
            stream.seek(max(start, (start + stop - _SAMPLE_BYTES) // 2))
            yield f"{name} {entry.get('dtype')} {entry.get('shape')}".encode()
            yield stream.read(min(_SAMPLE_BYTES, stop - start))
