"""A running server, asked by a command over one connection: `ps`, `stop`, and the conversation of `run`.

`run` uses the model of a server that has it loaded: a second copy would take as much memory.
"""

import json
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx2
import typer

from models.names import parse_repository
from models.short_names import size_text
from server.app.config import StartError
from server.cli.models import plain_table
from server.cli.repl.conversation import (
    AnswerCosts,
    Answerer,
    AnswerFailed,
    Manner,
    Said,
    Turn,
    body_fields,
    costs_of,
)

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0


class AskedServer:
    """A connection to the server at an address."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._client = httpx2.Client(timeout=timeout_seconds, trust_env=False, headers=headers)

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Returns the answer's object. Raises StartError with a sentence where there is none."""
        try:
            answer = self._client.get(self.url + path, params=dict(query or {}))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise StartError(f"no server answers at {self.url}") from error
        if answer.status_code == httpx2.codes.UNAUTHORIZED:
            raise StartError(f"the server at {self.url} asks for a key: --api-key or MLX_SERVE_API_KEY gives it")
        try:
            found = answer.json()
            if answer.status_code == httpx2.codes.OK:
                return found
            said = str(found["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = f"status {answer.status_code}"
        raise StartError(f"the server at {self.url} refuses: {said}")


FOR_EVER_DAYS = 3650
"""A model that expires later than this stays for ever."""

HEADINGS = ("NAME", "SIZE", "CONTEXT", "UNTIL", "SERVER")


@dataclass(frozen=True)
class LoadedEntry:
    """A model in the memory of a server."""

    name: str
    size_bytes: int
    context_tokens: int
    idle_seconds_left: float
    """Idle time until the model is unloaded; infinite if it stays."""
    url: str

    def record(self) -> dict[str, Any]:
        """Returns the entry for programs."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "context_tokens": self.context_tokens,
            "idle_seconds_left": None if math.isinf(self.idle_seconds_left) else round(self.idle_seconds_left),
            "server": self.url,
        }

    def cells(self) -> tuple[str, ...]:
        """Returns the entry for a person, under `HEADINGS`."""
        minutes = self.idle_seconds_left / 60
        until = "for ever" if math.isinf(minutes) else f"{max(minutes, 0):.0f} minutes from now, if not used"
        return self.name, size_text(self.size_bytes), str(self.context_tokens), until, self.url


def show_loaded(urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Prints the models that the servers have loaded. Raises StartError where a server refuses to say."""
    found = [entry for url in urls for entry in _loaded_at(url, api_key)]
    if as_json:
        typer.echo(json.dumps([entry.record() for entry in found], indent=2))
    elif found:
        typer.echo(plain_table([HEADINGS, *(entry.cells() for entry in found)]))
    else:
        typer.echo("No server of yours on this machine has a model loaded. `mlx-serve serve` starts one.")


def unload(name: str, urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Unloads a model from every server where it is loaded and idle. Raises StartError where it is not loaded, or
    answers.
    """
    done = [url for url in urls if _unload_at(url, name, api_key)]
    if as_json:
        typer.echo(json.dumps({"name": name, "servers": done}, indent=2))
    elif done:
        typer.echo(f"{name} is unloaded.")
    if not done:
        raise StartError(f"{name} is not loaded by any server on this machine; mlx-serve ps lists what is")


def _unload_at(url: str, name: str, api_key: str | None) -> bool:
    """Returns whether a server had the model loaded and has unloaded it."""
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
    """Returns a server's answer; None if there is none."""
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


ASK_SECONDS = 1.0
"""Seconds that a server may take to list its models; a healthy one on this machine needs far less."""
OWNER = "mlx-serve/"
"""Prefix of our servers' owner, before the version; another program has another owner."""

_MANNERS = {"reasoning_content": Manner.THOUGHT, "content": Manner.ANSWER}


@dataclass(frozen=True)
class Served:
    """A model as a server names it."""

    url: str
    """Such as `http://127.0.0.1:8080`."""
    model: str


class KeyNeeded(Exception):
    """A server asks for a key, or for another one; the message is its address."""


def find_served(name: str, urls: Sequence[str], api_key: str | None) -> Served | None:
    """Returns the first of the servers that has the model called `name`; None where none has. Raises KeyNeeded."""
    locked = None
    for url in urls:
        try:
            served = next((one for one in _models_at(url, api_key) if _is_same(name, one)), None)
        except KeyNeeded as error:
            locked = locked or error
            continue
        if served is not None:
            return Served(url, served)
    if locked is not None:
        raise locked
    return None


def _models_at(url: str, api_key: str | None) -> list[str]:
    """Returns the models of one of our servers; none if another program answers, or nothing."""
    try:
        with httpx2.Client(timeout=ASK_SECONDS, trust_env=False) as client:
            answer = client.get(f"{url}/v1/models", headers=_headers(api_key))
            if answer.status_code == httpx2.codes.UNAUTHORIZED:
                raise KeyNeeded(url)
            return [str(model["id"]) for model in answer.json()["data"] if model["owned_by"].startswith(OWNER)]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("no server at %s: %s", url, error)
        return []


def _is_same(name: str, served: str) -> bool:
    """Whether two names are of one model: a short name and an address stand for a repository."""
    repository = parse_repository(name)
    return name == served or (repository is not None and repository == parse_repository(served))


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class JoinedModel:
    """A model behind HTTP. Conversations of several such programs never mix."""

    def __init__(self, served: Served, api_key: str | None = None) -> None:
        self._served = served
        self._headers = _headers(api_key)
        self._session = f"run-{uuid.uuid4().hex[:6]}"

    @property
    def name(self) -> str:
        return self._served.model

    async def answer(
        self, turns: Sequence[Turn], conversation: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Yields an answer, and its costs last. Raises AnswerFailed. On a cancel, the server notices the closed
        connection.
        """
        body = {
            "model": self._served.model,
            "messages": list(turns),
            "session_id": f"{self._session}-{conversation}",
            "stream": True,
            **body_fields(parameters),
        }
        # The server sends heartbeats every few seconds, at an interval of its choice.
        timeout = httpx2.Timeout(None, connect=ASK_SECONDS)
        try:
            async with (
                httpx2.AsyncClient(timeout=timeout, trust_env=False, headers=self._headers) as client,
                client.stream("POST", f"{self._served.url}/v1/chat/completions", json=body) as answer,
            ):
                if answer.status_code != httpx2.codes.OK:
                    raise AnswerFailed(_message_of(await answer.aread()))
                async for line in answer.aiter_lines():
                    for part in _parts_of(line):
                        yield part
        except httpx2.HTTPError as error:
            raise AnswerFailed(f"the server at {self._served.url} does not answer any more") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AnswerFailed(f"what the server at {self._served.url} sends cannot be read") from error


class JoinedModels:
    """The models of one server, which loads the one asked for."""

    def __init__(self, served: Served, api_key: str | None = None) -> None:
        self._url, self._api_key = served.url, api_key
        self.current: Answerer = JoinedModel(served, api_key)

    def names(self) -> Sequence[str]:
        """Returns the models that the server has or can load."""
        return _models_at(self._url, self._api_key)

    def change(self, name: str) -> None:
        """Changes to another model of the server. Raises AnswerFailed."""
        found = find_served(name, [self._url], self._api_key)
        if found is None:
            raise AnswerFailed(f"the server at {self._url} has no model {name!r}; /model lists those it has")
        self.current = JoinedModel(found, self._api_key)


def _parts_of(line: str) -> list[Said | AnswerCosts]:
    """Returns the parts in one line of the stream. Raises AnswerFailed for the server's own error."""
    if not line.startswith("data: {"):
        return []
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise AnswerFailed(_message_of(line.removeprefix("data: ")))
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    said: list[Said | AnswerCosts] = [
        Said(delta[field], manner) for delta in deltas for field, manner in _MANNERS.items() if delta.get(field)
    ]
    return said + ([costs_of(chunk["timings"])] if chunk.get("timings") else [])


def _message_of(body: str | bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        hint = "; /new starts another conversation" if error["code"] == "context_length_exceeded" else ""
        return f"{error['message']}{hint}"
    except (ValueError, KeyError, TypeError):
        return "the server gave no answer that can be read"
