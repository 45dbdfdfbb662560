"""Items of prompts and answers, and messages read from them.

What the assistant does between two messages of others is one message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from models.prompt.shapes import Message
from server.api.bodies import BodyModel, validated
from server.api.errors import Code, wrong
from server.api.openai.types import ChatMessage, template_message
from server.api.responses.output import INPUT, SEARCH, joined_name, reasoning_of

Item: TypeAlias = dict[str, Any]
"""Items that were read have a `type`."""

LOCAL_SHELL: Final = "local_shell"
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "Input should be a text or a list of parts")
    return "".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
        raise PydanticCustomError("no_images", "this model takes no images, sounds or files, only text")
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
        raise PydanticCustomError("part_type", "A part should be an input_text or output_text with its text")
    return text


ItemText = Annotated[str, BeforeValidator(_text)]


class MessageItem(BodyModel):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText


class FunctionCallItem(BodyModel):
    """A call of a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(BodyModel):
    """A call of a tool that takes a text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ShellCallItem(BodyModel):
    """A call of older clients' local shell."""

    call_id: str
    action: dict[str, Any]


class OutputItem(BodyModel):
    """What a call came to."""

    call_id: str | None = None
    id: str | None = None
    output: ItemText


class SearchCallItem(BodyModel):
    """A search for tools that the client ran."""

    call_id: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class SearchOutputItem(BodyModel):
    """The tools that the client has found."""

    call_id: str | None = None
    tools: list[dict[str, Any]]


class ReasoningItem(BodyModel):
    """The model's reasoning."""

    summary: ItemText = ""
    content: ItemText | None = None
    encrypted_content: str | None = None


class ReferenceItem(BodyModel):
    """An item that is stored."""

    id: str


_KINDS: Mapping[str, type[BodyModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "local_shell_call": ShellCallItem,
    "local_shell_call_output": OutputItem,
    "tool_search_call": SearchCallItem,
    "tool_search_output": SearchOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}
ITEM_TYPES: Final = tuple(_KINDS)
SKIPPED_ITEM_TYPES: Final = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    "compaction",
)
"""Left out of the prompt: only other servers read these."""


def check_items(items: Sequence[Any], param: str = "input") -> list[Item]:
    """Checked items with types; raises ApiError (400)."""
    return [_checked(item, param, index) for index, item in enumerate(items)]


def _checked(item: Any, param: str, index: int) -> Item:
    place = f"{param}[{index}]"
    if not isinstance(item, dict):
        raise wrong(place, "Input should be an item, an object", Code.INVALID_TYPE)
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
    if isinstance(kind, str) and _is_skipped(item):
        return item
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(ITEM_TYPES)
        raise wrong(f"{place}.type", f"Input should be one of {known}")
    validated(_KINDS[kind], item, param, index)
    return {**item, "type": kind}


def _is_skipped(item: Item) -> bool:
    # A tool search run by another server has no call, and the request lists its tools.
    is_search = item.get("type") in ("tool_search_call", "tool_search_output")
    return item.get("type") in SKIPPED_ITEM_TYPES or (is_search and not item.get("call_id"))


def search_outputs(items: Sequence[Item]) -> list[Item]:
    """The results of the client's tool searches."""
    return [item for item in items if item["type"] == "tool_search_output" and not _is_skipped(item)]


def read_messages(items: Sequence[Item], found: Mapping[str, str] | None = None) -> list[Message]:
    """Checked items as messages; references must be resolved.

    `found` maps the call ids of tool searches to definitions.
    """
    return [template_message(ChatMessage.model_validate(one)) for one in _chat_messages(items, found or {})]


def _chat_messages(items: Sequence[Item], found: Mapping[str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    previous = ""
    for item in items:
        kind = item["type"]
        if _is_skipped(item):
            continue
        said = _assistant_part(item)
        if said is None:
            messages.append(_other_message(item, found))
        elif not messages or messages[-1]["role"] != "assistant" or (kind == previous == "message"):
            messages.append({"role": "assistant", "content": "", **said})
        else:
            message = messages[-1]
            message |= {name: message[name] + value if name in message else value for name, value in said.items()}
        previous = kind
    return messages


def _assistant_part(item: Item) -> dict[str, Any] | None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            return {"content": _text(item["content"])}
        case "reasoning":
            sent = ReasoningItem.model_validate(item)
            return {"reasoning_content": reasoning_of(sent.encrypted_content, sent.content, sent.summary)}
        case "function_call":
            name = joined_name(item.get("namespace"), item["name"])
            return _call(item, name, item["arguments"])
        case "custom_tool_call":
            name = joined_name(item.get("namespace"), item["name"])
            return _call(item, name, json.dumps({INPUT: item["input"]}, ensure_ascii=False))
        case "tool_search_call":
            return _call(item, SEARCH, json.dumps(item.get("arguments") or {}, ensure_ascii=False))
        case "local_shell_call":
            return _call(item, LOCAL_SHELL, json.dumps(item["action"], ensure_ascii=False))
    return None


def _call(item: Item, name: str, arguments: str) -> dict[str, Any]:
    call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [call]}


def _other_message(item: Item, found: Mapping[str, str]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _text(item["content"])}
    if item["type"] == "tool_search_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": found.get(item["call_id"], "")}
    call_id = item.get("call_id") or item.get("id")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item["output"])}
