"""An answer's items, their events, and the client's tools. Pure.

Thoughts return as encrypted content, for clients that
send nothing else of them back; it is no secret and proves nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from models.output import pieces
from models.output.pieces import OutputPart, OutputParts, PartBody, PartEvent, PartStatus
from models.texts import enclose, opened, read_object

Item: TypeAlias = dict[str, Any]
"""Items that were read have a `type`."""

SEARCH: Final = "tool_search"
INPUT: Final = "input"
_SEPARATOR: Final = "__"


@dataclass(frozen=True)
class ClientTool:
    """A tool under the client's names."""

    name: str
    namespace: str | None = None
    kind: Literal["function_call", "custom_tool_call", "tool_search_call"] = "function_call"
    """The type of its calls' items."""


@dataclass(frozen=True)
class ToolSet:
    """One request's tools."""

    shown: Sequence[Mapping[str, Any]] = ()
    """Functions at the head of the prompt."""
    by_name: Mapping[str, ClientTool] = field(default_factory=dict)
    """By the model's name."""
    found: Sequence[Mapping[str, Any]] = ()

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        return [*self.shown, *self.found]

    def with_found(self, loaded: "Sequence[ToolSet]") -> "ToolSet":
        """Adds found tools; a known one stays unchanged."""
        known = {tool["function"]["name"]: tool for tool in self.callable_tools}
        num_known = len(known)
        for tool in (tool for one in loaded for tool in one.shown):
            known.setdefault(tool["function"]["name"], tool)
        by_name = {name: tool for one in (*reversed(loaded), self) for name, tool in one.by_name.items()}
        return ToolSet(self.shown, by_name, [*self.found, *list(known.values())[num_known:]])


def joined_name(namespace: str | None, name: str) -> str:
    """The model's name for a tool."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)
"""JSON text up to an escape that may be incomplete."""


def reasoning_of(enclosed: str | None, content: str | None, summary: str) -> str:
    """Returned reasoning: its encrypted content, else content or summary."""
    return opened(enclosed or "") or content or summary


class _Item(OutputPart):
    kind: str
    prefix: str

    def __init__(self, name: str) -> None:
        """`name` is the answer's; nothing else is random in ids."""
        self._name = name

    @property
    def id(self) -> str:
        return f"{self.prefix}_{self._name}_{self.index}"

    def body(self, status: PartStatus) -> PartBody:
        return {"id": self.id, "type": self.kind, "status": status}

    def begin(self) -> list[PartEvent]:
        return [self._told("added", "in_progress"), *self.opening()]

    def end(self, status: PartStatus) -> list[PartEvent]:
        return [*self.closing(), self._told("done", status)]

    def _told(self, what: str, status: PartStatus) -> PartEvent:
        return {"type": f"response.output_item.{what}", "output_index": self.index, "item": self.body(status)}

    def opening(self) -> list[PartEvent]:
        return []

    def grow(self, text: str) -> list[PartEvent]:
        self.text += text
        return []

    def closing(self) -> list[PartEvent]:
        return []

    def event(self, kind: str, **fields: Any) -> PartEvent:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class _TextItem(_Item):
    fields: Mapping[str, Any]
    place = "content"
    """The item's field with the part."""
    part: str
    texts: str
    """What the names of the text's events begin with."""
    parts = "content_part"
    part_fields: Mapping[str, Any] = {}
    event_fields: Mapping[str, Any] = {}

    def __init__(self, name: str, *, is_enclosed: bool = False) -> None:
        """`is_enclosed`: the text is repeated as encrypted content."""
        super().__init__(name)
        self._is_enclosed = is_enclosed

    def body(self, status: PartStatus) -> PartBody:
        item = {**super().body(status), **self.fields}
        if self.text:
            item[self.place] = [self._part]
            if self._is_enclosed and status != "in_progress":
                item["encrypted_content"] = enclose(self.text)
        return item

    def opening(self) -> list[PartEvent]:
        return [self._event(f"{self.parts}.added", part=self._part)]

    def grow(self, text: str) -> list[PartEvent]:
        self.text += text
        return [self._event(f"{self.texts}.delta", delta=text, **self.event_fields)]

    def closing(self) -> list[PartEvent]:
        done = self._event(f"{self.texts}.done", text=self.text, **self.event_fields)
        return [done, self._event(f"{self.parts}.done", part=self._part)]

    def _event(self, kind: str, **fields: Any) -> PartEvent:
        return self.event(kind, **{f"{self.place}_index": 0}, **fields)

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": self.part, "text": self.text, **self.part_fields}


class _Message(_TextItem):
    kind, prefix, part, texts = "message", "msg", "output_text", "output_text"
    fields: Mapping[str, Any] = {"role": "assistant", "content": []}
    part_fields: Mapping[str, Any] = {"annotations": [], "logprobs": []}
    event_fields: Mapping[str, Any] = {"logprobs": []}


class _Reasoning(_TextItem):
    kind, prefix, part, texts = "reasoning", "rs", "reasoning_text", "reasoning_text"
    fields: Mapping[str, Any] = {"summary": []}


class _Summary(_Reasoning):
    place, part, texts, parts = "summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part"


class _Call(_Item):
    kind, prefix, field = "function_call", "fc", "arguments"

    def __init__(self, name: str, call_id: str, tool: ClientTool) -> None:
        super().__init__(name)
        self._call_id = call_id
        self._tool = tool

    def body(self, status: PartStatus) -> PartBody:
        return {**super().body(status), "call_id": self._call_id, **self.called()}

    def called(self) -> dict[str, Any]:
        name, namespace = self._tool.name, self._tool.namespace
        return {"name": name, **({} if namespace is None else {"namespace": namespace}), self.field: self.text}

    def grow(self, text: str) -> list[PartEvent]:
        self.text += text
        return [self.event("function_call_arguments.delta", delta=text)]

    def closing(self) -> list[PartEvent]:
        return [self.event("function_call_arguments.done", name=self._tool.name, arguments=self.text)]


class _CustomCall(_Call):
    """A call of a custom tool: the text `input` is taken from the model's JSON arguments as they arrive."""

    kind, prefix, field = "custom_tool_call", "ctc", "input"
    _arguments = ""
    _read_to: int | None = None
    """None before the input begins."""

    def grow(self, text: str) -> list[PartEvent]:
        self._arguments += text
        if self._read_to is None:
            if (head := _HEAD.match(self._arguments)) is None:
                return []
            self._read_to = head.end()
        match = _WHOLE.match(self._arguments, self._read_to)
        assert match is not None, "the pattern takes the empty text"
        self._read_to = match.end()
        return self._delta(json.loads(f'"{match.group()}"', strict=False))

    def closing(self) -> list[PartEvent]:
        """Other arguments are the input, but for a single text under another name; cut-off ones end as they were."""
        values, whole = read_object(self._arguments), self.text
        if values is not None:
            value = values.get(INPUT, next(iter(values.values())) if len(values) == 1 else None)
            whole = value if isinstance(value, str) else self._arguments
        events = self._delta(whole.removeprefix(self.text) if whole.startswith(self.text) else "")
        self.text = whole
        return [*events, self.event("custom_tool_call_input.done", input=whole)]

    def _delta(self, text: str) -> list[PartEvent]:
        self.text += text
        return [self.event("custom_tool_call_input.delta", delta=text)] if text else []


class _SearchCall(_Call):
    """Sent whole: the API has no events for its arguments."""

    kind, prefix = "tool_search_call", "tsc"
    grow, closing = _Item.grow, _Item.closing

    def called(self) -> dict[str, Any]:
        return {"execution": "client", "arguments": read_object(self.text) or {}}


_CALLS: Final[Mapping[str, type[_Call]]] = {kind.kind: kind for kind in (_Call, _CustomCall, _SearchCall)}


class AnswerOutput(OutputParts):
    """The output of one answer."""

    def __init__(self, name: str, tools: ToolSet, *, is_summary: bool = False, is_enclosed: bool = False) -> None:
        """`is_summary`: reasoning is its own summary. `is_enclosed`: it is repeated as encrypted content."""
        super().__init__()
        self._name = name
        self._tools = tools
        self._reasoning = partial(_Summary if is_summary else _Reasoning, name, is_enclosed=is_enclosed)

    def part_of(self, piece: pieces.Text | pieces.Reasoning | pieces.ToolCallStarted) -> OutputPart:
        """An item."""
        match piece:
            case pieces.Text():
                return _Message(self._name)
            case pieces.Reasoning():
                return self._reasoning()
            case pieces.ToolCallStarted(call_id, name):
                # An unknown name is a function's.
                tool = self._tools.by_name.get(name) or ClientTool(name)
                return _CALLS[tool.kind](self._name, call_id, tool)
