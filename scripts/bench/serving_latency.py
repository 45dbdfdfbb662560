"""Serving scenarios that count seconds: a newcomer's first token, the gap a long prompt tears, four at once.

Both servers stand side by side and are asked in turns; only one works at a time. A running stream is read by the
same client, so what is measured is what a user would see.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cache.types import common_prefix_length
from scripts.bench.common import Report, Target, median
from scripts.bench.serving_client import Answer, Messages, Stream, ask, warm_up
from scripts.bench.serving_prompts import TextMaker, tokens_of
from scripts.bench.serving_raw import RawEngine, raw_engine
from scripts.bench.serving_servers import OURS, PEER, Server, both, running
from server.app.config import ServerConfig

LONG_PROMPT_TOKENS = 1500
SHORT_PROMPT_TOKENS = 40
DEFAULT_CHUNK = ServerConfig().chunk_tokens
CHUNKS = (128, 256, 512, 1024, 2048)

NUM_ROUNDS = 5
NUM_SWEEP_ROUNDS = 3
NEWCOMERS_PER_ROUND = 3
STREAM_TOKENS = 4000
"""More than a stream can say while something is measured beside it; it is left then."""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


async def _begin_stream(server: Server, maker: TextMaker) -> Stream:
    stream = Stream(server, [maker.message(SHORT_PROMPT_TOKENS)], max_tokens=STREAM_TOKENS)
    await stream.wait_for(15)
    return stream


async def _end_stream(stream: Stream) -> Answer:
    answer = await stream.stop()
    # The peer notices only after a while that somebody left.
    await asyncio.sleep(0.6)
    return answer


# ------------------------------------------------------------------------------------------------------ newcomer


@dataclass
class _FirstTokens:
    """Seconds to a newcomer's first token, and those between two tokens of the stream beside it."""

    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        return median(self.busy) - median(self.idle)

    @property
    def step(self) -> float:
        return median(self.steps)


async def newcomer(models: Path, work: Path) -> Report:
    """The first token of a short new prompt, while nothing runs and while one stream decodes."""
    times = {name: _FirstTokens() for name in (OURS, PEER)}
    maker = TextMaker(3)
    with both(models / "tiny", work) as servers:
        await warm_up(servers)
        for _ in range(NUM_ROUNDS):
            for server in servers:
                await _measure_newcomers(server, maker, times[server.name])
    return _newcomer_report(times)


async def _measure_newcomers(server: Server, maker: TextMaker, times: _FirstTokens) -> None:
    times.idle += [await _first_seconds(server, maker) for _ in range(NEWCOMERS_PER_ROUND)]
    stream = await _begin_stream(server, maker)
    times.busy += [await _first_seconds(server, maker) for _ in range(NEWCOMERS_PER_ROUND)]
    times.steps.append(median((await _end_stream(stream)).gaps()))


async def _first_seconds(server: Server, maker: TextMaker) -> float:
    await asyncio.sleep(0.13)
    return (await ask(server, [maker.message(SHORT_PROMPT_TOKENS)], max_tokens=3)).first_seconds


def _newcomer_report(sides: dict[str, _FirstTokens]) -> Report:
    report = Report(
        "A newcomer's first token: idle, and beside one running stream (medians)",
        ("server", "idle", "busy", "busy, worst", "added", "one step", "added, in steps"),
    )
    for name, side in sides.items():
        steps = side.added / side.step
        times = (median(side.idle), median(side.busy), max(side.busy), side.added, side.step)
        report.rows.append((name, *map(_ms, times), f"{steps:.1f}"))
        report.figures[name] = {"idle": side.idle, "busy": side.busy, "step": side.step, "added_steps": steps}
        if name == OURS:
            report.add_verdict("decode steps added", steps, Target(2))
    return report


# ----------------------------------------------------------------------------------------------------------- gap


async def gap(models: Path, work: Path) -> Report:
    """The longest pause of a running stream while a long prompt is evaluated."""
    gaps: dict[str, list[float]] = {OURS: [], PEER: []}
    bounds, maker = list[float](), TextMaker(4)
    with both(models / "tiny", work) as servers:
        await warm_up(servers)
        for _ in range(NUM_ROUNDS):
            for server in servers:
                gaps[server.name].append(await _longest_gap(server, maker))
            bounds.append(await _chunk_and_step(servers[0], maker))
    ours, peer, bound = median(gaps[OURS]), median(gaps[PEER]), median(bounds)
    report = Report(
        f"Longest gap of a running stream while {LONG_PROMPT_TOKENS} tokens are evaluated",
        ("server", "median", "worst", f"{OURS}: one chunk of {DEFAULT_CHUNK} and one step"),
        [(OURS, _ms(ours), _ms(max(gaps[OURS])), _ms(bound)), (PEER, _ms(peer), _ms(max(gaps[PEER])), "")],
        {**gaps, "chunk_and_step": bounds},
    )
    report.add_verdict("share of the peer's gap", ours / peer, Target(0.2))
    report.add_verdict("of one chunk and one step", ours / bound, Target(1))
    return report


async def _longest_gap(server: Server, maker: TextMaker) -> float:
    stream = await _begin_stream(server, maker)
    long = await ask(server, [maker.message(LONG_PROMPT_TOKENS)], max_tokens=2)
    return max((await _end_stream(stream)).gaps(long.sent, long.times[0]))


async def _chunk_and_step(server: Server, maker: TextMaker, chunk: int = DEFAULT_CHUNK) -> float:
    """Returns the seconds that the last whole chunk of the long prompt takes, and the step after it.

    The server's own clock: from the restored part of the prompt to its first token.
    """
    known = [maker.message(LONG_PROMPT_TOKENS - chunk)]
    await ask(server, known, max_tokens=1)
    text = f"{known[0]['content']} {maker.text(chunk)}"
    answer = await ask(server, [{"role": "user", "content": text}], max_tokens=1)
    evaluated = int(answer.timings["prompt_n"])
    return float(answer.timings["prompt_ms"]) / 1000 * min(1.0, chunk / evaluated)


async def chunk_sizes(models: Path, work: Path) -> Report:
    """What shorter chunks cost in prefill speed, and what longer ones cost the streams that run."""
    report = Report(
        "Chunk sizes: speed of a cold prefill alone, and the longest gap it tears in a running stream",
        ("chunk", "prefill tokens/s", "of the fastest", "longest gap (median)"),
    )
    figures: dict[int, tuple[float, float]] = {}
    for chunk in CHUNKS:
        with running(OURS, models / "tiny", work, ["--chunk-tokens", str(chunk)]) as server:
            figures[chunk] = await _speed_and_gap(server, TextMaker(5))
    fastest = max(speed for speed, _ in figures.values())
    for chunk, (speed, longest) in figures.items():
        report.rows.append((str(chunk), f"{speed:.0f}", f"{speed / fastest:.0%}", _ms(longest)))
        report.figures[str(chunk)] = {"prefill_tokens_per_second": speed, "longest_gap_seconds": longest}
    return report


async def _speed_and_gap(server: Server, maker: TextMaker) -> tuple[float, float]:
    await warm_up([server])
    speeds, gaps = list[float](), list[float]()
    for _ in range(NUM_SWEEP_ROUNDS):
        answer = await ask(server, [maker.message(LONG_PROMPT_TOKENS)], max_tokens=1)
        speeds.append(float(answer.timings["prompt_per_second"]))
        gaps.append(await _longest_gap(server, maker))
    return median(speeds), median(gaps)


# -------------------------------------------------------------------------------------------------- four at once

_ANSWER_TOKENS = 16
_MODEL_CALLS = "its model calls"


async def four_at_once(models: Path, work: Path) -> Report:
    """Four requests at once on a system prompt that nobody has evaluated yet, against one alone.

    Beside the servers: the model calls that are left when the shared tokens are evaluated once, without a server.
    """
    report = Report(
        f"Four requests at once on one cold system prompt of {LONG_PROMPT_TOKENS} tokens",
        ("model", "server", "one alone", "four at once", "ratio"),
    )
    for model in ("tiny", "wide"):
        await _compare_four(report, model, models / model, work)
    return report


async def _compare_four(report: Report, model: str, folder: Path, work: Path) -> None:
    alone: dict[str, list[float]] = {OURS: [], PEER: [], _MODEL_CALLS: []}
    together: dict[str, list[float]] = {OURS: [], PEER: [], _MODEL_CALLS: []}
    maker = TextMaker(6)
    async with raw_engine("ours", folder) as raw:
        with both(folder, work) as servers:
            await warm_up(servers)
            await _raw_seconds(raw, _on_new_system(maker, 4))
            for _ in range(NUM_ROUNDS):
                for server in servers:
                    alone[server.name].append(await _all_seconds(server, _on_new_system(maker, 1)))
                    together[server.name].append(await _all_seconds(server, _on_new_system(maker, 4)))
                alone[_MODEL_CALLS].append(await _raw_seconds(raw, _on_new_system(maker, 1)))
                together[_MODEL_CALLS].append(await _raw_seconds(raw, _on_new_system(maker, 4)))
    for name in (OURS, _MODEL_CALLS, PEER):
        ratio = median([four / single for four, single in zip(together[name], alone[name], strict=True)])
        report.rows.append((model, name, _ms(median(alone[name])), _ms(median(together[name])), f"{ratio:.2f}"))
        report.figures[f"{model}, {name}"] = {"alone": alone[name], "together": together[name], "ratio": ratio}
        if name == OURS:
            report.add_verdict(f"time of four against one, {model}", ratio, Target(1.25))


def _on_new_system(maker: TextMaker, count: int) -> list[Messages]:
    system = maker.message(LONG_PROMPT_TOKENS, "system")
    return [[system, maker.message(SHORT_PROMPT_TOKENS)] for _ in range(count)]


async def _all_seconds(server: Server, prompts: Sequence[Messages]) -> float:
    answers = await asyncio.gather(*(ask(server, prompt, max_tokens=_ANSWER_TOKENS) for prompt in prompts))
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)


async def _raw_seconds(raw: RawEngine, prompts: Sequence[Messages]) -> float:
    tokens = [tokens_of(prompt) for prompt in prompts]
    num_shared = min((common_prefix_length(tokens[0], other) for other in tokens[1:]), default=0)
    return await raw.seconds([prompt.tolist() for prompt in tokens], _ANSWER_TOKENS, num_shared)
