"""Serving scenarios that count tokens per second: four streams against the bare engine, and what sampling costs.

A run of four streams is timed from the first byte sent to the last one received, prefill included, and so is the
bare engine's: the same prompts, the same number of tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import Report, Target, median
from scripts.bench.serving_client import Messages, ask, warm_up
from scripts.bench.serving_prompts import TextMaker, tokens_of
from scripts.bench.serving_raw import RawEngine, raw_engine
from scripts.bench.serving_servers import OURS, PEER, Server, both

NUM_STREAMS = 4
PROMPT_TOKENS = 60
ANSWER_TOKENS = {"tiny": 200, "small": 100}
NUM_ROUNDS = 5
SHARE_TARGET = Target(0.9, is_ceiling=False)
SAMPLING_TARGET = Target(0.95, is_ceiling=False)

SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "greedy with a seed": {"seed": 7},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7 with a seed": {"temperature": 0.7, "seed": 7},
}


async def four_streams(models: Path, work: Path) -> Report:
    """Four streams together, as a share of what the bare engine gives for the same work."""
    report = Report(
        f"{NUM_STREAMS} streams together, tokens/s (medians)",
        ("model", "server", "served", "bare engine", "share"),
    )
    for model in ANSWER_TOKENS:
        async with raw_engine("ours", models / model) as ours, raw_engine("peer", models / model) as peer:
            await _compare_streams(report, model, models / model, work, {OURS: ours, PEER: peer})
    return report


async def _compare_streams(report: Report, model: str, folder: Path, work: Path, raw: dict[str, RawEngine]) -> None:
    maker, num_tokens = TextMaker(7), ANSWER_TOKENS[model]
    served: dict[str, list[float]] = {OURS: [], PEER: []}
    bare: dict[str, list[float]] = {OURS: [], PEER: []}
    with both(folder, work) as servers:
        await warm_up(servers)
        for number in range(NUM_ROUNDS + 1):
            for server in servers:
                prompts = [[maker.message(PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]
                tokens = [tokens_of(prompt).tolist() for prompt in prompts]
                alone = await raw[server.name].seconds(tokens, num_tokens)
                with_server = await _seconds(server, prompts, num_tokens, {})
                if number:  # the first round warms the bare engine up
                    bare[server.name].append(NUM_STREAMS * num_tokens / alone)
                    served[server.name].append(NUM_STREAMS * num_tokens / with_server)
    for name in (OURS, PEER):
        share = median([ours / other for ours, other in zip(served[name], bare[name], strict=True)])
        rates = (f"{median(served[name]):.0f}", f"{median(bare[name]):.0f}")
        report.rows.append((model, name, *rates, f"{share:.0%}"))
        report.figures[f"{model}, {name}"] = {"served": served[name], "bare": bare[name], "share": share}
        if name == OURS:
            report.add_verdict(f"share of the bare engine, {model}", share, SHARE_TARGET)


async def sampling(models: Path, work: Path) -> Report:
    """Four streams with seeds and temperature, against four greedy ones."""
    maker = TextMaker(8)
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in SAMPLING} for name in (OURS, PEER)}
    with both(models / "tiny", work) as servers:
        await warm_up(servers)
        for _ in range(NUM_ROUNDS):
            for server in servers:
                for way, fields in SAMPLING.items():
                    prompts = [[maker.message(PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]
                    seconds = await _seconds(server, prompts, ANSWER_TOKENS["tiny"], fields)
                    rates[server.name][way].append(NUM_STREAMS * ANSWER_TOKENS["tiny"] / seconds)
    return _sampling_report(rates)


def _sampling_report(rates: dict[str, dict[str, list[float]]]) -> Report:
    report = Report(
        f"{NUM_STREAMS} streams together, tokens/s by way of sampling (medians; share of greedy)",
        ("sampling", OURS, PEER),
    )
    for way in SAMPLING:
        cells = []
        for name in (OURS, PEER):
            share = median([a / b for a, b in zip(rates[name][way], rates[name]["greedy"], strict=True)])
            cells.append(f"{median(rates[name][way]):.0f} ({share:.0%})")
            report.figures[f"{way}, {name}"] = {"tokens_per_second": rates[name][way], "share": share}
            if name == OURS and way != "greedy":
                report.add_verdict(f"{way}, share of greedy", share, SAMPLING_TARGET)
        report.rows.append((way, *cells))
    return report


async def _seconds(server: Server, prompts: Sequence[Messages], max_tokens: int, fields: Mapping[str, Any]) -> float:
    answers = await asyncio.gather(*(ask(server, prompt, max_tokens=max_tokens, **fields) for prompt in prompts))
    for answer in answers:
        assert answer.completion_tokens == max_tokens, f"{server.name} said {answer.completion_tokens} tokens"
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
