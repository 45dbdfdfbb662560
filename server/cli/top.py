"""`mlx-serve top`: looks at a server again and again, and draws what it sees until the user leaves."""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live

from server.cli.asking import AskedServer
from server.cli.top_view import TopPage, lines, max_scroll
from server.errors import StartError

TIMEOUT_SECONDS = 5.0
PLAIN = TopPage("", width=100, height=60)


class Watched:
    """A server, asked over one connection."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._server = AskedServer(url, api_key, TIMEOUT_SECONDS)
        self._before: dict[str, Any] | None = None
        self.speeds: dict[str, float] = {}

    def stats(self) -> dict[str, Any]:
        """Returns what the server does; raises StartError where it does not say."""
        found: dict[str, Any] = self._server.get("/v1/stats")
        self._measure(found)
        return found

    def _measure(self, found: dict[str, Any]) -> None:
        """Notes how fast each request decodes, by how far it has come since the last look."""
        before = {one["id"]: one for one in self._before["requests"]} if self._before else {}
        passed = found["time"] - self._before["time"] if self._before else 0.0
        self.speeds = {
            one["id"]: (one["completion_tokens"] - before[one["id"]]["completion_tokens"]) / passed
            for one in found["requests"]
            if one["id"] in before and passed > 0
        }
        self._before = found


def show_once(url: str, api_key: str | None, *, as_json: bool) -> None:
    """Prints what the server does now; raises StartError where it does not say."""
    stats = Watched(url, api_key).stats()
    if as_json:
        typer.echo(json.dumps(stats, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    width = console.width if console.is_terminal else PLAIN.width
    for line in lines(stats, replace(PLAIN, url=url, width=width)):
        console.print(line, soft_wrap=True)


def watch(url: str, api_key: str | None, interval_seconds: float) -> None:
    """Draws until the user leaves; raises StartError where no server answers at first."""
    watched = Watched(url, api_key)
    stats: dict[str, Any] | None = watched.stats()
    console = Console(highlight=False)
    screen = TopPage(url, console.width, console.height)
    with _keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            screen = replace(screen, width=console.width, height=console.height, speeds=watched.speeds)
            live.update(Group(*lines(stats, screen)), refresh=True)
            due = time.monotonic() + interval_seconds
            while (left := due - time.monotonic()) > 0:
                key = read_key(left)
                if key in ("q", "Q"):
                    return
                screen = _moved(screen, key, max_scroll(stats))
                if key:
                    live.update(Group(*lines(stats, screen)), refresh=True)
            try:
                stats, screen = watched.stats(), replace(screen, problem=None)
            except StartError as error:
                screen = replace(screen, problem=str(error))


def _moved(screen: TopPage, key: str, last: int) -> TopPage:
    if key in ("h", "?"):
        return replace(screen, shows_help=not screen.shows_help)
    step = {"up": -1, "down": 1}.get(key, 0)
    return replace(screen, first=min(max(0, screen.first + step), last))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Has keys read as they are pressed; the terminal is as it was afterwards, whatever happens."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    # Ended from outside, a terminal must not stay without echo.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def read(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        typed = os.read(descriptor, 32).decode(errors="replace")
        return {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "": "q"}.get(typed, typed[:1])

    try:
        tty.setcbreak(descriptor)
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
