"""A running server, asked by a command over one connection: `ps`, `stop`, `doctor`, and where a model is loaded."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from models.names import parse_repository
from models.short_names import size_text
from server.app.config import DEFAULT_URL, KEY_VARIABLE, ConfigError, StartError
from server.app.memory_budget import running, runtime_folder
from server.cli.models import plain_table
from server.cli.options import Json, Key, Url, command_group

logger = logging.getLogger(__name__)

app = command_group()

TIMEOUT_SECONDS = 30.0
FOR_EVER_DAYS = 3650
"""A model that expires later than this stays for ever."""
FIND_SECONDS = 1.0
"""Seconds that a server may take to list its models; a healthy one on this machine needs far less."""
OWNER = "mlx-serve/"
"""Prefix of our servers' owner, before the version; another program has another owner."""


def known_urls() -> list[str]:
    """Returns the addresses of this user's servers, then the usual one, as of another user's or a container's."""
    own = [claim.url for claim in running(runtime_folder(os.environ)) if claim.url]
    return list(dict.fromkeys([*own, DEFAULT_URL]))


def usual_url() -> str:
    """Returns the usual address or, where this user's servers run only at others, the first of these."""
    return known_urls()[0]


def bearer(api_key: str | None) -> dict[str, str]:
    """Returns the headers that a key makes."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class AskedServer:
    """A connection to the server at an address."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.Client(timeout=timeout_seconds, trust_env=False, headers=bearer(api_key))

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Returns the answer's object. Raises StartError with a sentence where there is none."""
        answer = self._ask("GET", path, params=dict(query or {}))
        if answer is None:
            raise StartError(f"no server answers at {self.url}")
        return self._read(answer)

    def find(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any | None:
        """Returns the answer's object; None where no server answers, or it has no such path or model.

        Raises StartError where the server refuses.
        """
        answer = self._ask(method, path, json=body)
        return None if answer is None or answer.status_code == httpx2.codes.NOT_FOUND else self._read(answer)

    def _ask(self, method: str, path: str, **content: Any) -> httpx2.Response | None:
        try:
            return self._client.request(method, self.url + path, **content)
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return None

    def _read(self, answer: httpx2.Response) -> Any:
        try:
            found = answer.json()
            if answer.status_code == httpx2.codes.OK:
                return found
            error = found["error"]
            said = error if isinstance(error, str) else str(error["message"])
        except (ValueError, KeyError, TypeError):
            said = f"status {answer.status_code}"
        if answer.status_code == httpx2.codes.UNAUTHORIZED:
            said += "; --api-key or MLX_SERVE_API_KEY gives the key"
        raise StartError(f"the server at {self.url} refuses: {said}")


# ------------------------------------------------------------------------------------------------ what is loaded

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


@app.command()
def ps(api_key: Key = None, as_json: Json = False) -> None:
    """Prints the models that servers of this machine have loaded. Raises StartError where a server refuses to say."""
    show_loaded(known_urls(), api_key, as_json=as_json)


def show_loaded(urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Prints the models that the servers have loaded. Raises StartError where a server refuses to say."""
    answers = [(url, AskedServer(url, api_key).find("GET", "/api/ps")) for url in urls]
    found = [_entry(model, url) for url, answer in answers if answer for model in answer["models"]]
    if as_json:
        typer.echo(json.dumps([entry.record() for entry in found], indent=2))
    elif found:
        typer.echo(plain_table([HEADINGS, *(entry.cells() for entry in found)]))
    else:
        typer.echo("No server of yours on this machine has a model loaded. `mlx-serve serve` starts one.")


def _entry(model: dict[str, Any], url: str) -> LoadedEntry:
    left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
    seconds = math.inf if left.days > FOR_EVER_DAYS else max(left.total_seconds(), 0.0)
    name = str(model["name"]).removesuffix(":latest")
    return LoadedEntry(name, int(model["size"]), int(model["context_length"]), seconds, url)


@app.command()
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A loaded model, as `mlx-serve ps` shows it.")],
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Unloads a model from every server of this machine; raises StartError."""
    unload(name, known_urls(), api_key, as_json=as_json)


def unload(name: str, urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Unloads a model where it is loaded and idle. Raises StartError where it is not loaded, or answers."""
    asked = {"model": name}
    done = [url for url in urls if _changes(AskedServer(url, api_key).find("POST", "/v1/models/unload", asked))]
    if as_json:
        typer.echo(json.dumps({"name": name, "servers": done}, indent=2))
    elif done:
        typer.echo(f"{name} is unloaded.")
    if not done:
        raise StartError(f"{name} is not loaded by any server on this machine; mlx-serve ps lists what is")


def _changes(answer: Any) -> bool:
    return bool(answer and answer.get("changed"))


# --------------------------------------------------------------------------------------------------- the doctor


@app.command()
def doctor(
    url: Url = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read recorded requests from a file of JSON lines instead.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", envvar=KEY_VARIABLE, help="The key that the client sends: a key sees its own sessions."
        ),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The cache_salt that the client sends, if it does.")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="With --file: prompt tokens per second, to show seconds too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prints what `server/doctor/` finds. Raises ConfigError and DoctorError."""
    from server.doctor.report import examine_file, examine_server

    if speed is not None and not 0 < speed < math.inf:
        raise ConfigError(f"--speed is {speed}; it must be above 0")
    if file is None:
        examine_server(url or usual_url(), api_key, cache_salt, as_json=as_json)
    elif url is not None:
        raise ConfigError("give the address of a server or --file, not both")
    else:
        examine_file(Path(file), speed, as_json=as_json)


# ------------------------------------------------------------------------------------------ where a model is loaded


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
            served = next((one for one in models_at(url, api_key) if _is_same(name, one)), None)
        except KeyNeeded as error:
            locked = locked or error
            continue
        if served is not None:
            return Served(url, served)
    if locked is not None:
        raise locked
    return None


def models_at(url: str, api_key: str | None) -> list[str]:
    """Returns the models of one of our servers; none if another program answers, or nothing."""
    try:
        with httpx2.Client(timeout=FIND_SECONDS, trust_env=False, headers=bearer(api_key)) as client:
            answer = client.get(f"{url}/v1/models")
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
