"""What serving costs: tokens per second through HTTP and the `openai` client, as a share of the bare engine's.

One, four and eight streams, free and bound to a JSON schema. Each round times the bare engine and both ways in turn,
so that a busy machine slows all alike: from the first byte sent to the last token, prefill included. Where other
programs leave too few cores for engine, event loop and client together, the processor time of the server says more.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from scripts.bench.common import Report, Target, median
from scripts.bench.serving_client import Messages, warm_up
from scripts.bench.serving_prompts import TextMaker, tokens_of
from scripts.bench.serving_raw import RawEngine, raw_engine
from scripts.bench.serving_servers import OURS, Server, running
from scripts.load.served import cpu_seconds

MODEL = "small"
PROMPT_TOKENS = 60
ANSWER_TOKENS = 100
NUM_STREAMS = (1, 4, 8)
NUM_ROUNDS = 7
_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
"""Of which no answer comes to the end."""
_BOUND = {"type": "json_schema", "json_schema": {"name": "words", "schema": _SCHEMA}}
WAYS: Mapping[str, tuple[Mapping[str, Any], Target]] = {
    "free": ({}, Target(0.9, is_ceiling=False)),
    "bound to a schema": ({"response_format": _BOUND}, Target(0.8, is_ceiling=False)),
}


@dataclass(frozen=True)
class Cost:
    """What one run took: seconds from its beginning to its end, and of the processor, without the client's."""

    wall_seconds: float
    cpu_seconds: float


async def overhead(models: Path, work: Path) -> Report:
    """Streams by the `openai` client as a share of what the bare engine gives for the same work."""
    report = Report(
        f"streams through the openai client, {MODEL} model (medians)",
        ("streams", "way", "tokens/s", "bare engine", "share", "share by processor time"),
    )
    folder = models / MODEL
    async with raw_engine("ours", folder) as bare:
        with running(OURS, folder, work, ("--slots", str(max(NUM_STREAMS)))) as server:
            await warm_up([server])
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
            async with client:
                for num_streams in NUM_STREAMS:
                    _add(report, num_streams, await _costs(num_streams, bare, server, client))
    return report


async def _costs(num_streams: int, bare: RawEngine, server: Server, client: AsyncOpenAI) -> dict[str, list[Cost]]:
    """Returns the cost of each round, of the bare engine as of each way."""
    maker, costs = TextMaker(num_streams), {name: list[Cost]() for name in ("bare", *WAYS)}
    for number in range(NUM_ROUNDS + 1):
        prompts = [[[maker.message(PROMPT_TOKENS)] for _ in range(num_streams)] for _ in costs]
        alone = bare.seconds([tokens_of(prompt).tolist() for prompt in prompts[0]], ANSWER_TOKENS)
        taken = {"bare": await _cost(alone, bare.pid)}
        for (way, (fields, _)), fresh in zip(WAYS.items(), prompts[1:], strict=True):
            taken[way] = await _cost(_read_all(client, fresh, fields), server.process.pid)
        if number:  # the first round warms everything up
            for name, cost in taken.items():
                costs[name].append(cost)
    return costs


async def _cost(run: Awaitable[object], pid: int) -> Cost:
    began, used = time.perf_counter(), cpu_seconds(pid)
    await run
    return Cost(time.perf_counter() - began, cpu_seconds(pid) - used)


async def _read_all(client: AsyncOpenAI, prompts: Sequence[Messages], fields: Mapping[str, Any]) -> None:
    await asyncio.gather(*(_read(client, prompt, fields) for prompt in prompts))


async def _read(client: AsyncOpenAI, messages: Messages, fields: Mapping[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": list(messages), "max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
    stream = await client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **asked
    )
    num_tokens = 0
    async for chunk in stream:
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    assert num_tokens == ANSWER_TOKENS, f"an answer of {num_tokens} tokens"


def _add(report: Report, num_streams: int, costs: Mapping[str, Sequence[Cost]]) -> None:
    num_tokens, bare = num_streams * ANSWER_TOKENS, costs["bare"]
    for way, (_, target) in WAYS.items():
        share = median([alone.wall_seconds / cost.wall_seconds for alone, cost in zip(bare, costs[way], strict=True)])
        cpu_share = median([alone.cpu_seconds for alone in bare]) / median([cost.cpu_seconds for cost in costs[way]])
        rates = (median([num_tokens / cost.wall_seconds for cost in taken]) for taken in (costs[way], bare))
        report.rows.append(
            (str(num_streams), way, *(f"{rate:.0f}" for rate in rates), f"{share:.0%}", f"{cpu_share:.0%}")
        )
        figures = {name: [asdict(cost) for cost in costs[name]] for name in (way, "bare")}
        report.figures[f"{num_streams} streams, {way}"] = {**figures, "share": share, "cpu_share": cpu_share}
        report.add_verdict(f"{num_streams} streams, {way}", share, target)
