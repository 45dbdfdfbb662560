"""`mlx-serve top` and `mlx-serve cache tree`: what they show at any size, and how they behave in a terminal."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from server.api.app import create_pool_app
from server.app.config import ServerConfig, StartError
from server.app.service import open_service
from server.cli import ask
from server.cli.cache import tree_lines
from server.cli.main import app
from server.cli.top import BAR, TopPage, _after, gauge, lines, speeds_between
from server.pool.pool import ModelPool
from tests.server.cli.test_chat import Terminal
from tests.support import forked
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 12}


def request(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"r{number}", "model": "m", "endpoint": "/v1/chat/completions", "namespace": "", "key": None,
        "session_id": f"session {number}", "phase": "decode", "slot": number, "received": 1.0 + number,
        "seconds": 4.5,
        "prompt_tokens": 1200, "cached_tokens": 300, "evaluated_tokens": 300, "completion_tokens": 40,
        "tier": "memory",
        **fields,
    }  # fmt: skip


def stats(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    cache = {"nodes": 3, "stored_bytes": 10**9, "live_bytes": 1, "budget_bytes": 4 * 10**9, "disk_bytes": 5 * 10**8}
    model = {
        "id": "m", "waiting": 1, "open_requests": 2, "preemptions": 0, "cache": cache, "disk_budget_bytes": 10**9,
        "slots": {"total": 8, "prefilling": 1, "decoding": 2, "idle": 5},
    }  # fmt: skip
    totals = {
        "requests": 12, "succeeded": 9, "failed": 1, "cancelled": 2, "prompt_tokens": 20_000, "cached_tokens": 15_000,
        "evaluated_tokens": 5000, "completion_tokens": 300, "lost_tokens": 700, "saved_seconds": 61.5,
        "misses": [{"reason": "history_edited", "count": 1, "tokens": 700}, {"reason": "cold", "count": 2,
        "tokens": 0}],
    }  # fmt: skip
    return {
        "object": "stats", "time": 100.0, "status": "ok", "version": "1.2.3", "uptime_seconds": 4000.0,
        "scope": "all",
        "models": [model], "loading": [], "requests": list(requests), "totals": totals, "sessions": 4, **fields,
    }  # fmt: skip


def shown(found: Any, **screen: Any) -> list[str]:
    return [line.plain for line in lines(found, TopPage("http://here", **{"width": 80, "height": 24, **screen}))]


def test_everything_is_there_on_a_common_terminal() -> None:
    text = "\n".join(shown(stats(request(0), request(1, phase="prefill")), speeds={"r0": 41.7}))
    for part in (
        "1.2.3", "up 1 h 7 min", "15 000 tokens (75 %)", "62 s", "failed 1, left early 2", "3 of 8 slots, 1 wait",
        "live 1 byte", "stored 1.0 GB of 4.0 GB", "500.0 MB of 1.0 GB", "session 0", "40 42/s",
        "50 % of 1 200", "again",
        "history edited 700",
    ):  # fmt: skip
        assert part in text, part
    assert "cold" not in text, "nothing was lost by it"


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_no_line_is_wider_than_the_terminal_and_no_page_higher(width: int, height: int) -> None:
    many = [request(n, session_id="名前" * 30, slot=None if n > 8 else n) for n in range(100)]
    for found in (stats(*many), stats()):
        for shows_help in (False, True):
            page = shown(found, width=width, height=height, shows_help=shows_help, problem="no server answers")
            assert len(page) <= height
            assert all(cell_len(line) <= width for line in page)


def test_requests_are_scrolled_through_and_those_that_wait_come_last() -> None:
    many = stats(*[request(n) for n in range(30)], request(99, slot=None, phase="waiting"))
    first, later = shown(many), shown(many, first=10)
    assert any("session 0 " in line for line in first) and not any("session 0 " in line for line in later)
    assert any("session 10 " in line for line in later) and any("above" in line for line in later)
    assert any("session 99" in line for line in shown(many, first=30, height=40))


def test_arrows_move_through_the_requests_and_not_beyond() -> None:
    page = TopPage("http://here", 80, 24)
    assert [_after(key, page, 2).first for key in ("up", "down", "x")] == [0, 1, 0]
    page = _after("down", page, 2)
    assert [_after(key, page, 2).first for key in ("up", "down")] == [0, 1]


def test_nothing_that_is_shown_moves_the_cursor() -> None:
    hostile = stats(request(0, session_id="\x1b[2J\x1b]0;owned\x07"), loading=[{"id": "\x1b[H", "step": "\x9b5n"}])
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(shown(hostile)))
    cache = tree([edge(1, None, 0, 9, preview="\x1b[2Jhello\nyou")])
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(line.plain for line in tree_lines(cache)))


def test_a_gauge_shows_the_smallest_amount_and_no_more_than_all() -> None:
    assert gauge([(0, "x"), (0, "x")], 100, BAR).plain == "[" + " " * BAR + "]"
    assert gauge([(1, "x")], 10**9, BAR).plain.count("|") == 1
    assert gauge([(80, "x"), (90, "x")], 100, BAR).plain == "[" + "|" * BAR + "]"
    assert gauge([(5, "x")], 0, BAR).plain.count("|") == 1


def edge(number: int, parent: int | None, start: int, stop: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": number, "parent": parent, "start": start, "stop": stop, "tokens": stop - start, "bytes": 2_000_000,
        "tier": "memory", "preview": f"words {number}", "restore_point": None, "pinned": False, "uses": 0,
        "disk_tokens": 0, "memory_tokens": 0, "memory_id": None, **fields,
    }  # fmt: skip


def tree(
    nodes: list[dict[str, Any]], disk_nodes: list[dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    held = {"span": 10, "window": 0, "point": 0, "live": 0, "disk": 7}
    return {
        "model": "m", "bytes": held, "num_tokens": 60, "num_nodes": len(nodes), "nodes": nodes,
        "disk_nodes": disk_nodes or [], "truncated": False, "namespace": "", "namespaces": None, **fields,
    }  # fmt: skip


def test_the_tree_has_a_line_for_each_edge() -> None:
    nodes = [
        edge(1, None, 0, 30, uses=3, restore_point="user_start", disk_tokens=30),
        edge(2, 1, 30, 40, tier="live", pinned=True),
        edge(3, 1, 30, 50),
        edge(4, None, 0, 9),
    ]
    on_disk = [edge(1, None, 0, 30, memory_tokens=30), edge(2, 1, 30, 35), edge(3, 2, 35, 45)]
    assert [line.plain for line in tree_lines(tree(nodes, on_disk))] == [
        "m  60 tokens on 4 edges, 10 bytes in memory, 7 bytes on disk",
        "├ 30 memory 2.0 MB  words 1  (restored 3×, user start, on disk too)",
        "│ ├ 10 live  words 2  (pinned)",
        "│ └ 20 memory 2.0 MB  words 3",
        "└ 9 memory 2.0 MB  words 4",
        "on disk only",
        "└ 5 disk 2.0 MB  words 2",
        "  └ 10 disk 2.0 MB  words 3",
    ]
    assert [line.plain for line in tree_lines(tree(nodes), 1)][1:] == [
        "├ 30 memory 2.0 MB  words 1  (restored 3×, user start, on disk too)",
        "│ … 2 more",
        "└ 9 memory 2.0 MB  words 4",
    ]
    others = [{"namespace": name, "num_tokens": 1000 + at} for at, name in enumerate(("", "k\x1b", *"abcdefghi"))]
    assert [line.plain for line in tree_lines(tree([], namespaces=others))][-1].startswith(
        "other namespaces, for --namespace: k\\x1b, 1 001 tokens; a, 1 002 tokens; b,"
    )
    assert [line.plain for line in tree_lines(tree([], namespaces=others))][-1].endswith("; and 2 more")
    assert len(list(tree_lines(tree([], namespaces=others[:1])))) == 2
    assert [line.plain for line in tree_lines(tree([], truncated=True))][1:] == [
        "nothing is held", "there is more: --limit shows up to 10000 edges",
    ]  # fmt: skip


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_scripts_get_what_the_server_says() -> None:
    with running(create_app(FakeEngine(), fake_model(), ServerConfig())) as address:
        httpx.post(f"{address}/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        found = json.loads(run("top", address, "--once", "--json").output)
        assert found["object"] == "stats" and found["totals"]["requests"] == 1
        text = run("top", f"{address}/").output
        assert "requests 1, failed 0" in text and "no request is running" in text and "\x1b" not in text


@pytest.mark.parametrize("command", [("top",), ("cache", "tree")])
def test_what_is_wrong_is_one_sentence(command: tuple[str, ...]) -> None:
    gone = run(*command, "http://127.0.0.1:9", "--json")
    assert isinstance(gone.exception, StartError) and "no server answers at http://127.0.0.1:9" in str(gone.exception)
    with running(create_app(FakeEngine(), fake_model(), ServerConfig(api_key="sesame"))) as address:
        refused = run(*command, address, "--json")
        assert isinstance(refused.exception, StartError) and "--api-key" in str(refused.exception)
        assert run("top", address, "--once", "--json", "--api-key", "sesame").exit_code == 0


def test_the_speed_is_that_between_two_looks() -> None:
    before = stats(request(0, completion_tokens=10), time=10.0)
    assert speeds_between(before, stats(request(0, completion_tokens=50), request(1), time=12.0)) == {"r0": 20.0}
    assert speeds_between(before, before) == {}


@contextmanager
def demo() -> Iterator[str]:
    config = ServerConfig(models=("demo",), cache_memory_bytes=1 << 26)
    service = open_service(config)
    service.engine.start()
    try:
        with running(create_pool_app(ModelPool.of(service.opened), config)) as address:
            yield address
    finally:
        service.engine.stop()


def test_the_tree_of_a_running_server_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with demo() as address:
        for text in ("My name is Ada.", "My name is Bob."):
            body = {"messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 1}
            assert httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).status_code == 200
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(ask, "DEFAULT_URL", address)
        for _ in range(40):  # an idle engine still evaluates the replies
            printed = run("cache", "tree", address).output
            if run("cache").output == printed:
                break
        assert run("cache").output == run("cache", address).output == printed
        assert "You are a careful assistant" in printed and "├ " in printed and "└ " in printed
        assert "restored 1×" in printed
        assert json.loads(run("cache", "--json", "--limit", "1").output)["truncated"]
        wrong = run("cache", "tree", address, "--model", "nobody")
        assert isinstance(wrong.exception, StartError) and "nobody" in str(wrong.exception)


@contextmanager
def top(address: str) -> Iterator[Terminal]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        screen = Terminal("top", address, "--interval", "0.2", imported=forked.COMMANDS)
    with closing(screen):
        screen.wait_for("no request is running")
        yield screen


@pytest.mark.parametrize("how", ["q", "Ctrl-C", "SIGTERM"])
def test_it_is_watched_and_left(how: str) -> None:
    app_ = create_app(FakeEngine(Script(step_seconds=0.05)), fake_model(), ServerConfig())
    with running(app_) as address, top(address) as screen:
        screen.type("h")
        at = screen.wait_for("restored, hence not evaluated again")
        screen.type("h")
        screen.wait_for("saved", at)
        if how == "q":
            screen.type("q")
        else:
            screen.process.send_signal({"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}[how])
        screen.wait_for("\x1b[?1049l", at)
        assert screen.process.wait(120) == {"q": 0, "Ctrl-C": 130, "SIGTERM": 143}[how]
        assert screen.is_as_before()


def test_a_server_that_goes_is_waited_for() -> None:
    with ExitStack() as stack:
        with running(create_app(FakeEngine(), fake_model(), ServerConfig())) as address:
            screen = stack.enter_context(top(address))
        screen.wait_for("trying again")
        assert screen.process.poll() is None
