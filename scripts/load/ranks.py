"""A model divided among three processes: long prompts that overlap are answered as alone, and no answer is stuck.

Clients send prompts of many chunks, two at a time, some with beginnings in common; some leave in the middle.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.load.answers import streamed_text
from scripts.load.served import serving
from scripts.load.wire import NoAnswer, Wire, ask, json_request

NUM_RANKS = 3
"""As many as the built-in model has heads."""
SERVER = ("--ranks", str(NUM_RANKS), "--context", "4096", "--slots", "3", "--cache-memory", "40MB")
"""Less memory than all prompts need: state is evicted and evaluated again."""
NUM_CLIENTS, NUM_PROMPTS = 3, 6
ANSWER_SECONDS = 120.0
LEAVING_SHARE = 0.25
WORDS = ("Ada", "lives", "in", "Paris", "and", "Bob", "has", "a", "boat", "from", "Oslo", "with", "seven", "doors")


@dataclass
class Figures:
    """What clients saw."""

    num_answers: int = 0
    num_left: int = 0
    longest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def bodies(seed: int) -> list[dict[str, Any]]:
    """Prompts of a thousand tokens and more; each two have one beginning."""
    random, made = Random(seed), list[dict[str, Any]]()
    for number in range(NUM_PROMPTS):
        if number % 2 == 0:
            beginning = " ".join(random.choices(WORDS, k=400))
        text = f"{beginning} {' '.join(random.choices(WORDS, k=300))}"
        messages = [{"role": "user", "content": text}]
        made.append({"model": "demo", "temperature": 0, "stream": True, "messages": messages, "max_tokens": 24})
    return made


class Load:
    """The clients of one run."""

    def __init__(self, port: int, asked: Sequence[dict[str, Any]], answers: Sequence[str], deadline: float) -> None:
        self._port, self._asked, self._answers, self._deadline = port, asked, answers, deadline
        self.figures = Figures()

    async def run(self, seed: int) -> None:
        """Has all clients ask until time is up."""
        await asyncio.gather(*(self._client(Random(f"{seed}/{index}")) for index in range(NUM_CLIENTS)))

    async def _client(self, random: Random) -> None:
        while time.monotonic() < self._deadline and not self.figures.wrong:
            number, began = random.randrange(NUM_PROMPTS), time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._ask(number, leaves=random.random() < LEAVING_SHARE)
            except (NoAnswer, OSError, TimeoutError) as error:
                self.figures.wrong.append(f"prompt {number}: {type(error).__name__} {error}")
            self.figures.longest_seconds = max(self.figures.longest_seconds, time.monotonic() - began)

    async def _ask(self, number: int, *, leaves: bool) -> None:
        async with await Wire.open(self._port) as wire:
            await wire.send(json_request("/v1/chat/completions", self._asked[number]))
            if leaves:
                await asyncio.sleep(0.1 * (number + 1))
                self.figures.num_left += 1
                return
            text = streamed_text((await wire.receive()).body)
        self.figures.num_answers += 1
        if text != self._answers[number]:
            self.figures.wrong.append(f"prompt {number}: {text!r}, not {self._answers[number]!r}")


async def _alone(port: int, asked: Sequence[dict[str, Any]]) -> list[str]:
    return [streamed_text((await ask(port, "POST", "/v1/chat/completions", body)).body) for body in asked]


def run(args: argparse.Namespace) -> bool:
    """Whether answers are those of one process, one after the other."""
    asked = bodies(args.seed)
    with serving("--context", "4096") as one:
        answers = asyncio.run(_alone(one.port, asked))
    with serving(*SERVER) as divided:
        load = Load(divided.port, asked, answers, time.monotonic() + args.stream_seconds)
        asyncio.run(load.run(args.seed))
        figures, faults = load.figures, divided.faults()
    print(
        f"{NUM_RANKS} processes: {figures.num_answers} answers, {figures.num_left} left, the longest took"
        f" {figures.longest_seconds:.1f} s"
    )
    for text in (*figures.wrong[:5], *faults[:5]):
        print(f"  {text}")
    return figures.num_answers >= NUM_PROMPTS and not figures.wrong and not faults
