"""Changes conversations that a model's template would refuse, or drop a part of, into a shape that it shows whole.

Clients send what OpenAI's interface allows; templates were written for less. For each shape that some templates do
not take, a small sample is rendered once, as it is and changed. Only where the template refuses or drops the first
and shows the second are conversations of that shape changed. So what becomes of a message depends on the template and
on the messages before it, hardly ever on those after: a conversation that grows keeps its prompt's beginning.

Pure: knows messages and tools, and the template only as a function. Nothing is changed in place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from models.prompt.shape_changes import (
    Message,
    all_named,
    arguments_as_object,
    arguments_as_text,
    described,
    late_system_in_words,
    no_system,
    one_call_each,
    one_leading_system,
    results_named,
    short_ids,
    users_joined,
)

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
Apply: TypeAlias = Callable[[Sequence[Message], Tools], str | None]
"""Renders a conversation; None where the template refuses it."""
Change: TypeAlias = Callable[[Sequence[Message]], list[Message]]
ToolChange: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A conversation that not every template takes, and how it is changed for those that do not."""

    sample: Sequence[Message]
    is_shown: Callable[[str], bool]
    """Whether a rendering of the sample shows what matters in it."""
    change: Change = list
    change_tool: ToolChange = dict
    tools: Tools = None
    """Shown with the sample."""

    def must_change(self, apply: Apply, tools: Tools) -> bool:
        """Returns whether a template takes the sample only as changed."""
        given = self.tools or tools
        if self._is_taken(apply(self.sample, given)):
            return False
        return self._is_taken(
            apply(self.change(self.sample), [self.change_tool(tool) for tool in given or ()] or None)
        )

    def _is_taken(self, text: str | None) -> bool:
        return text is not None and self.is_shown(text)


@dataclass(frozen=True)
class Adaptation:
    """What is changed for one template."""

    shapes: tuple[Shape, ...] = ()

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages in shapes that the template takes."""
        return reduce(lambda changed, shape: shape.change(changed), self.shapes, list(messages))

    def tools(self, tools: Tools) -> Tools:
        """Returns the tools in shapes that the template takes."""
        if not tools:
            return None
        return [reduce(lambda changed, shape: shape.change_tool(changed), self.shapes, tool) for tool in tools]


def adaptation_for(apply: Apply, *, with_tools: bool) -> Adaptation:
    """Returns what a template needs changed, in conversations with or without tools: many have a part for each."""
    tools = [_TOOL] if with_tools else None
    return Adaptation(tuple(shape for shape in SHAPES if shape.must_change(apply, tools)))


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calls(*names: str, arguments: Any = None, has_ids: bool = True) -> Message:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments or {}}} for name in names]
    named = [{"id": f"call0000{i}", **call} for i, call in enumerate(calls)] if has_ids else calls
    return {"role": "assistant", "content": "", "tool_calls": named}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "qfirst"}


def _in_order(*words: str) -> Callable[[str], bool]:
    """Returns whether a text holds the words, each behind the one before it."""

    def is_shown(text: str) -> bool:
        position = 0
        for word in words:
            position = text.find(word, position)
            if position < 0:
                return False
        return True

    return is_shown


def _has(*words: str) -> Callable[[str], bool]:
    return lambda text: all(word in text for word in words)


def _without(message: Message, *names: str) -> Message:
    return {key: value for key, value in message.items() if key not in names}


_ASKS = _says("user", "qask")
_TOOL = {
    "type": "function",
    "function": {
        "name": "qfirst",
        "description": "qdescription",
        "parameters": {"type": "object", "properties": {"qkey": {"type": "string", "description": "d"}}},
    },
}
_LONG_IDS = [
    {**_calls("qfirst"), "tool_calls": [{**_calls("qfirst")["tool_calls"][0], "id": "call_0123456789abcdef"}]},
    {**_result(0, "qresult"), "tool_call_id": "call_0123456789abcdef"},
]

SHAPES: tuple[Shape, ...] = (
    Shape(
        [_ASKS, _calls("qfirst", arguments={"qkey": "qvalue"}), _result(0, "qresult")],
        # A template that does not write JSON shows the object as Python does.
        lambda text: _in_order("qkey", "qvalue")(text) and "'qkey'" not in text,
        arguments_as_text,
        tools=[_TOOL],
    ),
    Shape(
        [_ASKS, _calls("qfirst", arguments="qtext"), _result(0, "qresult")],
        _has("qtext"),
        arguments_as_object,
        tools=[_TOOL],
    ),
    Shape(
        [_ASKS, _calls("qfirst", has_ids=False), _without(_result(0, "qresult"), "tool_call_id")],
        _has("qfirst", "qresult"),
        all_named,
        tools=[_TOOL],
    ),
    Shape([_ASKS, *_LONG_IDS], _has("qfirst", "qresult"), short_ids, tools=[_TOOL]),
    Shape(
        [_ASKS, _calls("qfirst"), _without(_result(0, "qresult"), "name")],
        _has("qfirst", "qresult"),
        results_named,
        tools=[_TOOL],
    ),
    Shape(
        [_ASKS, _calls("qfirst", "qsecond"), _result(0, "qresult"), _result(1, "qother")],
        _has("qfirst", "qsecond", "qresult", "qother"),
        one_call_each,
        tools=[_TOOL],
    ),
    Shape([_ASKS], _has("qbare"), change_tool=described, tools=[{"type": "function", "function": {"name": "qbare"}}]),
    Shape([_says("system", "qrule"), _says("system", "qother"), _ASKS], _has("qrule", "qother"), one_leading_system),
    Shape(
        [_ASKS, _says("assistant", "qanswer"), _says("system", "qrule"), _says("user", "qgo")],
        _in_order("qask", "qanswer", "qrule", "qgo"),
        late_system_in_words,
    ),
    Shape([_says("system", "qrule"), _ASKS], _has("qrule", "qask"), no_system),
    Shape([_ASKS, _says("user", "qgo")], _in_order("qask", "qgo"), users_joined),
)
"""In the order in which conversations are changed."""
