"""Many streams at once on few slots: answers right and whole, waiting shared out, and 429 where too many wait.

Some clients leave in the middle of their answer, others read slowly. Each answer is compared with the one that the
same request got alone.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.load.answers import streamed_text
from scripts.load.served import serving
from scripts.load.wire import NoAnswer, Reply, Wire, ask, json_request

NUM_CLIENTS = 200
NUM_SLOTS = 8
MAX_WAITING = 128
"""Fewer than there are clients, so that some are sent away."""
SERVER = ("--slots", str(NUM_SLOTS), "--max-waiting", str(MAX_WAITING), "--context", "1024")
LEAVING_SHARE = 1 / 3
SLOW_SHARE = 1 / 2
SLOW_PAUSE_SECONDS = 0.05
MAX_TOKENS = 32
THINKING_SECONDS = 2.0
"""What a client takes at most before it asks again."""
NAMES = [
    "Ada",
    "Bob",
    "Eve",
    "Kim",
    "Lee",
    "Max",
    "Mia",
    "Noa",
    "Sam",
    "Tom",
    "Zoe",
    "Ana",
    "Ben",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Ida",
    "Jan",
    "Leo",
]
CITIES = ["Paris", "Rome", "Oslo", "Berlin"]
_PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses")


@dataclass(frozen=True)
class Question:
    """A request and the text that it is answered with when it is alone."""

    path: str
    body: Mapping[str, Any]
    answer: str


@dataclass(frozen=True)
class Manner:
    """How a client reads one answer."""

    is_slow: bool
    leaves_after: int | None
    """Bytes of the answer after which it goes; None: it reads all."""


@dataclass
class Figures:
    """What one client saw."""

    waits: list[float] = field(default_factory=list)
    """Seconds from its first attempt to the first text, refusals and what it was told to wait included."""
    num_answers: int = 0
    num_left: int = 0
    refusals: Counter[int] = field(default_factory=Counter)
    """By the seconds that `Retry-After` said."""


def request_body(path: str, name: str, city: str) -> dict[str, Any]:
    """Returns a streamed request whose answer depends on all that it says."""
    messages = [
        {"role": "user", "content": f"My name is {name} and I live in {city}."},
        {"role": "assistant", "content": f"Nice to meet you, {name}!"},
        {"role": "user", "content": "What is my name, and where do I live?"},
    ]
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "stream": True}
    if path == "/v1/responses":
        return {**body, "input": messages, "max_output_tokens": MAX_TOKENS, "store": False}
    if path == "/api/chat":
        return {"model": "demo", "messages": messages, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}
    return {**body, "messages": messages, "max_tokens": MAX_TOKENS}


async def ask_alone(port: int) -> list[Question]:
    """Returns the questions with their answers, asked one after the other."""
    questions = []
    for index, name in enumerate(NAMES):
        for city in CITIES:
            path = _PATHS[(index + CITIES.index(city)) % len(_PATHS)]
            body = request_body(path, name, city)
            reply = await ask(port, "POST", path, body)
            questions.append(Question(path, body, streamed_text(reply.body)))
    return questions


class Load:
    """The clients of one run."""

    def __init__(self, port: int, questions: Sequence[Question], seed: int, deadline: float) -> None:
        self._port = port
        self._questions = questions
        self._seed = seed
        self._deadline = deadline
        self.clients = [Figures() for _ in range(NUM_CLIENTS)]
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Has all clients ask until time is up."""
        await asyncio.gather(*(self._client(index) for index in range(NUM_CLIENTS)))

    async def _client(self, index: int) -> None:
        random = Random(f"{self._seed}/{index}")
        is_slow = index < NUM_CLIENTS * SLOW_SHARE
        while time.monotonic() < self._deadline:
            question = random.choice(self._questions)
            leaves_after = random.randrange(1, 40) * 100 if random.random() < LEAVING_SHARE else None
            try:
                await self._ask(question, Manner(is_slow, leaves_after), self.clients[index])
            except (NoAnswer, OSError) as error:
                self._blame(f"client {index}: {type(error).__name__} {error}")
            # Else who has just been answered would always come before those who were told to come back.
            await asyncio.sleep(random.uniform(0, THINKING_SECONDS))

    async def _ask(self, question: Question, manner: Manner, figures: Figures) -> None:
        """Asks until it is not told to come back; then reads the answer, or a part of it."""
        began = time.monotonic()
        while True:
            async with await Wire.open(self._port, holds_little=manner.is_slow) as wire:
                await wire.send(json_request(question.path, question.body))
                reply = await _read(wire, manner, figures, began)
            if reply is None:
                figures.num_left += 1
                return
            if reply.status != 429:
                self._judge(question, reply, figures)
                return
            seconds = int(reply.headers["retry-after"])
            figures.refusals[seconds] += 1
            if time.monotonic() + seconds > self._deadline:
                return
            await asyncio.sleep(seconds)

    def _judge(self, question: Question, reply: Reply, figures: Figures) -> None:
        if reply.status != 200 or streamed_text(reply.body) != question.answer:
            self._blame(f"{question.path} {reply.status}: {reply.body[-800:]!r} instead of {question.answer!r}")
        else:
            figures.num_answers += 1

    def _blame(self, text: str) -> None:
        self.wrong.append(text)
        print(f"  WRONG {text[:800]}", flush=True)


async def _read(wire: Wire, manner: Manner, figures: Figures, began: float) -> Reply | None:
    """Returns the answer; None where the client has left before its end. Notes when the first text came."""
    status, headers = await wire.receive_head()
    body, has_text = b"", False
    async for part in wire.parts(headers):
        body += part
        if status == 200 and not has_text and streamed_text(body):
            has_text = True
            figures.waits.append(time.monotonic() - began)
        if status == 200 and manner.leaves_after is not None and len(body) >= manner.leaves_after:
            return None
        if manner.is_slow:
            await asyncio.sleep(SLOW_PAUSE_SECONDS)
    return Reply(status, headers, body)


async def _load(port: int, seed: int, seconds: float) -> Load:
    questions = await ask_alone(port)
    num_answers = len({question.answer for question in questions})
    print(f"  {len(questions)} questions, {num_answers} different answers; {NUM_CLIENTS} clients for {seconds:g} s")
    load = Load(port, questions, seed, time.monotonic() + seconds)
    await load.run()
    return load


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds."""
    print(f"streams: {NUM_CLIENTS} clients on {NUM_SLOTS} slots, --seed {options.seed}", flush=True)
    with serving(*SERVER) as served:
        load = asyncio.run(_load(served.port, options.seed, options.stream_seconds))
        faults = served.faults()
        rest = asyncio.run(_open_requests(served.port))
    _report(load.clients)
    for fault in faults:
        print(f"  WRONG in the log: {fault}")
    if rest:
        print(f"  WRONG: {rest} requests are still open at the end")
    return not load.wrong and not faults and not rest and _is_fair(load.clients)


async def _open_requests(port: int) -> int:
    """Returns how many requests are not over some seconds after their clients have left."""
    for _ in range(40):
        engines = (await ask(port, "GET", "/health")).json()["engines"]
        count = sum(engine["open_requests"] for engine in engines.values())
        if count == 0:
            return 0
        await asyncio.sleep(0.25)
    return int(count)


def _is_fair(clients: Sequence[Figures]) -> bool:
    """Whether each client got answers, and some were told to come back."""
    num_starved = sum(not client.waits and not client.num_left for client in clients)
    num_refused = sum(client.refusals.total() for client in clients)
    if num_starved:
        print(f"  WRONG: {num_starved} clients saw no answer begin")
    if not num_refused:
        print("  WRONG: nobody was told to come back, so the queue was never full")
    return not num_starved and num_refused > 0


def _report(clients: Sequence[Figures]) -> None:
    waits = sorted(wait for client in clients for wait in client.waits)
    refusals = sum((client.refusals for client in clients), Counter[int]())
    print(
        f"  {sum(client.num_answers for client in clients)} whole answers, all as alone unless said; "
        f"{sum(client.num_left for client in clients)} left by their client; {refusals.total()} times 429, "
        f"Retry-After {min(refusals, default=0)} to {max(refusals, default=0)} s"
    )
    print(f"  seconds to the first text: p50 {_share(waits, 0.5):.1f}, p99 {_share(waits, 0.99):.1f}")
    for share in (0.5, 0.99):
        each = sorted(_share(sorted(client.waits), share) for client in clients if client.waits)
        words = f"least {each[0]:.1f}, median {_share(each, 0.5):.1f}, most {each[-1]:.1f}"
        print(f"  p{share * 100:.0f} of each client: {words}")
    begun = sorted(len(client.waits) for client in clients)
    print(f"  answers begun for each client: least {begun[0]}, median {begun[len(begun) // 2]}, most {begun[-1]}")


def _share(values: Sequence[float], share: float) -> float:
    """Returns the value that this share of sorted values does not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
