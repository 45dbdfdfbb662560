"""A thousand clients that never finish their request, idle or sending a byte at times, and a new one is served."""

import argparse
import asyncio
import contextlib
import http.client
import json
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from scripts.load.served import Served, serving
from scripts.load.wire import ANSWER_SECONDS, NoAnswer, Wire

NUM_CLIENTS = 1000
CLIENT_SECONDS = 5.0
"""What the server gives a client; it looks four times as often."""
SECONDS = 15.0
"""How long half-open connections are opened again as they are closed."""
NUM_FILES = (4096, 256)
"""What the server may open: enough for all of them, and for a quarter."""
DRIP_SECONDS = 0.5
MAX_WAIT_SECONDS = 5.0
"""Longest wait of a new client, on a machine that is busy with the thousand others as well."""
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
OPENINGS = {"idle": b"", "half a head": _HEAD, "half a body": _HEAD + b'Content-Length: 100000\r\n\r\n{"messages": ['}
_JSON = {"Content-Type": "application/json"}
_HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@dataclass
class Siege:
    """What came of the half-open connections and of the new clients."""

    lives: list[float] = field(default_factory=list)
    """Seconds until the server closed each."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each new client took."""
    refusals: Counter[str] = field(default_factory=Counter)
    most_open: int = 0
    num_open: int = 0


async def _hold(port: int, kind: str, siege: Siege, deadline: float) -> None:
    """Opens a connection and never finishes; does it again as long as there is time."""
    while time.monotonic() < deadline:
        began = time.monotonic()
        with contextlib.suppress(OSError, NoAnswer):
            async with await Wire.open(port) as wire, _counted(siege):
                await _drip(wire, kind)
                siege.lives.append(time.monotonic() - began)


@contextlib.asynccontextmanager
async def _counted(siege: Siege) -> AsyncIterator[None]:
    siege.num_open += 1
    siege.most_open = max(siege.most_open, siege.num_open)
    try:
        yield
    finally:
        siege.num_open -= 1


async def _drip(wire: Wire, kind: str) -> None:
    """Sends a beginning, then a byte now and then unless it is idle, until the server closes."""
    await wire.send(OPENINGS[kind])
    closed = asyncio.ensure_future(wire.read_to_end())
    try:
        while not closed.done():
            await asyncio.wait((closed,), timeout=DRIP_SECONDS)
            if kind != "idle":
                await wire.send(b"x")
    finally:
        closed.cancel()


def _new_clients(port: int, siege: Siege, deadline: float) -> None:
    """Has one client after the other ask something, each on a connection of its own.

    On a thread of its own: between connecting and sending it must not wait for the thousand others.
    """
    while time.monotonic() < deadline:
        began = time.monotonic()
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)) as client:
                client.request("POST", "/v1/chat/completions", json.dumps(_HI), _JSON)
                status = client.getresponse().status
            if status != 200:
                siege.refusals[str(status)] += 1
        except (OSError, http.client.HTTPException) as error:
            siege.refusals[type(error).__name__] += 1
        siege.waits.append(time.monotonic() - began)
        time.sleep(0.2)


async def _besiege(port: int) -> Siege:
    siege = Siege()
    deadline = time.monotonic() + SECONDS
    kinds = list(OPENINGS)
    holders = (_hold(port, kinds[index % len(kinds)], siege, deadline) for index in range(NUM_CLIENTS))
    await asyncio.gather(asyncio.to_thread(_new_clients, port, siege, deadline), *holders)
    return siege


def _holds(siege: Siege, served: Served) -> bool:
    waits, lives = sorted(siege.waits), sorted(siege.lives)
    print(
        f"  at most {siege.most_open} half-open at once; {len(lives)} closed by the server, after "
        f"{lives[len(lives) // 2]:.1f} s in the median and {lives[-1]:.1f} s at most"
    )
    print(
        f"  {len(waits)} new clients: {sum(siege.refusals.values())} not served {dict(siege.refusals)}; "
        f"{waits[len(waits) // 2]:.2f} s in the median, {waits[-1]:.2f} s at most"
    )
    return not siege.refusals and waits[-1] <= MAX_WAIT_SECONDS and not served.faults()


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds."""
    _allow_files()
    results = [_run_with(num_files) for num_files in ([options.files] if options.files else NUM_FILES)]
    return all(results)


def _run_with(num_files: int) -> bool:
    print(f"slow clients: {NUM_CLIENTS} at once, a server that may open {num_files} files", flush=True)
    with serving("--client-timeout", f"{CLIENT_SECONDS:g}", num_files=num_files) as served:
        return _holds(asyncio.run(_besiege(served.port)), served)


def _allow_files() -> None:
    """Has this process open as many connections as it needs."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * NUM_CLIENTS + 200), most))
