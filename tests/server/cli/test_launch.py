"""Agents that are started against a server: what they are told, what is started for them, what is said at the end."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from server.app.config import ConfigError, ServerConfig, StartError
from server.cli import launch as commands
from server.cli.ask import Served, find_served
from server.cli.launch import RECIPES, as_shell, command_of, environment_of, savings_between, started_server
from server.cli.main import execute
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

DOCS = Path(__file__).parents[3] / "docs"
TARGET = Served("http://h:1", 'a "b"/c', 200_000, "key")
PLAIN = Served("http://h:1", "demo")


# ----------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", RECIPES)
def test_an_agent_is_told_the_server_the_model_and_the_key_and_no_secret_in_its_arguments(name: str) -> None:
    recipe = RECIPES[name]
    variables, arguments = recipe.start(TARGET)
    told = " ".join([*arguments, *filter(None, variables.values())])
    assert TARGET.url in told
    assert TARGET.model in told or json.dumps(TARGET.model) in told or json.dumps(f"mlx/{TARGET.model}") in told
    assert TARGET.key in environment_of(recipe, TARGET, {}).values() or f'"{TARGET.key}"' in told
    assert TARGET.key not in shlex.split(" ".join(map(shlex.quote, arguments)))
    assert command_of(recipe, TARGET, ["x", "-y"])[-2:] == ["x", "-y"]


def test_codex_reads_toml() -> None:
    for target in (TARGET, PLAIN):
        _, arguments = RECIPES["codex"].start(target)
        assert arguments[::2] == ["-c"] * (len(arguments) // 2)
        settings = tomllib.loads("\n".join(arguments[1::2]))
        assert settings["model"] == target.model and settings["model_provider"] == "mlx"
        assert settings["model_providers"]["mlx"]["base_url"] == "http://h:1/v1"
        assert ("env_key" in settings["model_providers"]["mlx"]) == bool(target.key)


def test_opencode_reads_json() -> None:
    content = environment_of(RECIPES["opencode"], TARGET, {})["OPENCODE_CONFIG_CONTENT"]
    provider = json.loads(content)["provider"]["mlx"]
    assert provider["models"] == {TARGET.model: {"limit": {"context": 200_000, "output": 32_000}}}
    assert provider["options"] == {"baseURL": "http://h:1/v1", "apiKey": "key"}


def test_a_key_for_anthropic_does_not_reach_this_server() -> None:
    seen = environment_of(RECIPES["claude"], TARGET, {"ANTHROPIC_API_KEY": "theirs", "HOME": "/h"})
    assert "ANTHROPIC_API_KEY" not in seen and seen["HOME"] == "/h"
    assert seen["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "200000"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in environment_of(RECIPES["claude"], PLAIN, {})


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_shown_does_the_same_in_a_shell(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    program = tmp_path / recipe.program
    code = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ANTHROPIC_API_KEY": "theirs"}
    line = as_shell(recipe, TARGET, ["a b", "$HOME"])
    shown = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
    arguments, seen = json.loads(shown)
    assert arguments == command_of(recipe, TARGET, ["a b", "$HOME"])[1:]
    assert environment_of(recipe, TARGET, environment).items() <= seen.items()
    assert name != "claude" or "ANTHROPIC_API_KEY" not in seen


def test_the_docs_name_every_agent() -> None:
    section = (DOCS / "cli.md").read_text(encoding="utf-8").partition("## `mlx-serve launch")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z]+)` \|", section, re.MULTILINE)) == set(RECIPES)


# ----------------------------------------------------------------------------------------------------- savings


def totals(cached: int, evaluated: int, seconds: float = 0.0) -> dict[str, float]:
    return {"cached_tokens": cached, "evaluated_tokens": evaluated, "saved_seconds": seconds, "requests": 7}


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (totals(100, 10, 5), "Nothing was asked of the server."),
        ({}, "Nothing was asked of the server."),
        (totals(100, 20, 5), "0 of 10 prompt tokens (0 %) were reused; 10 were evaluated."),
        (
            totals(9100, 1010, 95.0),
            "9 000 of 10 000 prompt tokens (90 %) were reused, which saved about 90 s; 1 000 were",
        ),
        (totals(720_100, 10, 7205.0), "which saved about 2 h 0 min"),
        (totals(150, 10, 5.5), "50 of 50 prompt tokens (100 %) were reused; 0 were"),
    ],
)
def test_only_what_happened_in_between_counts_and_is_one_line(after: dict[str, float], said: str) -> None:
    assert said in savings_between(totals(100, 10, 5), after)
    assert "\n" not in savings_between(totals(100, 10, 5), after)


# ----------------------------------------------------------------------------------------------------- servers

STUB = """
import http.server, os, sys
from pathlib import Path
from server.app import memory_budget as claims
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
claims.take(Path(sys.argv[1]), claims.Claim(os.getpid(), "m", 0, f"http://127.0.0.1:{server.server_port}"))
server.serve_forever()
"""


def test_a_server_is_started_and_ended(tmp_path: Path) -> None:
    said: list[str] = []
    with started_server([sys.executable, "-c", STUB, str(tmp_path / "run")], tmp_path / "run", said.append) as url:
        assert url.startswith("http://127.0.0.1:")
        assert find_served("m", [url], None) is None
    assert said == ["Ending the server …"]
    with pytest.raises(OSError, match="refused"):
        _connect(url)


def _connect(url: str) -> None:
    socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=120)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('loading'); sys.exit('mlx-serve: the disk is full')"]
    with pytest.raises(StartError, match=r"^the disk is full$"), started_server(command, tmp_path / "run", print):
        pass


# ---------------------------------------------------------------------------------------------------- the whole

AGENT = """#!{python}
import json, os, sys, urllib.request
messages = [{{"role": "user", "content": "Hi"}}]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "session_id": "agent", "messages": messages}}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/chat/completions"
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}}
for _ in range(2):
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def agent(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds a program `claude`, which asks something twice."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def url() -> Iterator[str]:
    with running(create_app(FakeEngine(Script(hit_tokens=2)), fake_model(), ServerConfig())) as address:
        yield address


def launch(
    client: str, model: str | None, key: str | None, arguments: list[str], urls: list[str], runtime: Path, shell: Any
) -> int:
    """The exit status of `mlx-serve launch` in a shell with the environment `shell`, where servers are at `urls`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "known_urls", lambda: urls)
        patch.setattr("server.app.memory_budget.runtime_folder", lambda environment: runtime)
        patch.setattr(os, "environ", shell)
        with pytest.raises(typer.Exit) as ended:
            commands.launch(client, arguments, model, False, key)
    return ended.value.exit_code


@pytest.mark.parametrize("status", [0, 3])
def test_an_agent_runs_against_a_server_and_its_status_is_ours(
    status: int, agent: dict[str, str], url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("claude", "tiny", None, [str(status)], [url], tmp_path, agent) == status
    captured = capfd.readouterr()
    assert captured.out == ""
    assert f"Asking the server at {url}.\n" in captured.err
    assert re.search(r"^4 of \d+ prompt tokens \(\d+ %\) were reused", captured.err, re.MULTILINE)


def test_an_agent_that_is_not_installed_starts_nothing(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        StartError, match=r"Claude Code is not installed, there is no claude: npm install .*npm comes with Node\.js"
    ):
        launch("claude", "tiny", None, [], [url], tmp_path, {"PATH": "/none", "XDG_CONFIG_HOME": "/none"})
    with pytest.raises(ConfigError, match="there is no client 'clod'"):
        launch("clod", None, None, [], [url], tmp_path, {})


def test_a_server_with_a_key_is_told(agent: dict[str, str], tmp_path: Path) -> None:
    app = create_app(FakeEngine(Script(hit_tokens=2)), fake_model(), ServerConfig(api_key="sesame"))
    with running(app) as url:
        with pytest.raises(StartError, match="asks for a key"):
            launch("claude", "tiny", None, ["0"], [url], tmp_path, agent)
        assert launch("claude", "tiny", "sesame", ["0"], [url], tmp_path, agent) == 0
        agent["MLX_SERVE_API_KEY"] = "sesame"
        assert launch("claude", "tiny", None, ["0"], [url], tmp_path, agent) == 0


def test_sigterm_ends_the_agent_and_the_server_that_was_started_for_it(
    agent: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, begun, main = tmp_path / "run", tmp_path / "begun", threading.get_ident()
    program = Path(agent["PATH"].partition(":")[0]) / "claude"
    tell = f"echo $$ $ANTHROPIC_BASE_URL > {begun}.new; mv {begun}.new {begun}"
    program.write_text(f"#!/bin/sh\n{tell}; exec sleep 600\n")
    monkeypatch.setattr(commands, "own_program", lambda _: [sys.executable, "-c", STUB, str(runtime)])

    def end_it() -> None:
        # The agent may run before the call that started it has returned; a signal then would leave it alone.
        deadline = time.monotonic() + 120
        while not begun.exists() or sys._current_frames()[main].f_code.co_name != "_try_wait":
            if time.monotonic() > deadline:
                return  # `launch` has failed, and the test with it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_it, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        launch("claude", "demo", None, [], ["http://127.0.0.1:1"], runtime, agent)
    assert ended.value.code == 143
    pid, url = begun.read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    with pytest.raises(OSError, match="refused"):
        _connect(url)


def test_showing_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["launch", "codex", "--show", "--model", "demo", "--", "exec", "--json"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("exec --json")
