"""Random and malformed requests over all dialects; between them proper ones, whose answers must be as ever.

Each request is made of the seed and its number, so `--seed S --first N --requests 1` repeats one.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from scripts.load.answers import essence
from scripts.load.attacks import Attack, Leaving, attack
from scripts.load.bodies import Example
from scripts.load.served import Served, serving
from scripts.load.wire import ClosedUnanswered, NoAnswer, Reply, Wire, ask

NUM_CONNECTIONS = 12
CONTROL_EVERY = 20
WARM_UP_REQUESTS = 1000
"""Before memory is measured first: libraries, threads and tables that stay take what they take."""
SLACK_BYTES = 64 << 20
"""What the process may hold more at the end than after its warm-up."""
TABLE_BYTES = 8 << 20
LEAK_BYTES = 512
"""What may be in use more: this, and so much for each request, for tables that are bounded but not full yet."""
CLIENT_SECONDS = 3
# Responses that are stored are kept on disk, so that they do not count as memory.
SERVER = (
    f"--context 512 --default-max-tokens 12 --client-timeout {CLIENT_SECONDS} --heartbeat 0.5 --cache-memory 400MB "
    "--cache-disk 300MB --max-body 4MB"
).split()
_FAULTS = (b'"internal_error"', b'"generation_failed"', b"internal error; the server")
"""What a stream holds that began with status 200 and failed by the server's fault."""

_ADA = [
    {"role": "user", "content": "My name is Ada and I live in Paris."},
    {"role": "assistant", "content": "Nice to meet you, Ada!"},
    {"role": "user", "content": "What is my name?"},
]
_GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
CONTROLS = (
    Example("POST", "/v1/chat/completions", {**_GREEDY, "messages": _ADA, "max_tokens": 30}),
    Example("POST", "/v1/chat/completions", {**_GREEDY, "messages": _ADA, "max_tokens": 30, "stream": True}),
    Example("POST", "/v1/completions", {**_GREEDY, "prompt": "The capital of France", "max_tokens": 16}),
    Example("POST", "/v1/messages", {**_GREEDY, "messages": _ADA, "max_tokens": 30}),
    Example("POST", "/v1/responses", {**_GREEDY, "input": _ADA, "max_output_tokens": 30, "store": False}),
    Example("POST", "/api/chat", {"model": "demo", "messages": _ADA, "options": {"temperature": 0}}),
    Example(
        "POST", "/api/generate", {"model": "demo", "prompt": "Hi", "options": {"temperature": 0}, "stream": False}
    ),
    Example("POST", "/tokenize", {"content": "My name is Ada."}),
    Example("POST", "/v1/messages/count_tokens", {"model": "demo", "messages": _ADA}),
    Example("GET", "/v1/models"),
)
_SCHEMAS = ({"type": "string", "maxLength": 5}, {"type": "string", "maxLength": "😀" * 60})
BINDING = tuple(
    Example("POST", "/api/chat", {"model": "demo", "messages": _ADA, "format": schema}) for schema in _SCHEMAS
)
"""Has the model's tokens made ready for grammars. The second makes llguidance panic, which keeps 38 MB of what it
looks up of the program to say where."""


@dataclass
class Findings:
    """What came of the requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_controls: int = 0
    num_sent_again: int = 0
    """Requests whose connection was closed for idleness as they were sent."""

    def blame(self, name: str, text: str) -> None:
        """Notes what should not be, and prints it."""
        self.wrong.append(f"{name}: {text}")
        print(f"  WRONG {name}: {text[:2500]}", flush=True)


class Fuzzer:
    """Sends the requests of one seed to one server."""

    def __init__(self, port: int, document: Mapping[str, Any], seed: str, deadline: float) -> None:
        self._port = port
        self._document = document
        self._seed = seed
        self._deadline = deadline
        self._alone: dict[int, Any] = {}
        self._numbers: Iterator[int] = iter(())
        self.findings = Findings()

    async def learn(self) -> None:
        """Asks the proper requests, one at a time, for the answers that they must get from then on."""
        for index, control in enumerate(CONTROLS):
            self._alone[index] = essence(await ask(self._port, control.method, control.path, control.body))

    async def run(self, first: int, count: int) -> None:
        """Sends so many requests over several connections, until time is up."""
        self._numbers = iter(range(first, first + count))
        await asyncio.gather(*(self._work() for _ in range(NUM_CONNECTIONS)))

    async def _work(self) -> None:
        wire: Wire | None = None
        for number in self._numbers:
            if time.monotonic() > self._deadline:
                break
            if number % CONTROL_EVERY == 0:
                await self._control(number // CONTROL_EVERY % len(CONTROLS))
            wire = await self._attack(number, wire)
        if wire is not None:
            wire.close()

    async def _control(self, index: int) -> None:
        control = CONTROLS[index]
        self.findings.num_controls += 1
        name = f"control {control.path}"
        try:
            reply = await ask(self._port, control.method, control.path, control.body)
        except (NoAnswer, OSError) as error:
            self.findings.blame(name, f"no answer: {error}")
            return
        if essence(reply) != self._alone[index]:
            self.findings.blame(name, f"another answer than alone: {reply.status} {reply.body[:2000]!r}")

    async def _attack(self, number: int, wire: Wire | None) -> Wire | None:
        """Sends one request; returns the connection if another may follow on it."""
        shot = attack(f"{self._seed}/{number}", self._document)
        name = f"request {number}, {shot.kind}"
        self.findings.kinds[shot.kind] += 1
        try:
            outcome, wire = await self._sent(shot, wire, name)
        except (OSError, TimeoutError) as error:
            outcome, wire = type(error).__name__, None
            self.findings.blame(name, f"no connection: {error}")
        self.findings.statuses[outcome] += 1
        if wire is not None and (shot.wants_new_connection or not wire.is_usable):
            wire.close()
            return None
        return wire

    async def _sent(self, shot: Attack, wire: Wire | None, name: str) -> tuple[str, Wire]:
        """Sends it, once more where the server closed the connection since it had been idle, as clients do."""
        while True:
            began = time.monotonic()
            may_be_idle = wire is not None and wire.is_usable
            if wire is None or not wire.is_usable:
                wire = await Wire.open(self._port)
            await wire.send(shot.raw)
            # This process may have been busy with something else between connecting and sending.
            may_be_idle = may_be_idle or time.monotonic() - began > CLIENT_SECONDS / 2
            try:
                return await self._outcome(shot, wire, name), wire
            except ClosedUnanswered as error:
                if may_be_idle:
                    self.findings.num_sent_again += 1
                    continue
                if not shot.may_be_silent:
                    self.findings.blame(name, f"no answer: {error}; sent {shot.raw[:400]!r}")
                return "no answer", wire

    async def _outcome(self, shot: Attack, wire: Wire, name: str) -> str:
        if shot.leaving is not Leaving.NEVER:
            await _leave(wire, shot.leaving)
            return "left"
        try:
            reply = await wire.receive(shot.method)
        except ClosedUnanswered:
            raise
        except NoAnswer as error:
            if not shot.may_be_silent:
                self.findings.blame(name, f"an answer that does not end: {error}; sent {shot.raw[:400]!r}")
            return "no answer"
        self._judge(shot, reply, name)
        return str(reply.status)

    def _judge(self, shot: Attack, reply: Reply, name: str) -> None:
        if (reply.status >= 500 and reply.status not in (501, 503)) or any(mark in reply.body for mark in _FAULTS):
            self.findings.blame(name, f"{reply.status} {reply.body[-300:]!r}; sent {shot.raw[:1500]!r}")
        elif reply.body and reply.headers.get("content-type", "").startswith("application/json"):
            try:
                reply.json()
            except ValueError as error:
                self.findings.blame(
                    name, f"{reply.status} with a body that is no JSON, {error}; sent {shot.raw[:400]!r}"
                )


async def _leave(wire: Wire, leaving: Leaving) -> None:
    if leaving is Leaving.IN_ANSWER:
        await wire.read(400)
    if leaving is Leaving.RESET:
        wire.reset()
    else:
        wire.close()


async def clear_all(port: int) -> int:
    """Has the server forget the state of all namespaces; returns the bytes of state that it still holds."""
    for namespace in (await ask(port, "GET", "/v1/cache?limit=0")).json()["namespaces"]:
        target = f"/v1/cache/clear?namespace={quote(namespace['namespace'], safe='')}"
        await ask(port, "POST", target, {})
    rest = (await ask(port, "GET", "/v1/cache?limit=0")).json()["namespaces"]
    return sum(sum(namespace["bytes"].values()) for namespace in rest)


async def _wait_until_idle(port: int) -> bool:
    """Returns whether no request is left within a minute."""
    for _ in range(120):
        engines = (await ask(port, "GET", "/health")).json()["engines"]
        if not any(engine["open_requests"] for engine in engines.values()):
            return True
        await asyncio.sleep(0.5)
    return False


@dataclass(frozen=True)
class Memory:
    """What the server's process has in use, and holds in all, once it has given back what it can."""

    used_bytes: int
    held_bytes: int

    def excess(self, floor: "Memory", num_requests: int) -> str:
        """Returns what is too much beside the memory before the requests; empty if nothing is."""
        more_used, more_held = self.used_bytes - floor.used_bytes, self.held_bytes - floor.held_bytes
        if more_used > TABLE_BYTES + LEAK_BYTES * num_requests:
            return f"{more_used >> 10} kB more are in use, {more_used / num_requests:.0f} bytes for each request"
        return f"{more_held >> 20} MB more are held" if more_held > SLACK_BYTES else ""


async def _settle(fuzzer: Fuzzer, served: Served) -> Memory:
    """Has the server do what it does once, and forget the rest; returns what it holds then."""
    await fuzzer.learn()
    for example in BINDING:
        await ask(served.port, example.method, example.path, example.body)
    rest = await clear_all(served.port)
    if rest:
        fuzzer.findings.blame("memory", f"{rest} bytes of state are left")
    # The signal is handled by the event loop's thread.
    return Memory(await asyncio.to_thread(served.used_bytes), served.rss_bytes())


async def _fuzz(served: Served, options: argparse.Namespace) -> Findings:
    deadline = time.monotonic() + options.seconds
    document = (await ask(served.port, "GET", "/openapi.json")).json()
    warm_up = Fuzzer(served.port, document, f"warm-up/{options.seed}", deadline)
    await warm_up.learn()
    await warm_up.run(0, min(WARM_UP_REQUESTS, options.requests))
    floor = await _settle(warm_up, served)
    fuzzer = Fuzzer(served.port, document, str(options.seed), deadline)
    await fuzzer.learn()
    began = time.monotonic()
    await fuzzer.run(options.first, options.requests)
    findings, took = fuzzer.findings, time.monotonic() - began
    findings.wrong += warm_up.findings.wrong
    peak = served.rss_bytes()
    if not await _wait_until_idle(served.port):
        findings.blame("at the end", "requests are still open a minute after the last one")
    memory = await _settle(fuzzer, served)
    _report(findings, took)
    _report_memory(floor, peak, memory)
    excess = memory.excess(floor, findings.kinds.total())
    if excess:
        findings.blame("memory", excess)
    return findings


def _report_memory(floor: Memory, peak_bytes: int, memory: Memory) -> None:
    print(f"  memory in use: {floor.used_bytes >> 10} kB after the warm-up, {memory.used_bytes >> 10} kB at the end")
    print(
        f"  memory of the process: {floor.held_bytes >> 20} MB after the warm-up, {peak_bytes >> 20} MB at the end, "
        f"{memory.held_bytes >> 20} MB once cleared"
    )


def _report(findings: Findings, took: float) -> None:
    count = findings.kinds.total()
    rate = f"{count / took:.0f} a second"
    print(f"  {count} requests in {took:.0f} s, {rate}; {findings.num_controls} proper ones between")
    print(f"  sent again, for an idle connection was just being closed: {findings.num_sent_again}")
    print(f"  kinds: {dict(findings.kinds.most_common())}")
    print(f"  answers: {dict(findings.statuses.most_common())}")


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds."""
    print(f"fuzz: {options.requests} requests from {options.first} on, --seed {options.seed}", flush=True)
    with serving(*SERVER, leak_bytes=options.leak) as served:
        findings = asyncio.run(_fuzz(served, options))
        for line in served.faults():
            findings.blame("the log", line)
    return not findings.wrong
