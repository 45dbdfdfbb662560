"""How conversations and tools are changed for templates that do not take them as they are: one function per reason.

Which of them a template needs is found in `models.prompt.template_shapes`. Pure: nothing is changed in place.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""As templates read it; `content` is always a text."""

_JOINT = "\n\n"
_ID_CHARACTERS = 9
"""What Mistral's templates insist on."""


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """For templates that write a call's arguments out as they are."""
    return _each_call(messages, lambda arguments: arguments if isinstance(arguments, str) else _json(arguments))


def arguments_as_object(messages: Sequence[Message]) -> list[Message]:
    """For templates that go through a call's arguments one by one: anything else becomes an object of one."""
    return _each_call(messages, lambda given: given if isinstance(given, Mapping) else {"arguments": given})


def _each_call(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}

    return [_with_calls(message, map(changed, message.get("tool_calls") or ())) for message in messages]


def _with_calls(message: Message, calls: Iterable[Mapping[str, Any]]) -> Message:
    return {**message, "tool_calls": list(calls)} if message.get("tool_calls") else message


def all_named(messages: Sequence[Message]) -> list[Message]:
    """For templates that insist on ids: counts the calls that have none; results answer them in order."""
    result: list[Message] = []
    unanswered: list[str] = []
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            calls.append({**call, "id": call.get("id") or f"call{num_calls:05}"})
            num_calls += 1
        unanswered += [call["id"] for call in calls]
        changed = _with_calls(message, calls)
        if message["role"] == "tool":
            answered = message.get("tool_call_id") or (unanswered[0] if unanswered else f"call{num_calls:05}")
            unanswered = [call_id for call_id in unanswered if call_id != answered]
            changed = {**message, "tool_call_id": answered}
        result.append(changed)
    return result


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """For templates that take ids of nine letters and digits only."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    calls = (
        {**call, "id": _short(call["id"])} if call.get("id") else call for call in message.get("tool_calls") or ()
    )
    changed = _with_calls(message, calls)
    answered = message.get("tool_call_id")
    return {**changed, "tool_call_id": _short(answered)} if answered else changed


def _short(call_id: str) -> str:
    if len(call_id) == _ID_CHARACTERS and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_CHARACTERS]


def results_named(messages: Sequence[Message]) -> list[Message]:
    """For templates that say whose result it is: a result without a name has that of the function it answers."""
    names: dict[Any, str] = {}
    result: list[Message] = []
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(message.get("tool_call_id"), "tool")}
        result.append(message)
    return result


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """For templates that take one call in a message: each call is followed by its result, then the next one."""
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
    """Yields each call with its result, in the order of the results: one that comes later changes nothing before."""
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
    """For templates that insist on what OpenAI's interface leaves optional."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }


def one_leading_system(messages: Sequence[Message]) -> list[Message]:
    """For templates that take one system message: those at the beginning are joined."""
    count = _num_leading_system(messages)
    if count < 2:
        return list(messages)
    text = _JOINT.join(message["content"] for message in messages[:count])
    return [{**messages[0], "content": text}, *messages[count:]]


def late_system_in_words(messages: Sequence[Message]) -> list[Message]:
    """For templates that take no system message later on: it is said by the user, where it stands.

    At the end of the user's or tool's message before it; behind an answer, at the start of the user's next message.
    """
    count = _num_leading_system(messages)
    result: list[Message] = list(messages[:count])
    is_open = False
    for message in messages[count:]:
        last = result[-1] if len(result) > count else None
        if message["role"] == "system":
            said = f"<system>\n{message['content']}\n</system>"
            if last is not None and last["role"] in ("user", "tool"):
                result[-1] = _followed_by(last, said)
            else:
                result.append({"role": "user", "content": said})
                is_open = True
        elif is_open and message["role"] == "user":
            result[-1] = {**message, "content": _followed_by(result[-1], message["content"])["content"]}
            is_open = False
        else:
            result.append(message)
            is_open = False
    return result


def no_system(messages: Sequence[Message]) -> list[Message]:
    """For templates that take no system message at all: its text begins the first message of the user."""
    count = _num_leading_system(messages)
    if count == 0:
        return list(messages)
    text = _JOINT.join(message["content"] for message in messages[:count])
    first = messages[count] if count < len(messages) else None
    if first is None or first["role"] != "user":
        return [{"role": "user", "content": text}, *messages[count:]]
    return [{**first, "content": text + _JOINT + first["content"]}, *messages[count + 1 :]]


def users_joined(messages: Sequence[Message]) -> list[Message]:
    """For templates whose roles must alternate: what a user says in several messages becomes one."""
    result: list[Message] = []
    for message in messages:
        if result and message["role"] == result[-1]["role"] == "user":
            result[-1] = _followed_by(result[-1], message["content"])
        else:
            result.append(message)
    return result


def _followed_by(message: Message, text: str) -> Message:
    return {**message, "content": message["content"] + _JOINT + text}


def _num_leading_system(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
