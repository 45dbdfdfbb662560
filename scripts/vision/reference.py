"""Writes tiny models that see, with seeded weights, and what transformers has them answer: reference.py FOLDER.

Runs with PyTorch, in an environment of its own (`scripts.vision`). FOLDER/NAME becomes a model's folder as on the
hub, FOLDER/NAME.json its conversations, each with messages, the number of prompt tokens and twelve greedy tokens,
every one of a whole evaluation in float32 without a cache.
"""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoImageProcessor, PreTrainedTokenizerFast

NUM_TOKENS = 12
VOCABULARY, WORDS = 512, 490
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
IDS = {name: WORDS + number for number, name in enumerate(SPECIAL)}
PAD = IDS["<|image_pad|>"]
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'SHOWN' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 16_384},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_convert_rgb": True,
    "resample": 3,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "in_channels": 3,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ATTENTION = {"num_hidden_layers": 4, "head_dim": 16, "rope_parameters": ROPE}
HYBRID = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA3 = {
    **TEXT,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
GEMMA3_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_convert_rgb": True,
    "resample": 2,
}
GEMMA4 = {
    **TEXT,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
}
WITH_LAYER_INPUTS = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
WITH_MUTUAL_ATTENTION = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
GEMMA4_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "do_normalize": False,
    "do_convert_rgb": True,
    "resample": 3,
}
MISTRAL = {**TEXT, "num_hidden_layers": 3, "head_dim": 16, "rms_norm_eps": 1e-5, "initializer_range": 0.1}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 4,
    "hidden_act": "gelu",
}
PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 4,
    "size": {"longest_edge": 40},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
    "resample": 3,
}


class Family:
    """A model's configuration, its processor, and what it puts in a picture's place."""

    def __init__(self, kind: str, config: dict, processor: dict, shown: str, framed: str = "", **call: int) -> None:
        """`call`: what the processor of texts and images tells that of images."""
        self.kind, self.config, self.processor, self.call = kind, config, processor, call
        self.shown, self.framed = shown, framed or shown

    @property
    def template(self) -> str:
        """The chat template, which says `shown`."""
        return TEMPLATE.replace("SHOWN", self.shown)


def qwen(kind: str, text: dict, **vision: object) -> Family:
    """Returns a family of Qwen's."""
    config = {
        "text_config": {**TEXT, **text},
        "vision_config": {**VISION, **vision},
        "image_token_id": PAD,
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    return Family(kind, config, QWEN_PROCESSOR, "<|vision_start|><|image_pad|><|vision_end|>")


def gemma4(text: dict, **vision: object) -> Family:
    """Returns a family of Gemma 4's."""
    config = {
        "text_config": {**GEMMA4, **text},
        "vision_config": {**GEMMA4_VISION, **vision},
        "audio_config": None,
        "image_token_id": IDS["<|image|>"],
        "boi_token_id": IDS["<|image>"],
        "eoi_token_id": IDS["<image|>"],
        "tie_word_embeddings": False,
    }
    return Family("Gemma4", config, GEMMA4_PROCESSOR, "<|image|>", "<|image><|image|><image|>")


def mistral(text: dict) -> Family:
    """Returns a family of Mistral's."""
    config = {
        "text_config": {**MISTRAL, **text},
        "vision_config": PIXTRAL,
        "image_token_index": IDS["[IMG]"],
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }
    return Family("Mistral3", config, PIXTRAL_PROCESSOR, "[IMG]", patch_size=8)


FAMILIES = {
    "qwen3_vl": qwen("Qwen3VL", ATTENTION, deepstack_visual_indexes=[0, 1]),
    "qwen3_vl_moe": qwen("Qwen3VLMoe", {**ATTENTION, **EXPERTS}, deepstack_visual_indexes=[0, 1]),
    "qwen3_5": qwen("Qwen3_5", HYBRID),
    "qwen3_5_moe": qwen("Qwen3_5Moe", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "gemma3": Family(
        "Gemma3",
        {
            "text_config": GEMMA3,
            "vision_config": SIGLIP,
            "image_token_index": IDS["<image_soft_token>"],
            "boi_token_index": IDS["<start_of_image>"],
            "eoi_token_index": IDS["<end_of_image>"],
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        GEMMA3_PROCESSOR,
        "<start_of_image>",
        "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    ),
    "gemma4": gemma4(WITH_LAYER_INPUTS, use_clipped_linears=True),
    "gemma4_moe": gemma4(WITH_MUTUAL_ATTENTION, standardize=True),
    "mistral3": mistral({"model_type": "mistral", "rope_theta": 10_000.0}),
    "ministral3": mistral({"model_type": "ministral3", "rope_parameters": YARN}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer whose last tokens are the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"§{number}": number for number in range(len(letters), WORDS - 1)}
    # A frame of a picture may merge with the text beside it.
    vocabulary["ĊĊ"] = WORDS - 1
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    more = [f"<|extra_{number}|>" for number in range(VOCABULARY - WORDS - len(SPECIAL))]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, *more)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_model(name: str) -> Any:
    """Returns a family's model with weights that make its answers depend on all of a prompt."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.kind}Config")(**json.loads(json.dumps(family.config)))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.kind}ForConditionalGeneration")(config).eval().float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(3.0)
            elif "bias" in path:
                weight.normal_(0, 0.1)
            elif "norm" in path:
                weight.add_(torch.randn_like(weight) * 0.1)
                # Sharp attention, so that a few places of many matter; Gemma's is, and sharper has near ties.
                is_flat = name.startswith("qwen") and path.endswith(("q_norm.weight", "k_norm.weight"))
                weight.mul_(2.5 if is_flat else 1)
            if "mm_input_projection" in path:
                weight.normal_(0, 0.3)
            if "position_embedding_table" in path:
                weight.normal_(0, 1)
            if "lm_head" in path:
                weight[WORDS - 1 :] = 0
        for path, buffer in model.named_buffers():
            if path.endswith(("_min", "_max")):
                buffer.fill_(-1.5 if path.endswith("_min") else 1.5)
            elif path.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer.uniform_(0.8, 1.2)
    return model


def write_folder(name: str, model: Any, folder: Path) -> None:
    """Writes the model as the hub has it."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if name.startswith("qwen3_vl"):
        rope = config["text_config"].pop("rope_parameters")
        config["text_config"]["rope_theta"] = rope.pop("rope_theta")
        config["text_config"]["rope_scaling"] = {**rope, "rope_type": "default"}
        config["text_config"] |= {
            "num_experts": config["text_config"].get("num_local_experts"),
            "norm_topk_prob": True,
        }
    if name == "gemma3":
        config["text_config"].pop("rope_parameters", None)
        config["text_config"] |= {key: GEMMA3[key] for key in ("rope_theta", "rope_local_base_freq")}
        config |= {"vocab_size": VOCABULARY, "mm_tokens_per_image": 16}
        config["text_config"]["sliding_window_pattern"] = GEMMA3["sliding_window_pattern"]
    elif name.startswith("gemma4"):
        config |= {"vocab_size": VOCABULARY}
        config["text_config"] |= FAMILIES[name].config["text_config"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = load_file(folder / "model.safetensors")
    tensors = stacked(tensors, name) if name.endswith("_moe") else tensors
    if name.startswith("gemma4"):
        # As mlx-lm reads an output matrix; those on the hub have none.
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(FAMILIES[name].processor))
    (folder / "chat_template.jinja").write_text(FAMILIES[name].template)
    (folder / "generation_config.json").write_text("{}")


def stacked(tensors: dict, name: str) -> dict:
    """Experts in one tensor each, as on the hub, where those of Qwen3-VL are transposed."""
    found = {path: tensor for path, tensor in tensors.items() if ".experts.0" not in path}
    for layer in sorted({path.split(".experts.")[0] for path in tensors if ".experts.0." in path}):
        numbers = range(EXPERTS["num_experts"])
        gate, up, down = (
            torch.stack(
                [
                    found.pop(f"{layer}.experts.{number}.{part}_proj.weight", None)
                    if number
                    else tensors[f"{layer}.experts.0.{part}_proj.weight"]
                    for number in numbers
                ]
            )
            for part in ("gate", "up", "down")
        )
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{layer}.experts.down_proj"] = down
    turns = name.startswith("qwen3_vl")
    return {
        path: tensor.transpose(1, 2).contiguous() if turns and ".experts." in path else tensor
        for path, tensor in found.items()
    }


def make_images() -> dict[str, Image.Image]:
    """Returns images; `a` and `b` are of one size."""
    generator, found = np.random.default_rng(7), {}
    for name, size in {"a": (48, 32), "b": (48, 32), "c": (24, 40)}.items():
        colours = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        found[name] = Image.fromarray(colours).resize(size, Image.BICUBIC)
    return found


def _url_of(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _text(words: str) -> dict:
    return {"type": "text", "text": words}


def _image(name: str) -> dict:
    return {"type": "image", "name": name}


SYSTEM = {"role": "system", "content": "tell me more about the picture please and what is in it " * 6}


def _user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


FIRST = _user(_text("what is in this image "), _image("a"), _text(" please tell me"))
CONVERSATIONS = {
    "one image": [SYSTEM, FIRST],
    "its next turn": [SYSTEM, FIRST, {"role": "assistant", "content": "cats"}, _user(_image("b"), _text("and this"))],
    "another question": [SYSTEM, _user(_text("what is in this image "), _image("a"), _text(" more about it"))],
    "another image of one size": [
        SYSTEM,
        _user(_text("what is in this image "), _image("b"), _text(" please tell me")),
    ],
    "none": [SYSTEM, _user(_text("the quick brown fox"))],
    "two beside each other": [_user(_image("a"), _image("c"), _text("what is this"))],
}


def answer(name: str, model: Any, tokenizer: Any, processor: Any, messages: list, images: dict) -> tuple:
    """Returns the number of prompt tokens, and the greedy tokens."""
    family = FAMILIES[name]
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    shown = [images[part["name"]] for part in parts if part["type"] == "image"]
    made = dict(processor(images=shown, return_tensors="pt", **family.call)) if shown else {}
    places, image_token = places_of(name, made, len(shown)), model.config.image_token_id
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=family.template, tokenize=False, add_generation_prompt=True
    ).replace(family.shown, family.framed)
    ids = list[int]()
    for token in tokenizer(rendered, add_special_tokens=False)["input_ids"]:
        ids += next(places) if token == image_token else [token]
    told = list(ids)
    for _ in range(NUM_TOKENS):
        tokens = torch.tensor([told])
        kinds = {KINDS[name]: (tokens == image_token).int()} if name in KINDS and (shown or name == "gemma3") else {}
        with torch.no_grad():
            logits = model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **made, **kinds
            ).logits
        told.append(int(logits[0, -1].argmax()))
    return len(ids), told[len(ids) :]


KINDS = {name: "mm_token_type_ids" for name in FAMILIES if "stral3" not in name}
KINDS["gemma3"] = "token_type_ids"


def places_of(name: str, made: dict, num_images: int) -> Iterator[list[int]]:
    """The tokens of each picture; takes what the model does not."""
    if name == "gemma3":
        made.pop("num_crops", None)
        return iter([[IDS["<image_soft_token>"]] * 16] * num_images)
    if name.startswith("gemma4"):
        counts = made.pop("num_soft_tokens_per_image", [])
        return iter([[IDS["<|image|>"]] * int(count) for count in counts])
    if "stral3" in name:
        return iter([_rows(int(height) // 8, int(width) // 8) for height, width in made.get("image_sizes", [])])
    return iter([[PAD] * (int(grid[1] * grid[2]) // 4) for grid in made.get("image_grid_thw", [])])


def _rows(rows: int, columns: int) -> list[int]:
    """The tokens of a picture whose rows end with tokens of their own."""
    row = [IDS["[IMG]"]] * columns
    return [*[*row, IDS["[IMG_BREAK]"]] * (rows - 1), *row, IDS["[IMG_END]"]]


def with_urls(messages: list, images: dict) -> list:
    """Messages as clients send them."""
    return [
        {**message, "content": [_sent(part, images) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _sent(part: dict, images: dict) -> dict:
    return (
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": _url_of(images[part["name"]])}}
    )


def main() -> None:
    """Writes all families."""
    torch.set_num_threads(1)
    out, images = Path(sys.argv[1]), make_images()
    for name in sys.argv[2:] or FAMILIES:
        model, folder = make_model(name), out / name
        write_folder(name, model, folder)
        processor, found = AutoImageProcessor.from_pretrained(folder), {}
        for title, messages in CONVERSATIONS.items():
            num_prompt, tokens = answer(name, model, make_tokenizer(), processor, messages, images)
            found[title] = {"messages": with_urls(messages, images), "num_prompt": num_prompt, "tokens": tokens}
        answers = [one["tokens"] for one in found.values()]
        if len({*map(tuple, answers)}) < len(answers) - 1 or min(len({*tokens}) for tokens in answers) < 4:
            raise SystemExit(f"{name}: answers that hardly depend on the prompt prove nothing: {answers}")
        (out / f"{name}.json").write_text(json.dumps(found))
        print(name, {title: one["num_prompt"] for title, one in found.items()}, flush=True)


main()
