"""What other requests feel while long prompts are planned: parsed, checked, rendered and tokenized.

    python -m scripts.bench.planning [--megabytes 4] [--seconds 8]

One stream decodes, `/health` is asked twenty times a second, and another client sends long bodies. Measured are the
gaps between two pieces of the stream, which should not grow by more than 50 ms at the 99th percentile, and the time
to the answer of `/health`, at most 100 ms. The bodies are a little longer than the model's context, so they are
planned and refused; nothing of them is evaluated. The long bodies come from a process of their own, so that writing
them does not delay the clock. Servers and clients share the machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from models.names import resolve
from scripts.bench.serving_client import Stream
from scripts.bench.serving_servers import OURS, Server, running

HEALTH_SECONDS = 0.05
CONTEXT_TOKENS_PER_MEGABYTE = 500_000
"""The demo's tokenizer makes some 600 000 tokens of a megabyte of code or HTML."""
MESSAGES_PER_BODY = 100_000
LONG_CONVERSATION = 9_999
_ends = json.loads((resolve("demo") / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
ENDLESS: dict[str, Any] = {
    "max_tokens": 100_000,
    "logit_bias": dict.fromkeys(map(str, _ends), -100),
}
"""For a stream that goes on while anything is measured: it never says that it has ended."""
CODE = 'def area(shape: "Shape") -> float:\n    return sum(side.length for side in shape.sides) / 2\n\n\n'
HTML = "<table><tr><td>one</td><td><b>two</b></td></tr></table>\n"

Body = Callable[[int], bytes]


@dataclass
class Felt:
    """Seconds that others waited, while bodies were planned."""

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    """Time to the first token of a short new request."""
    planned: list[float] = field(default_factory=list)
    """How long each long body took to its answer."""


def _chat(messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": 1}


def _text(sample: str) -> Body:
    def body(num_bytes: int) -> bytes:
        text = sample * (num_bytes // len(sample))
        return json.dumps(_chat([{"role": "user", "content": f"{time.perf_counter()}\n{text}"}])).encode()

    return body


def _many(_: int) -> bytes:
    return json.dumps(_chat([{"role": "user", "content": "x"}] * MESSAGES_PER_BODY)).encode()


def _conversation(num_bytes: int) -> bytes:
    text = CODE * (num_bytes // LONG_CONVERSATION // len(CODE))
    said = ({"role": ("user", "assistant")[i % 2], "content": f"{i}\n{text}"} for i in range(LONG_CONVERSATION))
    return json.dumps(_chat(list(said))).encode()


SCENARIOS: dict[str, tuple[Body | None, int]] = {
    "nothing": (None, 0),
    "one body of code": (_text(CODE), 1),
    "one body of HTML": (_text(HTML), 1),
    f"one body of {LONG_CONVERSATION} messages": (_conversation, 1),
    f"eight bodies of {MESSAGES_PER_BODY} messages": (_many, 8),
}
"""By name: what is sent, and how many of them at once."""


async def measure(server: Server, name: str, num_bytes: int, seconds: float) -> Felt:
    """Returns what others felt for some seconds, and until the last body was answered."""
    felt = Felt()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300) as client:
        (await client.get("/health")).raise_for_status()
        with _sending(server.port, name, num_bytes, seconds) as sender:
            stream = Stream(server, [{"role": "user", "content": "Tell me a long story."}], **ENDLESS)
            await stream.wait_for(15)
            begun = time.perf_counter()
            sender.send("go")
            others = [asyncio.create_task(_ask_health(client, felt)), asyncio.create_task(_ask_short(client, felt))]
            felt.planned += await asyncio.to_thread(sender.recv)
            for task in others:
                task.cancel()
        answer = await stream.stop()
    times = [at for at in answer.times if at >= begun]
    felt.gaps += [after - before for before, after in pairwise(times)]
    return felt


async def _ask_health(client: httpx.AsyncClient, felt: Felt) -> None:
    while True:
        sent = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        felt.health.append(time.perf_counter() - sent)
        await asyncio.sleep(HEALTH_SECONDS)


async def _ask_short(client: httpx.AsyncClient, felt: Felt) -> None:
    while True:
        sent = time.perf_counter()
        body = _chat([{"role": "user", "content": f"{sent}"}])
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        felt.short.append(time.perf_counter() - sent)
        await asyncio.sleep(10 * HEALTH_SECONDS)


@contextmanager
def _sending(port: int, name: str, num_bytes: int, seconds: float) -> Iterator[Connection]:
    """Yields a pipe to a process whose bodies are made: told to go, it sends them, and then says their times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_all, args=(theirs, port, name, num_bytes, seconds), daemon=True)
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


def _send_all(pipe: Connection, port: int, name: str, num_bytes: int, seconds: float) -> None:
    asyncio.run(_send_some(pipe, port, name, num_bytes, seconds))


async def _send_some(pipe: Connection, port: int, name: str, num_bytes: int, seconds: float) -> None:
    body, at_once = SCENARIOS[name]
    raws = [body(num_bytes) for _ in range(at_once)] if body else []
    planned: list[float] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        pipe.send("ready")
        pipe.recv()
        until = time.perf_counter() + seconds
        await asyncio.gather(*(_send(client, raw, until, planned) for raw in raws))
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
    pipe.send(planned)


async def _send(client: httpx.AsyncClient, raw: bytes, until: float, planned: list[float]) -> None:
    headers = {"content-type": "application/json"}
    while time.perf_counter() < until:
        sent = time.perf_counter()
        answer = await client.post("/v1/chat/completions", content=raw, headers=headers)
        planned.append(time.perf_counter() - sent)
        assert answer.status_code == 400, answer.text[:300]


def _model(folder: Path, megabytes: float) -> Path:
    """Returns the demo model with a context that long texts exceed only near their end."""
    copy = folder / "demo"
    shutil.copytree(resolve("demo"), copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = int(CONTEXT_TOKENS_PER_MEGABYTE * megabytes)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def _row(name: str, felt: Felt) -> str:
    gaps, health, short = felt.gaps, felt.health, felt.short
    times = [(gaps, 0.5), (gaps, 0.99), (health, 0.99), (health, 1), (short, 1), (felt.planned, 0.5)]
    cells = [name, *(_share(seconds, share) for seconds, share in times), str(len(felt.planned)), str(len(gaps))]
    return f"| {' | '.join(cells)} |"


def _share(seconds: Sequence[float], share: float) -> str:
    if not seconds:
        return ""
    return f"{1000 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]:.0f}"


def main() -> None:
    """Prints one line per scenario, in milliseconds."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=float, default=4.0, help="length of a long text")
    options.add_argument("--seconds", type=float, default=8.0, help="time per scenario")
    chosen = options.parse_args()
    print("| beside | gap p50 | gap p99 | health p99 | health max | short max | answered p50 | bodies | gaps |")
    print("|---|---|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(running(OURS, _model(folder, chosen.megabytes), folder))
        for name in SCENARIOS:
            num_bytes = int(chosen.megabytes * 1_000_000)
            print(_row(name, asyncio.run(measure(server, name, num_bytes, chosen.seconds))), flush=True)


if __name__ == "__main__":
    main()
