"""Coding agents, headless: each edits a file in a temporary folder, with the scripted model behind the real server.

An agent is pointed at the server as `mlx-serve launch` does it. It gets a home of its own, no telemetry, no updates
and no address but the server's.
"""

import json
import os
import struct
import subprocess
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from scripts.clients.scripted_server import Reply, ScriptedEngine
from server.cli.ask import Served
from server.cli.launch import RECIPES, environment_of
from tests.support import tiny_vision

TASK = "Change the greeting in greeting.py from hello to goodbye."
BEFORE = 'print("hello")\n'
AFTER = 'print("goodbye")\n'
SECONDS = 180.0
"""An agent that takes longer has failed."""
REUSED_SHARE = 0.95
"""Least share of known prompt tokens that a proof must find restored."""
CONTEXT_TOKENS = 100_000
"""What agents are told that the model holds."""


def _target(url: str, model: str) -> Served:
    return Served(url, model, CONTEXT_TOKENS)


def launch_variables(name: str, url: str, model: str) -> dict[str, str]:
    """Returns what `mlx-serve launch` sets for an agent."""
    return environment_of(RECIPES[name], _target(url, model), {})


def _png() -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    image = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", image) + chunk(b"IEND", b"")


PNG = _png()
PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 72 72]>>endobj
trailer<</Root 1 0 R>>
%%EOF
"""


class AgentFailed(Exception):
    """An agent did not do its task; the message says what was seen."""


class Agent(ABC):
    """How one agent is installed, pointed at the server and made to do its task."""

    name: str
    package: str
    """Its package on npm."""
    program: str
    files: Mapping[str, bytes] = MappingProxyType({})
    """What the folder holds, besides the file to be edited."""
    sees = False
    """The agent is tried with an image and a model that sees images."""
    num_breaks = 0
    """Turns that evaluate over 64 tokens beyond new text, as docs/clients.md names them."""

    @abstractmethod
    def replies(self, file: Path) -> Sequence[Reply]:
        """Returns what the model says, turn by turn, so that `file` is edited."""

    @abstractmethod
    def arguments(self, url: str, model: str) -> Sequence[str]:
        """Returns the command line after the program's name."""

    def goes_on(self, url: str, model: str) -> Sequence[str] | None:
        """Returns the command line of a second run, which continues the first; None for none."""
        return None

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """Returns the variables that point it at the server."""
        return {}


class OpenCode(Agent):
    """opencode, by Chat Completions."""

    name, package, program = "opencode", "opencode-ai", "opencode"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Reads, edits, ends."""
        edit = {"filePath": str(file), "oldString": "hello", "newString": "goodbye"}
        return [
            Reply("I read the file.", "read", {"filePath": str(file)}),
            Reply("I change it.", "edit", edit),
            Reply("Done."),
        ]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """One task, without questions."""
        return ["run", TASK]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """A provider of its own, and nothing from outside."""
        launched = launch_variables("opencode", url, model)["OPENCODE_CONFIG_CONTENT"]
        config = {
            **json.loads(launched),
            "autoupdate": False,
            "share": "disabled",
            "permission": {"edit": "allow", "external_directory": "allow"},
        }
        return {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }


class ClaudeCode(Agent):
    """Claude Code, by Anthropic's Messages."""

    name, package, program = "claude", "@anthropic-ai/claude-code", "claude"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Reads, which it must do before an edit, edits, ends."""
        edit = {"file_path": str(file), "old_string": "hello", "new_string": "goodbye"}
        return [
            Reply("I read the file.", "Read", {"file_path": str(file)}),
            Reply("I change it.", "Edit", edit),
            Reply("Done."),
        ]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """One task, edits accepted."""
        return ["--print", TASK, "--permission-mode", "acceptEdits", "--output-format", "json"]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """The server in place of Anthropic's, for all sizes of model."""
        return {
            **launch_variables("claude", url, model),
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }


class ClaudeMedia(ClaudeCode):
    """Claude Code that reads a picture and a document, edits, and is continued with both in its history."""

    name = "claude-media"
    files = MappingProxyType({"picture.png": PNG, "paper.pdf": PDF})

    def replies(self, file: Path) -> Sequence[Reply]:
        """Reads them before it reads and edits the file."""
        media = [Reply("", "Read", {"file_path": str(file.with_name(name))}) for name in self.files]
        return [*media, *super().replies(file)]

    def goes_on(self, url: str, model: str) -> Sequence[str]:
        """Continues the session."""
        return ["--continue", *self.arguments(url, model)]


class ClaudeImage(ClaudeMedia):
    """Claude Code that reads a picture for a model that sees, edits, and is continued."""

    name, sees = "claude-image", True
    files = MappingProxyType({"picture.png": tiny_vision.image(1, 64, 48)})


class Codex(Agent):
    """Codex, by OpenAI's Responses."""

    name, package, program = "codex", "@openai/codex", "codex"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Edits by a shell command, ends."""
        command = f"sed -i s/hello/goodbye/ {file}"
        return [Reply("I change it.", "exec_command", {"cmd": command}), Reply("Done.")]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """One task in the folder, which is a sandbox already."""
        _, launched = RECIPES["codex"].start(_target(url, model))
        quiet = ["-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"]
        open_flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [*launched, "exec", *quiet, *open_flags, TASK]


class CodexPatch(Codex):
    """Codex with its tool for patches, whose input is a text: it offers that to models of its catalog only."""

    name = "codex-patch"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Edits by a patch, ends."""
        change = f"*** Update File: {file.name}\n@@\n-{BEFORE}+{AFTER}"
        patch = f"*** Begin Patch\n{change}*** End Patch\n"
        return [Reply("I change it.", "apply_patch", {"input": patch}), Reply("Done.")]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """The same, with a catalog that has the model."""
        catalog = Path(__file__).parent / "programs" / "codex_models.json"
        return ["-c", f'model_catalog_json="{catalog}"', *super().arguments(url, model)]


class CodexImage(CodexPatch):
    """Codex that looks at a picture for a model that sees, edits, and is continued."""

    name, sees = "codex-image", True
    files = ClaudeImage.files

    def replies(self, file: Path) -> Sequence[Reply]:
        """Looks at the picture before it edits."""
        looks = [Reply("", "view_image", {"path": str(file.with_name(name))}) for name in self.files]
        return [*looks, *Codex.replies(self, file)]

    def goes_on(self, url: str, model: str) -> Sequence[str]:
        """Continues the session."""
        *before, task = self.arguments(url, model)
        return [*before, "resume", "--last", task]


class QwenCode(Agent):
    """Qwen Code, by Chat Completions."""

    name, package, program = "qwen", "@qwen-code/qwen-code", "qwen"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Reads, which it must do before an edit, edits, ends."""
        edit = {"file_path": str(file), "old_string": "hello", "new_string": "goodbye"}
        return [
            Reply("I read the file.", "read_file", {"file_path": str(file)}),
            Reply("I change it.", "edit", edit),
            Reply("Done."),
        ]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """One task, without questions."""
        return ["--auth-type", "openai", "--yolo", TASK]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """The server in place of OpenAI's."""
        return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model}


class Copilot(Agent):
    """GitHub Copilot's command line, by Chat Completions; it is continued."""

    name, package, program = "copilot", "@github/copilot", "copilot"

    def replies(self, file: Path) -> Sequence[Reply]:
        """Edits by a shell command, ends."""
        command = {"command": f"sed -i s/hello/goodbye/ {file}", "description": "Changes the greeting"}
        return [Reply("I change it.", "bash", command), Reply("Done.")]

    def arguments(self, url: str, model: str) -> Sequence[str]:
        """One task, without questions."""
        return ["--allow-all-tools", "--allow-all-paths", "--no-color", "-p", TASK]

    def goes_on(self, url: str, model: str) -> Sequence[str]:
        """Continues the session."""
        return ["--continue", *self.arguments(url, model)]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """The server in place of GitHub's."""
        own = {"TYPE": "openai", "BASE_URL": f"{url}/v1", "API_KEY": "none"}
        return {"COPILOT_MODEL": model, **{f"COPILOT_PROVIDER_{name}": value for name, value in own.items()}}


AGENTS: Sequence[Agent] = (
    OpenCode(),
    ClaudeCode(),
    ClaudeMedia(),
    ClaudeImage(),
    Codex(),
    CodexPatch(),
    CodexImage(),
    QwenCode(),
    Copilot(),
)


class Installed(Protocol):
    """What npm has to know of an agent."""

    package: str
    program: str


def install(agent: Installed, folder: Path) -> Path:
    """Returns the agent's program, brought into `folder` by npm where it is not there yet."""
    place = folder / agent.program
    program = place / "node_modules" / ".bin" / agent.program
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(place), agent.package]
        subprocess.run(command, check=True)
    return program


def prove(agent: Agent, program: Path, url: str, model: str, engine: ScriptedEngine) -> str:
    """Has the agent do its task and returns a line of figures; raises AgentFailed."""
    with tempfile.TemporaryDirectory(prefix="mlx-serve-client-") as name:
        home, work = Path(name) / "home", Path(name) / "work"
        home.mkdir()
        work.mkdir()
        file = work / "greeting.py"
        file.write_text(BEFORE)
        for file_name, content in agent.files.items():
            (work / file_name).write_bytes(content)
        num_before = engine.stats().num_encoded
        engine.begin(agent.replies(file))
        output = run_agent(program, agent.arguments(url, model), agent.environment(url, model), home, work)
        if file.read_text() != AFTER:
            raise AgentFailed(f"the file was not edited; {len(engine.answered())} requests, and it said:\n{output}")
        if (more := agent.goes_on(url, model)) is not None:
            run_agent(program, more, agent.environment(url, model), home, work)
    if engine.refusals:
        raise AgentFailed(f"refused: {', '.join(engine.refusals)}")
    num_seen, num_encoded = len(engine.seen), engine.stats().num_encoded - num_before
    if (agent.sees and not num_seen) or num_encoded != num_seen:
        raise AgentFailed(f"prompts showed {num_seen} images, and {num_encoded} were encoded")
    share = engine.reused_share()
    if share < REUSED_SHARE:
        raise AgentFailed(f"{share:.1%} of the known prompt tokens were reused; {REUSED_SHARE:.0%} are wanted")
    longest = max(len(exchange.prompt) for exchange in engine.answered())
    counts = f"{len(engine.answered())} requests of up to {longest} tokens, {share:.1%} of what was known reused"
    return f"{counts}, {engine.num_again()} tokens evaluated beyond new text"


def run_agent(program: Path, arguments: Sequence[str], environment: Mapping[str, str], home: Path, work: Path) -> str:
    """Runs an agent to its end; returns the end of what it said. Raises AgentFailed."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", "NO_PROXY": "127.0.0.1"}
    try:
        done = subprocess.run(
            [str(program), *arguments],
            cwd=work,
            env={**variables, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
        raise AgentFailed(f"it did not end within {SECONDS:g} s, and said:\n{said}") from error
    return str(done.stdout[-2000:])
