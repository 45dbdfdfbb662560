"""A body's system prompt, messages and tools as chat templates read them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from models.prompt.chat_template import Message
from server.api.anthropic.body_types import (
    MAX_CACHE_POINTS,
    InputMessage,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from server.api.anthropic.signature import thought_of
from server.api.context import ServedModel
from server.api.conversation import Conversation, check_continuable, open_conversation
from server.api.errors import ApiError, Code
from server.config import ServerConfig
from server.prompt_hygiene import with_constant_headers

_ERROR_PREFIX = "Error: "


def read_conversation(body: PromptBody, model: ServedModel, config: ServerConfig, namespace: str) -> Conversation:
    """Returns what the prompt is rendered from; raises ApiError for what no conversation may hold."""
    continues = body.messages[-1].role == "assistant"
    if continues:
        _check_begun(body, model)
    num_points = body.num_cache_points()
    if num_points > MAX_CACHE_POINTS:
        found = f"at most {MAX_CACHE_POINTS} blocks may hold cache_control, and {num_points} do"
        raise ApiError(Code.INVALID_VALUE, f"messages: {found}", "messages")
    # An empty text, as forms of clients send it, is no system prompt.
    has_system = any(block.text for block in body.system or ())
    system = [{"role": "system", "content": _parts(body.system or ())}] if has_system else []
    messages = [*system, *template_messages(body.messages)]
    return open_conversation(
        model,
        tools=_offered_tools(body, model),
        messages=with_constant_headers(messages) if config.prompt_hygiene else messages,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
        continues=continues,
    )


def _check_begun(body: PromptBody, model: ServedModel) -> None:
    """Raises ApiError where the answer cannot go on with the last message, which is the assistant's."""
    check_continuable(model)
    blocks = body.messages[-1].content
    if any(isinstance(block, ToolUseBlock) for block in blocks):
        raise _cannot_begin("it holds tool_use, whose tool_result is to follow in a message of the user's")
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if not text:
        raise _cannot_begin("it holds no text")
    if text[-1].isspace():
        raise _cannot_begin("its text ends with white space, behind which models go on badly")
    if body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        raise _cannot_begin("tool_choice has the answer begin with a call")


def _cannot_begin(why: str) -> ApiError:
    message = f"messages: the last one is the assistant's, and cannot be continued: {why}"
    return ApiError(Code.INVALID_VALUE, message, "messages")


def template_messages(messages: Sequence[InputMessage]) -> list[Message]:
    """Returns the messages as chat templates read them: each result of a tool is a message of its own."""
    return [shown for message in messages for shown in _template_messages(message)]


def _template_messages(message: InputMessage) -> Iterator[Message]:
    if message.role == "assistant":
        yield _assistant_message(message.content)
        return
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": _parts(texts)}
                texts = []
            yield _tool_message(block)
    if texts or not message.content:
        yield {"role": message.role, "content": _parts(texts)}


def _assistant_message(blocks: Sequence[Any]) -> Message:
    """Returns an answer that was given: what it thought, all of its text, then its calls."""
    thoughts = [thought_of(one.thinking, one.signature or "") for one in blocks if isinstance(one, ThinkingBlock)]
    texts = [one.text for one in blocks if isinstance(one, TextBlock)]
    calls = [_call(one) for one in blocks if isinstance(one, ToolUseBlock)]
    # A text may have been split into blocks anywhere, so its parts are joined as they are.
    message: dict[str, Any] = {"role": "assistant", "content": [{"text": "".join(texts)}] if texts else []}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    marks = [mark for one in blocks if (mark := getattr(one, "cache_control", None)) is not None]
    return {**message, "cache_control": marks[-1].model_dump()} if marks else message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _tool_message(block: ToolResultBlock) -> Message:
    parts = _parts(block.content or ())
    if block.is_error:
        parts = _as_error(parts)
    message: dict[str, Any] = {"role": "tool", "content": parts, "tool_call_id": block.tool_use_id}
    return message if block.cache_control is None else {**message, "cache_control": block.cache_control.model_dump()}


def _as_error(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a result that says that it is an error: templates have no field for it."""
    first, *others = parts or [{"text": ""}]
    says_so = first["text"].lstrip().lower().startswith("error")
    return [first if says_so else {**first, "text": _ERROR_PREFIX + first["text"]}, *others]


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [block.model_dump(include={"text", "cache_control"}, exclude_none=True) for block in blocks]


def _offered_tools(body: PromptBody, model: ServedModel) -> list[Mapping[str, Any]]:
    """Returns the tools in the form that templates are written for."""
    if not body.tools or (body.tool_choice is not None and body.tool_choice.type == "none"):
        return []
    if not model.renderer.reads_tools:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"tools: the model {model.id!r} takes none", "tools")
    return [{"type": "function", "function": _function(tool)} for tool in body.tools]


def _function(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function
