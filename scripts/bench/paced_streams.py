"""A server that says what it was told to say, one frame a stream each so many seconds, and does nothing else.

Usage: python -m scripts.bench.paced_streams

Reads one JSON line from standard input, `{"frames": [text, …], "seconds": s}`, prints its port, and answers every
request with these frames, `seconds` apart. What a client costs beside an engine can be measured with it: it is the
least that any server would cost.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from scripts.bench.common import ROOT

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def paced_streams(frames: Sequence[str], seconds: float) -> AsyncIterator[int]:
    """Serves `frames`, one each `seconds`, in a process of its own while the block runs; yields its port."""
    command = (sys.executable, "-m", "scripts.bench.paced_streams")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"frames": frames, "seconds": seconds}).encode() + b"\n")
        await process.stdin.drain()
        yield int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class _Clock:
    """Wakes all streams at once, as an engine does that steps for all of them."""

    def __init__(self) -> None:
        self._turn = asyncio.Event()

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            self._turn.set()
            self._turn = asyncio.Event()

    async def wait(self) -> None:
        await self._turn.wait()


async def _serve(frames: Sequence[str], seconds: float) -> None:
    clock = _Clock()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        await reader.readexactly(int(fields.get(b"content-length", 0)))
        writer.write(_HEAD)
        for frame in frames:
            await clock.wait()
            writer.write(frame.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    print(server.sockets[0].getsockname()[1], flush=True)
    await clock.run(seconds)


def main() -> None:
    """Serves until it is ended."""
    order = json.loads(sys.stdin.readline())
    asyncio.run(_serve(order["frames"], order["seconds"]))


if __name__ == "__main__":
    main()
