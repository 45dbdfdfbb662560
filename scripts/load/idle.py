"""What a server costs that nobody asks anything, with many connections kept open."""

import argparse
import asyncio
import contextlib
import time

from scripts.load.served import Served, serving
from scripts.load.wire import Wire, request_bytes

NUM_CONNECTIONS = 100
SECONDS = 20.0
MAX_SHARE = 0.03
"""Of one core."""


async def _measure(served: Served) -> float:
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(await Wire.open(served.port)) for _ in range(NUM_CONNECTIONS)]
        for wire in wires:
            await _ask_health(wire)
        await asyncio.sleep(1)
        before, began = served.cpu_seconds(), time.monotonic()
        await asyncio.sleep(SECONDS)
        share = (served.cpu_seconds() - before) / (time.monotonic() - began)
        for wire in wires:
            await _ask_health(wire)
        return share


async def _ask_health(wire: Wire) -> None:
    await wire.send(request_bytes("GET", "/health"))
    await wire.receive()


def run(options: argparse.Namespace) -> bool:
    """Runs the proof; whether it holds. Raises NoAnswer where a connection was closed meanwhile."""
    print(f"idle: {NUM_CONNECTIONS} connections kept open for {SECONDS:g} s", flush=True)
    with serving("--client-timeout", "600") as served:
        share = asyncio.run(_measure(served))
    print(f"  {share:.2%} of a core")
    return share <= MAX_SHARE
