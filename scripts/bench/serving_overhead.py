"""What serving costs: tokens per second through HTTP and the `openai` client, as a share of the bare engine's.

One, four and eight streams, free and bound to a JSON schema. Each round times the bare engine and both ways in turn,
so that a busy machine slows all alike: from the first byte sent to the last token, prefill included. Where the
engine computes on the processor, the client alone slows it: how much is measured too, by a bare engine beside clients
that read as many streams of a server that computes nothing. No server reaches more than that share.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from scripts.bench.common import Report, Target, median
from scripts.bench.paced_streams import paced_streams
from scripts.bench.serving_client import Messages, ask, warm_up
from scripts.bench.serving_prompts import TextMaker, tokens_of
from scripts.bench.serving_raw import RawEngine, raw_engine
from scripts.bench.serving_servers import OURS, Server, running
from scripts.load.served import cpu_seconds

MODEL = "small"
PROMPT_TOKENS = 60
ANSWER_TOKENS = 100
NUM_STREAMS = (1, 4, 8)
NUM_ROUNDS = 7
BARE, BESIDE = "bare", "bare beside clients"
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
        ("streams", "way", "tokens/s", "bare engine", "share", "of what clients leave", "share by processor time"),
    )
    folder = models / MODEL
    async with raw_engine("ours", folder) as bare:
        with running(OURS, folder, work, ("--slots", str(max(NUM_STREAMS)))) as server:
            await warm_up([server])
            frames = await _frames(server)
            async with _client(server.port) as client:
                for num_streams in NUM_STREAMS:
                    bench = _Bench(num_streams, bare, server, client, frames)
                    _add(report, num_streams, await bench.costs())
    return report


def _client(port: int) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


async def _frames(server: Server) -> list[str]:
    """Returns the frames of one real answer."""
    answer = await ask(server, [TextMaker(0).message(PROMPT_TOKENS)], max_tokens=ANSWER_TOKENS)
    return [*(f"data: {json.dumps(chunk)}\n\n" for _, chunk in answer.chunks), "data: [DONE]\n\n"]


class _Bench:
    """The same work by the bare engine, alone and beside clients, and by the server."""

    def __init__(
        self, num_streams: int, bare: RawEngine, server: Server, client: AsyncOpenAI, frames: Sequence[str]
    ) -> None:
        self._num_streams = num_streams
        self._bare = bare
        self._server = server
        self._client = client
        self._frames = frames
        self._maker = TextMaker(num_streams)

    async def costs(self) -> dict[str, list[Cost]]:
        """Returns the cost of each round, of the bare engine as of each way."""
        costs = {name: list[Cost]() for name in (BARE, BESIDE, *WAYS)}
        alone = await self._alone()  # the first rounds warm everything up
        async with paced_streams(self._frames, alone.wall_seconds / ANSWER_TOKENS) as port, _client(port) as reader:
            await self._round(reader)
            for _ in range(NUM_ROUNDS):
                for name, cost in (await self._round(reader)).items():
                    costs[name].append(cost)
        return costs

    async def _round(self, reader: AsyncOpenAI) -> dict[str, Cost]:
        taken = {BARE: await self._alone(), BESIDE: await self._beside(reader)}
        for way, (fields, _) in WAYS.items():
            reading = _read_all(self._client, self._prompts(), fields)
            taken[way] = await _cost(reading, self._server.process.pid)
        return taken

    async def _alone(self) -> Cost:
        tokens = [tokens_of(prompt).tolist() for prompt in self._prompts()]
        return await _cost(self._bare.seconds(tokens, ANSWER_TOKENS), self._bare.pid)

    async def _beside(self, reader: AsyncOpenAI) -> Cost:
        reading = asyncio.create_task(_read_all(reader, self._prompts(), {}))
        cost = await self._alone()
        await reading
        return cost

    def _prompts(self) -> list[Messages]:
        return [[self._maker.message(PROMPT_TOKENS)] for _ in range(self._num_streams)]


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
    num_tokens, bare, beside = num_streams * ANSWER_TOKENS, costs[BARE], costs[BESIDE]
    ceiling = _wall_share(bare, beside)
    report.figures[f"{num_streams} streams, {BESIDE}"] = {"share": ceiling, BESIDE: [asdict(cost) for cost in beside]}
    report.rows.append((str(num_streams), BESIDE, *_rates(num_tokens, beside, bare), f"{ceiling:.0%}", "", ""))
    for way, (_, target) in WAYS.items():
        share, left = _wall_share(bare, costs[way]), _wall_share(beside, costs[way])
        cpu_share = median([alone.cpu_seconds for alone in bare]) / median([cost.cpu_seconds for cost in costs[way]])
        rates = _rates(num_tokens, costs[way], bare)
        report.rows.append((str(num_streams), way, *rates, f"{share:.0%}", f"{left:.0%}", f"{cpu_share:.0%}"))
        figures = {name: [asdict(cost) for cost in costs[name]] for name in (way, BARE)}
        shares = {"share": share, "share_beside_clients": left, "cpu_share": cpu_share}
        report.figures[f"{num_streams} streams, {way}"] = {**figures, **shares}
        report.add_verdict(f"{num_streams} streams, {way}", share, target)


def _wall_share(yardstick: Sequence[Cost], costs: Sequence[Cost]) -> float:
    """Returns the median over the rounds of how much of the yardstick's speed was reached."""
    return median([ideal.wall_seconds / cost.wall_seconds for ideal, cost in zip(yardstick, costs, strict=True)])


def _rates(num_tokens: int, *taken: Sequence[Cost]) -> list[str]:
    return [f"{median([num_tokens / cost.wall_seconds for cost in costs]):.0f}" for costs in taken]
