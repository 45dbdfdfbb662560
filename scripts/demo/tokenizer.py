"""The demo model's tokenizer and chat template, and the same template in Python for training.

A byte-level BPE whose words are the same tokens with and without a space before them, so that a value can be
copied from a sentence into JSON: merges are learned on words without their space, and only the most common words
get a token that includes it. Digits are single tokens. Invariant: `render` and the Jinja template agree.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Json = dict[str, Any]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB_SIZE = 1536
NUM_MERGES_IN_WORDS = 860
SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"

TEMPLATE = r"""{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none and content is defined -%}
{%- for part in content -%}{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = namespace(at=0) -%}
{%- if tools or (messages and messages[0].role in ['system', 'developer']) -%}
{{- '<|im_start|>system\n' -}}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set first.at = 1 -%}
{{- text(messages[0].content) -}}
{%- if tools -%}{{- '\n' -}}{%- endif -%}
{%- endif -%}
{%- if tools -%}
{{- '<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages[first.at:] -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>tool\n<tool_response>\n' + text(message.content) + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' and message.reasoning_content -%}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- text(message.content) -}}
{%- if message.tool_calls -%}
{%- for tool_call in message.tool_calls -%}
{%- if tool_call.function -%}{%- set tool_call = tool_call.function -%}{%- endif -%}
{%- if not loop.first or message.content -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": ' + tool_call.name | tojson + ', "arguments": ' -}}
{%- if tool_call.arguments is string -%}{{- tool_call.arguments -}}
{%- else -%}{{- tool_call.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\n' -}}{%- endif -%}
{%- endif -%}
"""


def assistant_text(message: Json) -> str:
    """What the model writes for an assistant message, from its thinking (if any) to the last tool call."""
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    return _thought_text(message) + "\n".join([message["content"]] * bool(message["content"]) + calls)


def _call_text(function: Json) -> str:
    name, arguments = json.dumps(function["name"]), json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _begun(message: Json) -> str:
    """What stands after the role of an assistant message before the model writes."""
    if "reasoning_content" not in message:
        return ""
    return _thought_text(message) if message["is_thought_cut"] else "<think>\n"


def _thought_text(message: Json) -> str:
    return f"<think>\n{message['reasoning_content']}\n</think>\n\n" if "reasoning_content" in message else ""


def render(messages: list[Json], tools: list[Json]) -> list[tuple[str, bool]]:
    """The dialogue as pieces of text; True marks what the model is to write, its end mark included."""
    pieces: list[tuple[str, bool]] = []
    has_system = bool(messages) and messages[0]["role"] == "system"
    if has_system or tools:
        system = messages[0]["content"] if has_system else ""
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        block = ("\n" if has_system else "") + f"<tools>\n{lines}</tools>" if tools else ""
        pieces.append((f"<|im_start|>system\n{system}{block}<|im_end|>\n", False))
    for message in messages[has_system:]:
        role, content = message["role"], message["content"]
        if role == "assistant":
            given, text = _begun(message), assistant_text(message)
            pieces.append((f"<|im_start|>assistant\n{given}", False))
            pieces += [(text[len(given) :] + "<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            pieces.append((f"<|im_start|>tool\n<tool_response>\n{content}\n</tool_response><|im_end|>\n", False))
        else:
            pieces.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
    return pieces


def _bare(merges: list[tuple[str, str]] | None, vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_tokenizer(texts: list[str]) -> Tokenizer:
    """A tokenizer of exactly `VOCAB_SIZE` tokens for `texts`. Deterministic."""
    marks = re.compile("|".join(re.escape(mark) for mark in SPECIAL + MARKS))
    words: Counter[str] = Counter()
    spaced: Counter[str] = Counter()
    for text in texts:
        for word in re.findall(r" ?[^\W\d_]+| ?[^\s\w]+|_", marks.sub("\n", text)):
            words[word.strip()] += 1
            spaced[word] += word.startswith(" ")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = _bare(None, {})
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES_IN_WORDS, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(
        (word for word, count in sorted(words.items()) for _ in range(min(count, 20000))), trainer
    )
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = [token for token, _ in sorted(learned["vocab"].items(), key=lambda item: item[1])]
    for word, _ in sorted(spaced.items(), key=lambda item: (-item[1], item[0])):
        if len(vocab) == VOCAB_SIZE - len(SPECIAL + MARKS):
            break
        if word.startswith(" ") and word[1:] in learned["vocab"]:
            merges.append(("Ġ", word[1:]))
            vocab.append("Ġ" + word[1:])
    tokenizer = _bare(merges, {token: index for index, token in enumerate(vocab)})
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: give it more text"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
