"""A request as a sequence of parts, before any template: the same for a server's and a recorded one. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from models.texts import read_object

PLAIN = "prompt"
_PART_BYTES = 400
"""Python's overhead of a part, besides its text."""


@dataclass(frozen=True)
class Part:
    """One message, as the template reads it."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    """Name and arguments of each call, as JSON text in the written order of keys."""
    call_ids: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return "\n".join(text for text in (self.reasoning, self.text, *self.calls) if text)

    @property
    def num_bytes(self) -> int:
        """About the prompt's memory."""
        return _text_bytes(self.shown) + _PART_BYTES

    @property
    def is_system(self) -> bool:
        return self.role == "system"


@dataclass(frozen=True)
class Prompt:
    """Tools, messages and all other inputs of a prompt."""

    parts: tuple[Part, ...]
    tools: tuple[str, ...] = ()
    """Each tool's JSON text, keys in written order."""
    arguments: str = ""
    """Other arguments of the template, as canonical JSON."""
    model: str = ""
    namespace: str = ""

    @cached_property
    def num_head(self) -> int:
        """Leading system messages."""
        return next((index for index, part in enumerate(self.parts) if not part.is_system), len(self.parts))

    @property
    def head(self) -> tuple[Part, ...]:
        return self.parts[: self.num_head]

    @property
    def has_replies(self) -> bool:
        return any(part.role == "assistant" for part in self.parts)

    @cached_property
    def said(self) -> frozenset[Part]:
        """All but system messages; they identify a conversation."""
        return frozenset(part for part in self.parts if not part.is_system and part.shown)

    def shares_state_with(self, other: "Prompt") -> bool:
        """Whether the other prompt could reuse any state."""
        return (self.model, self.namespace) == (other.model, other.namespace)

    def has_inputs_of(self, other: "Prompt") -> bool:
        """Whether all but the messages is the same for a template."""
        return (self.tools, self.arguments) == (other.tools, other.arguments)

    @property
    def tools_text(self) -> str:
        return "\n".join(self.tools)

    @property
    def num_bytes(self) -> int:
        return _text_bytes(self.tools_text) + sum(part.num_bytes for part in self.parts)


def prompt_of(
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
    *,
    model: str = "",
    namespace: str = "",
) -> Prompt:
    """A conversation's parts."""
    offered = ({name: value for name, value in tool.items() if name != "cache_control"} for tool in tools)
    texts = tuple(json.dumps(tool, ensure_ascii=False) for tool in offered)
    inputs = json.dumps(arguments, sort_keys=True, default=str) if arguments else ""
    return Prompt(tuple(map(part_of, messages)), texts, inputs, model, namespace)


def part_of(message: Mapping[str, Any]) -> Part:
    """Reads a message as a client sends it or as a template gets it."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    ids = [call.get("id") for call in calls] + [message.get("tool_call_id")]
    role = str(message.get("role"))
    return Part(
        role="system" if role == "developer" else role,
        text=_content_text(message.get("content")) or str(message.get("refusal") or ""),
        reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
        calls=tuple(_call_text(call) for call in calls),
        call_ids=tuple(str(call_id) for call_id in ids if call_id),
    )


MIN_REPEATS = 4
MAX_CALL_CHARACTERS = 300


@dataclass(frozen=True)
class RepeatedCall:
    """A call that a conversation holds at least `MIN_REPEATS` times, without a call between that was new there."""

    call: str
    """Name and arguments, as JSON text; of a long one the beginning."""
    times: int


def repeated_call(parts: Iterable[Part]) -> RepeatedCall | None:
    """The call that was repeated most often, if any was: a model that calls in a circle makes no new call."""
    known, times, most = set[str](), Counter[str](), RepeatedCall("", MIN_REPEATS - 1)
    for call in (call for part in parts for call in part.calls):
        if call not in known:
            known.add(call)
            times.clear()
        times[call] += 1
        if times[call] > most.times:
            most = RepeatedCall(call[:MAX_CALL_CHARACTERS], times[call])
    return most if most.call else None


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_object(arguments, allow_nan=True) or arguments
    return json.dumps([function.get("name"), arguments or {}], ensure_ascii=False, default=str)


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(_piece_text(piece) for piece in content)


def _piece_text(piece: Any) -> str:
    for name in ("text", "refusal"):
        if isinstance(piece, Mapping) and isinstance(piece.get(name), str):
            return str(piece[name])
    return json.dumps(piece, ensure_ascii=False, default=str)


def _text_bytes(text: str) -> int:
    """At most; `sys.getsizeof` grows once a text was encoded."""
    return len(text) * (1 if text.isascii() else 4)
