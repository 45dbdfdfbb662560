"""Short names of models as known from Ollama, such as `qwen3:8b` and `qwen3:8b-8bit`, and sizes for people. Pure.

`short_names.toml` maps families, sizes and quantizations to repositories.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORGANIZATION = "mlx-community"
_PARAMETERS = "parameters"
_OVERHEAD = 1.06


@dataclass(frozen=True)
class ShortName:
    """A short name and its repository."""

    name: str
    family: str
    repository: str
    num_bytes: int
    """Estimated, of the weights."""
    is_usual: bool


def _read(families: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, ShortName]:
    found: dict[str, ShortName] = {}
    for family, sizes in families.items():
        for size, entry in sizes.items():
            kinds = [kind for kind in entry if kind != _PARAMETERS]
            for kind in kinds:
                num_bytes = int(entry[_PARAMETERS] * 1e9 * _bits(kind) / 8 * _OVERHEAD)
                usual = kind == kinds[0]
                repository = f"{ORGANIZATION}/{entry[kind]}"
                for name in [f"{family}:{size}", f"{family}:{size}-{kind}"] if usual else [f"{family}:{size}-{kind}"]:
                    found[name] = ShortName(name, family, repository, num_bytes, usual and name.endswith(size))
    return found


def _bits(kind: str) -> float:
    """A quantization's bits for each weight, scales included."""
    return {"bf16": 16.0, "mxfp4": 4.25}.get(kind) or int(kind.removesuffix("bit")) + 0.5


SHORT_NAMES = _read(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))
FAMILIES: Mapping[str, Sequence[ShortName]] = {
    family: sorted(
        (one for one in SHORT_NAMES.values() if one.family == family and one.is_usual), key=lambda one: one.num_bytes
    )
    for family in dict.fromkeys(one.family for one in SHORT_NAMES.values())
}


def find_short_name(text: str) -> ShortName | None:
    """The known name of `text`, in any case."""
    return SHORT_NAMES.get(text.lower())


def find_family(text: str) -> Sequence[ShortName]:
    """Usual names of a family, written `qwen3` or `qwen3:latest`."""
    return FAMILIES.get(text.lower().removesuffix(":latest"), ())


def like(text: str) -> list[str]:
    """Usual names of families that begin like `text`."""
    wanted = _plain(text.partition(":")[0])
    families = [family for family in FAMILIES if wanted and _plain(family).startswith(wanted)]
    return [one.name for family in families for one in FAMILIES[family]]


def largest(names: Sequence[ShortName], limit_bytes: int) -> ShortName | None:
    """The largest model with weights within `limit_bytes`, if any."""
    fitting = [one for one in names if one.num_bytes <= limit_bytes]
    return max(fitting, key=lambda one: one.num_bytes, default=None)


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()


def grouped(number: int) -> str:
    """A number such as `12 340`."""
    return f"{number:,}".replace(",", " ")


def size_text(num_bytes: int) -> str:
    """A size for people, such as `3.4 GB`; a GB is 10^9 bytes."""
    for unit, bytes_per_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= bytes_per_unit:
            return f"{num_bytes / bytes_per_unit:.1f} {unit}"
    return f"{num_bytes} bytes"
