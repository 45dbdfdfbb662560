"""What to do about each cause, by its place; `advice.toml` has the sentences."""

import tomllib
from pathlib import Path

from models.texts import size_text
from server.engine.diagnosis import Cause

TOOLS = "tools"
"""Stands for a role where the place is the tools."""

_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


def advice(cause: Cause, place: str | None, missing_bytes: int | None = None) -> str:
    """What to change; `place` is the role of the message, or `TOOLS`."""
    more = "more " if missing_bytes is None else f"about {size_text(missing_bytes)} more "
    by_place: dict[str, str] = _ADVICE[cause.name]
    return by_place.get(place or "", by_place["any"]).replace("{more}", more)
