"""The module with which a model predicts a token more (multi-token prediction, MTP): found in a folder, and loaded.

mlx-lm drops its weights, so the module is built here: two norms and a projection join a token's embedding and the
hidden state before the token; one decoder layer of the model's own class and a norm follow; embedding and output
matrix are the model's (DeepSeek-V3 Technical Report, 2024, section 2.2). A folder's tensors tell whether it has one:
conversions drop them but keep the configuration. Only the module's tensors are read.
"""

import inspect
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from cache.types import LayerCache
from models import weights
from models.errors import ModelBroken
from models.mlx_lm_import import CacheList, create_attention_mask, infer_quant_config

_MAX_RAW_NORM: Final = 0.8
"""Mean of a layer's norms: of differences from one .4 to .6, of whole ones 1.3, or 1 where untrained."""


@dataclass(frozen=True)
class _Layout:
    """How a family's checkpoints name the tensors."""

    prefix: str
    """`{n}` stands for the number of the model's layers."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    """Before the names of the decoder layer."""
    hidden_first: bool = False
    """The projection takes the hidden state, then the embedding."""
    array_mask: bool = False
    """Attention takes no mask by name."""
    copies: tuple[str, ...] = ()
    """Of the model's own tensors."""
    stores_difference: bool = False
    """Original checkpoints hold norms as their difference from one."""

    def own_name(self, name: str) -> str:
        """A tensor's name in `MtpModule`."""
        for theirs, ours in (
            (self.embedding_norm, "embedding_norm"),
            (self.hidden_norm, "hidden_norm"),
            (self.projection, "projection"),
            (self.norm, "norm"),
        ):
            if name.startswith(f"{theirs}."):
                return ours + name.removeprefix(theirs)
        return f"layer.{name.removeprefix(self.layer)}"


_QWEN = _Layout(
    "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.", stores_difference=True
)
_GLM = _Layout(
    "model.layers.{n}.",
    *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.", "shared_head.head."),
)
_MIMO = _Layout(
    "model.mtp_layers.0.",
    *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    hidden_first=True,
)
_LAYOUTS: Final = {
    "qwen3": replace(_QWEN, stores_difference=False),
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "deepseek_v3": replace(_GLM, array_mask=True),
    "deepseek_v32": replace(_GLM, array_mask=True),
    "glm4_moe": _GLM,
    "mimo": _MIMO,
}
"""By mlx-lm's module of the language model."""


class MtpModule(Module):
    """Predicts hidden states one token ahead of the model."""

    def __init__(self, text: Module) -> None:
        """`text` is a language model of a family in `_LAYOUTS`."""
        super().__init__()  # type: ignore[no-untyped-call]
        layout, width, eps = _LAYOUTS[_family(text)], text.args.hidden_size, text.args.rms_norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.projection = Linear(2 * width, width, bias=False)
        self.layer = _make_layer(text)
        self.norm = RMSNorm(width, eps)
        self._layout = layout

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: LayerCache | None = None) -> mx.array:
        """The states that the output matrix scores, of tokens and the model's hidden states before them.

        All `[num_rows, num_tokens, width]`.
        """
        first = cache[0] if isinstance(cache, CacheList) else cache
        mask = create_attention_mask(embedded, first, return_array=self._layout.array_mask)
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = self.projection(mx.concatenate(parts[::-1] if self._layout.hidden_first else parts, axis=-1))
        return cast(mx.array, self.norm(self.layer(joined, mask, cache)))


def language_model(model: Module) -> Any:
    """The part of a model that has body, `args` and output matrix."""
    return getattr(model, "language_model", model)


def _family(text: Any) -> str:
    return type(text).__module__.rpartition(".")[2]


def _make_layer(text: Any) -> Module:
    """A layer with attention, and with experts where the model's last have them."""
    args, kind = text.args, type(text.model.layers[-1])
    if hasattr(args, "full_attention_interval"):
        args = replace(args, full_attention_interval=1)
    takes_index = len(inspect.signature(kind).parameters) > 1
    return cast(Module, kind(args, args.num_hidden_layers) if takes_index else kind(args))


def load_mtp(folder: Path, name: str, model: Module) -> MtpModule | None:
    """The module in a loaded model's folder, not evaluated; None without one, or for an unknown family.

    Raises ModelBroken for tensors that do not fit the model.
    """
    text = language_model(model)
    layout = _LAYOUTS.get(_family(text))
    if layout is None:
        return None
    try:
        found = _read_tensors(folder, layout.prefix.format(n=text.args.num_hidden_layers))
        if not found:
            return None
        if layout.stores_difference:
            found = _with_whole_norms(found, layout)
        found = {layout.own_name(tensor): array for tensor, array in _sanitized(found, layout, model).items()}
        module = MtpModule(text)
        quantize(module, class_predicate=partial(_packing, found))
    except ModelBroken:
        raise
    except Exception as error:  # MLX does not read all types; mlx-lm's code for the family raises anything
        raise ModelBroken(f"{name}: the tensors of its MTP module do not belong together: {error}") from error
    _check(found, dict(tree_flatten(module.parameters())), name)  # type: ignore[no-untyped-call]
    module.load_weights(list(found.items()))
    module.eval()
    return module


def _read_tensors(folder: Path, prefix: str) -> dict[str, mx.array]:
    """Lazy, by their names behind `prefix`: those of the file beside the model's, else of its own files."""
    sidecar = folder / weights.MTP_FILE
    if sidecar.is_file():
        weights.read_header(sidecar)
        return {name.rpartition(prefix)[2]: array for name, array in _load(sidecar).items()}
    found = dict[str, mx.array]()
    for file in weights.find_weight_files(folder):
        names = [name for name in weights.read_header(file) if _is_in(name, prefix)]
        tensors = _load(file) if names else {}
        found |= {name.rpartition(prefix)[2]: tensors[name] for name in names}
    return found


def _is_in(name: str, prefix: str) -> bool:
    return name.removeprefix("language_model.").startswith(prefix)


def _load(file: Path) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(str(file)))


def _with_whole_norms(found: dict[str, mx.array], layout: _Layout) -> dict[str, mx.array]:
    """All norms are stored in one way, which only those of the layer tell."""
    norms = [name for name, array in found.items() if array.ndim == 1 and "norm" in name]
    telling = [found[name].astype(mx.float32).mean() for name in norms if name.startswith(layout.layer)]
    if not telling or cast(float, mx.stack(telling).mean().item()) > _MAX_RAW_NORM:
        return found
    return found | {name: found[name] + 1.0 for name in norms}


def _sanitized(found: dict[str, mx.array], layout: _Layout, model: Any) -> dict[str, mx.array]:
    """Tensors as the model's class takes them: experts stacked, for one. Its own code does so for a first layer."""
    text, first = language_model(model), "model.layers.0."
    found = {name: array for name, array in found.items() if not name.startswith(layout.copies)}
    ours = layout.own_name
    matrices = {name for name, array in found.items() if array.ndim > 1 and ours(name).startswith("layer.")}
    inner = SimpleNamespace(args=replace(text.args, num_hidden_layers=1))
    inner.sanitize = partial(type(text).sanitize, inner)
    outer = inner if text is model else SimpleNamespace(args=model.args, language_model=inner)
    layer = {first + name.removeprefix(layout.layer): found[name] for name in matrices}
    sanitized: dict[str, mx.array] = type(model).sanitize(outer, layer)
    kept = {name: array for name, array in found.items() if name not in matrices}
    return kept | {layout.layer + name.rpartition(first)[2]: array for name, array in sanitized.items()}


def _packing(found: dict[str, mx.array], path: str, module: Module) -> dict[str, Any] | bool:
    """How a module's weight is quantized."""
    if f"{path}.scales" not in found:
        return False
    return cast(dict[str, Any], infer_quant_config(path, module, found))


def _check(found: dict[str, mx.array], expected: dict[str, mx.array], name: str) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    both = sorted(expected.keys() & found.keys())
    shapes = [one for one in both if found[one].shape != expected[one].shape]
    types = [one for one in both if _kind(found[one]) != _kind(expected[one])]
    faults = {"lacks": missing, "has too much:": extra, "has in another shape": shapes, "has in another type": types}
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ModelBroken(f"{name}: its MTP module {fault} {names[0]}{more}")


def _kind(array: mx.array) -> mx.Dtype | mx.DtypeCategory:
    """Only floating-point numbers may differ in precision."""
    return mx.floating if mx.issubdtype(array.dtype, mx.floating) else array.dtype
