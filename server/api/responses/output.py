"""The output of an answer: its items as they grow, their events, and the client's tools. Pure.

An item is announced, grows and is done before the next begins. The sender numbers the events. Thoughts return as
encrypted content, for clients that send nothing else of them back; it is no secret and proves nothing.
"""

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
from models.texts import enclose, opened, read_object

SEARCH: Final = "tool_search"
INPUT: Final = "input"
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
    """One request's tools, and the names that the model sees."""

    shown: Sequence[Mapping[str, Any]] = ()
    """Functions at the head of the prompt."""
    loaded: Sequence[Mapping[str, Any]] = ()
    by_name: Mapping[str, ClientTool] | None = None
    """The model's name."""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        return [*self.shown, *self.loaded]

    def with_found(self, found: "ToolSet") -> "ToolSet":
        """Adds found tools; a known one stays unchanged."""
        known = {tool["function"]["name"] for tool in self.callable_tools}
        new = [tool for tool in found.shown if tool["function"]["name"] not in known]
        by_name = {**(found.by_name or {}), **(self.by_name or {})}
        return ToolSet(self.shown, [*self.loaded, *new], by_name)

    def find(self, name: str) -> ClientTool:
        """Returns a called tool; an unknown name is a function's."""
        return (self.by_name or {}).get(name) or ClientTool(name)


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the model's name for a tool."""
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
"""JSON text up to an escape that may be incomplete."""


class CustomInput:
    """A custom tool's input, read from its growing JSON arguments."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read_to: int | None = None
        """None before the input begins."""
        self._told = ""

    def feed(self, arguments: str) -> str:
        """Takes more arguments; returns the input's new part."""
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
        """Returns the whole input, and what `feed` has not returned of it.

        Other arguments are the input themselves, but for a single text under another name. If they were cut off, the
        input is what was returned.
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


def thought_of(enclosed: str | None, content: str | None, summary: str) -> str:
    """Returns a returned thought: its encrypted content, else content or summary."""
    return opened(enclosed or "") or content or summary


Event: TypeAlias = dict[str, Any]
ItemBody: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True)
class ThoughtStyle:
    """The form in which thoughts are returned."""

    is_summary: bool = False
    """As their own summary, which some clients show."""
    is_enclosed: bool = False
    """Repeated as encrypted content."""


class _OpenItem(ABC):
    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self._index = index
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def body(self, status: Status) -> ItemBody:
        """Returns the item as it is now."""

    def begin(self) -> list[Event]:
        return []

    def grow(self, text: str) -> list[Event]:
        """Takes more text; returns its events."""
        self._texts.append(text)
        return []

    def end(self) -> list[Event]:
        """Returns the events that end the item's parts."""
        return []

    def event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index, **fields}


class _OpenMessage(_OpenItem):
    def body(self, status: Status) -> ItemBody:
        content = [self._part()] if self._texts else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> list[Event]:
        return [self.event("content_part.added", content_index=0, part=self._part())]

    def grow(self, text: str) -> list[Event]:
        return [*super().grow(text), self.event("output_text.delta", content_index=0, delta=text, logprobs=[])]

    def end(self) -> list[Event]:
        return [
            self.event("output_text.done", content_index=0, text=self._text, logprobs=[]),
            self.event("content_part.done", content_index=0, part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}


class _OpenThought(_OpenItem):
    def __init__(self, item_id: str, index: int, style: ThoughtStyle) -> None:
        super().__init__(item_id, index)
        self._style = style
        of_content = ("reasoning_text", "content_part", "content_index")
        of_summary = ("reasoning_summary_text", "reasoning_summary_part", "summary_index")
        self._kind, self._part_kind, self._place = of_summary if style.is_summary else of_content

    def body(self, status: Status) -> ItemBody:
        item: ItemBody = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        if self._texts:
            item["summary" if self._style.is_summary else "content"] = [self._part()]
            if self._style.is_enclosed and status != "in_progress":
                item["encrypted_content"] = enclose(self._text)
        return item

    def begin(self) -> list[Event]:
        return [self._event(f"{self._part_kind}.added", part=self._part())]

    def grow(self, text: str) -> list[Event]:
        return [*super().grow(text), self._event(f"{self._kind}.delta", delta=text)]

    def end(self) -> list[Event]:
        return [
            self._event(f"{self._kind}.done", text=self._text),
            self._event(f"{self._part_kind}.done", part=self._part()),
        ]

    def _event(self, kind: str, **fields: Any) -> Event:
        return self.event(kind, **{self._place: 0}, **fields)

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self._style.is_summary else "reasoning_text", "text": self._text}


class _OpenCall(_OpenItem):
    kind = "function_call"

    def __init__(self, item_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._tool = tool

    def body(self, status: Status) -> ItemBody:
        head = {"id": self.id, "type": self.kind, "status": status, "call_id": self._call_id}
        return {**head, **self.called()}

    def called(self) -> dict[str, Any]:
        """Returns what is called, and with what."""
        return {**_name_of(self._tool), "arguments": self._text}

    def grow(self, text: str) -> list[Event]:
        return [*super().grow(text), self.event("function_call_arguments.delta", delta=text)]

    def end(self) -> list[Event]:
        return [self.event("function_call_arguments.done", name=self._tool.name, arguments=self._text)]


class _OpenCustomCall(_OpenCall):
    kind = "custom_tool_call"

    def __init__(self, item_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, index, call_id, tool)
        self._input = CustomInput()
        self._whole: str | None = None

    def called(self) -> dict[str, Any]:
        return {**_name_of(self._tool), "input": self._input.so_far if self._whole is None else self._whole}

    def grow(self, text: str) -> list[Event]:
        return self._delta(self._input.feed(text))

    def end(self) -> list[Event]:
        self._whole, rest = self._input.finish()
        return [*self._delta(rest), self.event("custom_tool_call_input.done", input=self._whole)]

    def _delta(self, text: str) -> list[Event]:
        return [self.event("custom_tool_call_input.delta", delta=text)] if text else []


class _OpenSearchCall(_OpenCall):
    """Sent whole: the API has no events for its arguments."""

    kind = "tool_search_call"

    def called(self) -> dict[str, Any]:
        return {"execution": "client", "arguments": read_object(self._text) or {}}

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
        """Nothing but `name` is random in item ids."""
        self._name = name
        self._tools = tools
        self._thoughts = thoughts
        self._done: list[ItemBody] = []
        self._open: _OpenItem | None = None
        self._num_begun = 0
        """Failed calls included."""

    @property
    def items(self) -> list[ItemBody]:
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
        """Ends the open item; returns its events."""
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
        kind, prefix = _OpenCall, "fc"
        if tool.is_custom or tool.is_search:
            kind, prefix = (_OpenCustomCall, "ctc") if tool.is_custom else (_OpenSearchCall, "tsc")
        return self._begin(prefix, lambda item_id, index: kind(item_id, index, call_id, tool))

    def _ready(self, kind: type[_OpenItem], prefix: str, make: _Make) -> list[Event]:
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
        """Texts around a failed call are joined."""
        last = self._done[-1] if self._done else None
        if last is not None and last["type"] == item["type"] == "message":
            text = last["content"][0]["text"] + item["content"][0]["text"]
            self._done[-1] = {**item, "id": last["id"], "content": [{**item["content"][0], "text": text}]}
        else:
            self._done.append(item)
