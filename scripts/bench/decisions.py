"""Benchmarks questions about one state beside chats that ask them one by one.

Usage: python -m scripts.bench.decisions [--json FILE] [--model tiny] [--rounds 3] [--counts 16]

A state of 8 000 tokens is asked 1, 4, 16 and 64 questions: in one request to `/v1/systemone`, cold and again with
other questions; as chats with `max_tokens: 1` and `cache_prompt: false`, of which two are measured; and as chats with
the cache, one after another. The sides take turns on one server. Memory is what the cache holds after 16 questions,
against their tokens. Last come 64 questions of 255 options each, on a short state.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from scripts.bench import serving_models
from scripts.bench.common import Report, Target, median, write_json
from server.app.config import ServerConfig
from server.app.service import Service, open_service
from tests.support.apps import create_app
from tests.support.live_server import running

STATE_TOKENS = 8000
COUNTS = (1, 4, 16, 64)
LEAST_FASTER = Target(10.0, is_ceiling=False)
MOST_MEMORY = Target(1.15)


@contextmanager
def served(name: str) -> Iterator[tuple[httpx.Client, Service]]:
    """A client of a model of random weights, and what serves it."""
    with tempfile.TemporaryDirectory() as folder:
        path = serving_models.write(name, Path(folder) / name)
        config = ServerConfig(models=(str(path),), cache_memory_bytes=2 << 30, speculate="off")
        service = open_service(config)
        service.engine.start()
        try:
            with (
                running(create_app(service.engine, service.model, config)) as base,
                httpx.Client(base_url=base, timeout=1200) as client,
            ):
                yield client, service
        finally:
            service.engine.stop()


def state_of(seed: int) -> str:
    """A text of `STATE_TOKENS` tokens, one for each byte of most."""
    lines = (f"{seed}-{line}: order {line * 7919 % 100_003} arrived, refund {line % 13}.\n" for line in range(10**6))
    text = ""
    while len(text) < STATE_TOKENS:
        text += next(lines)
    return text[:STATE_TOKENS]


def questions_of(count: int, seed: int) -> dict[str, Any]:
    """Questions of a few words, with yes and no for answers."""
    return {
        f"q{number}": {"type": "noul", "instructions": f"Is order {number + seed} refunded?"}
        for number in range(count)
    }


def timed(client: httpx.Client, path: str, **body: Any) -> tuple[float, Any]:
    """Seconds of a request, and its answer."""
    begun = time.perf_counter()
    answer = client.post(path, json=body)
    answer.raise_for_status()
    return time.perf_counter() - begun, answer.json()


def chats(client: httpx.Client, state: str, questions: dict[str, Any], *, is_cached: bool) -> float:
    """Seconds of a chat for each question, one after another."""
    seconds = 0.0
    for one in questions.values():
        text = f"{state}\n\nQuestion: {one['instructions']}\nAnswer with one word, yes or no."
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, "max_tokens": 1, "temperature": 0, "cache_prompt": is_cached}
        seconds += timed(client, "/v1/chat/completions", **fields)[0]
    return seconds


def measure(client: httpx.Client, report: Report, rounds: int, counts: Sequence[int]) -> None:
    """Adds a row for each number of questions."""
    for count in counts:
        cold, warm, cached, uncached = list[float](), list[float](), list[float](), list[float]()
        for turn in range(rounds):
            seed = 1000 * count + turn
            questions, state = questions_of(count, seed), state_of(seed)
            cold.append(timed(client, "/v1/systemone", state=state, questions=questions)[0])
            warm.append(timed(client, "/v1/systemone", state=state, questions=questions_of(count, seed + 100))[0])
            cached.append(chats(client, state_of(seed + 500), questions, is_cached=True))
            some = questions_of(min(count, 2), seed)
            uncached.append(chats(client, state, some, is_cached=False) * count / len(some))
        ours = median(cold)
        figures = {"cold": ours, "warm": median(warm), "cached": median(cached), "uncached": median(uncached)}
        report.figures[str(count)] = figures
        faster = figures["uncached"] / ours, figures["cached"] / ours
        seconds = (f"{figures[name]:.2f}" for name in ("cold", "warm", "uncached", "cached"))
        report.rows.append((str(count), *seconds, f"{faster[0]:.1f}", f"{faster[1]:.2f}"))
        if count == 16:
            report.add_verdict("faster than chats without the cache, 16 questions", faster[0], LEAST_FASTER)


def measure_memory(client: httpx.Client, service: Service, report: Report) -> None:
    """What the state of 16 questions takes, against its tokens."""
    client.post("/v1/cache/clear").raise_for_status()
    told = timed(client, "/v1/systemone", state=state_of(9), questions=questions_of(16, 9))[1]
    cache = service.engine.stats().cache
    unique = told["usage"]["input_tokens"] * cache.bytes_per_token
    share = (cache.stored_bytes + cache.live_bytes) / unique
    report.add_verdict("memory against unique tokens, 16 questions", share, MOST_MEMORY)


def measure_many(client: httpx.Client, report: Report) -> None:
    """64 questions of 255 options each."""
    labels: dict[str, None] = dict.fromkeys(f"{number:x}" for number in range(255))
    question = {"type": "choice", "criteria": labels}
    many = {f"q{number}": {**question, "instructions": f"Which code has order {number}?"} for number in range(64)}
    seconds, told = timed(client, "/v1/systemone", state="Short.", questions=many)
    assert all(len(one["probabilities"]) == 255 for one in told["answers"].values())
    report.figures["64 x 255"] = {"seconds": seconds, "tokens": told["usage"]["input_tokens"]}
    report.rows.append(("64 of 255 options", f"{seconds:.2f}", "", "", "", "", ""))


def main() -> int:
    """Prints the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="tiny", choices=serving_models.BENCH_CONFIGS)
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS, help="how many questions are asked")
    args = parser.parse_args()
    columns = ("questions", "one request, s", "again", "chats, no cache", "chats, cached", "faster", "than cached")
    report = Report(f"Questions about {STATE_TOKENS} tokens ({args.model})", columns)
    with served(args.model) as (client, service):
        measure(client, report, args.rounds, args.counts)
        measure_memory(client, service, report)
        measure_many(client, report)
    print(report.text())
    if args.json is not None:
        write_json(args.json, "python -m scripts.bench.decisions", [report])
    return 0 if all(target.is_met(measured) for _, measured, target in report.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
