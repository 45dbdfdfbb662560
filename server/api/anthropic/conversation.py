"""Reads a body of the Messages API."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from models.inference.sampling_params import check
from models.prompt.shapes import Message
from models.prompt.tool_definitions import Tool
from server.api.anthropic.content import reasoning_of
from server.api.anthropic.types import (
    MAX_CACHE_POINTS,
    InputMessage,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolSearchResultBlock,
    ToolUseBlock,
)
from server.api.conversation import Conversation, check_continuable
from server.api.dialect import ApiContext
from server.api.errors import ApiError, Code, wrong
from server.api.params import (
    AnswerGrammar,
    ForcedCalls,
    GenerationParams,
    answer_grammar,
    can_forbid_calls,
    changed_sampling,
    json_grammar,
)
from server.app.config import ServerConfig
from server.pool.names import ModelUnknown
from server.pool.served import ServedModel

_ERROR_PREFIX = "Error: "

Define: TypeAlias = Callable[[Sequence[str], Mapping[str, Tool], str], str]
"""From names, tools by name and a place in the conversation to definitions."""


def read_conversation(body: PromptBody, model: ServedModel, config: ServerConfig, namespace: str) -> Conversation:
    """The prompt's source; raises ApiError."""
    last = body.messages[-1]
    # The answer continues after the results of its own search, as after any result.
    continues = last.role == "assistant" and not (
        last.content and isinstance(last.content[-1], ToolSearchResultBlock)
    )
    if continues:
        _check_begun(body, model)
    num_points = body.num_cache_points()
    if num_points > MAX_CACHE_POINTS:
        raise wrong("messages", f"at most {MAX_CACHE_POINTS} blocks may hold cache_control, and {num_points} do")
    # Forms of clients send an empty text for no system prompt.
    has_system = any(block.text for block in body.system or ())
    system = [{"role": "system", "content": _parts(body.system or ())}] if has_system else []
    if body.tools and not body.forbids_calls and not model.renderer.reads_tools:
        raise wrong("tools", f"the model {model.id!r} takes none", Code.UNSUPPORTED_PARAMETER)
    texts = [block.text for block in body.messages[0].content if isinstance(block, TextBlock)]
    first = hashlib.sha256(repr(texts).encode()).digest()

    def define(names: Sequence[str], tools: Mapping[str, Tool], place: str) -> str:
        return model.renderer.tool_definitions(names, tools, (namespace, first, place))

    reader = _Reader(body.tools or (), define)
    messages = [*system, *reader.read(body.messages)]
    is_hidden = body.forbids_calls and not can_forbid_calls(model)
    return Conversation(
        model.renderer,
        tools=[] if is_hidden else [as_function(tool) for tool in body.tools or () if not tool.defer_loading],
        changed_tools=reader.callable_tools(),
        forbids_calls=body.forbids_calls,
        messages=messages,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
        continues=continues,
    ).prepared_for(model, hygiene=config.prompt_hygiene)


def _check_begun(body: PromptBody, model: ServedModel) -> None:
    """Raises ApiError."""
    check_continuable(model)
    blocks = body.messages[-1].content
    if any(block.type == "tool_use" for block in blocks):
        raise _cannot_begin("it holds tool_use, whose tool_result is to follow in a message of the user's")
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if not text:
        raise _cannot_begin("it holds no text")
    if text[-1].isspace():
        raise _cannot_begin("its text ends with white space, behind which models go on badly")
    if body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        raise _cannot_begin("tool_choice has the answer begin with a call")


def _cannot_begin(why: str) -> ApiError:
    return wrong("messages", f"the last one is the assistant's, and cannot be continued: {why}")


class _Reader:
    """Converts messages, and tracks which tools may be called."""

    def __init__(self, tools: Sequence[ToolDefinition], define: Define) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._define = define
        self._callable = {name for name, tool in self._tools.items() if not tool.defer_loading}

    def callable_tools(self) -> list[Tool]:
        return [as_function(tool) for name, tool in self._tools.items() if name in self._callable]

    def read(self, messages: Sequence[InputMessage]) -> list[Message]:
        return [shown for place, message in enumerate(messages) for shown in self._read(message, place)]

    def _read(self, message: InputMessage, place: int) -> Iterator[Message]:
        said: list[Any] = []
        for number, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock | ToolSearchResultBlock):
                if said:
                    yield _message(message.role, said)
                    said = []
                yield self._result(block)
            elif isinstance(block, ToolChangeBlock):
                said.append(self._changed(block, f"{place}.{number}"))
            else:
                said.append(block)
        if said or not message.content:
            yield _message(message.role, said)

    def _changed(self, block: ToolChangeBlock, place: str) -> TextBlock:
        name = block.tool.tool_name
        if block.type == "tool_removal":
            self._callable.discard(name)
            return TextBlock(type="text", text=f"{name} is no longer available.", cache_control=block.cache_control)
        if block.tool.definition is not None:
            self._tools[name] = block.tool.definition
            place += block.tool.definition.model_dump_json()
        return TextBlock(type="text", text=self._loaded([name], place), cache_control=block.cache_control)

    def _loaded(self, names: Sequence[str], place: str) -> str:
        tools = {name: as_function(self._tools[name]) for name in names if name in self._tools}
        self._callable.update(tools)
        return self._define(names, tools, place)

    def _result(self, block: ToolResultBlock | ToolSearchResultBlock) -> Message:
        if isinstance(block, ToolResultBlock):
            parts = self._result_parts(block)
            first, *others = parts or [{"text": ""}]
            if block.is_error and not first["text"].lstrip().lower().startswith("error"):
                # Templates have no field for an error.
                parts = [{**first, "text": _ERROR_PREFIX + first["text"]}, *others]
        else:
            names, error = [one.tool_name for one in block.content.tool_references], block.content.error_code
            failed = f"{_ERROR_PREFIX}{error}" if error else "No tool was found."
            parts = [{"text": self._loaded(names, block.tool_use_id) if names else failed}]
        message: dict[str, Any] = {"role": "tool", "content": parts, "tool_call_id": block.tool_use_id}
        return _marked(message, [block])

    def _result_parts(self, block: ToolResultBlock) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, group in groupby(block.content or (), type):
            found: list[Any] = list(group)
            if kind is TextBlock:
                parts += _parts(found)
                continue
            text = self._loaded([one.tool_name for one in found], f"{block.tool_use_id}.{len(parts)}")
            parts.append(_marked({"text": text}, found))
        return parts


def template_messages(messages: Sequence[InputMessage]) -> list[Message]:
    """Messages for templates, without changes of tools."""
    return _Reader((), lambda names, tools, place: "").read(messages)


def _message(role: str, blocks: Sequence[Any]) -> Message:
    return _assistant_message(blocks) if role == "assistant" else {"role": role, "content": _parts(blocks)}


def _assistant_message(blocks: Sequence[Any]) -> Message:
    reasoning = [reasoning_of(one.thinking, one.signature or "") for one in blocks if isinstance(one, ThinkingBlock)]
    texts = [one.text for one in blocks if isinstance(one, TextBlock)]
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}}
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    # Text may be split into blocks anywhere, so its parts are joined unchanged.
    message: dict[str, Any] = {"role": "assistant", "content": [{"text": "".join(texts)}] if texts else []}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return _marked(message, blocks)


def _marked(made: dict[str, Any], blocks: Sequence[Any]) -> dict[str, Any]:
    marks = [mark for one in blocks if (mark := getattr(one, "cache_control", None)) is not None]
    return {**made, "cache_control": marks[-1].model_dump()} if marks else made


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [block.model_dump(include={"text", "cache_control"}, exclude_none=True) for block in blocks]


def as_function(tool: ToolDefinition) -> dict[str, Any]:
    """A tool for chat templates."""
    named = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


_OWN_NAMES = "claude-"


def find_model(context: ApiContext, name: str | None) -> ServedModel:
    """The named model; raises ApiError (404, 400).

    An unknown name of Anthropic's, which clients send by default, means the model of requests without a name.
    """
    try:
        return context.find_model(name)
    except ModelUnknown:
        if name is None or not name.startswith(_OWN_NAMES):
            raise
        return context.find_model(None)


def read_params(body: MessagesBody, conversation: Conversation, model: ServedModel) -> GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    sampling = changed_sampling(model.sampling, body, model.vocab_size)
    check(sampling, model.vocab_size)
    return GenerationParams(
        sampling=sampling,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        max_thinking_tokens=body.thinking_wish().max_tokens,
        is_single_call=bool(conversation.callable_tools)
        and body.tool_choice is not None
        and body.tool_choice.is_single,
        grammar=_grammar(body, conversation, model),
    )


def _grammar(body: MessagesBody, conversation: Conversation, model: ServedModel) -> AnswerGrammar | None:
    choice, forced = body.tool_choice, None
    if choice is not None and choice.type in ("any", "tool"):
        names = (choice.name,) if choice.type == "tool" and choice.name is not None else None
        forced = ForcedCalls(names, choice.is_single)
    wanted = _output_format(body) if forced is None else None
    return answer_grammar(model, conversation, wanted, forced)


def _output_format(body: MessagesBody) -> AnswerGrammar | None:
    newer = body.output_config.format if body.output_config is not None else None
    wanted, param = newer or body.output_format, "output_format" if newer is None else "output_config.format"
    if newer is not None and body.output_format is not None:
        raise wrong("output_format", "it is another name of output_config.format, which is given too")
    return None if wanted is None else AnswerGrammar(f"{param}.schema", json_grammar(wanted.schema_))
