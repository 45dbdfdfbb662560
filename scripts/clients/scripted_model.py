"""A model that coding agents can be tried with: real layers and state, a tokenizer of 16 000 tokens, no knowledge.

Agents send prompts of 20 000 to 60 000 tokens. The built-in model's tokenizer, made for its small world, would make
three times as many of them, so this one is trained on the source of Python's standard library. The same library and
seed make the same model.
"""

import copy
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.output.call_formats import HERMES, JSON, CallFormat, Tags
from tests.support import tiny_models, tiny_vision

VOCAB_SIZE = 16_384
CONTEXT_TOKENS = 262_144
MAX_SOURCE_FILES = 300
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_RESULT = "<tool_response>"
"""Begins each result of a tool in a prompt."""

TEMPLATE = r"""{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\n' + text(message.content) + '\n</tool_response>' -}}
{%- else -%}
{{- text(message.content) -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set name, arguments = tool_call.function.name, tool_call.function.arguments -%}
{%- if not loop.first or message.content -%}{{- '\n' -}}{%- endif -%}
CALL
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def make_model(folder: Path, call_format: CallFormat = HERMES) -> Path:
    """Writes the model, whose template knows this format of calls, into `folder`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("CALL", call_template(call_format)))
    if (folder / "model.safetensors").is_file():
        return folder
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "config.json", CONFIG)
    eos = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


def make_like(model: Path, config: dict[str, Any], folder: Path) -> Path:
    """Writes a tiny model of another architecture with the tokenizer and template of `model`; returns the folder."""
    config = copy.deepcopy(config)
    inner = config.get("text_config", config)
    inner |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_TOKENS}
    shutil.copytree(model, folder, dirs_exist_ok=True)
    parameters = tree_flatten(tiny_models.make(config).parameters())  # type: ignore[no-untyped-call]
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters), {"format": "mlx"})
    _write_json(folder / "config.json", config)
    return folder


def make_seeing(model: Path, folder: Path) -> Path:
    """Writes a tiny model that sees, with tokenizer and template of `model`, and its name; returns the folder."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tiny_vision.PAD, special=True, normalized=False)])
    text = {**tiny_vision.config_of("qwen3_vl")["text_config"], "max_position_embeddings": CONTEXT_TOKENS}
    text["vocab_size"] = tokenizer.get_vocab_size()
    pad = tokenizer.token_to_id(tiny_vision.PAD)
    tiny_vision.write("qwen3_vl", folder / model.name, text_config=text, image_token_id=pad)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(model / name, folder / model.name / name)
    tokenizer.save(str(folder / model.name / "tokenizer.json"))
    shown = f"{{{{- '{tiny_vision.PAD}' if part.type == 'image' else part.text -}}}}"
    template = (model / "chat_template.jinja").read_text().replace("{{- part.text -}}", shown)
    (folder / model.name / "chat_template.jinja").write_text(template)
    return folder / model.name


def call_template(call_format: CallFormat) -> str:
    """Jinja that writes the call of `name` with `arguments`: for formats with tags or JSON."""
    body = call_format.body
    if isinstance(body, Tags):
        value = "value if value is string else value | tojson"
        argument = f"{_jinja(body.key, 'key')} + ({value}) + {_jinja(body.end)}"
        arguments = f"{{%- for key, value in arguments.items() -%}}{{{{- {argument} -}}}}{{%- endfor -%}}"
    else:
        assert body == JSON
        arguments = "{{- arguments if arguments is string else arguments | tojson -}}"
    head = _jinja(f"{call_format.open}{call_format.head.replace('#', '0')}", "name")
    return f"{{{{- {head} -}}}}{arguments}{{{{- {_jinja(call_format.end + call_format.close)} -}}}}"


def _jinja(text: str, name: str = "") -> str:
    return f"{text!r}.replace('{{}}', {name})" if name else repr(text)


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }


def _train_tokenizer() -> Tokenizer:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:MAX_SOURCE_FILES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8", errors="ignore") for file in files), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
