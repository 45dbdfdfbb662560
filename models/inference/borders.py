"""The lengths at which a model's attention may change: sliding windows, chunks, an indexer's selection.

Sizes come from three places: layer caches that keep a bounded number of rows, windows that the model asks its caches'
masks for, and numbers of its configuration whose names suggest a bound of attention. A number that has nothing to do
with attention only costs the probe one more length."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mlx.nn.layers.base import Module

from cache.types import LayerCache
from models.inference.ragged import leaves

MAX_NAMED_TOKENS = 8192
"""Larger numbers of a configuration are ignored: often they repeat the context. Those of caches and masks count."""

_SIZE = re.compile(r"(window|window_size|chunk_size|index_topk)$")
_BLOCKS = re.compile(r"^(.*)topk_blocks$")


def find_borders(model: Any, caches: Sequence[LayerCache], asked_windows: set[int]) -> list[int]:
    """Returns the lengths in tokens, ascending, at which attention may change.

    `asked_windows` are those that `spy_on_masks` has collected in a call of the model.
    """
    kept = {int(size) for cache in leaves(caches) for size in _bounds(cache)}
    named = {size for size in _named_sizes(model, set()) if size <= MAX_NAMED_TOKENS}
    return sorted(size for size in kept | asked_windows | named if size > 1)


def spy_on_masks(caches: Sequence[LayerCache]) -> set[int]:
    """Returns a set that fills with the windows that a model asks the masks of `caches` for, as it is called."""
    windows: set[int] = set()
    for cache in leaves(caches):
        if hasattr(cache, "make_mask"):
            cache.make_mask = _spying(cache.make_mask, windows)
    return windows


def _spying(make_mask: Any, windows: set[int]) -> Any:
    def spy(*args: Any, **options: Any) -> Any:
        asked = (*args[1:2], options.get("window_size"))
        windows.update(size for size in asked if isinstance(size, int) and not isinstance(size, bool))
        return make_mask(*args, **options)

    return spy


def _bounds(cache: LayerCache) -> Iterator[int]:
    for name in ("max_size", "chunk_size"):
        if isinstance(size := getattr(cache, name, None), int):
            yield size


def _named_sizes(value: Any, seen: set[int]) -> Iterator[int]:
    """Sizes among the fields of `value` and of what it consists of: modules, configurations, lists, dicts."""
    if id(value) in seen:
        return
    seen.add(id(value))
    fields = _fields(value)
    for name, field in fields.items():
        if isinstance(field, int) and not isinstance(field, bool):
            yield from _size(str(name), field, fields)
        elif isinstance(field, dict | list | tuple) or hasattr(field, "__dict__"):
            yield from _named_sizes(field, seen)


def _fields(value: Any) -> dict[Any, Any]:
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    own = dict(value) if isinstance(value, dict) else {}
    return own | (vars(value) if hasattr(value, "__dict__") and (isinstance(value, Module) or not own) else {})


def _size(name: str, number: int, fields: dict[Any, Any]) -> Iterator[int]:
    if _SIZE.search(name):
        yield number
    elif (blocks := _BLOCKS.match(name)) and isinstance(size := fields.get(f"{blocks[1]}block_size"), int):
        yield number * size  # an indexer that selects whole blocks
