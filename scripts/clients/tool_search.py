"""Coding agents that load the tools of an MCP server when they need them.

A task with three loads, its continuation, the MCP server gone and back, and a second session.

The model's words stand in a script (`scripted_server.py`); the agent, its search for tools and the 40 tools of
`office_mcp.py` are real. No request may be refused. What was evaluated again is printed.
"""

import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.agents import SECONDS, AgentFailed, ClaudeCode, Codex
from scripts.clients.scripted_server import Reply, ScriptedEngine

OFFICE = Path(__file__).parent / "office_mcp.py"
DONE = Reply("Done.")


@dataclass(frozen=True)
class Run:
    """One start of the agent."""

    name: str
    arguments: Sequence[str]
    replies: Sequence[Reply]
    """By the number of results of tools that the prompt holds."""


class ToolSearcher(ABC):
    """How one agent is started, and how its model searches for tools and calls them."""

    name: str
    package: str
    program: str

    @abstractmethod
    def search(self, *tools: str) -> Reply:
        """Returns the call that loads tools."""

    @abstractmethod
    def call(self, tool: str) -> Reply:
        """Returns the call of a tool that was loaded."""

    @abstractmethod
    def start(self, url: str, model: str, said: str, *, continues: bool, has_office: bool) -> Sequence[str]:
        """Returns the arguments of one run."""

    @abstractmethod
    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """Returns the variables that point it at the server."""

    def runs(self, url: str, model: str) -> Sequence[Run]:
        """Returns a task with three loads, and what comes after it."""
        task = [
            *(self.search("ledger_lookup"), self.call("ledger_lookup")),
            *(self.search("mail_create", "calendar_create"), self.call("mail_create")),
            *(self.search("travel_report"), self.call("travel_report"), DONE),
        ]
        again = [*task[:-1], self.call("ledger_lookup"), DONE]

        def run(name: str, replies: Sequence[Reply], *, continues: bool = False, has_office: bool = True) -> Run:
            said = "Go on." if continues else "See to the ledger, the mail and the journey."
            return Run(name, self.start(url, model, said, continues=continues, has_office=has_office), replies)

        return [
            run("task", task),
            run("continued", again, continues=True),
            run("MCP server gone", [*again[:-1], DONE], continues=True, has_office=False),
            run("MCP server back", [*again[:-1], self.call("mail_create"), DONE], continues=True),
            run("second session", task),
        ]


class ClaudeTools(ToolSearcher):
    """Claude Code's ToolSearch, by `tool_reference`."""

    name, package, program = "claude-tools", ClaudeCode.package, ClaudeCode.program

    def search(self, *tools: str) -> Reply:
        """Names the tools."""
        names = ",".join(f"mcp__office__{tool}" for tool in tools)
        return Reply("I look for tools.", "ToolSearch", {"query": f"select:{names}", "max_results": 5})

    def call(self, tool: str) -> Reply:
        """Calls one by its whole name."""
        return Reply("I use it.", f"mcp__office__{tool}", {"id": "7"})

    def start(self, url: str, model: str, said: str, *, continues: bool, has_office: bool) -> Sequence[str]:
        """Prints the answer; every tool of the office is allowed."""
        servers = {"office": {"command": sys.executable, "args": [str(OFFICE)]}} if has_office else {}
        config = ["--mcp-config", json.dumps({"mcpServers": servers}), "--strict-mcp-config"]
        goes_on = ["--continue"] if continues else []
        return [*goes_on, *config, "--allowedTools", "mcp__office", "--output-format", "json", "--print", said]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """As for its other proof."""
        return ClaudeCode().environment(url, model)


class CodexTools(ToolSearcher):
    """Codex's `tool_search`, which it offers to models whose entry in the catalog says that they have it."""

    name, package, program = "codex-tools", Codex.package, Codex.program

    def search(self, *tools: str) -> Reply:
        """Searches by words."""
        words = " ".join(tools).replace("_", " ")
        return Reply("I look for tools.", "tool_search", {"query": words, "limit": len(tools)})

    def call(self, tool: str) -> Reply:
        """Calls one by its namespace and its name."""
        return Reply("I use it.", f"mcp__office__{tool}", {"id": "7"})

    def start(self, url: str, model: str, said: str, *, continues: bool, has_office: bool) -> Sequence[str]:
        """One task in the folder, which is a sandbox already; or the latest one goes on."""
        catalog = Path(__file__).parent / "programs" / "codex_models.json"
        office = f"mcp_servers.office={{command={json.dumps(sys.executable)}, args=[{json.dumps(str(OFFICE))}]}}"
        settings = [f'model_catalog_json="{catalog}"', *([office] if has_office else [])]
        given = list(Codex().arguments(url, model))
        before, rest = given[: given.index("exec") + 1], given[given.index("exec") + 1 : -1]
        goes_on = ["resume", "--last"] if continues else []
        return [*(part for setting in settings for part in ("-c", setting)), *before, *rest, *goes_on, said]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """Nothing: all stands on its command line."""
        return {}


SEARCHERS: Sequence[ToolSearcher] = (ClaudeTools(), CodexTools())


def prove(agent: ToolSearcher, program: Path, url: str, model: str, engine: ScriptedEngine) -> str:
    """Has the agent do its runs and returns a line of figures; raises AgentFailed."""
    engine.begin(())
    figures = []
    with tempfile.TemporaryDirectory(prefix="mlx-serve-client-") as name:
        home, work = Path(name) / "home", Path(name) / "work"
        home.mkdir()
        work.mkdir()
        for run in agent.runs(url, model):
            engine.replies, before = run.replies, len(engine.exchanges)
            said = _run(run, program, {**agent.environment(url, model), "HOME": str(home)}, work)
            asked = [exchange for exchange in engine.exchanges[before:] if not exchange.is_idle_work]
            lost = engine.num_lost(before)
            lengths = [len(exchange.prompt) for exchange in asked]
            evaluated = sum(lengths) - sum(exchange.cached_tokens for exchange in asked)
            figures.append(
                f"{run.name}: {len(asked)} requests of {lengths[0]} to {max(lengths)} tokens, "
                f"{evaluated} evaluated, {lost} of them again"
            )
            if engine.refusals or not any(exchange.said_all(run.replies[-1]) for exchange in asked):
                seen = "\n".join([*figures, *engine.refusals, said])
                raise AgentFailed(f"{run.name}: {len(engine.refusals)} requests were refused:\n{seen}")
    return "\n    ".join(["", *figures])


def _run(run: Run, program: Path, environment: Mapping[str, str], work: Path) -> str:
    variables = {"PATH": os.environ["PATH"], "NO_COLOR": "1", "NO_PROXY": "127.0.0.1", **environment}
    try:
        done = subprocess.run(
            [str(program), *run.arguments],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailed(f"{run.name}: it did not end within {SECONDS:g} s") from error
    return str(done.stdout[-2000:])
