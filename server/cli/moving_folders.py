"""Bundles of the folders of `--cache-disk`, where no server runs."""

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from cache.budget import UNBOUNDED_BYTES
from cache.disk import model_folders
from cache.disk.bundle import BundleError, BundleHead, BundleReader
from cache.disk.folder import DiskStore, find_fingerprint
from cache.disk.tier import DiskTier
from cache.moving import CacheCall, Departure, Intake, conversations
from cache.prefix_cache import PrefixCache
from models.errors import told_as
from server.app.config import StartError
from server.cli.ask import BLOCK_BYTES
from server.cli.cache import find_folders, named_folder
from server.engine.moving import into, is_of

CLOSE_SECONDS = 60.0


@contextlib.contextmanager
def _opened(path: Path, fingerprint: str) -> Iterator[CacheCall]:
    """Calls functions with a cache without memory over a model's folder, all of it written at the end."""
    tier = DiskTier(DiskStore(path, fingerprint), budget_bytes=UNBOUNDED_BYTES)
    cache = PrefixCache(list, num_slots=1, budget_bytes=0, disk=tier)
    try:
        yield lambda function, *given: function(cache, *given)
    finally:
        cache.end(CLOSE_SECONDS)


def export_folder(cache_dir: str | None, model: str | None, namespace: str, file: BinaryIO) -> None:
    """Writes a bundle. Raises StartError."""
    parent, folders = find_folders(cache_dir)
    if model is None and len(folders) != 1:
        there = ", ".join(folder.path.name for folder in folders) or "none"
        raise StartError(f"no server answers; of the folders in {parent}, name one with --model: {there}")
    folder = named_folder(model, folders) if model is not None else folders[0]
    fingerprint = find_fingerprint(folder.path) or ""
    with _opened(folder.path, fingerprint) as call:
        texts = call(conversations, is_of(namespace))
        file.writelines(Departure(call).blocks(BundleHead(folder.model, fingerprint), texts))
    if not file.tell():
        raise StartError(f"{folder.path} keeps nothing of this namespace; --namespace all exports every one")


def import_folder(cache_dir: str | None, namespace: str, file: BinaryIO) -> tuple[dict[str, Any], str]:
    """Takes a bundle in; returns what is kept, and the folder. Raises StartError."""
    parent, _ = find_folders(cache_dir)
    with told_as(StartError, "the file cannot be used", BundleError):
        reader = BundleReader(iter(partial(file.read, BLOCK_BYTES), b""), UNBOUNDED_BYTES)
        head = reader.head
        if not re.fullmatch(r"[0-9a-f]{16}.*", head.fingerprint):
            raise BundleError("this is no bundle of a model's state")
    path = model_folders.place(parent, head.model, head.fingerprint)
    fingerprint = find_fingerprint(path) or head.fingerprint
    with _opened(path, fingerprint) as call:
        intake = Intake(call, into(namespace))
        try:
            intake.take(reader, fingerprint)
        except BundleError as error:
            raise StartError(f"{error}; conversations kept before that: {len(intake.kept)}") from error
    sums = {"tokens": intake.num_tokens, "bytes": intake.num_bytes, "new_bytes": intake.new_bytes}
    kept = {"object": "cache.imported", "model": head.model, "conversations": len(intake.kept), **sums}
    return kept, str(path)
