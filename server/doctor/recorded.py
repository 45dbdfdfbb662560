"""Recorded requests, from JSON lines, and what they would evaluate again. Pure but for reading the file.

A line is the body of a chat completion, or an object with the body as `body` or `request` and the answer as
`response`. Sessions are named as for the server. Requests are in the order of `timestamp`, `time` or `created` where
every line has one, else of the file. Requests are compared as by a server whose cache forgets nothing.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache.trie import TokenNode, TokenTrie
from cache.types import TokenArray
from models.errors import InvalidParameter, told_as
from models.prompt.shapes import Outline, with_constant_header
from server.api.sessions import resolve_line
from server.app.config import StartError
from server.diagnosis.account import Conversations, EvaluatedTurn, Name, Rendered, explain, healed
from server.diagnosis.compare import thoughts_apart
from server.diagnosis.prompt import Part, Prompt, RepeatedCall, part_of, prompt_of, repeated_call
from server.doctor.findings import Checkup, LinkedTurn, checkup_from, losses_of

TIME_FIELDS = ("timestamp", "time", "created")
TEMPLATE_FIELDS = ("enable_thinking", "reasoning_effort")
"""Arguments of the template."""


@dataclass(frozen=True)
class Recorded:
    """One request as it was sent."""

    prompt: Prompt
    session_id: str | None = None
    time: str | float | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    reply: Mapping[str, Any] | None = None
    """The answer's message."""


class Reader:
    """Makes tokens of requests, one after the other, where no model is known: a character is a token.

    It stands for a template that shows all. Thoughts in a text and in a field are the same.
    """

    characters_per_token = 4
    """Characters of an array per token."""

    def __init__(self) -> None:
        self.refused: list[dict[str, Any]] = []
        """As `/v1/sessions` lists them."""

    def read(self, request: Recorded) -> tuple[Rendered, EvaluatedTurn] | None:
        """The prompt, and the turn with what the cache holds after it. None for a refused request: here for none."""
        parts, reply = request.prompt.parts, part_of(request.reply) if request.reply else None
        last = request.body["messages"][-1]
        if last["role"] == "assistant" and (last.get("prefix") or request.body.get("continue_final_message")):
            # The answer continues the last message.
            reply = reply and replace(reply, text=parts[-1].text + reply.text)
            parts = parts[:-1]
        reply = reply and thoughts_apart(reply)
        prompt = replace(request.prompt, parts=tuple(map(thoughts_apart, parts)))
        tokens, answered = characters_of(prompt), characters_of(prompt, reply)
        turn = EvaluatedTurn(prompt, reply, tokens=answered, num_prompt_tokens=len(tokens))
        return Rendered(prompt, tokens, outline_of(prompt)), turn


def read_requests(path: Path) -> list[Recorded]:
    """A file's requests in order. Raises StartError."""
    with told_as(StartError, f"--file needs a file with a recorded request on each line, and {path} cannot be read"):
        lines = path.read_text(encoding="utf-8").splitlines()
    requests = [_parse_line(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise StartError(f"{path} holds no requests")
    return _in_order(requests)


def _in_order(requests: list[Recorded]) -> list[Recorded]:
    times = {type(request.time) for request in requests}
    is_comparable = times == {str} or times == {float}
    return sorted(requests, key=lambda request: request.time) if is_comparable else requests  # type: ignore[arg-type,return-value]


def _parse_line(line: str, place: str) -> Recorded:
    with told_as(StartError, f"{place} is no JSON", ValueError, RecursionError):
        outer = json.loads(line)
    if not isinstance(outer, dict):
        raise StartError(f"{place} is no JSON object; each line must hold one request")
    body = next((outer[name] for name in ("body", "request") if isinstance(outer.get(name), dict)), outer)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise StartError(f"{place} holds no list of messages, as the body of a chat completion does")
    if "system" in body or "anthropic_version" in body:
        raise StartError(f"{place} is a body of the Messages API; only those of chat completions are read")
    with told_as(StartError, place, InvalidParameter):
        named = {**body, **{name: value for name, value in outer.items() if value is not None}}
        session_id = resolve_line(named, _headers(outer))
    return Recorded(_prompt(outer, body, place), session_id, _time(outer, body), body, _reply(outer))


def _prompt(outer: Mapping[str, Any], body: Mapping[str, Any], place: str) -> Prompt:
    given = body.get("chat_template_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    arguments |= {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise StartError(f"{place}: tools is no list of objects")
    for index, message in enumerate(body["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise StartError(f"{place}: messages[{index}] is no object with a role")
    model, namespace = str(body.get("model") or ""), _namespace(outer, body)
    prompt = prompt_of(body["messages"], tools, arguments, model=model, namespace=namespace)
    # The server replaces these values by constants too, so they cost nothing.
    head = (replace(part, text=with_constant_header(part.text)) for part in prompt.parts[: prompt.num_head])
    return replace(prompt, parts=(*head, *prompt.parts[prompt.num_head :]))


def _namespace(outer: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """A name for key and salt that does not contain the key."""
    key = next((value for name, value in _headers(outer).items() if name.lower() == "authorization"), "")
    digest = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
    return f"{digest}/{body.get('cache_salt') or ''}"


def _reply(outer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    match outer.get("response"):
        case {"choices": [{"message": message}, *_]} | {"choices": [message, *_]} | {"message": message} | message:
            if isinstance(message, dict) and message.keys() & {"content", "tool_calls"}:
                return {"role": "assistant", **message}
    return None


def _headers(outer: Mapping[str, Any]) -> dict[str, str]:
    given = outer.get("headers")
    return {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}


def _time(outer: Mapping[str, Any], body: Mapping[str, Any]) -> str | float | None:
    times = (fields.get(name) for fields in (outer, body) for name in TIME_FIELDS)
    known = next((time for time in times if type(time) in (str, int, float)), None)
    return float(known) if isinstance(known, int) else known


# -------------------------------------------------------------------------------------------------- what they lose

MAX_BYTES = 1 << 30
"""Bound on the last turns of all conversations."""


def checkups_of(requests: Iterable[Recorded], reader: Reader | None = None) -> list[Checkup]:
    """Each conversation's losses."""
    reader = reader or Reader()
    per_token = reader.characters_per_token
    visits: dict[Name, list[LinkedTurn]] = {}
    repeated: dict[Name, RepeatedCall | None] = {}
    saved = Counter[Name]()
    conversations = Conversations(MAX_BYTES, is_of_one_owner=True)
    known: dict[tuple[str, str], TokenTrie[TokenNode]] = {}
    for number, request in enumerate(requests):
        if (read := reader.read(request)) is None:
            continue
        request_id, (rendered, turn) = str(number), read
        name, previous = conversations.find(request.session_id, rendered, request_id)
        turns = visits.setdefault(name, [])
        state = known.setdefault((turn.prompt.model, turn.prompt.namespace), TokenTrie(TokenNode))
        hit = min(state.match(rendered.tokens).length, len(rendered.tokens) - 1)
        reuse = explain(previous, rendered, match=hit, hit=hit)
        saved[name] += healed(previous, rendered, hit).saved_tokens
        losses = losses_of(len(turns) + 1, reuse.misses, lambda lost: lost // per_token)
        turns.append(LinkedTurn(request_id, previous.request_id if previous else None, losses, reuse.kept))
        said = turn.prompt.parts if turn.reply is None else (*turn.prompt.parts, turn.reply)
        repeated[name] = repeated_call(said) or repeated.get(name)
        conversations.record(name, replace(turn, request_id=request_id))
        state.extend(state.root, turn.tokens)
    unnamed = itertools.count(1)
    checkups = (
        checkup_from(name.id if name.is_named else f"(unnamed {next(unnamed)})", turns, repeated[name])
        for name, turns in visits.items()
    )
    return [replace(one, healed_tokens=saved[name]) for one, name in zip(checkups, visits, strict=True)]


def characters_of(prompt: Prompt, reply: Part | None = None) -> TokenArray:
    """A prompt's characters as numbers."""
    text = "".join(_texts(prompt if reply is None else replace(prompt, parts=(*prompt.parts, reply))))
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def outline_of(prompt: Prompt) -> Outline:
    """Where messages begin in `characters_of`."""
    starts = itertools.accumulate(map(len, _texts(prompt)))
    return Outline(tuple(starts)[:-1], tuple(part.role for part in prompt.parts))


def _texts(prompt: Prompt) -> list[str]:
    """The tools, and each message; templates show their arguments after the first system messages, or later."""
    texts = [f"\0{part.role}\0{part.shown}{' '.join(part.call_ids)}" for part in prompt.parts]
    first = min(prompt.num_head, len(texts) - 1)
    return [prompt.tools_text, *texts[:first], prompt.arguments + texts[first], *texts[first + 1 :]]
