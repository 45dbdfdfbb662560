"""Runs an application on a real uvicorn, on a free port of the loopback address, in a thread."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from server.api.connections import HttpConfig, Limits

START_SECONDS = 120.0


class QuickServer(uvicorn.Server):
    """Looks ten times as often whether it should end."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter // 10):
            counter += 1
            await asyncio.sleep(0.01)


@contextmanager
def running(app: ASGIApp, limits: Limits = Limits(), port: int = 0) -> Iterator[str]:  # noqa: B008 - frozen
    """Serves `app` while the block runs; gives its base address, without a slash at the end. Port 0 is a free one."""
    config = HttpConfig(app, limits, host="127.0.0.1", port=port, timeout_graceful_shutdown=2)
    server = QuickServer(config)
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{_port_of(server, thread)}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


def _port_of(server: uvicorn.Server, thread: threading.Thread) -> int:
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        assert thread.is_alive(), "the server ended at its start"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
