"""Serving compared with llama.cpp's server: both over HTTP, on the same float32 weights, one server after the other.

Usage: python -m scripts.bench.serving_llama_cpp [--rounds N] [--llama-cpp OPTIONS] [--json FILE]

Needs `llama-server` on the PATH, and the package gguf, with which the weights are written for it. Both servers are
given four slots, else they run as they are; beside other programs llama.cpp is faster with `--threads 1`, since its
threads wait for one another. A greedy answer is compared first: the same
weights and the same tokens must say the same letters.
"""

import argparse
import asyncio
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from scripts.bench import serving_models
from scripts.bench.common import Report, machine, median, write_json
from scripts.bench.serving_client import Stream, ask, warm_up
from scripts.bench.serving_prompts import TextMaker, with_answer
from scripts.bench.serving_servers import LLAMA_CPP, OURS, Server, running
from tests.support import tiny_models

MODEL = "small"
NUM_STREAMS = 4
ANSWER_TOKENS = 100
COLD_TOKENS = 1500
PROCESSOR = "processor time, s"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def write_gguf(folder: Path) -> Path:
    """Writes a llama model folder as a GGUF file beside its weights; returns the file."""
    gguf: Any = importlib.import_module("gguf")  # not among the packages that the project locks
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config["vocab_size"])
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    for name, weight in weights.items():
        for long, short in _NAMES.items():
            name = name.replace(long, short)
        rows = np.array(weight)
        num_heads = next((number for part, number in heads.items() if part in name), None)
        writer.add_tensor(name, rows if num_heads is None else _interleaved(rows, num_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def _interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Returns the rows of a projection in the order in which llama.cpp rotates them: both halves in turns."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    file = json.loads((folder / "tokenizer.json").read_text())
    tokens = {number: token for token, number in file["model"]["vocab"].items()}
    added = {token["id"]: token for token in file["added_tokens"]}
    tokens |= {number: token["content"] for number, token in added.items()}
    kinds = {number: 3 if token["special"] else 4 for number, token in added.items()}
    everything = range(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in everything])
    writer.add_token_types([kinds.get(number, 1 if number in tokens else 5) for number in everything])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    )
    writer.add_eos_token_id(next(number for number, text in tokens.items() if text == "<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)


async def _measure(server: Server, seed: int) -> dict[str, float]:
    """Returns the figures of one server that runs, for texts that no earlier seed had."""
    maker = TextMaker(seed)

    async def stream(number: int) -> float:
        prompts = [[maker.message(60)] for _ in range(number)]
        answers = await asyncio.gather(*(ask(server, prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts))
        seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
        return sum(answer.completion_tokens for answer in answers) / seconds

    figures = {"one stream, tokens/s": await stream(1)}
    before = _usage(server)[PROCESSOR]
    figures["four streams, tokens/s"] = await stream(NUM_STREAMS)
    spent = _usage(server)[PROCESSOR] - before
    figures["four streams, processor time per token, ms"] = 1000 * spent / (NUM_STREAMS * ANSWER_TOKENS)
    history = [maker.message(COLD_TOKENS, "system"), maker.message(40)]
    cold = await ask(server, history, max_tokens=24)
    turn = [*with_answer(history, cold.text), maker.message(40)]
    warm = await ask(server, turn, max_tokens=24)
    other = await ask(server, [history[0], maker.message(40)], max_tokens=24)
    again = await ask(server, [*with_answer(turn, warm.text), maker.message(20)], max_tokens=24)
    running_stream = Stream(server, [maker.message(60)], max_tokens=400)
    await running_stream.wait_for(20)
    newcomer = await ask(server, [maker.message(60)], max_tokens=8)
    await running_stream.stop()
    alone = await ask(server, [maker.message(60)], max_tokens=8)
    return figures | {
        "cold prompt of 1 500 tokens, first token, ms": 1000 * cold.first_seconds,
        "its next turn, first token, ms": 1000 * warm.first_seconds,
        "its next turn, tokens evaluated": warm.prompt_tokens - warm.cached_tokens,
        "second conversation on its system prompt, tokens evaluated": other.prompt_tokens - other.cached_tokens,
        "back to the first, tokens evaluated": again.prompt_tokens - again.cached_tokens,
        "newcomer beside a stream, added, ms": 1000 * (newcomer.first_seconds - alone.first_seconds),
    }


def _usage(server: Server) -> dict[str, float]:
    """Returns the memory of a server's process and the processor time that it has used."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
    return {"memory, MB": resident / 1024, PROCESSOR: ticks / os.sysconf("SC_CLK_TCK")}


async def _run(folder: Path, rounds: int, extra: list[str]) -> Report:
    model = serving_models.write(MODEL, folder / MODEL)
    sides = {
        OURS: (model, ["--slots", str(NUM_STREAMS)]),
        LLAMA_CPP: (
            write_gguf(model),
            ["-np", str(NUM_STREAMS), "-c", str(serving_models.CONTEXT), "--kv-unified", *extra],
        ),
    }
    series: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    texts = {}
    for number in range(rounds):
        for name in [*sides] if number % 2 else [*sides][::-1]:
            begun = time.monotonic()
            with running(name, sides[name][0], folder, sides[name][1]) as server:
                figures = {"start, s": time.monotonic() - begun}
                figures |= {f"at the start: {what}": value for what, value in _usage(server).items()}
                texts[name] = (await ask(server, [{"role": "user", "content": "Say it."}], max_tokens=24)).text
                await warm_up([server])
                figures |= await _measure(server, 100 + number)
                figures |= {f"at the end: {what}": value for what, value in _usage(server).items()}
            for what, value in figures.items():
                series[name].setdefault(what, []).append(value)
    report = Report(
        f"{MODEL}, float32, medians of {rounds}; the same greedy answer: {texts[OURS] == texts[LLAMA_CPP]}",
        ("what", *sides),
    )
    for what in series[OURS]:
        report.rows.append((what, *(f"{median(series[name][what]):.3g}" for name in sides)))
    report.figures.update(series)
    return report


def main() -> None:
    """Measures both servers and prints the table."""
    parser = argparse.ArgumentParser(description="Compare serving with llama.cpp's server.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", default="", metavar="OPTIONS", help="more options for llama-server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if shutil.which("llama-server") is None:
        sys.exit("llama-server is not on the PATH: install llama.cpp first")
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-llama-cpp-") as folder:
        report = asyncio.run(_run(Path(folder), arguments.rounds, arguments.llama_cpp.split()))
    print(f"\n{report.text()}")
    if arguments.json is not None:
        write_json(
            arguments.json, f"python -m scripts.bench.serving_llama_cpp {' '.join(sys.argv[1:])}".strip(), [report]
        )


if __name__ == "__main__":
    main()
