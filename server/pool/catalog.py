"""Which models a server may be asked for, whether they are loaded or not.

A name from a request is never taken for a path: folders are served only where the command line named them, under the
name of the folder. Everything else is `demo` or a complete repository of the local Hugging Face cache.
"""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from models.names import find_installed, installed, parse_repository
from server.pool.source import ModelSource

LISTING_SECONDS = 5.0
"""How old a list of what is installed may be: making it looks at every file of the cache."""


class Catalog(Protocol):
    """Finds models by name. For any thread; may read the disk."""

    def find(self, name: str) -> ModelSource | None:
        """Returns the model of that name; None where there is none."""
        ...

    def all(self) -> Sequence[ModelSource]:
        """Returns every model that may be served, those of the command line first."""
        ...


class FixedCatalog:
    """Models that are known beforehand, by their ids."""

    def __init__(self, sources: Sequence[ModelSource]) -> None:
        self._sources = {source.name: source for source in sources}

    def find(self, name: str) -> ModelSource | None:
        """Returns the model of that id."""
        return self._sources.get(name)

    def all(self) -> Sequence[ModelSource]:
        """Returns them in order."""
        return list(self._sources.values())


class InstalledCatalog:
    """The models of the command line, and what is installed."""

    def __init__(self, named: Sequence[ModelSource], *, has_others: bool = True) -> None:
        """`named` are those of the command line, with their adapters. Without `has_others` there are no more."""
        self._named = named
        self._has_others = has_others
        self._listed: Sequence[ModelSource] = ()
        self._listed_at: float | None = None
        self._lock = threading.Lock()

    def find(self, name: str) -> ModelSource | None:
        """Returns the model of that name, short name or address; raises ModelBroken for half a download."""
        known = self._known(name)
        if known is not None or not self._has_others:
            return known
        found = find_installed(name)
        return None if found is None else self._known(found[0]) or ModelSource(*found)

    def all(self) -> Sequence[ModelSource]:
        """Returns those of the command line, then the others; the list may be a few seconds old."""
        if not self._has_others:
            return self._named
        with self._lock:
            if self._listed_at is None or time.monotonic() - self._listed_at > LISTING_SECONDS:
                self._listed = [ModelSource(one.name, one.path) for one in installed()]
                self._listed_at = time.monotonic()
            others = self._listed
        return [*self._named, *(one for one in others if self._known(one.id) is None)]

    def _known(self, name: str) -> ModelSource | None:
        """Returns the model that the command line has named so, or under another name of the same repository."""
        repository = parse_repository(name)
        for source in self._named:
            if source.name == name:
                return source
        for source in self._named:
            if source.adapter is None and repository is not None and parse_repository(source.id) == repository:
                return source
        return None
