"""`mlx-serve ps` and `mlx-serve stop`: what the servers of this user have loaded, and unloading it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx2
import typer

from models.short_names import size_text
from server.cli.models import plain_table
from server.errors import StartError

TIMEOUT_SECONDS = 30.0
"""To unload a model its conversations may have to be written to a disk first."""
FOR_EVER_DAYS = 3650
"""A model that is to be unloaded so late stays for ever."""

HEADINGS = ("NAME", "SIZE", "CONTEXT", "UNTIL", "SERVER")


@dataclass(frozen=True)
class LoadedEntry:
    """A model in the memory of a server."""

    name: str
    size_bytes: int
    context_tokens: int
    idle_seconds_left: float
    """After which it is unloaded if nobody asks for it; infinite if it stays."""
    url: str

    def record(self) -> dict[str, Any]:
        """Returns it for programs."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "context_tokens": self.context_tokens,
            "idle_seconds_left": None if math.isinf(self.idle_seconds_left) else round(self.idle_seconds_left),
            "server": self.url,
        }

    def cells(self) -> tuple[str, ...]:
        """Returns it as a person reads it, under `HEADINGS`."""
        minutes = self.idle_seconds_left / 60
        until = "for ever" if math.isinf(minutes) else f"{max(minutes, 0):.0f} minutes from now, if not used"
        return self.name, size_text(self.size_bytes), str(self.context_tokens), until, self.url


def show_loaded(urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Prints the models that the servers have loaded; raises StartError where one refuses to say."""
    found = [entry for url in urls for entry in _loaded_at(url, api_key)]
    if as_json:
        typer.echo(json.dumps([entry.record() for entry in found], indent=2))
    elif found:
        typer.echo(plain_table([HEADINGS, *(entry.cells() for entry in found)]))
    else:
        typer.echo("No server of yours on this machine has a model loaded. `mlx-serve serve` starts one.")


def unload(name: str, urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Unloads a model wherever it is loaded and idle; raises StartError where it is not loaded, or answers."""
    done = [url for url in urls if _unload_at(url, name, api_key)]
    if as_json:
        typer.echo(json.dumps({"name": name, "servers": done}, indent=2))
    elif done:
        typer.echo(f"{name} is unloaded.")
    if not done:
        raise StartError(f"{name} is not loaded by any server on this machine; mlx-serve ps lists what is")


def _unload_at(url: str, name: str, api_key: str | None) -> bool:
    """Returns whether a server had the model loaded, and has it no more."""
    answer = _ask("POST", url, "/v1/models/unload", api_key, {"model": name})
    if answer is None or answer.status_code == httpx2.codes.NOT_FOUND:
        return False
    if answer.status_code != httpx2.codes.OK:
        raise StartError(_message(answer, url))
    return bool(answer.json().get("changed"))


def _loaded_at(url: str, api_key: str | None) -> list[LoadedEntry]:
    answer = _ask("GET", url, "/api/ps", api_key)
    if answer is None or answer.status_code == httpx2.codes.NOT_FOUND:
        return []
    if answer.status_code != httpx2.codes.OK:
        raise StartError(_message(answer, url))
    return [_entry(model, url) for model in answer.json()["models"]]


def _entry(model: dict[str, Any], url: str) -> LoadedEntry:
    left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
    seconds = math.inf if left.days > FOR_EVER_DAYS else max(left.total_seconds(), 0.0)
    name = str(model["name"]).removesuffix(":latest")
    return LoadedEntry(name, int(model["size"]), int(model["context_length"]), seconds, url)


def _ask(
    method: str, url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None
) -> httpx2.Response | None:
    """Returns a server's answer; None where none answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx2.Client(timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers) as client:
            return client.request(method, url + path, json=body)
    except httpx2.HTTPError:
        return None


def _message(answer: httpx2.Response, url: str) -> str:
    try:
        error = answer.json()["error"]
        said = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        said = f"status {answer.status_code}"
    hint = "; give the server's key with --api-key" if answer.status_code == httpx2.codes.UNAUTHORIZED else ""
    return f"the server at {url} refuses: {said}{hint}"
