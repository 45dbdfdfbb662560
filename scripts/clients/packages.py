"""Client packages of Python and Node, each by a program of ours that uses it against the built-in model."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"
SECONDS = 600.0
"""A program that takes longer has failed."""


class PackageFailed(Exception):
    """A program failed; the message is what it said."""


@dataclass(frozen=True)
class Package(ABC):
    """A client package, and the program that proves it: `programs/<name>_client`."""

    name: str
    requirements: Sequence[str]

    @abstractmethod
    def install(self, folder: Path) -> Sequence[str]:
        """Returns the command that runs the program, once its packages are in `folder`."""


class PythonPackage(Package):
    """Packages of Python, in a virtual environment of their own."""

    def install(self, folder: Path) -> Sequence[str]:
        """By uv, where the environment is not there yet."""
        place = folder / self.name
        python = place / "bin" / "python"
        if not (place / "ready").exists():
            uv = [sys.executable, "-m", "uv", "--quiet"]
            subprocess.run([*uv, "venv", "--clear", str(place)], check=True)
            subprocess.run([*uv, "pip", "install", "--python", str(python), *self.requirements], check=True)
            (place / "ready").touch()
        return [str(python), str(PROGRAMS / f"{self.name}_client.py")]


class NodePackage(Package):
    """Packages of Node, in a folder of their own beside a link to the program."""

    def install(self, folder: Path) -> Sequence[str]:
        """By npm, where the folder is not there yet."""
        place = folder / self.name
        if not (place / "ready").exists():
            place.mkdir(parents=True, exist_ok=True)
            command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(place)]
            subprocess.run([*command, *self.requirements], check=True)
            (place / "ready").touch()
        # Node looks for packages beside the file itself, hence a copy.
        program = place / f"{self.name}_client.mjs"
        program.write_text((PROGRAMS / program.name).read_text())
        return ["node", str(program)]


PACKAGES: Sequence[Package] = (
    PythonPackage("langchain_openai", ["langchain-openai"]),
    PythonPackage("langchain_ollama", ["langchain-ollama"]),
    PythonPackage("langchain_anthropic", ["langchain-anthropic"]),
    PythonPackage("litellm", ["litellm", "mcp"]),
    PythonPackage("pydantic_ai", ["pydantic-ai-slim[openai]"]),
    PythonPackage("instructor", ["instructor"]),
    PythonPackage("openai_agents", ["openai-agents"]),
    NodePackage("openai_node", ["openai"]),
    NodePackage("ollama_node", ["ollama"]),
    NodePackage("anthropic_node", ["@anthropic-ai/sdk"]),
    NodePackage("ai_sdk", ["ai", "@ai-sdk/openai-compatible", "zod"]),
    NodePackage("ai_sdk_anthropic", ["ai", "@ai-sdk/anthropic", "zod"]),
)

BENCHMARKS: Sequence[Package] = (
    PythonPackage("llama_benchy", ["llama-benchy"]),
    PythonPackage("aiperf", ["aiperf"]),
    PythonPackage("lm_eval", ["lm-eval[api]"]),
)
"""Programs that measure servers. They take minutes, and run only where they are named."""


def prove(package: Package, command: Sequence[str], url: str) -> None:
    """Runs the program against a server; raises PackageFailed."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))},
        "BASE_URL": url,
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    output = subprocess.PIPE
    try:
        done = subprocess.run(
            list(command), env=variables, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PackageFailed(f"it did not end within {SECONDS:g} s") from error
    if done.returncode != 0:
        raise PackageFailed(done.stdout.decode(errors="replace")[-2000:])
