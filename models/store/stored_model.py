"""A model under a name of our own: where its weights lie, and its defaults. Pure.

A name holds no slash, so that it never looks like a path or like a repository.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from models.errors import StoreError
from models.store.defaults import ModelDefaults

LATEST = "latest"
"""The tag of a name that says none."""
MAX_NAME_CHARACTERS = 80
_PART = rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}"
_NAME = re.compile(rf"({_PART})(?::({_PART}))?")


@dataclass(frozen=True)
class WeightsPlace:
    """Where the weights of a stored model lie."""

    kind: Literal["built-in", "repository", "folder"]
    name: str
    """The name of a built-in model, `org/name` of a repository, or the whole path of a folder."""
    commit: str = ""
    """The revision of a repository, resolved when the name was given."""

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}" if self.commit else self.name


@dataclass(frozen=True)
class StoredModel:
    """One name of the manifest."""

    name: str
    """`name:tag`, lower case."""
    weights: WeightsPlace
    created: datetime
    modified: datetime
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    license: str = ""
    adapters: tuple[str, ...] = ()
    """Folders of LoRA adapters; none can be set yet."""

    @property
    def short_name(self) -> str:
        """The name as people write it: without the tag `latest`."""
        return self.name.removesuffix(f":{LATEST}")


def find_full_name(text: str) -> str | None:
    """Returns `name:tag` in lower case for what may be the name of a stored model, else None."""
    match = _NAME.fullmatch(text.lower()) if text.isascii() else None
    return None if match is None else f"{match[1]}:{match[2] or LATEST}"


def parse_full_name(text: str) -> str:
    """Returns `name:tag` in lower case; raises StoreError."""
    name = find_full_name(text)
    if name is None:
        raise StoreError(
            f"{text[:MAX_NAME_CHARACTERS]!r} is no name for a model: it is letters, digits and any of . _ - with at "
            f"most {MAX_NAME_CHARACTERS} characters, and a tag behind a colon if you like, such as writer:v2"
        )
    return name
