"""Language models of mlx-vlm, as mlx-lm's are called: tokens and layer caches to logits.

mlx-vlm's models are imported without the package's `__init__`, which would load a server and generators. The models
use mlx-lm's classes of layer caches, which this server can take apart, and not mlx-vlm's copies of these classes. A
model that counts positions across conversations is given its positions. Towers are dropped, never evaluated. The
loader of mlx-vlm is never called, because it rewrites headers of weight files.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache as cached
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from cache.disk.codec import STORABLE
from cache.layers.kinds import RowKind, leaves_of, register_kind
from cache.types import LayerCache
from models.mlx_lm_import import ArraysCache, CacheList, cache_classes

_SHARED: Final = (
    "KVCache",
    "RotatingKVCache",
    "ChunkedKVCache",
    "QuantizedKVCache",
    "ConcatenateKVCache",
    "CacheList",
)


def get_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """As `providers.GetClasses`."""
    _enter()
    package = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    language = sys.modules.get(f"{package.__name__}.language")
    if (sparse := getattr(language, "QSAKVCache", None)) is not None:
        register_kind(sparse, _Sparse())
    return type("VlmText", (VlmText,), {"package": package}), Arguments


@cached
def _enter() -> None:
    """Makes mlx-vlm's models importable as this module's docstring says."""
    if "mlx_vlm" in sys.modules:
        raise ImportError("this process has imported it otherwise already")
    spec = importlib.util.find_spec("mlx_vlm")
    assert spec is not None, "the provider was found"
    bare = ModuleType("mlx_vlm")
    bare.__path__, bare.__spec__ = list(spec.submodule_search_locations or ()), spec
    sys.modules["mlx_vlm"] = bare
    try:
        theirs = importlib.import_module("mlx_vlm.models.cache")
    except BaseException:
        del sys.modules["mlx_vlm"]
        raise
    for name in _SHARED:
        setattr(theirs, name, getattr(cache_classes, name))
    extend_arrays_cache()
    theirs.ArraysCache = ArraysCache  # type: ignore[attr-defined]
    STORABLE.update(PoolingCache=theirs.PoolingCache, Nothing=Nothing)


def extend_arrays_cache() -> None:
    """Gives mlx-lm's class what mlx-vlm's layers call beside it; mlx-lm's own layers use none of these names."""
    ArraysCache.update_recurrent, ArraysCache.update_window = _update_recurrent, _update_window
    ArraysCache.is_speculating, ArraysCache.history_capacity, ArraysCache.metadata_revision = False, 0, 0


def _update_recurrent(self: Any, index: int, _: int, update: Callable[..., Any]) -> Any:
    output, self.cache[index] = update(self.cache[index], None)[:2]
    return output, self.cache[index]


def _update_window(self: Any, index: int, source: mx.array, width: int, *, lengths: Any = None) -> Any:
    assert lengths is None, "rows are never padded here"
    self.cache[index] = mx.contiguous(source[:, source.shape[1] - width :])
    return self.cache[index]


class Arguments(dict[str, Any]):
    """The configuration as it stands in the folder, with the sections that mlx-vlm's loader adds."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Arguments":
        """As `load_model` calls it."""
        return cls({"text_config": {}, "vision_config": {}, "audio_config": {}, **config})


class VlmText(Module):
    """A language model of mlx-vlm; its subclasses name the package of a family."""

    package: ModuleType

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        whole = self.package.Model(self.package.ModelConfig.from_dict(arguments))
        # In a tuple it is no child: its towers are never evaluated.
        self._whole: tuple[Any, ...] = (whole,)
        self.language_model = whole.language_model
        self.args = self.language_model.args
        self.model_type = str(arguments["model_type"])
        self._counts = "_rope_deltas" in vars(self.language_model)

    def __call__(self, tokens: mx.array, cache: Sequence[LayerCache] | None = None) -> mx.array:
        """Logits `[batch, num_tokens, vocab_size]`."""
        given = {"position_ids": _positions(tokens, cache or ())} if self._counts else {}
        logits: mx.array = self.language_model(tokens, cache=cache, **given).logits
        return logits

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    @property
    def quant_predicate(self) -> Any:
        """Which matrices may be quantized, and how."""
        return getattr(self.language_model, "quant_predicate", None)

    def make_cache(self) -> list[LayerCache]:
        """Fresh layer caches."""
        if not hasattr(self.language_model, "make_cache"):
            return [cache_classes.KVCache() for _ in self.layers]
        caches = list(self.language_model.make_cache())
        for cache in caches if self.model_type == "glm5_next" else ():
            if isinstance(cache, CacheList):
                # The last part only spares work in a prefill, and lags behind the others.
                cache.caches = (*cache.caches[:-1], Nothing())
        return caches

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Renames weights as mlx-vlm's loader does; drops those of towers, and the towers."""
        for part in (*self._whole, self.language_model):
            weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
        self._whole = ()
        return {name: weight for name, weight in weights.items() if name.startswith("language_model.")}


def _positions(tokens: mx.array, caches: Sequence[LayerCache]) -> mx.array:
    """Of tokens that follow what `caches` hold, `[batch, num_tokens]`."""
    offset: Any = next((leaf.offset for leaf in leaves_of(caches) if hasattr(leaf, "offset")), 0)
    first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
    return mx.broadcast_to(first + mx.arange(tokens.shape[1])[None], tokens.shape)


class Nothing:
    """Stands for a layer cache that shall keep nothing."""

    state = ()

    def size(self) -> int:
        """A length that no model takes for its own."""
        return -1


class _Sparse(RowKind):
    """`QSAKVCache`: keys, values, and the keys by which an indexer chooses; what it derives is made anew."""

    num_components = 3
    has_spare = can_join = can_group = can_share_head = False

    def arrays(self, cache: LayerCache) -> list[mx.array]:
        return [*super().arrays(cache), cache.index_keys[:, None, : cache.offset]] if cache.keys is not None else []

    def load(self, cache: LayerCache, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, arrays[:2], num_rows, offset)
        cache.index_keys = arrays[2][:, 0, :offset]
        cache.index_position_ids = mx.arange(offset)[None]
        cache.index_block_keys = cache.index_block_ratio = None
