"""The output of an answer: its items as they grow from pieces, and the stream's events. Pure.

An item is announced, grows and is done before the next one begins. Events lack their `sequence_number`, which the
sender adds. `ToolSet` maps the client's tools to the names that the model sees. `CustomInput` reads a custom tool's
input from its growing JSON arguments.

Thoughts return as encrypted content, for clients that send nothing else of them back. The content holds the thought
itself: it is no secret here and proves nothing.
"""

import base64
import binascii
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from models.output.pieces import (
    Piece,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.texts import read_object

SEARCH: Final = "tool_search"
"""The model's name for the client's tool search."""
INPUT: Final = "input"
"""The argument that holds a custom tool's input."""
_SEPARATOR: Final = "__"


@dataclass(frozen=True)
class ClientTool:
    """A tool under the client's names."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_search: bool = False


@dataclass(frozen=True)
class ToolSet:
    """The tools of one request."""

    shown: Sequence[Mapping[str, Any]] = ()
    """Functions at the head of the prompt, in the form of chat templates."""
    loaded: Sequence[Mapping[str, Any]] = ()
    """Functions found since by the client's tool search."""
    by_name: Mapping[str, ClientTool] | None = None
    """Keyed by the model's name of the tool."""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        return [*self.shown, *self.loaded]

    def with_found(self, found: "ToolSet") -> "ToolSet":
        """Returns these tools and newly found ones; a known tool stays unchanged."""
        known = {tool["function"]["name"] for tool in self.callable_tools}
        new = [tool for tool in found.shown if tool["function"]["name"] not in known]
        by_name = {**(found.by_name or {}), **(self.by_name or {})}
        return ToolSet(self.shown, [*self.loaded, *new], by_name)

    def find(self, name: str) -> ClientTool:
        """Returns the tool that the model calls; an unknown name is taken for a function."""
        return (self.by_name or {}).get(name) or ClientTool(name)


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the model's name for a tool in a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


def input_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments that hold a custom tool's input."""
    return {INPUT: text}


_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)
"""Text of a JSON string up to an escape that may be incomplete."""


class CustomInput:
    """The input of one call."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read_to: int | None = None
        """Where the unread input begins in the arguments; None before the input begins."""
        self._told = ""

    def feed(self, arguments: str) -> str:
        """Takes more of the arguments; returns the new part of the input."""
        self._arguments += arguments
        if self._read_to is None:
            head = _HEAD.match(self._arguments)
            if head is None:
                return ""
            self._read_to = head.end()
        found = _WHOLE.match(self._arguments, self._read_to)
        assert found is not None, "the pattern takes the empty text"
        self._read_to = found.end()
        added: str = json.loads(f'"{found.group()}"', strict=False)
        self._told += added
        return added

    def finish(self) -> tuple[str, str]:
        """Returns the whole input, and the part that `feed` has not returned.

        Arguments of another shape are the input themselves, except a single text under another name. If the arguments
        were cut off, the input is the part returned so far.
        """
        values = read_object(self._arguments)
        whole = self._told if values is None else _input_of(values, self._arguments)
        return whole, whole.removeprefix(self._told) if whole.startswith(self._told) else ""

    @property
    def so_far(self) -> str:
        return self._told


def _input_of(values: Mapping[str, Any], arguments: str) -> str:
    value = values.get(INPUT, next(iter(values.values())) if len(values) == 1 else None)
    return value if isinstance(value, str) else arguments


_MARK: Final = "mlx-serve-text-1:"


def enclose(thought: str) -> str:
    """Returns a thought's encrypted content."""
    return _MARK + base64.b64encode(thought.encode(errors="replace")).decode()


def thought_of(enclosed: str | None, content: str | None, summary: str) -> str:
    """Returns the thought of a returned item: its encrypted content, else its content, else its summary."""
    return (_opened(enclosed) if enclosed else None) or content or summary


def _opened(enclosed: str) -> str | None:
    """Returns the thought in a text made by `enclose`; None for another server's content."""
    if not enclosed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(enclosed.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


Event: TypeAlias = dict[str, Any]
ItemBody: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True)
class ThoughtStyle:
    """The form in which thoughts are returned."""

    is_summary: bool = False
    """Whether thoughts are their own summary, which some clients show; else they are reasoning text."""
    is_enclosed: bool = False
    """Whether thoughts are repeated as encrypted content, for clients that send nothing else back."""


class _OpenItem(ABC):
    """An item that grows."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self._index = index

    @abstractmethod
    def body(self, status: Status) -> ItemBody:
        """Returns the item as it is now."""

    def begin(self) -> list[Event]:
        """Returns the events that announce the item."""
        return []

    @abstractmethod
    def grow(self, text: str) -> list[Event]:
        """Takes more of the item's text; returns its events."""

    @abstractmethod
    def end(self) -> list[Event]:
        """Returns the events that end the item's parts."""

    def event(self, kind: str, **fields: Any) -> Event:
        """Returns an event about this item."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index, **fields}


class _OpenMessage(_OpenItem):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._texts: list[str] = []

    def body(self, status: Status) -> ItemBody:
        content = [self._part()] if self._texts else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> list[Event]:
        return [self.event("content_part.added", content_index=0, part=self._part())]

    def grow(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self.event("output_text.delta", content_index=0, delta=text, logprobs=[])]

    def end(self) -> list[Event]:
        part = self._part()
        return [
            self.event("output_text.done", content_index=0, text=part["text"], logprobs=[]),
            self.event("content_part.done", content_index=0, part=part),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": []}


class _OpenThought(_OpenItem):
    def __init__(self, item_id: str, index: int, style: ThoughtStyle) -> None:
        super().__init__(item_id, index)
        self._style = style
        self._texts: list[str] = []

    def body(self, status: Status) -> ItemBody:
        item: ItemBody = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        if self._texts:
            item["summary" if self._style.is_summary else "content"] = [self._part()]
            if self._style.is_enclosed and status != "in_progress":
                item["encrypted_content"] = enclose("".join(self._texts))
        return item

    def begin(self) -> list[Event]:
        if self._style.is_summary:
            return [self.event("reasoning_summary_part.added", summary_index=0, part=self._part())]
        return [self.event("content_part.added", content_index=0, part=self._part())]

    def grow(self, text: str) -> list[Event]:
        self._texts.append(text)
        if self._style.is_summary:
            return [self.event("reasoning_summary_text.delta", summary_index=0, delta=text)]
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self) -> list[Event]:
        part = self._part()
        if self._style.is_summary:
            return [
                self.event("reasoning_summary_text.done", summary_index=0, text=part["text"]),
                self.event("reasoning_summary_part.done", summary_index=0, part=part),
            ]
        return [
            self.event("reasoning_text.done", content_index=0, text=part["text"]),
            self.event("content_part.done", content_index=0, part=part),
        ]

    def _part(self) -> dict[str, Any]:
        kind = "summary_text" if self._style.is_summary else "reasoning_text"
        return {"type": kind, "text": "".join(self._texts)}


class _OpenFunctionCall(_OpenItem):
    def __init__(self, item_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._tool = tool
        self._texts: list[str] = []

    def body(self, status: Status) -> ItemBody:
        item = {"id": self.id, "type": "function_call", "status": status, "call_id": self._call_id}
        return {**item, **_name_of(self._tool), "arguments": "".join(self._texts)}

    def grow(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self) -> list[Event]:
        whole = "".join(self._texts)
        return [self.event("function_call_arguments.done", name=self._tool.name, arguments=whole)]


class _OpenCustomCall(_OpenItem):
    def __init__(self, item_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._tool = tool
        self._input = CustomInput()
        self._whole: str | None = None

    def body(self, status: Status) -> ItemBody:
        item = {"id": self.id, "type": "custom_tool_call", "status": status, "call_id": self._call_id}
        text = self._whole if self._whole is not None else self._input.so_far
        return {**item, **_name_of(self._tool), "input": text}

    def grow(self, text: str) -> list[Event]:
        return self._delta(self._input.feed(text))

    def end(self) -> list[Event]:
        self._whole, rest = self._input.finish()
        return [*self._delta(rest), self.event("custom_tool_call_input.done", input=self._whole)]

    def _delta(self, text: str) -> list[Event]:
        return [self.event("custom_tool_call_input.delta", delta=text)] if text else []


class _OpenSearchCall(_OpenItem):
    """A tool search: sent whole, since the API has no events for its arguments."""

    def __init__(self, item_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._texts: list[str] = []

    def body(self, status: Status) -> ItemBody:
        item = {"id": self.id, "type": "tool_search_call", "status": status, "call_id": self._call_id}
        return {**item, "execution": "client", "arguments": read_object("".join(self._texts)) or {}}

    def grow(self, text: str) -> list[Event]:
        self._texts.append(text)
        return []

    def end(self) -> list[Event]:
        return []


_Make: TypeAlias = Callable[[str, int], _OpenItem]


def _name_of(tool: ClientTool) -> dict[str, str]:
    named = {"name": tool.name}
    return named if tool.namespace is None else {**named, "namespace": tool.namespace}


class AnswerOutput:
    """The output of one answer."""

    def __init__(self, name: str, tools: ToolSet, thoughts: ThoughtStyle) -> None:
        """`name` is the base of item ids; nothing else in them is random."""
        self._name = name
        self._tools = tools
        self._thoughts = thoughts
        self._done: list[ItemBody] = []
        self._open: _OpenItem | None = None
        self._num_begun = 0
        """Items announced in the stream, failed calls included."""

    @property
    def items(self) -> list[ItemBody]:
        """All finished items."""
        return list(self._done)

    def add(self, piece: Piece) -> list[Event]:
        """Takes a piece; returns its events."""
        match piece:
            case Text(text):
                return [*self._ready(_OpenMessage, "msg", _OpenMessage), *self._grow(text)]
            case Reasoning(text):
                return [*self._ready(_OpenThought, "rs", self._thought), *self._grow(text)]
            case ToolCallStarted(call_id, name):
                return self._begin_call(call_id, self._tools.find(name))
            case ToolArguments(text):
                return self._grow(text)
            case ToolCallEnded():
                return self.close()
            case ToolCallCut():
                return []  # the end of the answer ends it too, as incomplete
            case ToolCallFailed(text):
                # No event ends the failed call, so that clients do not run it.
                self._open = None
                return self.add(Text(text))

    def close(self, status: Status = "completed") -> list[Event]:
        """Ends the open item, if any; returns its events."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        events = ended.end()
        item = ended.body(status)
        self._keep(item)
        index = self._num_begun - 1
        return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]

    def _thought(self, item_id: str, index: int) -> _OpenThought:
        return _OpenThought(item_id, index, self._thoughts)

    def _begin_call(self, call_id: str, tool: ClientTool) -> list[Event]:
        kind: type[_OpenFunctionCall | _OpenCustomCall | _OpenSearchCall] = _OpenFunctionCall
        prefix = "fc"
        if tool.is_custom or tool.is_search:
            kind, prefix = (_OpenCustomCall, "ctc") if tool.is_custom else (_OpenSearchCall, "tsc")
        return self._begin(prefix, lambda item_id, index: kind(item_id, index, call_id, tool))

    def _ready(self, kind: type[_OpenItem], prefix: str, make: _Make) -> list[Event]:
        """Begins an item, unless one of its kind is open."""
        return [] if isinstance(self._open, kind) else self._begin(prefix, make)

    def _begin(self, prefix: str, make: _Make) -> list[Event]:
        events, index = self.close(), self._num_begun
        self._num_begun += 1
        self._open = make(f"{prefix}_{self._name}_{index}", index)
        added = {"type": "response.output_item.added", "output_index": index, "item": self._open.body("in_progress")}
        return [*events, added, *self._open.begin()]

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None, "a part belongs to an item"
        return self._open.grow(text)

    def _keep(self, item: ItemBody) -> None:
        """Keeps a finished item. Texts around a failed call are joined."""
        last = self._done[-1] if self._done else None
        if last is not None and last["type"] == item["type"] == "message":
            text = last["content"][0]["text"] + item["content"][0]["text"]
            self._done[-1] = {**item, "id": last["id"], "content": [{**item["content"][0], "text": text}]}
        else:
            self._done.append(item)
