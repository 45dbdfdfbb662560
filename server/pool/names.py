"""What models are called, how long idle ones stay loaded, and what the pool reports: errors and changes. Pure.

No error ends the pool.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from models.store.stored_model import ModelDefaults

LATEST = ":latest"
"""Added by Ollama's clients to a name without a tag."""
MAX_NAME_LENGTH = 200
MAX_LISTED = 8


@dataclass(frozen=True)
class Alias:
    """Another name for a model, or a pattern of names with `*` and `?`."""

    pattern: str
    model: str


def parse_alias(text: str) -> Alias:
    """What `PATTERN=NAME` says; raises ValueError."""
    pattern, equals, model = (part.strip() for part in text.partition("="))
    if not (pattern and equals and model):
        raise ValueError(f"{text!r} is no alias; write it like gpt-4o=qwen3:8b, or 'gpt-*=qwen3:8b'")
    return Alias(pattern, model)


def spellings(name: str, aliases: Sequence[Alias]) -> list[str]:
    """What a name means: an alias of just this name, else itself, then what a pattern makes of it."""
    plain = name.removesuffix(LATEST)
    exact = [alias.model for alias in aliases if alias.pattern in (name, plain)]
    matched = [alias.model for alias in aliases if fnmatchcase(plain, alias.pattern)]
    return exact[:1] or [*dict.fromkeys((name, plain, *matched[:1]))]


def served_instead(name: str, served: Collection[str]) -> str:
    """A clause with near names, else all."""
    near = difflib.get_close_matches(name.lower(), served, n=3) if len(served) > 1 else []
    if near:
        return f"did you mean {' or '.join(near)}?"
    listed = ", ".join(list(served)[:MAX_LISTED])
    rest = f" and {len(served) - MAX_LISTED} more" if len(served) > MAX_LISTED else ""
    return f"only {listed or 'none'}{rest} {'are' if len(served) > 1 else 'is'} served here"


@dataclass(frozen=True)
class ModelSource:
    """A model that may be served, loaded or not."""

    id: str
    path: Path
    adapter: str | None = None
    label: str | None = None
    """A local name in place of the id."""
    defaults: ModelDefaults = field(default_factory=ModelDefaults)

    @property
    def name(self) -> str:
        return self.adapter or self.label or self.id

    @property
    def plain(self) -> "ModelSource":
        return ModelSource(self.id, self.path)


FOREVER = math.inf
WHEN_SHORT_SECONDS = 30 * 60.0
"""Time until idle models are unloaded if memory is short."""
LONGEST_SECONDS = 1e9
"""A longer time means for ever."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_NUMBER, _UNIT = r"\d+(?:\.\d+)?", "ms|s|m|h|d"


def parse_keep_alive(value: str | float) -> float:
    """Seconds from `30m`, `1h30m` or `90`; below 0, and `forever`, is forever. Raises ValueError."""
    seconds = _seconds(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        advice = "write it like 30m, 1h30m, 90 (seconds), or -1 for ever"
        raise ValueError(f"{str(value)[:60]!r} is no duration; {advice}")
    return FOREVER if seconds < 0 or seconds > LONGEST_SECONDS else float(seconds)


def _seconds(text: str) -> float | None:
    if text in ("forever", "none"):
        return -1.0
    if not re.fullmatch(rf"-?(?:{_NUMBER}|(?:{_NUMBER}(?:{_UNIT}))+)", text, re.ASCII):
        return None
    parts = re.findall(rf"({_NUMBER})({_UNIT})?", text, re.ASCII)
    seconds = sum(float(number) * _UNIT_SECONDS[unit or "s"] for number, unit in parts)
    return -seconds if text.startswith("-") else seconds


# ---------------------------------------------------------------------------------------- what the pool reports


class PoolError(Exception):
    """The message is one sentence for a person."""


class ModelNameNeeded(PoolError):
    """A request names no model, and there is no default."""


class ModelUnknown(PoolError):
    """No such model may be served here."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(f"there is no model {name[:MAX_NAME_LENGTH]!r}: {instead}")
        self.instead = instead


class ModelNotLoaded(PoolError):
    """Ask the pool to load the model."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(f"the model {source.id} is not loaded")
        self.source = source


class LoadFailed(PoolError):
    """A model's files are gone, damaged or of an unknown kind."""


class ModelTooLarge(PoolError):
    """The machine cannot hold the model, whatever is unloaded."""


class PoolBusy(PoolError):
    """Others hold the memory, and did not finish in time."""

    retry_after_seconds = 10


class ModelInUse(PoolError):
    """A model that answers requests is not unloaded."""


@dataclass(frozen=True)
class ModelChange:
    """A change of one model."""

    kind: Literal["loading", "loaded", "unloaded", "failed"]
    model_id: str
    seconds: float | None = None
    message: str | None = None


TellChange: TypeAlias = Callable[[ModelChange], None]
