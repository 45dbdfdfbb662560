"""`mlx-serve top`: a server's `/v1/stats`, drawn for a terminal of any size."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import typer
from rich.cells import set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from models.texts import grouped, size_text
from server.app.config import StartError
from server.app.log_events import one_line, percent_text, printable, seconds_text
from server.cli.ask import AskedServer, asking
from server.cli.keys import handling, keys_unseen, leave
from server.cli.options import Json, print_json

BAR = 20
HELP = (
    "q, Ctrl-C      leave",
    "up, down       move through the requests",
    "h              this page, and back",
    "",
    "saved          prompt tokens that were restored, hence not evaluated again,",
    "               and the seconds that evaluating them would have taken",
    "live, stored   state of past tokens in slots, and kept beside them",
    "again          prompt tokens that were evaluated again, by why; the console",
    "               and mlx-serve doctor name the words at fault",
)


@dataclass(frozen=True)
class TopPage:
    """What is shown besides the figures."""

    url: str
    width: int
    height: int
    first: int = 0
    """Requests scrolled past."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second, by request."""
    problem: str | None = None
    shows_help: bool = False


def lines(stats: Mapping[str, Any], screen: TopPage) -> list[Text]:
    """As many lines as fit."""
    up = f" {stats['version']}  up {seconds_text(stats['uptime_seconds'])}  {stats['status']}"
    shown = [Text.assemble(("mlx-serve", "bold"), f"{up}  {screen.url}")]
    if screen.problem is not None:
        shown.append(Text(f"trying again: {screen.problem}", "red"))
    if screen.shows_help:
        shown += [Text(""), *map(Text, HELP)]
    else:
        shown += _body(stats, screen, screen.height - len(shown))
    for line in shown:
        line.truncate(screen.width, overflow="ellipsis")
    return shown[: screen.height]


def _body(stats: Mapping[str, Any], screen: TopPage, height: int) -> list[Text]:
    rows = [*_totals(stats), Text(""), *chain.from_iterable(map(_model, stats["models"]))]
    rows += (Text(f"{printable(one['id'])} is being loaded: {printable(one['step'])}") for one in stats["loading"])
    if not stats["models"] and not stats["loading"]:
        rows.append(Text("no model is loaded"))
    rows.append(Text(""))
    again = _again(stats)
    room = max(1, height - len(rows) - len(again) - 1)
    return [*rows, *_requests(stats["requests"], screen, room), *again]


def _totals(stats: Mapping[str, Any]) -> Iterator[Text]:
    totals = stats["totals"]
    share = percent_text(totals["cached_tokens"], totals["prompt_tokens"])
    saved = f"{grouped(totals['cached_tokens'])} tokens ({share})"
    yield Text.assemble("saved ", (saved, "bold"), f", {seconds_text(totals['saved_seconds'])}")
    ended = f"requests {grouped(totals['requests'])}, failed {totals['failed']}, left early {totals['cancelled']}"
    yield Text(f"{ended}, sessions {stats['sessions']}")


def _model(model: Mapping[str, Any]) -> Iterator[Text]:
    slots, cache = model["slots"], model["cache"]
    busy = slots["prefilling"] + slots["decoding"]
    said = f"  {busy} of {slots['total']} slots, {model['waiting']} wait"
    yield Text.assemble((printable(model["id"]), "bold"), said)
    budget = cache["budget_bytes"]
    sizes = [(cache["live_bytes"], "green"), (cache["stored_bytes"], "blue")]
    said = f" live {size_text(cache['live_bytes'])}, stored {size_text(cache['stored_bytes'])} of {size_text(budget)}"
    yield Text.assemble("memory ", gauge(sizes, budget, BAR), said)
    if model["disk_budget_bytes"] is not None:
        disk_bytes, budget = cache["disk_bytes"], model["disk_budget_bytes"]
        said = f" {size_text(disk_bytes)} of {size_text(budget)}"
        yield Text.assemble("disk   ", gauge([(disk_bytes, "yellow")], budget, BAR), said)


def _requests(requests: Sequence[Mapping[str, Any]], screen: TopPage, room: int) -> Iterator[Text]:
    if not requests:
        yield Text("no request is running", "dim")
        return
    yield Text(_row("SLOT", "SESSION", "PHASE", "PROMPT", "OUTPUT", "TIME"), "bold")
    order = sorted(requests, key=lambda request: (request["slot"] is None, request["slot"] or 0, request["received"]))
    first = min(screen.first, max(0, len(order) - 1))
    shown = order[first : first + max(1, room - 1)]
    for request in shown:
        yield Text(_request(request, screen.speeds.get(request["id"])))
    left = len(order) - first - len(shown)
    if first or left:
        yield Text(f"{first} above, {left} below: up and down move", "dim")


def _request(request: Mapping[str, Any], speed: float | None) -> str:
    done = request["cached_tokens"] + request["evaluated_tokens"]
    is_prefill = request["phase"] == "prefill"
    prompt = f"{percent_text(done, request['prompt_tokens'])} of " if is_prefill else ""
    output = grouped(request["completion_tokens"]) + (f" {speed:.0f}/s" if speed and not is_prefill else "")
    slot, session = "-" if request["slot"] is None else str(request["slot"]), printable(request["session_id"] or "-")
    prompt += grouped(request["prompt_tokens"])
    return _row(slot, session, request["phase"], prompt, output, seconds_text(request["seconds"]))


def _row(slot: str, session: str, phase: str, prompt: str, output: str, time: str) -> str:
    return f"{slot:>4} {set_cell_size(one_line(session, 24), 24)} {phase:<8} {prompt:>14} {output:>14} {time:>8}"


def _again(stats: Mapping[str, Any]) -> list[Text]:
    lost = ((miss["reason"].replace("_", " "), miss["tokens"]) for miss in stats["totals"]["misses"])
    said = ", ".join(f"{reason} {grouped(tokens)}" for reason, tokens in lost if tokens)
    return [Text(""), Text(f"again  {said}")] if said else []


def gauge(parts: Sequence[tuple[float, str]], whole: float, width: int) -> Text:
    """A bar of `width` columns; any part above 0 fills at least one."""
    bar, used = Text("["), 0
    for amount, style in parts:
        columns = min(width - used, round(width * amount / whole) if whole else 0)
        if amount and not columns and used < width:
            columns = 1
        bar.append("|" * columns, style)
        used += columns
    return bar.append(" " * (width - used)).append("]")


TIMEOUT_SECONDS = 5.0


def speeds_between(before: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second of each request that both figures have."""
    passed = stats["time"] - before["time"]
    tokens = {request["id"]: request["completion_tokens"] for request in before["requests"]}
    return {
        request["id"]: (request["completion_tokens"] - tokens[request["id"]]) / passed
        for request in stats["requests"]
        if request["id"] in tokens and passed > 0
    }


@asking()
def top(
    server: AskedServer,
    interval: Annotated[float, typer.Option(min=0.2, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once")] = False,
    as_json: Json = False,
) -> None:
    """Draws a server's figures. Raises StartError."""
    server.timeout_seconds = TIMEOUT_SECONDS
    stats = server.get("/v1/stats")
    console = Console(highlight=False)
    if as_json:
        print_json(stats)
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in lines(stats, TopPage(server.url, console.width if console.is_terminal else 100, height=60)):
            console.print(line, soft_wrap=True)
    else:
        _watch(console, server, stats, interval)


def _watch(console: Console, server: AskedServer, stats: Mapping[str, Any], interval_seconds: float) -> None:
    page, due = TopPage(server.url, console.width, console.height), time.monotonic() + interval_seconds
    # Ended from outside, the terminal must not stay without echo.
    ended_in_order = handling(leave, signal.SIGTERM)
    with ended_in_order, keys_unseen(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            page = replace(page, width=console.width, height=console.height)
            live.update(Group(*lines(stats, page)), refresh=True)
            key = _read_key(max(due - time.monotonic(), 0))
            if key in ("q", "Q"):
                return
            page = _after(key, page, len(stats["requests"]))
            if time.monotonic() < due:
                continue
            try:
                before, stats = stats, server.get("/v1/stats")
                page = replace(page, problem=None, speeds=speeds_between(before, stats))
            except StartError as error:
                page = replace(page, problem=str(error))
            due = time.monotonic() + interval_seconds


def _after(key: str, page: TopPage, num_requests: int) -> TopPage:
    first = page.first + {"up": -1, "down": 1}.get(key, 0)
    is_help = page.shows_help ^ (key in ("h", "?"))
    return replace(page, first=min(max(0, first), max(0, num_requests - 1)), shows_help=is_help)


def _read_key(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return ""
    typed = os.read(sys.stdin.fileno(), 32).decode(errors="replace")
    return {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "": "q"}.get(typed, typed[:1])
