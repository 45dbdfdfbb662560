"""Claude Code itself edits a file by way of a server whose engine is a fake that follows a script.

Runs where `CLAUDE_CODE` names the program, or `claude` is in the path: `npm install @anthropic-ai/claude-code`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.types import common_prefix_length
from server.app.config import ServerConfig
from server.engine.request import GenerationRequest
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

PROGRAM = os.environ.get("CLAUDE_CODE") or shutil.which("claude")
CONTEXT_TOKENS = 1_000_000
"""The fake has a token for each character."""
SECONDS = 120.0
TASK = "Change the greeting in greeting.py from hello to goodbye."
LEAST_KEPT = 0.95

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="CLAUDE_CODE names no program, and claude is not in the path")


def calling(text: str, tool: str, **arguments: Any) -> Script:
    return Script((text, f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"))


def replies(file: Path) -> Sequence[Script]:
    """What the model does: it reads the file, as it must before an edit, searches the web, edits, and ends."""
    return (
        calling("I read the file.", "Read", file_path=str(file)),
        calling("I search.", "WebSearch", query="goodbye"),
        calling("I change it.", "Edit", file_path=str(file), old_string="hello", new_string="goodbye"),
        Script(("Done.",)),
    )


def text_of(request: GenerationRequest) -> str:
    return "".join(map(chr, request.tokens))


def claude(address: str, home: Path, work: Path) -> dict[str, Any]:
    """Runs the task in `work` and returns the result; nothing but the server is called."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    flags = ["--permission-mode", "acceptEdits", "--allowedTools", "WebSearch", "--output-format", "json"]
    done = subprocess.run(
        [str(PROGRAM), "--print", TASK, *flags],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_it_edits_a_file_and_its_prompts_extend_one_another(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    file = work / "greeting.py"
    file.write_text('print("hello")\n')
    script = replies(file)
    engine = FakeEngine(lambda request: script[min(text_of(request).count("<tool>"), len(script) - 1)])
    model = fake_model(context_tokens=CONTEXT_TOKENS)
    with running(create_app(engine, model, ServerConfig(api_key="secret"))) as address:
        result = claude(address, home, work)
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, "Done.", len(script))
    assert file.read_text() == 'print("goodbye")\n'
    assert len(engine.requests) == len(script)
    assert len({request.session_id for request in engine.requests}) == 1
    # The search asked for a tool of Anthropic's servers; it was refused, and the model told so.
    assert "Error: " in text_of(engine.requests[2]) and "web_search" in text_of(engine.requests[2])
    kept = [kept_share(first, second) for first, second in zip(engine.requests, engine.requests[1:], strict=False)]
    assert min(kept) >= LEAST_KEPT, kept


def kept_share(first: GenerationRequest, second: GenerationRequest) -> float:
    """How much of a prompt the next one begins with."""
    return common_prefix_length(np.asarray(first.tokens), np.asarray(second.tokens)) / len(first.tokens)
