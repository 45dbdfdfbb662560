"""Client packages of Python and Node, each by a program of ours that uses it against the built-in model."""

import json
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.clients.scripted_model import TOOL_RESULT
from scripts.clients.scripted_server import Reply

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


class LangChainTests(PythonPackage):
    """LangChain's standard tests, which ask for calls and objects that only a scripted model knows."""

    def reply(self, prompt: str) -> Reply:
        """Returns a good answer to the last question of a prompt: text, a call of the first tool, or JSON."""
        tools = re.findall(r'^{"type": "function", "function": {"name": "(\w+)"', prompt, re.MULTILINE)
        question = prompt.rpartition("<|im_start|>user\n")[2]
        has_result = TOOL_RESULT in question
        if "joke" in question and not tools:
            return Reply(json.dumps(JOKE))
        if not tools or has_result:
            return Reply("It is sunny.")
        named = re.search("named '(.+?)'", question)
        customer = {"customer_name": named[1], "description": "a company"} if named else {}
        return Reply(tool=tools[0], arguments=ARGUMENTS.get(tools[0], JOKE if "joke" in question else customer))


JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "For the mouse."}
ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "my_adder_tool": {"a": 3, "b": 4},
    "get_weather": {"location": "San Francisco"},
    "greeting_generator": {"answer_style": "pirate"},
}
"""Arguments that the tests expect, by tool."""

LANGCHAIN = LangChainTests(
    "langchain_standard",
    ["langchain-openai", "langchain-anthropic", "langchain-ollama", "langchain-tests", "pytest-asyncio"],
)

PACKAGES: Sequence[Package] = (
    PythonPackage("langchain_openai", ["langchain-openai"]),
    PythonPackage("langchain_ollama", ["langchain-ollama"]),
    PythonPackage("langchain_anthropic", ["langchain-anthropic"]),
    PythonPackage("litellm", ["litellm", "mcp"]),
    PythonPackage("pydantic_ai", ["pydantic-ai-slim[openai]"]),
    PythonPackage("instructor", ["instructor"]),
    PythonPackage("openai_agents", ["openai-agents"]),
    PythonPackage("systemone", ["systemone-client"]),
    PythonPackage("typesafe_sdk", ["typesafe-sdk"]),
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
    PythonPackage("llm_comply", ["llm-comply"]),
    NodePackage("compatcanary", ["compatcanary"]),
    LANGCHAIN,
)
"""Programs that measure or test servers. They take minutes, and run only where they are named."""


def prove(package: Package, command: Sequence[str], url: str, model: str = "demo") -> None:
    """Runs the program against a server; raises PackageFailed."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))},
        "BASE_URL": url,
        "MODEL": model,
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
