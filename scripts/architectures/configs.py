"""Tiny configurations for the architectures of mlx-lm.

Most architectures share the names of their fields, so one table of values serves them all: each takes the fields that
its arguments have. What an architecture needs otherwise stands in `OWN`; what cannot be built here, in `NOT_BUILT`.
"""

import dataclasses
import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.architectures.vlm_configs import VLM_CONFIGS
from tests.support.tiny_models import CONFIGS, CONTEXT, EXTRA_CONFIGS, VOCAB, WINDOW

# isort: split
import mlx_lm.models

LAYERS = 4
WIDTH = 64
HEADS = 4
HEAD = 16

_SHARED: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "embedding_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "dim_model_base"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), HEAD),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size"), CONTEXT),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"), 128),
    **dict.fromkeys(("ffn_hidden_size", "mlp_hidden_size", "hidden_dim", "n_inner"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    "expert_ffn_hidden_size": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "zero_expert_num"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "index_topk_freq"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), 10000.0),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), 0.5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "conv_bias", "tie_word_embeddings"), False),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "use_conv_bias"), True),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "residual_multiplier", "embedding_multiplier"), 1.0),
    "attention_multiplier": 0.25,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "mlp_only_layers": [],
    "rotary_dim": HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv1d_width", "mamba_d_conv"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), HEAD),
    **dict.fromkeys(("expand", "mamba_expand", "layer_group_size", "group_norm_size", "n_groups"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "hidden_size_per_layer_input"), HEAD),
    "time_step_rank": 4,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": WINDOW,
}

_DENSE: dict[str, Any] = {
    name: _SHARED[name]
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
        "tie_word_embeddings",
    )
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": CONTEXT // 2,
}
_SCALED_QUERIES = {**_YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
_HYBRID = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": HEADS,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    }
}
_DYNAMIC = {"type": "dynamic", "factor": 1.0, "alpha": 1.0}
_ROPE_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(_ALTERNATING)}
_MULTIMODAL_ROPE = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

OWN: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("falcon_h1", "gpt_oss", "lfm2", "llama4", "mamba2", "nemotron_h", "qwen3_5")},
    **{name: EXTRA_CONFIGS[name] for name in ("gemma3n",)},
    "gemma3_text": CONFIGS["gemma3"],
    "gemma4_text": EXTRA_CONFIGS["gemma4"],
    "gemma3": {"vocab_size": VOCAB, "text_config": CONFIGS["gemma3"]},
    "gemma4": {"vocab_size": VOCAB, "text_config": EXTRA_CONFIGS["gemma4"]},
    "afm7": {"num_kv_reuse_layers": 1, "hidden_dim": WIDTH},
    "afmoe": {"layer_types": _ALTERNATING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "num_key_value_heads": HEADS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_end_index": LAYERS - 1},
    "exaone4": {
        "rope_scaling": {**_YARN, "rope_type": "default"},
        "sliding_window_pattern": "LG",
        "layer_types": _ALTERNATING,
    },
    "exaone_moe": {"layer_types": _ALTERNATING, "is_moe_layer": [False, True] * (LAYERS // 2)},
    "gear": {"layer_types": _ALTERNATING},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {
        "text_config": {
            **_SHARED,
            "model_type": "kimi_linear",
            **_HYBRID,
            "num_experts_per_token": 2,
        }
    },
    "kimi_linear": {**_HYBRID, "model_max_length": CONTEXT},
    "lfm2-vl": {"text_config": CONFIGS["lfm2"]},
    "lfm2_moe": {"use_expert_bias": True, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mellum": {
        "layer_types": _ALTERNATING,
        "rope_parameters": _ROPE_BY_KIND,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * (LAYERS // 2),
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": HEAD,
        "swa_v_head_dim": HEAD,
    },
    "minicpm3": {"rope_scaling": {**_YARN, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
    "minimax_m3_vl": {"text_config": {**_SHARED, "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_freq": None}},
    "ministral3": {"rope_parameters": _SCALED_QUERIES},
    "mistral3": {"text_config": {**_DENSE, "model_type": "ministral3", "rope_parameters": _SCALED_QUERIES}},
    "mistral4": {"rope_parameters": _SCALED_QUERIES},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * (LAYERS - 1)
        + [{"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}}]
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "num_transformer_layers": LAYERS,
        "ffn_dim_divisor": 16,
        "num_query_heads": [HEADS] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [2.0] * LAYERS,
    },
    "pixtral": {"text_config": {**_DENSE, "model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": HEAD, "intermediate_size": 256},
    "qwen2_vl": {"text_config": {**_DENSE, "model_type": "qwen2", "rope_scaling": _MULTIMODAL_ROPE}},
    "qwen3_vl": {"text_config": {**_DENSE, "model_type": "qwen3", "rope_scaling": _MULTIMODAL_ROPE}},
    "qwen3_vl_moe": {"text_config": {**_SHARED, "model_type": "qwen3_moe", "rope_scaling": _MULTIMODAL_ROPE}},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "spark2_5": {"rope_parameters": _ROPE_BY_KIND},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"num_attention_groups": 2},
}

NOT_BUILT = {
    "bitnet": "its kernel for ternary weights needs a GPU",
    "muse_spark": "its kernel for norms and rotations needs a GPU",
    "olmo": "mlx-lm asks for the package ai2-olmo; OLMo 2 and 3 need none",
    "phi3small": "its block-sparse attention ends the process on MLX's CPU backend, in mlx-lm alone too",
    "prism_hadamard_qwen35": "it exists only as 2-bit weights with a pack of its own",
}
"""Architectures that no tiny float32 model stands for, and why."""

NOTES = {
    "deepseek_v41": "its caches are of a class of their own: kept in memory, and evaluated again after a restart",
    "plamo3": "in mlx-lm alone, too, a prompt beyond its window gives other logits in pieces than in one",
}
"""What is known of architectures that do not pass every check."""

_HELPERS = frozenset(
    (
        *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"),
        "switch_layers",
    )
)


def names() -> list[str]:
    """Returns the names of mlx-lm's architectures: its modules that define a model."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(mlx_lm.models.__path__)
        if module.name not in _HELPERS and _defines_model(module.name)
    )


def config(name: str) -> dict[str, Any]:
    """Returns a tiny configuration of the architecture `name`."""
    if name in VLM_CONFIGS:
        return VLM_CONFIGS[name]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    fields = {field.name for field in dataclasses.fields(module.ModelArgs)}
    values: dict[str, Any] = {key: value for key, value in _SHARED.items() if key in fields}
    if "text_config" in fields:
        values["text_config"] = {**_SHARED}
    return {**values, **OWN.get(name, {}), "model_type": OWN.get(name, {}).get("model_type", name)}


def _defines_model(name: str) -> bool:
    """Whether the module has a model of its own; read, not imported, since one ends the process where it is."""
    source = find_spec(f"mlx_lm.models.{name}")
    assert source is not None and source.origin is not None
    return "class ModelArgs" in Path(source.origin).read_text(encoding="utf-8")
