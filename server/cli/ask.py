"""Asks a running server: `ps`, `stop`, `doctor`, and where a model is loaded."""

import contextlib
import http.client
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import typer

from models.names import parse_repository
from models.texts import grouped, size_text
from server.app.config import DEFAULT_URL, ConfigError, StartError
from server.app.memory_budget import running, runtime_folder
from server.cli.models import plain_table
from server.cli.options import Json, Key, Url, command_group, key_option, model_names
from server.cli.recipes import Served

logger = logging.getLogger(__name__)

app = command_group()

TIMEOUT_SECONDS = 30.0
FOR_EVER_DAYS = 3650
FIND_SECONDS = 1.0
"""A server that takes longer to list its models is left out."""
PROGRAM = "mlx-serve"
OWNER = "mlx-serve/"
"""How `owned_by` of our servers' models begins, before the version."""


def known_urls() -> list[str]:
    """The addresses of this user's servers, then the usual one."""
    own = [claim.url for claim in running(runtime_folder(os.environ)) if claim.url]
    return list(dict.fromkeys([*own, DEFAULT_URL]))


def usual_url() -> str:
    """This user's first server, else the usual address."""
    return known_urls()[0]


def bearer(api_key: str | None) -> dict[str, str]:
    """A key's headers."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class AskedServer:
    """A server, asked by Python's own client, whose import is quick."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._headers = bearer(api_key)
        self._timeout_seconds = timeout_seconds

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Raises StartError."""
        answer = self.ask("GET", f"{path}?{urlencode(query)}" if query else path)
        if answer is None:
            raise StartError(f"no server answers at {self.url}")
        return self._read(*answer)

    def find(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any | None:
        """None where no server answers, or knows no such path or model. Raises StartError where it refuses."""
        answer = self.ask(method, path, body)
        return None if answer is None or answer[0] == http.client.NOT_FOUND else self._read(*answer)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes] | None:
        """Status and body; None where no server answers."""
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            address = urlsplit(self.url)
            kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
            with contextlib.closing(kind(address.netloc, timeout=self._timeout_seconds)) as connection:
                connection.request(method, address.path + path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            logger.debug("no server at %s: %s", self.url, error)
            return None

    def _read(self, status: int, body: bytes) -> Any:
        try:
            found = json.loads(body)
            if status == http.client.OK:
                return found
            error = found["error"]
            said = error if isinstance(error, str) else str(error["message"])
        except (ValueError, KeyError, TypeError):
            said = f"status {status}"
        if status == http.client.UNAUTHORIZED:
            said += "; --api-key or MLX_SERVE_API_KEY gives the key"
        raise StartError(f"the server at {self.url} refuses: {said}")


# ------------------------------------------------------------------------------------------------ what is loaded

HEADINGS = ("NAME", "SIZE", "CONTEXT", "UNTIL", "SERVER")


@app.command()
def ps(api_key: Key = None, as_json: Json = False) -> None:
    """Prints what is loaded on this machine. Raises StartError."""
    show_loaded(known_urls(), api_key, as_json=as_json)


def show_loaded(urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Prints the servers' loaded models. Raises StartError at the end where a server refuses."""
    answers: list[tuple[str, Any]] = []
    refusals: list[StartError] = []
    for url in urls:
        try:
            answers.append((url, AskedServer(url, api_key).find("GET", "/api/ps")))
        except StartError as error:
            refusals.append(error)
    found = [_loaded(model, url) for url, answer in answers if answer for model in answer["models"]]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif found:
        typer.echo(plain_table([HEADINGS, *map(_cells, found)]))
    elif idle := [url for url, answer in answers if answer]:
        typer.echo(f"No model is loaded at {', '.join(idle)}; one is loaded when a request names it.")
    elif not refusals:
        typer.echo("No server of yours runs on this machine. `mlx-serve serve` starts one.")
    if refusals:
        raise refusals[0]


def _loaded(model: dict[str, Any], url: str) -> dict[str, Any]:
    left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
    return {
        "name": str(model["name"]).removesuffix(":latest"),
        "size_bytes": int(model["size"]),
        "context_tokens": int(model["context_length"]),
        "idle_seconds_left": None if left.days > FOR_EVER_DAYS else max(round(left.total_seconds()), 0),
        "server": url,
    }


def _cells(loaded: Mapping[str, Any]) -> tuple[str, ...]:
    left = loaded["idle_seconds_left"]
    until = "for ever" if left is None else f"{left / 60:.0f} minutes from now, if not used"
    size, context = size_text(loaded["size_bytes"]), grouped(loaded["context_tokens"])
    return loaded["name"], size, context, until, loaded["server"]


@app.command()
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A loaded model, as `mlx-serve ps` shows it.")],
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Unloads a model from every server of this machine; raises StartError."""
    unload(name, known_urls(), api_key, as_json=as_json)


def unload(name: str, urls: Sequence[str], api_key: str | None, *, as_json: bool) -> None:
    """Unloads an idle model. Raises StartError."""
    asked = {"model": name}
    answers = [(url, AskedServer(url, api_key).find("POST", "/v1/models/unload", asked)) for url in urls]
    done = [url for url, answer in answers if answer and answer.get("changed")]
    if as_json:
        typer.echo(json.dumps({"name": name, "servers": done}, indent=2))
    elif done:
        typer.echo(f"{name} is unloaded.")
    if not done:
        raise StartError(f"{name} is not loaded by any server on this machine; mlx-serve ps lists what is")


# --------------------------------------------------------------------------------------------------- the doctor


@app.command()
def doctor(
    url: Url = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read recorded requests from a file of JSON lines instead.")
    ] = None,
    api_key: Annotated[str | None, key_option("The key that the client sends: a key sees its own sessions.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The cache_salt that the client sends, if it does.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --file: the model whose template and tokenizer read it; its weights are not loaded.",
            autocompletion=model_names,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prints what `server/doctor/` finds. Raises ConfigError, DoctorError and ModelError."""
    from server.doctor.report import examine_file, examine_server

    other = find_other_program(sys.argv[0])
    if other is not None:
        typer.echo(f"Another mlx-serve stands first on PATH: {other}; this is {sys.argv[0]}.", err=True)
    if file is None and model is not None:
        raise ConfigError("--model is of use with --file only: a server knows its own")
    if file is None:
        examine_server(url or usual_url(), api_key, cache_salt, as_json=as_json)
    elif url is not None:
        raise ConfigError("give the address of a server or --file, not both")
    else:
        reader = None
        if model is not None:
            # Else transformers advises to install PyTorch; it reads this when it is imported.
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
            from server.api.openai.recorded import ModelReader  # these two import what a server imports
            from server.app.service import open_renderer

            reader = ModelReader(open_renderer(model))
        examine_file(Path(file), reader, as_json=as_json)


def find_other_program(started: str) -> str | None:
    """The program that a shell would start in place of `started`."""
    first = shutil.which(PROGRAM)
    is_other = (
        Path(started).name == PROGRAM and first is not None and Path(first).resolve() != Path(started).resolve()
    )
    return first if is_other else None


# ------------------------------------------------------------------------------------------ where a model is loaded


class KeyNeeded(StartError):
    """A server that may have the model asks for a key."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the server at {url} asks for a key; give it with --api-key")


def find_served(name: str, urls: Sequence[str], api_key: str | None) -> Served | None:
    """The first server's model of that name. Raises KeyNeeded."""
    locked = None
    repository = parse_repository(name)
    for url in urls:
        try:
            for served in models_at(url, api_key):
                if name == served.model or (repository is not None and repository == parse_repository(served.model)):
                    return served
        except KeyNeeded as error:
            locked = locked or error
    if locked is not None:
        raise locked
    return None


def models_at(url: str, api_key: str | None) -> list[Served]:
    """The models of one of our servers; none of another program. Raises KeyNeeded."""
    status, body = AskedServer(url, api_key, FIND_SECONDS).ask("GET", "/v1/models") or (0, b"")
    if status == http.client.UNAUTHORIZED:
        raise KeyNeeded(url)
    try:
        models = [model for model in json.loads(body)["data"] if model["owned_by"].startswith(OWNER)]
        return [Served(url, one["id"], one.get("context_length") or 0, api_key or "") for one in models]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("%s lists no models: %s", url, error)
        return []
