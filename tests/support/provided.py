"""A provider as pip would install one: a tiny model of its own type, right or wrong in one way."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cache.layers  # noqa: F401

# isort: split
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from tests.support import tiny_models

TYPE = "acme_next"
WINDOW = 12
TOPK = 20
CONFIG: dict[str, Any] = {"model_type": TYPE, "vocab_size": tiny_models.VOCAB, "width": 32, "num_hidden_layers": 3}


@dataclass
class ModelArgs:
    vocab_size: int
    width: int
    fault: str = ""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        return cls(config["vocab_size"], config["width"], config.get("fault", ""))


class _Layer(Module):
    """One kind of state, added to what comes in."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.proj = Linear(args.width, 3 * args.width, bias=False)
        self.fault = args.fault

    def attend(self, x: mx.array, cache: Any, see: Callable[[mx.array, Any], Any]) -> mx.array:
        queries, keys, values = (part[:, None] for part in mx.split(self.proj(x), 3, axis=-1))
        mask = see(x, cache)
        keys, values = cache.update_and_fetch(keys, values)
        scores = queries @ keys.swapaxes(-1, -2) * x.shape[-1] ** -0.5
        if mask is not None:
            scores = mx.where(mask, scores, -1e9)
        return x + mx.squeeze(mx.softmax(self.select(scores), axis=-1) @ values, 1)

    def select(self, scores: mx.array) -> mx.array:
        return scores


class Window(_Layer):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.window_size = WINDOW

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        size = WINDOW + (self.fault == "window")
        return self.attend(x, cache, lambda x, cache: cache.make_mask(x.shape[1], size, True))


class Sparse(_Layer):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.index_topk = TOPK
        # A compiled function of any shape keeps where the first call's chosen keys began.
        self.divide = mx.compile(_divide, shapeless=True) if args.fault == "frozen" else _divide
        self.counted = 0

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        if self.fault == "counted":
            self.counted = self.counted if cache.offset else 0
            x = x + 0.1 * (self.counted + mx.arange(x.shape[1]))[None, :, None]
            self.counted += x.shape[1]
        return self.attend(x, cache, lambda x, cache: _causal(x.shape[1], cache.offset))

    def select(self, scores: mx.array) -> mx.array:
        if scores.shape[-1] <= TOPK:
            return scores
        chosen = self.divide(scores)[..., -TOPK:]
        return mx.put_along_axis(mx.full(scores.shape, -1e9), chosen, mx.take_along_axis(scores, chosen, -1), -1)


def _divide(scores: mx.array) -> mx.array:
    return mx.argpartition(scores, kth=-TOPK, axis=-1)


def _causal(length: int, offset: int) -> mx.array:
    return mx.arange(offset + length)[None] <= offset + mx.arange(length)[:, None]


class Pooled(_Layer):
    """Each token's pool overlaps with the one before."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.compress_ratio = 2

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        pools = self.proj(x)[..., : x.shape[-1]]
        before = mx.zeros_like(pools[:, :1]) if cache[0] is None or self.fault == "overlap" else cache[0]
        cache[0] = pools[:, -1:]
        return x + pools + mx.concatenate([before, pools[:, :-1]], axis=1)


class Model(Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.args = args
        self.embed = Embedding(args.vocab_size, args.width)
        self.layers = [Window(args), Sparse(args), Pooled(args)]
        self.head = Linear(args.width, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embed(tokens)
        for layer, layer_cache in zip(self.layers, cache or self.make_cache(), strict=True):
            x = layer(x, layer_cache)
        logits: mx.array = self.head(x)
        return logits

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(WINDOW), KVCache(), ArraysCache(1)]


def write_model(folder: Path, fault: str = "") -> Path:
    """A folder with weights of a model of `TYPE`; which code it runs on is the installed provider's matter."""
    config = CONFIG | {"fault": fault}
    model = tiny_models.make(config, lambda config: (Model, ModelArgs))
    return tiny_models.write_model(model, config, folder)


def install(site: Path, name: str, version: str = "1.2", *, code: str = "", model_type: str = TYPE) -> Path:
    """Puts a distribution with the entry point of a provider into `site`, a folder on Python's path."""
    site.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(code or f"from {__name__} import Model, ModelArgs\n")
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[mlx_serve.models]\n{model_type} = {module}\n")
    return site
