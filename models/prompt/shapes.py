"""Changes conversations that a model's template would refuse, or show in part, into a shape shown whole. Pure.

A sample of each shape is rendered unchanged and changed; only if the template shows just the second, conversations of
that shape are changed. A message's result hardly depends on later ones: prompts keep their beginnings.

Where a client changes a prompt's head without meaning anything by it, so that nothing after it could be reused, the
head is kept the same:
* the first line of Claude Code's system message, `x-anthropic-billing-header: cc_version=2.1.15.7b4;
  cc_entrypoint=cli; cch=eb6c6;`: `cch` and the version's last part become constants. The line is matched whole, only
  as the first one of a leading system message;
* the order of keys in a tool's definition: a tool is shown as first sent.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` (in this module a text; elsewhere also None or text parts), and other fields for the template.

`cache_control` in a part or message asks for a restore point at its end.
"""

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None

_JOINT = "\n\n"
GO_ON: Message = {"role": "assistant", "content": "Go on."}
"""Stands between a result and the user's message where roles alternate."""
_ID_CHARACTERS = 9
"""Length of a call's id in Mistral's templates."""


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """For templates that print arguments as they are."""
    return _with_arguments(
        messages, lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    )


def arguments_as_object(messages: Sequence[Message]) -> list[Message]:
    """For templates that iterate over arguments."""
    return _with_arguments(messages, lambda given: given if isinstance(given, Mapping) else {"arguments": given})


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}

    return _with_calls(messages, changed)


def _with_calls(
    messages: Sequence[Message], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Message]:
    return [
        {**message, "tool_calls": list(map(change, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def all_named(messages: Sequence[Message]) -> list[Message]:
    """For templates that require ids: numbers calls; results answer in order."""
    result: list[Message] = []
    unanswered: list[str] = []
    num_calls = 0
    for message in messages:
        if message.get("tool_calls"):
            named = enumerate(message["tool_calls"], num_calls)
            calls = [{**call, "id": call.get("id") or f"call{number:05}"} for number, call in named]
            unanswered += [call["id"] for call in calls]
            num_calls += len(calls)
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            answered = message.get("tool_call_id") or next(iter(unanswered), f"call{num_calls:05}")
            unanswered = [call_id for call_id in unanswered if call_id != answered]
            message = {**message, "tool_call_id": answered}
        result.append(message)
    return result


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """For templates that accept only nine letters and digits."""
    changed = _with_calls(messages, lambda call: {**call, "id": _short(call["id"])} if call.get("id") else call)
    return [
        {**message, "tool_call_id": _short(message["tool_call_id"])} if message.get("tool_call_id") else message
        for message in changed
    ]


def _short(call_id: str) -> str:
    if len(call_id) == _ID_CHARACTERS and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_CHARACTERS]


def results_named(messages: Sequence[Message]) -> list[Message]:
    """For templates that show a result's function: names it after its call."""
    names: dict[Any, str] = {}
    result: list[Message] = []
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(message.get("tool_call_id"), "tool")}
        result.append(message)
    return result


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """For templates with one call per message: each is followed by its result."""
    result: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = list(message.get("tool_calls") or ())
        if len(calls) < 2:
            result.append(message)
            continue
        stop = position
        while stop < len(messages) and messages[stop]["role"] == "tool":
            stop += 1
        result += _in_turn(message, calls, messages[position:stop])
        position = stop
    return result


def _in_turn(message: Message, calls: list[Mapping[str, Any]], results: Sequence[Message]) -> Iterator[Message]:
    """Yields calls and results in turn, so that a later result changes nothing before it."""
    content = message["content"]
    for result in results:
        answered = next((call for call in calls if call.get("id") == result.get("tool_call_id")), None)
        if answered is not None:
            calls.remove(answered)
            yield {**message, "content": content, "tool_calls": [answered]}
            content = ""
        yield result
    for call in calls:
        yield {**message, "content": content, "tool_calls": [call]}
        content = ""


def described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """For templates that require what OpenAI leaves optional."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }


def one_leading_system(messages: Sequence[Message]) -> list[Message]:
    """For templates with one system message: joins those at the beginning."""
    count = num_leading_system(messages)
    if count < 2:
        return list(messages)
    text = _JOINT.join(message["content"] for message in messages[:count])
    return [{**messages[0], "content": text}, *messages[count:]]


def late_system_in_words(messages: Sequence[Message]) -> list[Message]:
    """For templates without later system messages: the user says the text, in the same place.

    The message before ends with the text, or the user's next one begins with it.
    """
    count = num_leading_system(messages)
    result: list[tuple[Message, list[str]]] = [(message, [message["content"]]) for message in messages[:count]]
    is_open = False
    for message in messages[count:]:
        last, texts = result[-1] if len(result) > count else ({"role": ""}, [])
        if message["role"] == "system":
            said = f"<system>\n{message['content']}\n</system>"
            if last["role"] in ("user", "tool"):
                texts.append(said)
            else:
                result.append(({"role": "user"}, [said]))
                is_open = True
        elif is_open and message["role"] == "user":
            result[-1] = message, [*texts, message["content"]]
            is_open = False
        else:
            result.append((message, [message["content"]]))
            is_open = False
    return [_saying(message, texts) for message, texts in result]


def no_system(messages: Sequence[Message]) -> list[Message]:
    """For templates without system messages: the user's first message begins with the text."""
    count = num_leading_system(messages)
    if count == 0:
        return list(messages)
    text = _JOINT.join(message["content"] for message in messages[:count])
    first = messages[count] if count < len(messages) else None
    if first is None or first["role"] != "user":
        return [{"role": "user", "content": text}, *messages[count:]]
    return [{**first, "content": text + _JOINT + first["content"]}, *messages[count + 1 :]]


def results_answered(messages: Sequence[Message]) -> list[Message]:
    """For templates that take no user's message right after a result: the assistant says something between."""
    result: list[Message] = []
    for message in messages:
        is_late = message["role"] == "user" and result and result[-1]["role"] == "tool"
        result += [GO_ON, message] if is_late else [message]
    return result


def users_joined(messages: Sequence[Message]) -> list[Message]:
    """For templates whose roles alternate."""
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        run = list(group)
        result += [_saying(run[0], [message["content"] for message in run])] if role == "user" else run
    return result


def _saying(message: Message, texts: Sequence[str]) -> Message:
    """A message with several texts: they are joined once, however many they are."""
    return message if len(texts) == 1 and "content" in message else {**message, "content": _JOINT.join(texts)}


def num_leading_system(messages: Sequence[Message]) -> int:
    """How many system messages begin a conversation."""
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


Apply: TypeAlias = Callable[[Sequence[Message], Tools], str]
"""Renders a conversation; empty if the template refuses it."""
Reshape: TypeAlias = Callable[[Sequence[Message]], list[Message]]
ToolReshape: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A conversation that some templates refuse, and its change."""

    sample: Sequence[Message]
    is_shown: Callable[[str], bool]
    """False for an empty text."""
    change: Reshape = list
    change_tool: ToolReshape = dict
    tools: Tools = None

    def must_change(self, apply: Apply, tools: Tools) -> bool:
        """Whether a template accepts the sample only when changed."""
        given = self.tools or ([SAMPLE_TOOL] if any("tool_calls" in message for message in self.sample) else tools)
        if self.is_shown(apply(self.sample, given)):
            return False
        return self.is_shown(apply(self.change(self.sample), Adaptation((self,)).tools(given)))


@dataclass(frozen=True)
class Adaptation:
    """The changes for one template."""

    shapes: tuple[Shape, ...] = ()

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the shape that the template accepts."""
        return reduce(lambda changed, shape: shape.change(changed), self.shapes, list(messages))

    def tools(self, tools: Tools) -> Tools:
        """Tools in the shape that the template accepts."""
        if not tools:
            return None
        return [reduce(lambda changed, shape: shape.change_tool(changed), self.shapes, tool) for tool in tools]


def adaptation_for(apply: Apply, *, with_tools: bool) -> Adaptation:
    """The changes for a template."""
    tools = [SAMPLE_TOOL] if with_tools else None
    return Adaptation(tuple(shape for shape in SHAPES if shape.must_change(apply, tools)))


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calls(*names: str, arguments: Any = None, call_id: str | None = "call00000") -> Message:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments or {}}} for name in names]
    named = [{"id": call_id[:-1] + str(i), **call} for i, call in enumerate(calls)] if call_id else calls
    return {"role": "assistant", "content": "", "tool_calls": named}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "qfirst"}


def _in_order(*words: str) -> Callable[[str], bool]:
    return lambda text: re.search(".*".join(words), text, re.DOTALL) is not None


def _has(*words: str) -> Callable[[str], bool]:
    return lambda text: all(word in text for word in words)


def _without(message: Message, *names: str) -> Message:
    return {key: value for key, value in message.items() if key not in names}


_ASKS = _says("user", "qask")
SAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "qfirst",
        "description": "qdescription",
        "parameters": {"type": "object", "properties": {"qkey": {"type": "string", "description": "d"}}},
    },
}
_LONG_ID = "call_0123456789abcde0"
_RESULT = _result(0, "qresult")

SHAPES: tuple[Shape, ...] = (
    Shape(
        [_ASKS, _calls("qfirst", arguments={"qkey": "qvalue"}), _RESULT],
        # A template that does not write JSON shows the object as Python does.
        lambda text: _in_order("qkey", "qvalue")(text) and "'qkey'" not in text,
        arguments_as_text,
    ),
    Shape([_ASKS, _calls("qfirst", arguments="qtext"), _RESULT], _has("qtext"), arguments_as_object),
    Shape(
        [_ASKS, _calls("qfirst", call_id=None), _without(_RESULT, "tool_call_id")],
        _has("qfirst", "qresult"),
        all_named,
    ),
    Shape(
        [_ASKS, _calls("qfirst", call_id=_LONG_ID), {**_RESULT, "tool_call_id": _LONG_ID}],
        _has("qfirst", "qresult"),
        short_ids,
    ),
    Shape([_ASKS, _calls("qfirst"), _without(_RESULT, "name")], _has("qfirst", "qresult"), results_named),
    Shape(
        [_ASKS, _calls("qfirst", "qsecond"), _RESULT, _result(1, "qother")],
        _has("qfirst", "qsecond", "qresult", "qother"),
        one_call_each,
    ),
    Shape([_ASKS], _has("qbare"), change_tool=described, tools=[{"type": "function", "function": {"name": "qbare"}}]),
    Shape([_says("system", "qrule"), _says("system", "qother"), _ASKS], _has("qrule", "qother"), one_leading_system),
    Shape(
        [_ASKS, _says("assistant", "qanswer"), _says("system", "qrule"), _says("user", "qgo")],
        _in_order("qask", "qanswer", "qrule", "qgo"),
        late_system_in_words,
    ),
    Shape([_says("system", "qrule"), _ASKS], _has("qrule", "qask"), no_system),
    Shape(
        [_ASKS, _calls("qfirst"), _RESULT, _says("user", "qgo")],
        _in_order("qask", "qfirst", "qresult", "qgo"),
        results_answered,
    ),
    Shape([_ASKS, _says("user", "qgo")], _in_order("qask", "qgo"), users_joined),
)
"""All shapes, in the order in which they are changed."""


@dataclass(frozen=True)
class Outline:
    """Where messages begin in a prompt, in tokens; empty without a conversation."""

    starts: tuple[int, ...] = ()
    """Ascending; the template's own text comes before."""
    roles: tuple[str, ...] = ()

    def message_at(self, offset: int) -> tuple[int | None, str | None]:
        """Index and role of the message at token `offset`; None without messages."""
        if not self.starts:
            return None, None
        index = max(0, bisect_right(self.starts, offset) - 1)
        return index, self.roles[index]


NO_OUTLINE = Outline()


_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: ?[a-z][a-z0-9_]*=[\w.+-]*;)+ ?(?=\r?\n|\Z)", re.ASCII)
_CHANGING_VALUES = (
    (re.compile(r"(?<=[ :;]cch=)[0-9A-Za-z]+(?=;)", re.ASCII), "00000"),
    (re.compile(r"(?<=[ :;]cc_version=)(\d+\.\d+\.\d+)\.[0-9a-f]{3}(?=;)", re.ASCII), r"\1.000"),
)


def with_constant_headers(messages: Sequence[Message]) -> list[Message]:
    """Messages with constant headers; changed ones are copies."""
    num_system = num_leading_system(messages)
    return [*map(_with_constant_header, messages[:num_system]), *messages[num_system:]]


def _with_constant_header(message: Message) -> Message:
    content = message.get("content")
    if not content:
        return message
    if isinstance(content, str):
        return {**message, "content": with_constant_header(content)}
    return {**message, "content": [{**content[0], "text": with_constant_header(content[0]["text"])}, *content[1:]]}


def with_constant_header(text: str) -> str:
    """The text with constants in the first line."""
    line = _BILLING_LINE.match(text)
    if line is None:
        return text
    header = line[0]
    for pattern, constant in _CHANGING_VALUES:
        header = pattern.sub(constant, header)
    return header + text[line.end() :]


MAX_TOOLS = 512
"""Tools remembered; the least recently used are forgotten."""
MAX_TOOL_BYTES = 16 << 10
"""A longer definition is shown as sent. All remembered take at most 8 MiB."""


class ToolOrders:
    """Each tool's order of keys as first sent, by namespace. Any thread."""

    def __init__(self) -> None:
        # The cache has a lock of its own, and so has `setdefault`: two threads agree on one order.
        self._first = lru_cache(MAX_TOOLS)(lambda _namespace, _digest: dict[str, str]())

    def settle(self, namespace: str, tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tools with keys as first sent."""
        return [self._settle(namespace, tool) for tool in tools]

    def _settle(self, namespace: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        text = json.dumps(tool)
        if len(text) > MAX_TOOL_BYTES:
            return tool
        digest = hashlib.sha256(json.dumps(tool, sort_keys=True).encode()).digest()
        first = self._first(namespace, digest).setdefault("text", text)
        settled: Mapping[str, Any] = tool if first == text else json.loads(first)
        return settled
