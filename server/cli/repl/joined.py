"""Answers from a server's loaded models."""

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx2

from models.output.pieces import Reasoning, Text
from models.prompt.shapes import Message
from server.cli.ask import FIND_SECONDS, bearer, find_served, models_at
from server.cli.recipes import Served
from server.cli.repl import conversation
from server.cli.repl.conversation import AnswerFailed, AnswerPart
from server.engine.request import Timings

_KINDS: Mapping[str, type[Reasoning | Text]] = {"reasoning_content": Reasoning, "content": Text}


class JoinedModels:
    """The models of one server. Conversations of several programs never mix."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._session = f"run-{uuid.uuid4().hex[:6]}"

    @property
    def name(self) -> str:
        return self._served.model

    async def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """As `ModelChoice.answer`; the server notices a cancel by the closed connection."""
        arguments = conversation.template_arguments(parameters)
        body = {
            "model": self._served.model,
            "messages": list(turns),
            "session_id": f"{self._session}-{number}",
            "stream": True,
            **{name: value for name, value in parameters.items() if name != conversation.THINK},
            **({"chat_template_kwargs": arguments} if arguments else {}),
        }
        # The server sends heartbeats every few seconds, at an interval of its choice.
        timeout = httpx2.Timeout(None, connect=FIND_SECONDS)
        try:
            async with (
                httpx2.AsyncClient(timeout=timeout, trust_env=False, headers=bearer(self._served.key)) as client,
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

    def names(self) -> Sequence[str]:
        """The models that the server has or can load."""
        return [served.model for served in models_at(self._served.url, self._served.key)]

    def change(self, name: str) -> None:
        """Changes to another model of the server. Raises AnswerFailed."""
        found = find_served(name, [self._served.url], self._served.key)
        if found is None:
            raise AnswerFailed(f"the server at {self._served.url} has no model {name!r}; /model lists those it has")
        self._served = found


def _parts_of(line: str) -> list[AnswerPart]:
    """Raises AnswerFailed for the server's error."""
    if not line.startswith("data: {"):
        return []
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise AnswerFailed(_message_of(line.removeprefix("data: ")))
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    parts: list[AnswerPart] = [
        kind(delta[field]) for delta in deltas for field, kind in _KINDS.items() if delta.get(field)
    ]
    if told := chunk.get("timings"):
        counts = (int(told["cache_n"]), int(told["prompt_n"]), float(told["prompt_ms"]))
        parts.append(Timings(*counts, int(told["predicted_n"]), float(told["predicted_ms"])))
    return parts


def _message_of(body: str | bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        hint = "; /new starts another conversation" if error["code"] == "context_length_exceeded" else ""
        return f"{error['message']}{hint}"
    except (ValueError, KeyError, TypeError):
        return "the server gave no answer that can be read"
