"""The server that an agent asks: one that runs, or one that is started for it and ended with it."""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from server import claims
from server.cli.launch.recipes import LaunchTarget
from server.cli.launch.savings import SessionCounts, changed, count_sessions, prompt_speed
from server.cli.repl.joined import KeyNeeded, Served, find_served
from server.errors import StartError

ASK_SECONDS = 10.0
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0
"""For what it has to write to the disk."""


def find_running(model: str, urls: Sequence[str], key: str | None) -> Served | None:
    """Returns a running server that has the model loaded; raises StartError where one asks for a key."""
    try:
        return find_served(model, urls, key)
    except KeyNeeded as error:
        raise StartError(f"the server at {error} asks for a key; give it with --api-key") from error


@contextlib.contextmanager
def started_server(command: Sequence[str], runtime: Path, tell: Callable[[str], object]) -> Iterator[str]:
    """Starts a server, and ends it in the end; gives its address. Raises StartError with the server's own words.

    `runtime` is the folder in which servers tell each other what they do.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # In a session of its own Ctrl-C is for the agent alone.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            yield _wait_for(process, runtime, log)
        finally:
            tell("Ending the server …")
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", runtime: Path, log: Any) -> str:
    while process.poll() is None:
        url = next((claim.url for claim in claims.running(runtime) if claim.pid == process.pid), "")
        if url and _is_ready(url):
            return url
        time.sleep(POLL_SECONDS)
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    raise StartError((lines[-1] if lines else "it said nothing").removeprefix("mlx-serve: "))


def _is_ready(url: str) -> bool:
    try:
        with _client(None) as client:
            return client.get(f"{url}/health").status_code == httpx2.codes.OK
    except httpx2.HTTPError:
        return False


def describe_target(served: Served, key: str | None) -> LaunchTarget:
    """Returns the model as an agent is to be told of it."""
    models = _get(f"{served.url}/v1/models", key).get("data", [])
    found: dict[str, Any] = next((model for model in models if model.get("id") == served.model), {})
    return LaunchTarget(served.url, served.model, int(found.get("context_length") or 0), key or "")


def look_at_sessions(target: LaunchTarget) -> SessionCounts:
    """Returns what the server's sessions have cost so far; nothing where it does not say."""
    try:
        return count_sessions(_get(f"{target.url}/v1/sessions", target.key)["data"])
    except (KeyError, TypeError):
        return {}


def measure_speed(target: LaunchTarget, before: SessionCounts, after: SessionCounts) -> float:
    """Returns the prompt tokens per second of the sessions that were asked something in between."""
    turns: list[Any] = []
    for namespace, name in changed(before, after):
        query = httpx2.QueryParams({"namespace": namespace} if namespace and not target.key else {})
        session = _get(f"{target.url}/v1/sessions/{_quoted(name)}?{query}", target.key)
        turns += session.get("turns") or []
    try:
        return prompt_speed(turns)
    except (KeyError, TypeError):
        return 0.0


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _get(url: str, key: str | None) -> dict[str, Any]:
    """Returns what a server answers; empty where it does not."""
    try:
        with _client(key) as client:
            answer = client.get(url)
            found = answer.json() if answer.status_code == httpx2.codes.OK else {}
    except (httpx2.HTTPError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _client(key: str | None) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(timeout=ASK_SECONDS, trust_env=False, headers=headers)
