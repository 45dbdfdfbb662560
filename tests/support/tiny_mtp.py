"""MTP modules for tiny models: with random weights, or trained to expect what the model says after some prompts."""

import functools
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map_with_path

from cache.layers.kinds import make_caches
from models.mtp import MtpModule, language_model
from scripts.architectures.configs import config
from tests.support import tiny_models

_DENSE = tiny_models.CONFIGS["qwen3_5"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": tiny_models.CONFIGS["qwen3"],
    "qwen3_next": tiny_models.CONFIGS["qwen3_next"],
    "qwen3_5": _DENSE,
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**_DENSE["text_config"], **_EXPERTS, "moe_intermediate_size": 64},
    },
    "deepseek_v3": tiny_models.EXTRA_CONFIGS["deepseek_v3"],
    "deepseek_v32": tiny_models.CONFIGS["deepseek_v32"],
    **{name: config(name) for name in ("ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "mimo")},
    "mimo_v2_flash": config("mimo_v2_flash"),
    "step3p5": {
        **config("step3p5"),
        "layer_types": [*["full_attention", "sliding_attention"] * 2, "sliding_attention"],
    },
}
_QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}


def _named_for(num_layers: int, head: str = "shared_head") -> dict[str, str]:
    prefix = f"model.layers.{num_layers}"
    named = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": f"{head}.norm"}
    named["output"] = f"{head}.output"
    return {ours: f"{prefix}.{theirs}" for ours, theirs in named.items()} | {"layer": prefix}


CHECKPOINT_NAMES = {
    "deepseek_v3": _named_for(2),
    "deepseek_v32": _named_for(2),
    "glm4_moe": _named_for(4),
    "glm4_moe_lite": _named_for(4),
    "glm_moe_dsa": _named_for(4),
    "step3p5": _named_for(4, head="transformer.shared_head"),
    "ernie4_5_moe": {
        "embedding_norm": "model.mtp_emb_norm.0",
        "hidden_norm": "model.mtp_hidden_norm.0",
        "projection": "model.mtp_linear_proj.0",
        "layer": "model.mtp_block.0",
    },
    "mimo_v2_flash": {
        "embedding_norm": "model.mtp.layers.0.enorm",
        "hidden_norm": "model.mtp.layers.0.hnorm",
        "projection": "model.mtp.layers.0.eh_proj",
        "layer": "model.mtp.layers.0",
        "norm": "model.mtp.layers.0.final_layernorm",
    },
    "mimo": {
        "embedding_norm": "model.mtp_layers.0.token_layernorm",
        "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "projection": "model.mtp_layers.0.input_proj",
        "layer": "model.mtp_layers.0",
        "norm": "model.mtp_layers.0.final_layernorm",
    },
}


@functools.cache
def model_of(name: str) -> Any:
    """Returns the tiny model `name` of `CONFIGS`, evaluated."""
    model: Any = tiny_models.make(CONFIGS[name])
    if name in ("ernie4_5_moe", "mimo_v2_flash", "step3p5"):  # so that states before and after the norm differ
        norm = np.random.default_rng(4).normal(1.0, 0.5, model.args.hidden_size)
        model.model.norm.weight = mx.array(norm, mx.float32)
    return model


@functools.cache
def module_of(name: str) -> MtpModule:
    """With random weights, evaluated."""
    module = MtpModule(language_model(model_of(name)))
    generator = np.random.default_rng(3)

    def weight(path: str, array: mx.array) -> mx.array:
        scale, shift = (0.1, 1.0) if "norm" in path else (array.shape[-1] ** -0.5, 0.0)
        return mx.array(generator.normal(shift, scale, array.shape), mx.float32)

    module.update(tree_map_with_path(weight, parameters_of(module)))
    if name == "ernie4_5_moe":
        module.norm.weight = model_of(name).model.norm.weight
    mx.eval(parameters_of(module))
    return module


def parameters_of(module: Any) -> Any:
    return module.parameters()


def tensors_of(module: MtpModule, name: str) -> dict[str, mx.array]:
    """Under the names of the family's checkpoints."""
    names, tensors = CHECKPOINT_NAMES.get(name, _QWEN), dict[str, mx.array]()
    for path, array in cast(list[tuple[str, mx.array]], tree_flatten(parameters_of(module))):
        part, _, rest = path.partition(".")
        if name == "mimo_v2_flash":
            rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
        if part in names:
            tensors[f"{names[part]}.{rest}"] = array
    return tensors


def prompt(length: int, seed: int = 5) -> list[int]:
    return cast(list[int], np.random.default_rng(seed).integers(1, tiny_models.VOCAB, length).tolist())


def best(logits: mx.array) -> list[int]:
    """Of logits `[num_tokens, vocab_size]`."""
    return cast(list[int], mx.argmax(logits, axis=-1).tolist())


def plain(model: Any, tokens: list[int], num_tokens: int) -> list[int]:
    caches, output, fed = make_caches(model), list[int](), tokens
    while len(output) < num_tokens:
        fed = best(model(mx.array([fed]), cache=caches)[0, -1:])
        output += fed
    return output


@functools.cache
def learned_texts(name: str) -> list[list[int]]:
    """What the model says after random prompts of 8 tokens, and these."""
    prompts = [prompt(8, seed) for seed in range(4)]
    return [[*given, *plain(model_of(name), given, 40)] for given in prompts]


@functools.cache
def trained_module_of(name: str) -> MtpModule:
    """Knows what the model says in `learned_texts`."""
    model, texts = model_of(name), mx.array(learned_texts(name))
    text, module = language_model(model), MtpModule(language_model(model_of(name)))
    module.update(parameters_of(module_of(name)))
    hidden, embedded = text.model(texts), text.model.embed_tokens(texts[:, 1:])
    wanted = mx.argmax(text.lm_head(hidden), axis=-1)[:, 1:]

    def loss(module: MtpModule) -> mx.array:
        states = module(embedded, hidden[:, :-1])
        return cross_entropy(module.score(states, text.lm_head), wanted, reduction="mean")

    optimizer, gradients = optim.Adam(3e-3), value_and_grad(module, loss)
    for _ in range(60):
        _, grads = gradients(module)
        optimizer.update(module, grads)
        mx.eval(parameters_of(module), optimizer.state)
    return module


def weights_of(module: MtpModule) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(parameters_of(module))))
