"""Asks a running server: `ps`, `stop`, `decide`, and where a model is loaded."""

import contextlib
import http.client
import inspect
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, BinaryIO, TypeAlias
from urllib.parse import urlencode, urlsplit

import typer

from models.names import parse_repository
from models.texts import grouped, size_text
from server.app.config import DEFAULT_URL, KEY_VARIABLE, ConfigError, StartError
from server.app.memory_budget import running, runtime_folder
from server.cli.options import Address, Json, Key, Url, plain_table, taking, tell

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 1 << 20
DECIDE_SECONDS = 600.0
"""A model may have to be loaded, and a long state to be evaluated."""
FOR_EVER_DAYS = 3650
FIND_SECONDS = 1.0
"""A server that takes longer to list its models is left out."""
OWNER = "mlx-serve/"
"""How `owned_by` of our servers' models begins, before the version."""


Query: TypeAlias = Mapping[str, str | int | None]


def known_urls() -> list[str]:
    """The addresses of this user's servers, then the usual one."""
    own = [claim.url for claim in running(runtime_folder(os.environ)) if claim.url]
    return list(dict.fromkeys([*own, DEFAULT_URL]))


Command: TypeAlias = Callable[..., None]


def asking(address: Any = Url) -> Callable[[Command], Command]:
    """Gives a command an address and a key in place of the server that is its first parameter."""

    def given(command: Command) -> Command:
        @wraps(command)
        def run(*, url: str | None, api_key: str | None, **others: Any) -> None:
            command(AskedServer(url, api_key), **others)

        own = list(inspect.signature(command).parameters.values())[1:]
        return taking(run, {"url": address, "api_key": Key}, own)

    return given


def bearer(api_key: str | None) -> dict[str, str]:
    """A key's headers."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class NoServer(StartError):
    """No server answers at an address."""


class KeyNeeded(StartError):
    """A server asks for a key, or for another one."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the server at {url} asks for a key; give it with --api-key or {KEY_VARIABLE}")


class AskedServer:
    """A server, asked by Python's own client, whose import is quick."""

    def __init__(self, url: str | None, api_key: str | None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`url` may have `http://` and `/v1`, or not; None is this user's first server. Raises StartError."""
        self.url, self.api_key, self.is_named = _base_url(url or known_urls()[0]), api_key, url is not None
        self.timeout_seconds = timeout_seconds

    def get(self, path: str, query: Query | None = None) -> Any:
        """The JSON of an answer. Raises StartError."""
        return self._read(*self._ask("GET", _with(path, query or {})))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer. Raises StartError."""
        return self._read(*self._ask("POST", path, body))

    def find(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any | None:
        """None where no server answers, or knows no such path or model. Raises StartError where it refuses."""
        try:
            status, said = self._ask(method, path, body)
        except NoServer as error:
            logger.debug("%s", error)
            return None
        return None if status == http.client.NOT_FOUND else self._read(status, said)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body. Raises NoServer."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        with self._opened(method, path, None if body is None else json.dumps(body), headers) as answer:
            return self._whole(answer)

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[http.client.HTTPResponse]:
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(address.netloc, timeout=self.timeout_seconds, blocksize=BLOCK_BYTES)) as asked:
            with self._answering():
                # A server that refuses reads no further, and has answered.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    asked.request(method, address.path + path, body, {**bearer(self.api_key), **headers})
                answer = asked.getresponse()
            yield answer

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoServer(f"no server answers at {self.url}: {why}; mlx-serve serve starts one") from error

    def _whole(self, answer: http.client.HTTPResponse) -> tuple[int, bytes]:
        with self._answering():
            return answer.status, answer.read()

    def download(self, path: str, query: Query, file: BinaryIO) -> Mapping[str, Any]:
        """Writes an answer's body into a file; returns its headers. Raises StartError, NoServer if none answers."""
        with self._opened("GET", _with(path, query)) as answer:
            if answer.status != http.client.OK:
                self._read(*self._whole(answer))
            try:
                shutil.copyfileobj(answer, file, BLOCK_BYTES)
            except http.client.HTTPException as error:
                raise StartError(f"the server at {self.url} broke off in the middle") from error
            return dict(answer.headers)

    def upload(self, path: str, query: Query, body: Any, headers: Mapping[str, str]) -> Any:
        """Sends a file, or blocks; returns the JSON of the answer. Raises StartError, NoServer if none answers."""
        with self._opened("POST", _with(path, query), body, headers) as answer:
            return self._read(*self._whole(answer))

    def _read(self, status: int, body: bytes) -> Any:
        if status == http.client.UNAUTHORIZED:
            raise KeyNeeded(self.url)
        try:
            answer = json.loads(body)
            if status == http.client.OK:
                return answer
            error = answer["error"]
            said = error if isinstance(error, str) else str(error["message"])
        except (ValueError, KeyError, TypeError) as error:
            raise StartError(f"what answers at {self.url} is not mlx-serve: status {status}") from error
        raise StartError(f"the server at {self.url} refuses: {said}")


def _with(path: str, query: Query) -> str:
    """A path with those of the parameters that have a value."""
    values = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(values)}" if values else path


def _base_url(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise StartError(f"{url!r} is no address of a server; write it like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


# ------------------------------------------------------------------------------------------------ what is loaded

HEADINGS = ("NAME", "SIZE", "CONTEXT", "UNTIL", "SERVER")


def ps(api_key: Key = None, as_json: Json = False) -> None:
    """Prints what is loaded on this machine. Raises StartError at the end where a server refuses."""
    answers, refusals = _ask_all("GET", "/api/ps", api_key)
    models = [_loaded(model, url) for url, answer in answers.items() for model in answer["models"]]
    text = "No server of yours runs on this machine. `mlx-serve serve` starts one."
    if models:
        text = plain_table([HEADINGS, *map(_cells, models)])
    elif answers:
        text = f"No model is loaded at {', '.join(answers)}; one is loaded when a request names it."
    if as_json or answers or not refusals:
        tell(models, text, as_json)
    if refusals:
        raise refusals[0]


def stop(name: str, api_key: Key = None, as_json: Json = False) -> None:
    """Unloads an idle model from every server of this machine; raises StartError."""
    answers, refusals = _ask_all("POST", "/v1/models/unload", api_key, {"model": name})
    done = [url for url, answer in answers.items() if answer.get("changed")]
    if done or as_json:
        tell({"name": name, "servers": done}, f"{name} is unloaded.", as_json)
    if refusals:
        raise refusals[0]
    if not done:
        raise StartError(f"{name} is not loaded by any server on this machine; mlx-serve ps lists what is")


def _ask_all(
    method: str, path: str, api_key: str | None, body: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[StartError]]:
    """The answers of this machine's servers by address, and the errors of those that refuse."""
    answers, refusals = dict[str, Any](), list[StartError]()
    for url in known_urls():
        try:
            answers[url] = AskedServer(url, api_key).find(method, path, body)
        except StartError as error:
            refusals.append(error)
    return {url: answer for url, answer in answers.items() if answer}, refusals


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


# -------------------------------------------------------------------------------------------------------- questions


@asking(Address)
def decide(
    server: AskedServer,
    state: Annotated[str | None, typer.Argument(show_default=False)] = None,
    ask: Annotated[list[str] | None, typer.Option(show_default=False)] = None,
    options: Annotated[str | None, typer.Option(show_default=False)] = None,
    model: Annotated[str | None, typer.Option(show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Prints how likely each answer to each question is. Raises ConfigError and StartError."""
    if not ask:
        raise ConfigError("say what to ask with --ask")
    about: dict[str, Any] = {"type": "predicate"}
    if options is not None:
        about = {"type": "choice", "choices": [{"value": label.strip()} for label in options.split(",")]}
    questions = [{**about, "name": question, "instructions": question} for question in ask]
    body = {"input": sys.stdin.read() if state is None else state, "questions": questions}
    server.timeout_seconds = DECIDE_SECONDS
    answer = server.post("/v1/decisions", {**body, "model": model} if model else body)
    rows = [row for one in answer["answers"] for row in _chances(one)]
    tell(answer, plain_table([("QUESTION", "ANSWER", "PROBABILITY"), *rows]), as_json)


def _chances(answer: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """One line for each option, the likeliest first."""
    yes = answer.get("probability", 0.0)
    both = [{"value": "yes", "probability": yes}, {"value": "no", "probability": 1 - yes}]
    ranked = sorted(answer.get("probabilities", both), key=lambda one: -float(one["probability"]))
    return [
        ("" if place else str(answer["name"]), str(one["value"]), f"{one['probability']:.3f}")
        for place, one in enumerate(ranked)
    ]


# ------------------------------------------------------------------------------------------ where a model is loaded


@dataclass(frozen=True)
class Served:
    """A model as a server names it."""

    url: str
    model: str
    context_tokens: int = 0
    """0 if unknown."""
    key: str = ""
    """Empty where the server needs none."""
    sees: bool = False
    """Whether the model sees images."""


def find_served(name: str, urls: Sequence[str], api_key: str | None) -> Served | None:
    """The first server's model of that name. Raises KeyNeeded."""
    locked, repository = None, parse_repository(name)
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
    try:
        listed = AskedServer(url, api_key, FIND_SECONDS).get("/v1/models")
        models = [model for model in listed["data"] if model["owned_by"].startswith(OWNER)]
        return [
            Served(
                url, one["id"], one.get("context_length") or 0, api_key or "", "vision" in one.get("capabilities", ())
            )
            for one in models
        ]
    except KeyNeeded:
        raise
    except (StartError, KeyError, TypeError, AttributeError) as error:
        logger.debug("%s lists no models: %s", url, error)
        return []
