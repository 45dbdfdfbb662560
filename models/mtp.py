"""The module with which a model predicts a token more (multi-token prediction, MTP): found in a folder, and loaded.

mlx-lm drops its weights, so the module is built here: two norms and a projection join a token's embedding and the
hidden state before the token; one decoder layer of the model's own class and a norm follow; embedding and output
matrix are the model's (DeepSeek-V3 Technical Report, 2024, section 2.2). A folder's tensors tell whether it has one:
conversions drop them but keep the configuration. Only the module's tensors are read.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from models.errors import ModelBroken, brief
from models.mlx_lm_import import CacheList, create_attention_mask, infer_quant_config

_MAX_RAW_NORM: Final = 0.8
"""Mean of a layer's norms: of differences from one .4 to .6, of whole ones 1.3, or 1 where untrained."""

_PARTS: Final = ("embedding_norm", "hidden_norm", "projection", "norm", "output")
"""Parts of the module, in the order of `_Layout.parts`, beside the decoder layer."""


@dataclass(frozen=True)
class _Layout:
    """How a family's checkpoints name the tensors."""

    prefix: str
    """`{n}` stands for the number of the model's layers."""
    parts: str
    """Names of `_PARTS`: without a norm the model's is used, with an output matrix states before its last norm."""
    layer: str = ""
    """Before the names of the decoder layer."""
    hidden_first: bool = False
    """The projection takes the hidden state, then the embedding."""
    array_mask: bool = False
    """Attention takes no mask by name."""
    copies: tuple[str, ...] = ()
    """How names of the model's own tensors begin."""
    stores_difference: bool = False
    """Original checkpoints hold norms as their difference from one."""
    layer_arguments: tuple[bool, ...] = ()
    """In place of the layer's number."""

    @cached_property
    def names(self) -> dict[str, str]:
        """By part."""
        return dict(zip(_PARTS, self.parts.split(), strict=False))

    def own_name(self, name: str) -> str:
        """A tensor's name in `MtpModule`."""
        for part, theirs in self.names.items():
            if name.startswith(f"{theirs}."):
                return part + name.removeprefix(theirs)
        return "layer." + name.removeprefix(self.layer).replace("pre_mlp_layernorm", "post_attention_layernorm")


_QWEN3 = _Layout("mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm", layer="layers.0.")
_QWEN = replace(_QWEN3, stores_difference=True)
_NAMES = "enorm hnorm eh_proj "
_GLM = _Layout("model.layers.{n}.", _NAMES + "shared_head.norm", copies=("embed_tokens.", "shared_head.head."))
_LATENT = replace(_GLM, array_mask=True)
_MIMO = _Layout(
    "model.mtp_layers.0.", "token_layernorm hidden_layernorm input_proj final_layernorm", hidden_first=True
)
# No experts, but a window.
_MIMO_V2 = _Layout("model.mtp.layers.0.", _NAMES + "final_layernorm", layer_arguments=(False, True))
_STEP_HEAD = "transformer.shared_head.norm transformer.shared_head.output"
_STEP = _Layout("model.layers.{n}.", _NAMES + _STEP_HEAD, stores_difference=True)
_ERNIE = _Layout("model.mtp_", "emb_norm.0 hidden_norm.0 linear_proj.0", layer="block.0.")
_LAYOUTS: Final = {
    "qwen3": _QWEN3,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "ernie4_5_moe": _ERNIE,
    "glm4_moe": _GLM,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "step3p5": _STEP,
}
"""By mlx-lm's module of the language model."""


class MtpModule(Module):
    """Predicts hidden states one token ahead of the model."""

    def __init__(self, text: Module) -> None:
        """`text` is a language model of a family in `_LAYOUTS`."""
        super().__init__()  # type: ignore[no-untyped-call]
        layout, width, eps = _LAYOUTS[_family(text)], text.args.hidden_size, text.model.norm.eps
        self.embedding_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.projection = Linear(2 * width, width, bias=False)
        self.layer = _make_layer(text, layout)
        self.norm = RMSNorm(width, eps)
        if "output" in layout.names:
            self.output = Linear(width, text.args.vocab_size, bias=False)
        self._layout, self._last_norm, self._has_output = layout, text.model.norm, "output" in layout.names
        self.slides = any(getattr(self.layer, name, False) for name in ("is_sliding", "is_sliding_window"))

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: LayerCache | None = None) -> mx.array:
        """States a token ahead, of tokens and the states before them: `[num_rows, num_tokens, width]`."""
        first = cache[0] if isinstance(cache, CacheList) else cache
        mask = create_attention_mask(embedded, first, return_array=self._layout.array_mask)
        parts = [self.embedding_norm(embedded), self.hidden_norm(self._taken(hidden))]
        joined = self.projection(mx.concatenate(parts[::-1] if self._layout.hidden_first else parts, axis=-1))
        norm = self._last_norm if self._has_output else self.norm
        return cast(mx.array, norm(self.layer(joined, mask, cache)))

    def score(self, states: mx.array, output: Callable[[mx.array], mx.array]) -> mx.array:
        """Logits of the module's states; `output` is the model's matrix."""
        return self.output(self.norm(self._taken(states))) if self._has_output else output(states)

    def _taken(self, states: mx.array) -> mx.array:
        # Norms ignore a state's length, which alone the last norm has lost.
        weight = self._last_norm.weight
        return states / mx.where(weight == 0, 1, weight) if self._has_output else states


def pack_like(module: Module, tensors: dict[str, mx.array]) -> None:
    """Quantizes the layers of a module as their tensors are."""

    def packing(path: str, layer: Module) -> dict[str, Any] | bool:
        return f"{path}.scales" in tensors and cast(dict[str, Any], infer_quant_config(path, layer, tensors))

    quantize(module, class_predicate=packing)


def language_model(model: Module) -> Any:
    """The part of a model that has body, `args` and output matrix."""
    return getattr(model, "language_model", model)


def _family(text: Any) -> str:
    """By mlx-lm's module; others name their tensors otherwise."""
    return type(text).__module__.removeprefix("mlx_lm.models.")


def _make_layer(text: Any, layout: _Layout) -> Module:
    """A layer with attention, and with experts where the model's last have them."""
    args, kind = text.args, type(text.model.layers[-1])
    if hasattr(args, "full_attention_interval"):
        args = replace(args, full_attention_interval=1)
    further = layout.layer_arguments or (args.num_hidden_layers,)
    return cast(Module, kind(args, *further[: len(inspect.signature(kind).parameters) - 1]))


def load_mtp(folder: Path, name: str, model: Module, file: Path | None = None) -> MtpModule | None:
    """The module in `file` or a loaded model's folder, not evaluated; None without one, or for an unknown family.

    Raises ModelBroken for one that does not fit.
    """
    text = language_model(model)
    layout = _LAYOUTS.get(_family(text))
    if layout is None:
        return None
    try:
        prefix = layout.prefix.format(n=text.args.num_hidden_layers)
        tensors = _read_tensors(folder, prefix, file or folder / weights.MTP_FILE)
        if not tensors:
            return None
        if layout.stores_difference:
            tensors = _with_whole_norms(tensors, layout)
        tensors = {layout.own_name(tensor): array for tensor, array in _sanitized(tensors, layout, model).items()}
        if "norm" not in layout.names:
            tensors["norm.weight"] = text.model.norm.weight
        module = MtpModule(text)
        pack_like(module, tensors)
        expected = dict(tree_flatten(module.parameters()))  # type: ignore[no-untyped-call]
        module.load_weights(list(tensors.items()))
    except ModelBroken:
        raise
    except Exception as error:  # MLX does not read all types; mlx-lm's code for the family raises anything
        reason = brief(error, 120)
        raise ModelBroken(f"{name}: the tensors of its MTP module do not belong together: {reason}") from error
    for tensor, array in tensors.items():
        if _kind(array) != _kind(expected[tensor]):
            raise ModelBroken(f"{name}: {tensor} of its MTP module is of another type")
    module.eval()
    return module


def tensors_of(module: MtpModule) -> dict[str, mx.array]:
    """The module's tensors, named as in a checkpoint, for a file beside the model's."""
    layout, tensors = module._layout, dict[str, mx.array]()
    before = {part: f"{theirs}." for part, theirs in layout.names.items()} | {"layer": layout.layer}
    for path, array in cast(Any, tree_flatten(module.parameters())):  # type: ignore[no-untyped-call]
        part, _, rest = path.partition(".")
        if part in before:  # a norm may be the model's
            tensors[before[part] + rest] = array
    return tensors


def _read_tensors(folder: Path, prefix: str, sidecar: Path) -> dict[str, mx.array]:
    """Lazy, by their names after `prefix`: those of the file beside the model's, else of its own files."""
    read = dict[str, mx.array]()
    for file in [sidecar] if sidecar.is_file() else weights.find_weight_files(folder):
        everything = list(weights.read_header(file))
        names = [name for name in everything if name.removeprefix("language_model.").startswith(prefix)]
        if not names and file == sidecar:
            names = everything
        tensors: Any = mx.load(str(file), format="safetensors") if names else {}
        read |= {name.rpartition(prefix)[2]: tensors[name] for name in names}
    return read


def _with_whole_norms(tensors: dict[str, mx.array], layout: _Layout) -> dict[str, mx.array]:
    """All norms are stored in one way, which only those of the layer tell."""
    norms = [name for name, array in tensors.items() if array.ndim == 1 and "norm" in name]
    telling = [
        tensors[name].astype(mx.float32).mean() for name in norms if layout.own_name(name).startswith("layer.")
    ]
    if not telling or cast(float, mx.stack(telling).mean().item()) > _MAX_RAW_NORM:
        return tensors
    return tensors | {name: tensors[name] + 1.0 for name in norms}


def _sanitized(tensors: dict[str, mx.array], layout: _Layout, model: Any) -> dict[str, mx.array]:
    """Tensors as the model's class takes them: experts stacked, for one. Its own code does so for a first layer."""
    text, first = language_model(model), "model.layers.0."
    tensors = {name: array for name, array in tensors.items() if not name.startswith(layout.copies)}
    ours = layout.own_name
    matrices = {name for name, array in tensors.items() if array.ndim > 1 and ours(name).startswith("layer.")}
    inner = SimpleNamespace(args=replace(text.args, num_hidden_layers=1))
    inner.sanitize = partial(type(text).sanitize, inner)
    outer = inner if text is model else SimpleNamespace(args=model.args, language_model=inner)
    layer = {first + name.removeprefix(layout.layer): tensors[name] for name in matrices}
    sanitized: dict[str, mx.array] = type(model).sanitize(outer, layer)
    kept = {name: array for name, array in tensors.items() if name not in matrices}
    return kept | {layout.layer + name.rpartition(first)[2]: array for name, array in sanitized.items()}


def _kind(array: mx.array) -> mx.Dtype | mx.DtypeCategory:
    """Only floating-point numbers may differ in precision."""
    return mx.floating if mx.issubdtype(array.dtype, mx.floating) else array.dtype
