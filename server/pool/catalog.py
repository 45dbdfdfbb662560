"""Which models a server may be asked for.

A name from a request is never taken for a path: only the command line names folders. Models with the same folder have
the same id. For any thread; may read the disk.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from models.errors import ModelBroken, ModelError, ModelNotFound, StoreError
from models.names import (
    BUILT_IN,
    InstalledModel,
    cache_stamp,
    find_stored,
    folder_of,
    identity_of,
    installed,
    installed_place,
    parse_repository,
)
from models.store.manifest import user_manifest
from models.store.stored_model import StoredModel
from server.pool.names import ModelSource

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LISTING_SECONDS = 5.0
"""A list is made again after this time even if no folder changed; making it looks at every cached file."""


class Catalog:
    """Finds and lists models."""

    def __init__(self, named: Sequence[ModelSource], *, has_others: bool = True) -> None:
        """`named` come from the command line, with their adapters. Without `has_others` there are no more."""
        self._named: list[ModelSource] = []
        for source in named:
            self._named.append(self._identified(source))
        self._has_others = has_others
        self._listed: Sequence[ModelSource] = ()
        self._listed_at, self._seen = 0.0, object()
        self._lock = threading.Lock()

    def find(self, name: str) -> ModelSource | None:
        """The model of that name, short name or address. Raises ModelBroken for half a download."""
        known = self._known(name)
        if known is not None or not self._has_others:
            return known
        stored = _read(lambda: find_stored(name), None)
        if stored is not None:
            return self._identified(stored_source(stored))
        try:
            place = installed_place(name)
        except ModelNotFound:
            return self._by_id(name)
        model_id, folder = identity_of(place), folder_of(place)
        return self._known(model_id) or self._identified(ModelSource(model_id, folder)).plain

    def all(self) -> Sequence[ModelSource]:
        """The command line's models first."""
        if not self._has_others:
            return self._named
        seen = _all_stored(), cache_stamp()
        with self._lock:
            if seen != self._seen or time.monotonic() - self._listed_at > LISTING_SECONDS:
                built_in = [ModelSource(name, path) for name, path in BUILT_IN.items()]
                self._listed = _read(lambda: list(map(_source, installed())), built_in)
                self._listed_at, self._seen = time.monotonic(), seen
            others = [(one, self._known(one.name)) for one in map(self._identified, self._listed)]
        # A model that the command line names under a label also keeps its own name.
        return [*self._named, *(one for one, known in others if known not in self._named)]

    def _known(self, name: str) -> ModelSource | None:
        repository = parse_repository(name)
        exact = (one for one in self._named if one.name == name)
        bases = (one.plain for one in self._named if one.adapter is None and repository is not None)
        same = (one for one in bases if parse_repository(one.id) == repository)
        return next(chain(exact, same, (one.plain for one in self._named if one.id == name)), None)

    def _identified(self, source: ModelSource) -> ModelSource:
        folder = os.path.realpath(source.path)
        for named in self._named:
            if named.adapter is None and named.id != source.id and os.path.realpath(named.path) == folder:
                label = source.label or (None if source.adapter else source.id)
                return replace(source, id=named.id, label=label)
        return source

    def _by_id(self, name: str) -> ModelSource | None:
        for stored in _all_stored():
            if stored.weights.kind == "folder" and identity_of(stored.weights) == name:
                return self._identified(stored_source(stored)).plain
        return None


def stored_source(stored: StoredModel) -> ModelSource:
    """Raises ModelBroken, without a path, where weights are missing."""
    try:
        folder = folder_of(stored.weights)
    except ModelError as error:
        logger.warning("%s cannot be used: %s", stored.short_name, error)
        message = f"the weights of {stored.short_name} are not there any more, or not complete; see the server's log"
        raise ModelBroken(message) from error
    return _labelled(stored, folder)


def _labelled(stored: StoredModel, folder: Path) -> ModelSource:
    return ModelSource(identity_of(stored.weights), folder, label=stored.short_name, defaults=stored.defaults)


def _read(read: Callable[[], Result], otherwise: Result) -> Result:
    try:
        return read()
    except StoreError as error:
        logger.error("names of your own are not served: %s", error)
        return otherwise


def _all_stored() -> Sequence[StoredModel]:
    return _read(lambda: list(user_manifest().models().values()), [])


def _source(model: InstalledModel) -> ModelSource:
    return _labelled(model.stored, model.path) if model.stored else ModelSource(model.name, model.path)
