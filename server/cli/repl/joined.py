"""Answers from a server on this machine that has the model loaded: a second copy would take as much memory."""

import json
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from models.names import parse_repository
from server.cli.repl.parameters import body_fields
from server.cli.repl.speech import AnswerCosts, Answerer, AnswerFailed, Manner, Said, Turn, costs_of

logger = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""How long a server may take to say which models it has; one on this machine that is well needs far less."""
OWNER = "mlx-serve/"
"""Begins the owner that our servers name, with their version behind it; another program calls itself the same."""

_MANNERS = {"reasoning_content": Manner.THOUGHT, "content": Manner.ANSWER}


@dataclass(frozen=True)
class Served:
    """A model as a server calls it."""

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
    """Returns the models of one of our servers; none where something else answers, or nothing."""
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
    """Returns whether two names are of one model: a short name and an address stand for a repository."""
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
        """The model's id."""
        return self._served.model

    async def answer(
        self, turns: Sequence[Turn], conversation: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Said | AnswerCosts, None]:
        """Yields an answer, and its costs last; raises AnswerFailed. When cancelled, the server notices by itself."""
        body = {
            "model": self._served.model,
            "messages": list(turns),
            "session_id": f"{self._session}-{conversation}",
            "stream": True,
            **body_fields(parameters),
        }
        # The server's heartbeats come every few seconds, but how often is its own choice.
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
    """The models of one server, which loads those that are asked for."""

    def __init__(self, served: Served, api_key: str | None = None) -> None:
        self._url, self._api_key = served.url, api_key
        self.current: Answerer = JoinedModel(served, api_key)

    def names(self) -> Sequence[str]:
        """Returns the models that the server has or can load."""
        return _models_at(self._url, self._api_key)

    def change(self, name: str) -> None:
        """Talks to another model of the server; raises AnswerFailed."""
        found = find_served(name, [self._url], self._api_key)
        if found is None:
            raise AnswerFailed(f"the server at {self._url} has no model {name!r}; /model lists those it has")
        self.current = JoinedModel(found, self._api_key)


def _parts_of(line: str) -> list[Said | AnswerCosts]:
    """Returns what one line of the stream says; raises AnswerFailed for the server's own error."""
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
