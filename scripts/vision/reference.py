"""Writes tiny models that see, with seeded weights, and what transformers has them answer: reference.py FOLDER.

Runs with PyTorch, in an environment of its own (`scripts.vision`). FOLDER/NAME becomes a model's folder as on the
hub, FOLDER/NAME.json its conversations, each with messages, the number of prompt tokens and twelve greedy tokens,
every one of a whole evaluation in float32 without a cache.
"""

import base64
import io
import json
import sys
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
)
PAD = WORDS + SPECIAL.index("<|image_pad|>")
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PROCESSOR = {
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
FAMILIES = {
    "qwen3_vl": ("Qwen3VL", ATTENTION, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**ATTENTION, **EXPERTS}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("Qwen3_5", HYBRID, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32}, {}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer whose last tokens are the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"§{number}": number for number in range(len(letters), WORDS)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    more = [f"<|extra_{number}|>" for number in range(VOCABULARY - WORDS - len(SPECIAL))]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, *more)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_model(name: str) -> Any:
    """Returns a family's model with weights that make its answers depend on all of a prompt."""
    kind, text, vision = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=PAD,
        video_token_id=PAD + 1,
        vision_start_token_id=PAD + 2,
        vision_end_token_id=PAD + 3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(3.0)
            elif "bias" in path:
                weight.normal_(0, 0.1)
            if "lm_head" in path:
                weight[WORDS - 1 :] = 0
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
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if name.endswith("_moe"):
        tensors = load_file(folder / "model.safetensors")
        save_file(stacked(tensors, name), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
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


def answer(model: Any, tokenizer: Any, processor: Any, messages: list, images: dict) -> tuple[int, list[int]]:
    """Returns the number of prompt tokens, and the greedy tokens."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    shown = [images[part["name"]] for part in parts if part["type"] == "image"]
    made = processor(images=shown, return_tensors="pt") if shown else {}
    counts = iter([int(grid[1] * grid[2]) // 4 for grid in made.get("image_grid_thw", [])])
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    ids = list[int]()
    for token in tokenizer(rendered, add_special_tokens=False)["input_ids"]:
        ids += [token] * next(counts) if token == PAD else [token]
    told = list(ids)
    for _ in range(NUM_TOKENS):
        tokens = torch.tensor([told])
        kinds = {"mm_token_type_ids": (tokens == PAD).int()} if shown else {}
        with torch.no_grad():
            logits = model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **made, **kinds
            ).logits
        told.append(int(logits[0, -1].argmax()))
    return len(ids), told[len(ids) :]


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
            num_prompt, tokens = answer(model, make_tokenizer(), processor, messages, images)
            found[title] = {"messages": with_urls(messages, images), "num_prompt": num_prompt, "tokens": tokens}
        (out / f"{name}.json").write_text(json.dumps(found))
        print(name, {title: one["num_prompt"] for title, one in found.items()}, flush=True)


main()
