"""Compares tokens with transformers': tiny models with seeded weights, over HTTP.

    python -m scripts.vision               all families
    python -m scripts.vision qwen3_5       one

Each family answers six conversations cold, one after another, side by side, on a beginning held once, drafted, and
restored from disk after a restart. Then faults are put in on purpose, of which each must change an answer. PyTorch is
installed below --folder, from the registry that pip is set to. The exit status is 1 where anything differs.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.vision.faulty import FAULTS

QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
MISTRAL = ("mistral3", "ministral3")
FAMILIES = (*QWEN, "gemma3", "gemma4", "gemma4_moe", *MISTRAL)
PACKAGES = ("torch==2.13.0", "transformers==5.23.0", "pillow", "safetensors", "numpy")
FAULTS_OF_SOME = {
    "no shift": QWEN,
    "flat positions": QWEN,
    "no deepstack": QWEN[:2],
    "causal blocks": ("gemma3", "gemma4_moe"),
    "layer inputs of another token": ("gemma4",),
    "rows without ends": MISTRAL,
}
NUM_COLD, NUM_IMAGES = 7, 3
"""Images of all conversations, each for itself; different ones."""
START_SECONDS, ANSWER_SECONDS = 300, 300
ROOT = Path(__file__).parents[2]

Conversations = dict[str, dict[str, Any]]


def main() -> int:
    """Compares what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; by default all")
    parser.add_argument("--folder", type=Path, default=Path(".cache/vision"), help="for PyTorch and the models")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    wanted = args.families or FAMILIES
    _write_references(folder, wanted)
    results = [_compare(folder, name) for name in wanted]
    return 0 if all(results) else 1


def _write_references(folder: Path, families: Sequence[str]) -> None:
    missing = [name for name in families if not (folder / f"{name}.json").is_file()]
    python = folder / "torch" / "bin" / "python"
    if missing and not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "torch")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    if missing:
        subprocess.run(
            [str(python), str(Path(__file__).with_name("reference.py")), str(folder), *missing], check=True
        )


def _compare(folder: Path, name: str) -> bool:
    conversations: Conversations = json.loads((folder / f"{name}.json").read_text())
    results = dict[str, bool]()
    with tempfile.TemporaryDirectory() as cache:
        options = ("--cache-dir", cache, "--cache-disk", "1G", "--slots", "6")
        with _server("", folder / name, *options) as url:
            results |= _compare_in_memory(url, conversations)
            _ask_all(url, conversations, "disk")
            time.sleep(40)  # until all is written
        with _server("", folder / name, *options) as url:
            results["from disk"] = _ask_all(url, conversations, "disk")
            results["from disk, no image seen twice"] = _num_encoded(url) <= NUM_IMAGES
    for fault in FAULTS:
        if name in FAULTS_OF_SOME.get(fault, FAMILIES):
            with _server(fault, folder / name, "--slots", "6") as url:
                results[f"noticed: {fault}"] = not _ask_all(url, conversations, "shared")
    for title, is_right in results.items():
        print(f"{name:14} {'yes' if is_right else 'NO '}  {title}", flush=True)
    return all(results.values())


def _compare_in_memory(url: str, conversations: Conversations) -> dict[str, bool]:
    titles = list(conversations)
    results = {"cold": all(_is_equal(url, one, f"cold {title}") for title, one in conversations.items())}
    results["one after another"] = _ask_all(url, conversations, "shared") and _ask_all(url, conversations, "shared")
    results["an image is seen once"] = _num_encoded(url) - NUM_COLD == NUM_IMAGES
    with ThreadPoolExecutor(len(titles)) as pool:
        apart = [(url, one, f"side {title}") for title, one in conversations.items()]
        results["side by side"] = all(pool.map(lambda given: _is_equal(*given), apart))
        results["on a head"] = all(pool.map(lambda one: _is_equal(url, one, "head"), conversations.values()))
    results["drafted"] = all(_is_equal(url, conversations[titles[0]], "drafted", 40) for _ in range(4))
    return results


def _ask_all(url: str, conversations: Conversations, salt: str) -> bool:
    results = [_is_equal(url, one, salt) for one in conversations.values()]
    return all(results)


def _is_equal(url: str, conversation: dict[str, Any], salt: str, max_tokens: int = 12) -> bool:
    asked = {"messages": conversation["messages"], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = _post(url, {**asked, "max_tokens": max_tokens, "cache_salt": salt})
    tokens, num_prompt = answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"]
    return bool(tokens[:12] == conversation["tokens"] and num_prompt == conversation["num_prompt"])


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def _num_encoded(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/stats", timeout=ANSWER_SECONDS) as answer:
        return int(json.load(answer)["models"][0]["encoded_images"])


@contextmanager
def _server(fault: str, model: Path, *options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = ["scripts.vision.faulty", fault] if fault else ["mlx_serve"]
    command = [sys.executable, "-m", *program, "serve", str(model), "--port", str(port), *options]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT) as process:
        try:
            _wait(process, url := f"http://127.0.0.1:{port}")
            yield url
        finally:
            process.terminate()


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit("the server ended before it was ready") from None
            time.sleep(1)
    raise SystemExit("the server was not ready in time")


if __name__ == "__main__":
    sys.exit(main())
