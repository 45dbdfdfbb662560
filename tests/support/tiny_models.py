"""Tiny seeded models of real architectures: random weights, float32, a vocabulary of 320 tokens.

A model answers nothing sensible, but the same seed gives the same model, its greedy output varies with the
whole context (a wrong cache state changes tokens within a few steps), and it runs in a blink on a CPU.
Sliding windows are `WINDOW` tokens, so that short tests wrap them.
"""

import cache.layers  # noqa: F401

# isort: split
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 320
WINDOW = 32
CONTEXT = 4096
SEED = 20_26

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_PAIRS = (
    *(f"\u0120{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),  # the byte-level spelling of a leading space
    *("an", "ar", "as", "at", "de", "ed", "en", "er", "es", "ha", "he", "hi", "in", "is", "it", "le"),
    *("me", "nd", "ne", "ng", "nt", "on", "or", "ou", "re", "se", "st", "te", "th", "ti", "to"),
)

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}

_GATED_DELTA: dict[str, Any] = {
    **_DENSE,
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

_LLAMA: dict[str, Any] = {**_DENSE, "model_type": "llama"}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_4bit": {**_LLAMA, "quantization": {"group_size": 32, "bits": 4}},
    "llama_swa": {
        **_LLAMA,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {**_DENSE, "model_type": "qwen3"},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **_GATED_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "type": "default",
                "mrope_section": [1, 1, 0],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "qwen3_next": {
        **_GATED_DELTA,
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
    "gemma3": {
        **_DENSE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        **_DENSE,
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": CONTEXT // 2,
        },
    },
    "lfm2": {
        **_DENSE,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 10.0],
        "time_step_rank": "auto",
        "max_position_embeddings": CONTEXT,
    },
    "falcon_h1": {
        **_DENSE,
        "model_type": "falcon_h1",
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
    },
    "nemotron_h": {
        **_DENSE,
        "model_type": "nemotron_h",
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "gemma2": {**_DENSE, "model_type": "gemma2", "query_pre_attn_scalar": 16},
    "deepseek_v32": {
        **_DENSE,
        "model_type": "deepseek_v32",
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 24,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_DENSE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
}
NAMES = tuple(CONFIGS)
USUAL = ("llama", "llama_swa", "qwen3_5", "gpt_oss", "gemma3", "gemma3n", "llama4", "deepseek_v3", "mamba2")
"""One of each kind of state and attention, for tests of which a usual run has some cases only."""

_LATENT = {key: value for key, value in CONFIGS["deepseek_v32"].items() if not key.startswith("index_")}

EXTRA_CONFIGS: dict[str, dict[str, Any]] = {
    "llama_wide_heads": {**_LLAMA, "head_dim": 32},  # wide enough to quantize keys and values
    "deepseek_v3": {**_LATENT, "model_type": "deepseek_v3"},
    "gemma4": {  # the last two layers use the keys and values of earlier ones
        **_DENSE,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {
            **_DENSE,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "intermediate_size": [128] * 4,
        },
    },
}
"""Further kinds of attention, for tests of decoding."""


Precision: TypeAlias = Literal["float32", "bfloat16", "4bit"]


def build(name: str, precision: Precision = "float32") -> Module:
    """Returns the tiny model `name` of `NAMES` or `EXTRA_CONFIGS`, evaluated. One per process: do not change it.

    In `4bit` what is not quantized is bfloat16, as in the models that people run.
    """
    return _kept(name, precision)


def build_anew(name: str, precision: Precision = "float32") -> Module:
    """As `build`, to be changed."""
    config = (CONFIGS | EXTRA_CONFIGS)[name]
    model = make(config)
    if precision != "float32":
        model.set_dtype(mx.bfloat16)
    if precision == "4bit":
        quantize(model, group_size=32, bits=4, class_predicate=_can_be_quantized)
    elif quantization := config.get("quantization"):
        quantize(model, **quantization)
    mx.eval(_parameters(model))
    return model


_kept = functools.cache(build_anew)


def make(config: dict[str, Any], get_classes: Callable[..., Any] = _get_classes) -> Module:
    """Returns a model of this configuration with seeded float32 weights."""
    copied = json.loads(json.dumps(config))
    model_class, args_class = get_classes(config=copied)
    mx.random.seed(SEED)
    model: Module = model_class(args_class.from_dict(copied))
    model.update(tree_map_with_path(_weight_maker(config["model_type"]), _parameters(model)))
    model.eval()
    mx.eval(_parameters(model))
    return model


@functools.cache
def build_wide(name: str) -> Module:
    """As `build`, heads as wide as a group of rounded numbers."""
    return make(widened((CONFIGS | EXTRA_CONFIGS)[name]))


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with heads, and matrices of recurrent layers, that are 32 wide."""
    wide: dict[str, Any] = json.loads(json.dumps(config))
    for part in [wide, *(part for part in wide.values() if isinstance(part, dict))]:
        part.update({key: 32 for key in _WIDTHS if key in part})
        part.update({"mamba_d_ssm": 256} if "mamba_d_ssm" in part else {})
        if not _WIDTHS.intersection(part):
            part.update({key: 2 for key in ("num_attention_heads", "n_heads", "n_head") if key in part})
    return wide


_WIDTHS = {
    *("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"),
    *("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head", "mamba_head_dim"),
}


def _can_be_quantized(_: str, module: Module) -> bool:
    return hasattr(module, "to_quantized") and cast(Any, module).weight.shape[-1] % 32 == 0


def _parameters(model: Module) -> dict[str, Any]:
    return cast(dict[str, Any], model.parameters())  # type: ignore[no-untyped-call]


def _weight_maker(model_type: str) -> Callable[[str, mx.array], mx.array]:
    """Matrices get unit gain and more, so that attention is sharp and tokens far back still matter.

    The embedding stays small against the layers' output: otherwise the next token would hang on the last
    token alone and greedy decoding would run in a short circle. Recurrent layers get small time steps, so that
    their state remembers some hundred tokens.
    """
    generator = np.random.default_rng(SEED)
    embedding_scale = 0.05 if "gemma" in model_type else 0.3

    def make(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if path.endswith("dt_bias"):
            return mx.linspace(-4.0, -1.0, weight.size, dtype=mx.float32).reshape(weight.shape)
        if weight.ndim < 2 or "A_log" in path or "conv" in path:
            return weight.astype(mx.float32)
        scale = embedding_scale if "embed" in path else 1.6 / weight.shape[-1] ** 0.5
        return mx.array(generator.normal(0.0, scale, weight.shape), dtype=mx.float32)

    return make


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCAB` ids, the first 256 one byte each, with a ChatML-like template."""
    merges = [(pair[0], pair[1]) for pair in _PAIRS]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_PAIRS]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TURN, pad_token="<|endoftext|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write(name: str, folder: Path) -> Path:
    """Writes the tiny model `name` with tokenizer and chat template as a model folder; returns `folder`."""
    return write_model(build(name), (CONFIGS | EXTRA_CONFIGS)[name], folder)


def write_model(model: Module, config: dict[str, Any], folder: Path) -> Path:
    """Writes a model as a folder that has the tiny tokenizer and chat template; returns `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(_parameters(model)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer().save_pretrained(str(folder))
    with_eos = {**config, "eos_token_id": tokenizer().eos_token_id}
    (folder / "config.json").write_text(json.dumps(with_eos, indent=1))
    return folder
