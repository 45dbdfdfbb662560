"""An answer's items as they grow, their events, and the client's tools. Pure.

An item is announced, grows and is done before the next begins. Thoughts return as encrypted content, for clients that
send nothing else of them back; it is no secret and proves nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from models.output import pieces
from models.output.pieces import Piece
from models.texts import enclose, opened, read_object

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
    loaded: Sequence[Mapping[str, Any]] = ()
    by_name: Mapping[str, ClientTool] = field(default_factory=dict)
    """The model's name."""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        return [*self.shown, *self.loaded]

    def with_found(self, found: "ToolSet") -> "ToolSet":
        """Adds found tools; a known one stays unchanged."""
        known = {tool["function"]["name"] for tool in self.callable_tools}
        new = [tool for tool in found.shown if tool["function"]["name"] not in known]
        return ToolSet(self.shown, [*self.loaded, *new], {**found.by_name, **self.by_name})

    def shown_names(self, names: Sequence[str] | None) -> tuple[str, ...] | None:
        """The model's names for the client's."""
        shown = {tool.name: name for name, tool in self.by_name.items()}
        return None if names is None else tuple(shown.get(name, name) for name in names)


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


class CustomInput:
    """A custom tool's input, read from its growing JSON arguments."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read_to: int | None = None
        """None before the input begins."""
        self.told = ""
        """What `feed` has returned."""

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
        self.told += added
        return added

    def finish(self) -> tuple[str, str]:
        """The whole input, and its part that `feed` has not returned.

        Other arguments are the input themselves, but for a single text under another name. If they were cut off, the
        input is what was returned.
        """
        values, whole = read_object(self._arguments), self.told
        if values is not None:
            value = values.get(INPUT, next(iter(values.values())) if len(values) == 1 else None)
            whole = value if isinstance(value, str) else self._arguments
        return whole, whole.removeprefix(self.told) if whole.startswith(self.told) else ""


def reasoning_of(enclosed: str | None, content: str | None, summary: str) -> str:
    """Returned reasoning: its encrypted content, else content or summary."""
    return opened(enclosed or "") or content or summary


ResponseEvent: TypeAlias = dict[str, Any]
ItemBody: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class _OpenItem:
    kind: str
    prefix: str
    id = ""
    index = 0
    text = ""

    def body(self, status: Status) -> ItemBody:
        return {"id": self.id, "type": self.kind, "status": status}

    def begin(self) -> list[ResponseEvent]:
        return []

    def grow(self, text: str) -> list[ResponseEvent]:
        self.text += text
        return []

    def end(self) -> list[ResponseEvent]:
        return []

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


@dataclass(frozen=True)
class _Form:
    kind: str
    prefix: str
    fields: Mapping[str, Any]
    place: Literal["content", "summary"]
    """The item's field with the part."""
    part: str
    event: str
    """What the names of the text's events begin with."""
    part_event: str
    part_fields: Mapping[str, Any] = field(default_factory=dict)
    event_fields: Mapping[str, Any] = field(default_factory=dict)


_MESSAGE: Final = _Form(
    "message",
    "msg",
    {"role": "assistant", "content": []},
    "content",
    "output_text",
    "output_text",
    "content_part",
    part_fields={"annotations": [], "logprobs": []},
    event_fields={"logprobs": []},
)
_REASONING: Final = _Form(
    "reasoning", "rs", {"summary": []}, "content", "reasoning_text", "reasoning_text", "content_part"
)
_SUMMARY: Final = replace(
    _REASONING,
    place="summary",
    part="summary_text",
    event="reasoning_summary_text",
    part_event="reasoning_summary_part",
)


class _OpenText(_OpenItem):
    def __init__(self, form: _Form, *, is_enclosed: bool = False) -> None:
        """`is_enclosed`: the text is repeated as encrypted content."""
        self.form = form
        self.kind, self.prefix = form.kind, form.prefix
        self._is_enclosed = is_enclosed

    def body(self, status: Status) -> ItemBody:
        item = {**super().body(status), **self.form.fields}
        if self.text:
            item[self.form.place] = [self._part]
            if self._is_enclosed and status != "in_progress":
                item["encrypted_content"] = enclose(self.text)
        return item

    def begin(self) -> list[ResponseEvent]:
        return [self._event(f"{self.form.part_event}.added", part=self._part)]

    def grow(self, text: str) -> list[ResponseEvent]:
        self.text += text
        return [self._event(f"{self.form.event}.delta", delta=text, **self.form.event_fields)]

    def end(self) -> list[ResponseEvent]:
        return [
            self._event(f"{self.form.event}.done", text=self.text, **self.form.event_fields),
            self._event(f"{self.form.part_event}.done", part=self._part),
        ]

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self.event(kind, **{f"{self.form.place}_index": 0}, **fields)

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": self.form.part, "text": self.text, **self.form.part_fields}


class _OpenCall(_OpenItem):
    kind, prefix = "function_call", "fc"

    def __init__(self, call_id: str, tool: ClientTool) -> None:
        self._call_id = call_id
        self._tool = tool

    def body(self, status: Status) -> ItemBody:
        return {**super().body(status), "call_id": self._call_id, **self.called()}

    def called(self) -> dict[str, Any]:
        return {**self._named, "arguments": self.text}

    @property
    def _named(self) -> dict[str, str]:
        namespace = self._tool.namespace
        return {"name": self._tool.name, **({} if namespace is None else {"namespace": namespace})}

    def grow(self, text: str) -> list[ResponseEvent]:
        self.text += text
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self) -> list[ResponseEvent]:
        return [self.event("function_call_arguments.done", name=self._tool.name, arguments=self.text)]


class _OpenCustomCall(_OpenCall):
    kind, prefix = "custom_tool_call", "ctc"

    def __init__(self, call_id: str, tool: ClientTool) -> None:
        super().__init__(call_id, tool)
        self._input = CustomInput()

    def called(self) -> dict[str, Any]:
        return {**self._named, "input": self.text}

    def grow(self, text: str) -> list[ResponseEvent]:
        return self._delta(self._input.feed(text))

    def end(self) -> list[ResponseEvent]:
        whole, rest = self._input.finish()
        events = self._delta(rest)
        self.text = whole
        return [*events, self.event("custom_tool_call_input.done", input=whole)]

    def _delta(self, text: str) -> list[ResponseEvent]:
        self.text += text
        return [self.event("custom_tool_call_input.delta", delta=text)] if text else []


class _OpenSearchCall(_OpenCall):
    """Sent whole: the API has no events for its arguments."""

    kind, prefix = "tool_search_call", "tsc"
    grow, end = _OpenItem.grow, _OpenItem.end

    def called(self) -> dict[str, Any]:
        return {"execution": "client", "arguments": read_object(self.text) or {}}


_CALLS: Final[Mapping[str, type[_OpenCall]]] = {
    kind.kind: kind for kind in (_OpenCall, _OpenCustomCall, _OpenSearchCall)
}


class AnswerOutput:
    """The output of one answer."""

    def __init__(self, name: str, tools: ToolSet, *, is_summary: bool = False, is_enclosed: bool = False) -> None:
        """Nothing but `name` is random in item ids.

        `is_summary`: reasoning is its own summary. `is_enclosed`: it is repeated as encrypted content.
        """
        self.items: list[ItemBody] = []
        self._name = name
        self._tools = tools
        self._reasoning = _SUMMARY if is_summary else _REASONING
        self._is_enclosed = is_enclosed
        self._open: _OpenItem | None = None
        self._num_begun = 0

    @property
    def so_far(self) -> list[ItemBody]:
        return [*self.items, *(() if self._open is None else (self._open.body("in_progress"),))]

    def add(self, piece: Piece) -> list[ResponseEvent]:
        """Takes a piece; returns its events."""
        match piece:
            case pieces.Text(text):
                return [*self._ready(_MESSAGE), *self._grow(text)]
            case pieces.Reasoning(text):
                return [*self._ready(self._reasoning, is_enclosed=self._is_enclosed), *self._grow(text)]
            case pieces.ToolCallStarted(call_id, name):
                # An unknown name is a function's.
                tool = self._tools.by_name.get(name) or ClientTool(name)
                return self._begin(_CALLS[tool.kind](call_id, tool))
            case pieces.ToolArguments(text):
                return self._grow(text)
            case pieces.ToolCallEnded():
                return self.close()
            case pieces.ToolCallCut():
                return []  # the end of the answer ends the call too, as incomplete
            case pieces.ToolCallFailed(text):
                # No event ends the failed call, so that clients do not run it.
                self._open = None
                return self.add(pieces.Text(text))

    def close(self, status: Status = "completed") -> list[ResponseEvent]:
        """Ends the open item; returns its events."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        events, item = ended.end(), ended.body(status)
        last = self.items[-1] if self.items else None
        done = {"type": "response.output_item.done", "output_index": ended.index, "item": item}
        if last is not None and last["type"] == item["type"] == "message":
            # Texts around a failed call are joined.
            text = last["content"][0]["text"] + item["content"][0]["text"]
            self.items[-1] = {**item, "id": last["id"], "content": [{**item["content"][0], "text": text}]}
        else:
            self.items.append(item)
        return [*events, done]

    def _ready(self, form: _Form, *, is_enclosed: bool = False) -> list[ResponseEvent]:
        """Begins an item of text, unless it is open."""
        is_open = isinstance(self._open, _OpenText) and self._open.form is form
        return [] if is_open else self._begin(_OpenText(form, is_enclosed=is_enclosed))

    def _begin(self, item: _OpenItem) -> list[ResponseEvent]:
        events, index = self.close(), self._num_begun
        item.id, item.index = f"{item.prefix}_{self._name}_{index}", index
        self._num_begun += 1
        self._open = item
        added = {"type": "response.output_item.added", "output_index": index, "item": item.body("in_progress")}
        return [*events, added, *item.begin()]

    def _grow(self, text: str) -> list[ResponseEvent]:
        assert self._open is not None, "a part belongs to an item"
        return self._open.grow(text)
