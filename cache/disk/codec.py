"""Converts segments and recurrent state to tensors of a file, and back.

Rows of a pack, [num_components, num_heads, num_tokens, width] in memory, are [num_tokens, num_components, num_heads,
width] in a file: any token range is contiguous. Recurrent state is a tree of plain values and arrays.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from cache.budget import DiskFault
from cache.disk.files import NUMPY_TYPES, NumpyArray, Tensor, TensorFile
from cache.layers.state import Pack, RecurrentState, Rounded, Segment

# isort: split
from mlx_lm.models import cache as mlx_lm_cache

BLOCK_TOKENS = 256
"""Tokens that share a checksum, so they are read together."""

_MLX_TYPES: dict[str, mx.Dtype] = {
    **{name: getattr(mx, np.dtype(bits).name) for name, bits in NUMPY_TYPES.items() if name != "BOOL"},
    "BOOL": mx.bool_,
    "BF16": mx.bfloat16,
}
_POINTS = "points."
_TYPE_NAMES = {dtype: name for name, dtype in _MLX_TYPES.items()}

NamedArrays: TypeAlias = list[tuple[str, mx.array]]


STORABLE: dict[str, type] = {}
"""Classes of layer caches that are stored beside mlx-lm's: plain values and arrays, too."""


class Unstorable(Exception):
    """Recurrent state holds more than plain values and arrays."""


class StateImage:
    """Tensors of one segment or snapshot, made on the worker thread, written by another.

    Borrows the arrays; evaluates what the other thread reads.
    """

    def __init__(self, rows: Segment | None, recurrent: RecurrentState | None = None) -> None:
        """Raises Unstorable."""
        self.start = rows.start if rows is not None else 0
        packs = rows.packs if rows is not None else []
        arrays: NamedArrays = []
        self._indices = [list(pack.indices) for pack in packs] if rows is not None else None
        self._rounded = [number for number, pack in enumerate(packs) if pack.peaks is not None]
        self._tree = [_tree_of(cache, arrays) for cache in recurrent.caches] if recurrent is not None else None
        named = ((zip(("rows", "peaks"), pack.arrays, strict=False), number) for number, pack in enumerate(packs))
        self._rows = _carried([(f"{name}.{number}", array) for arrays, number in named for name, array in arrays])
        self._arrays = _carried(arrays)
        carriers = [carrier for *_, carrier in (*self._rows, *self._arrays)]
        mx.eval(carriers)
        self.num_bytes = sum(carrier.nbytes for carrier in carriers)

    def bytes_of(self, num_tokens: int) -> int:
        """About a file's size with `num_tokens` rows and all recurrent state."""
        rows = sum(carrier.nbytes // carrier.shape[2] * num_tokens for *_, carrier in self._rows)
        return rows + sum(carrier.nbytes for *_, carrier in self._arrays)

    def metadata(self) -> dict[str, str]:
        """Metadata that reading the tensors needs."""
        rounded = {"rounded": self._rounded} if self._rounded else {}
        return {"state": json.dumps({"rows": self._indices, "points": self._tree, **rounded})}

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """Rows `[start, stop)`, in token offsets, and all recurrent state."""
        first, last = start - self.start, stop - self.start
        rows = ((name, kind, _bits(array).transpose(2, 0, 1, 3)[first:last]) for name, kind, array in self._rows)
        whole = ((name, kind, _bits(array).reshape(1, -1)) for name, kind, array in self._arrays)
        return [*(Tensor(*array, BLOCK_TOKENS) for array in rows), *(Tensor(*array, 1) for array in whole)]


def _carried(arrays: NamedArrays) -> list[tuple[str, str, mx.array]]:
    """Names, types, and what another thread can read: numpy has no bfloat16, so its bits are viewed here."""
    views = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for _, array in arrays]
    return [(name, _TYPE_NAMES[array.dtype], view) for (name, array), view in zip(arrays, views, strict=True)]


LoadedState: TypeAlias = tuple[Segment | None, RecurrentState | None]
"""Rows and recurrent state, as far as a file has them."""


def read_state(file: TensorFile, first: int, start: int, stop: int) -> LoadedState:
    """Rows `[start, stop)` of a file that starts at `first`, and recurrent state, evaluated. Raises DiskFault."""
    state = json.loads(file.metadata["state"])
    indices, tree = state["rows"], state["points"]
    with mx.stream(mx.cpu):  # reading needs no GPU stream or time
        recurrent = None if tree is None else RecurrentState([_value_of(cache, file) for cache in tree])
        if indices is None:
            return None, recurrent
        packs = []
        for number, group in enumerate(indices):
            names = ("rows", "peaks") if number in state.get("rounded", ()) else ("rows",)
            stored = (_array(file, f"{name}.{number}", start - first, stop - first) for name in names)
            packs.append(Pack(tuple(group), *(mx.transpose(array, (1, 2, 0, 3)) for array in stored)))
        mx.eval([pack.arrays for pack in packs])
        return Segment(start, stop, packs), recurrent


def read_tensors(file: TensorFile, first: int, start: int, stop: int) -> tuple[list[Tensor], dict[str, str]]:
    """As `read_state`, in the form of files, and the metadata that reading needs. Knows no MLX: for any thread."""
    rows, tensors = (start - first, stop - first), list[Tensor]()
    for name, block_rows in file.block_rows.items():
        is_whole = name.startswith(_POINTS)
        tensors.append(Tensor(name, file.dtype(name), file.read(name, *(() if is_whole else rows)), block_rows))
    return tensors, {"state": file.metadata["state"]}


def _bits(array: mx.array) -> NumpyArray:
    buffer: Any = array
    return np.asarray(memoryview(buffer))


def _array(file: TensorFile, name: str, start: int = 0, stop: int | None = None) -> mx.array:
    array = mx.array(file.read(name, start, stop))
    dtype = _MLX_TYPES[file.dtype(name)]
    return array if array.dtype == dtype else array.view(dtype)


# ------------------------------------------------------------------------------------------------------- trees


def _tree_of(value: Any, arrays: NamedArrays) -> Any:
    """Returns a JSON tree in which names stand for arrays; `arrays` gets the arrays."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, mx.array):
        if value.dtype not in _TYPE_NAMES:
            raise Unstorable(f"arrays of {value.dtype} cannot be stored")
        if value.size == 0:
            return {"empty": [list(value.shape), _TYPE_NAMES[value.dtype]]}
        arrays.append((f"{_POINTS}{len(arrays)}", value))
        return {"array": [list(value.shape), arrays[-1][0]]}
    if type(value) in (list, tuple, Rounded):
        return {type(value).__name__: [_tree_of(part, arrays) for part in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _tree_of(part, arrays) for key, part in value.items()}}
    if _storable_class(type(value).__name__) is type(value):
        return {type(value).__name__: {key: _tree_of(part, arrays) for key, part in vars(value).items()}}
    raise Unstorable(f"{type(value).__name__} is not a class whose state can be stored")


def _value_of(tree: Any, file: TensorFile) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in ("array", "empty"):
        shape, name = content
        return _array(file, name).reshape(shape) if kind == "array" else mx.zeros(shape, _MLX_TYPES[name])
    if kind in ("list", "tuple", "Rounded"):
        parts: Sequence[Any] = [_value_of(part, file) for part in content]
        return parts if kind == "list" else tuple(parts) if kind == "tuple" else Rounded(*parts)
    values = {key: _value_of(part, file) for key, part in content.items()}
    return values if kind == "dict" else _revived(kind, values)


def _revived(name: str, state: dict[str, Any]) -> Any:
    kind = _storable_class(name)
    if kind is None:
        raise DiskFault(f"no class {name} is known")
    value = object.__new__(kind)
    vars(value).update(state)
    return value


def _storable_class(name: str) -> Any:
    if name in STORABLE:
        return STORABLE[name]
    kind = getattr(mlx_lm_cache, name, None)
    return kind if isinstance(kind, type) and kind.__module__ == mlx_lm_cache.__name__ else None
