"""Bodies of the Messages API, and how they are read."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from models.prompt.shapes import Message
from models.prompt.tool_definitions import Tool, ToolDefinitions
from server.api.anthropic.content import reasoning_of
from server.api.anthropic.tool_search import SEARCH_TOOLS, VERSION
from server.api.binding import AnswerGrammar, ForcedCalls, json_grammar, shows_tools
from server.api.bodies import BodyModel, FormatBody, Rules, Whole, part_text, refused, tool_result
from server.api.conversation import (
    Conversation,
    ShownAsBefore,
    ThinkingWish,
    check_continuable,
    mark_new_images,
    media_part,
)
from server.api.dialect import ApiContext
from server.api.errors import wrong
from server.api.generation import CacheSalt, Share, StopStrings, changed_sampling
from server.api.params import GenerationParams, Limit
from server.pool.names import ModelUnknown
from server.pool.served import ServedModel

MAX_CACHE_POINTS: Final = 4
"""Blocks with `cache_control`."""

_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Levels that chat templates do not know."""


class CacheControl(BodyModel):
    """Makes the prompt restorable after what holds this."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Without effect."""


class MarkedBody(BodyModel):
    """What the prompt may be restorable after."""

    cache_control: CacheControl | None = None


class TextBlock(MarkedBody):
    """A text."""

    type: Literal["text"]
    text: str


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_OF_SEARCHES: Final = ("server_tool_use", "tool_search_tool_result")
_BLOCKS_OF: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking", *_OF_SEARCHES),
    "system": ("text", "tool_addition", "tool_removal"),
}
_READ: Final = {"tool_reference"}.union(*_BLOCKS_OF.values())


def _known(value: Any, info: ValidationInfo) -> Any:
    """An unknown block as its text; refuses any other, and those of another role."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return value
    if kind in _READ and (kind != "server_tool_use" or value.get("name") in SEARCH_TOOLS):
        role = info.data.get("role", "")
        if kind not in _BLOCKS_OF.get(role, _READ):
            raise ValueError(f"a message of the role {role} holds no {kind}")
        return value
    if kind == "server_tool_use" or kind.endswith("_tool_result"):
        raise ValueError(f"{kind[:100]} is of a tool that runs on Anthropic's servers; no tools run on this server")
    if (shown := media_part(value)) is not None:
        return shown
    text = part_text(value) or _text_of(value)
    if text is None:
        raise ValueError(f"{kind[:100]} is not a known type of block")
    return {"type": "text", "text": text, "cache_control": value.get("cache_control")}


def _text_of(block: dict[str, Any]) -> str | None:
    inner = block.get("text", block.get("content"))
    if isinstance(inner, str):
        return inner
    parts = [_text_of(part) if isinstance(part, dict) else None for part in inner] if isinstance(inner, list) else []
    texts = [part for part in parts if part is not None]
    return "\n".join(texts) if texts and len(texts) == len(parts) else None


def _as_result(value: Any) -> Any:
    """A result as blocks; what is neither a text nor blocks as its JSON text."""
    blocks = value if isinstance(value, list) else [None]
    is_typed = all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in blocks)
    return value if is_typed else _as_blocks(tool_result(value))


class ToolReferenceBlock(MarkedBody):
    """A tool that was found."""

    type: Literal["tool_reference"]
    tool_name: str


ResultContent: TypeAlias = Annotated[
    TextBlock | ToolReferenceBlock, Field(discriminator="type"), BeforeValidator(_known)
]
TextOnly: TypeAlias = Annotated[TextBlock, BeforeValidator(_known)]


class ToolResultBlock(MarkedBody):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultContent] | None, BeforeValidator(_as_result)] = None
    is_error: bool | None = None


class ToolUseBlock(MarkedBody):
    """A call of the client's tool, or of a search that ran here."""

    type: Literal["tool_use", "server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(BodyModel):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(BodyModel):
    """Reasoning that only another server can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolDefinition(MarkedBody):
    """A tool of the client, or a search that runs here."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Unknown keywords in a forced call's schema are refused."""
    defer_loading: bool | None = None
    """Left out of the prompt until the conversation refers to it."""

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind == "custom":
            return value
        name = kind.removesuffix(VERSION)
        if name in SEARCH_TOOLS:
            return {"cache_control": value.get("cache_control"), **SEARCH_TOOLS[name], "type": name, "name": name}
        why = "is known to Anthropic's servers and models only; give the tool a name and an input_schema"
        raise ValueError(f"{kind[:100]} {why}")


class FoundTools(BodyModel):
    """What a search has found, or why it failed."""

    type: str
    tool_references: list[ToolReferenceBlock] = Field(default_factory=list)
    error_code: str | None = None


class ToolSearchResultBlock(MarkedBody):
    """What came of a search for tools."""

    type: Literal["tool_search_tool_result"]
    tool_use_id: str
    content: FoundTools


class KnownTool(BodyModel):
    """A tool of the request, by its name."""

    type: Literal["tool_reference"]
    name: str


class DefinedTool(BodyModel):
    """A new tool."""

    type: Literal["tool_definition"]
    definition: ToolDefinition


class ToolChangeBlock(MarkedBody):
    """A tool becomes callable, or stops being so."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[KnownTool | DefinedTool, Field(discriminator="type")]


AnswerBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolSearchResultBlock
_Block: TypeAlias = AnswerBlock | ToolResultBlock | RedactedThinkingBlock | ToolChangeBlock
ContentBlock: TypeAlias = Annotated[_Block, Field(discriminator="type"), BeforeValidator(_known)]


class InputMessage(BodyModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_as_blocks)]


class ToolChoiceOption(BodyModel):
    """Whether and which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(validate_default=True)] = None
    disable_parallel_tool_use: bool | None = None

    @property
    def is_forced(self) -> bool:
        return self.type in ("any", "tool")

    @property
    def is_single(self) -> bool:
        return self.type == "tool" or self.disable_parallel_tool_use is True

    @field_validator("name")
    @classmethod
    def _is_named(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None and info.data.get("type") == "tool":
            raise PydanticCustomError("missing", "Field required with this type")
        return name


_THINKING: Final = ("enabled", "disabled", "adaptive", "between_tools")


def _thinking_type(value: Any) -> Any:
    if isinstance(value, str) and value not in _THINKING:
        taken = ", ".join(_THINKING)
        raise ValueError(f"Input should be one of {taken} (capability_rejected: thinking_type:{value[:40]})")
    return value


class ThinkingOption(BodyModel):
    """Whether and for how long the model thinks."""

    type: Annotated[Literal["enabled", "disabled", "adaptive", "between_tools"], BeforeValidator(_thinking_type)]
    budget_tokens: Annotated[Whole, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(FormatBody):
    """What the answer is bound to."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyModel):
    """The effort and form of the answer."""

    effort: str | None = None
    format: JsonFormat | None = None


class RequestMetadata(BodyModel):
    """Who asks."""

    user_id: str | None = None
    """Agents put the session here."""


class PromptBody(MarkedBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Annotated[list[TextOnly] | None, BeforeValidator(_as_blocks)] = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None

    @property
    def forbids_calls(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type == "none"

    def thinking_wish(self) -> ThinkingWish:
        """The body's wishes for thinking."""
        option = self.thinking or ThinkingOption(type="adaptive")
        effort = (self.output_config or OutputConfig()).effort
        is_enabled = {"enabled": True, "disabled": False}.get(option.type)
        budget = option.budget_tokens if is_enabled else None
        return ThinkingWish(is_enabled, _EFFORTS.get(effort or "", effort), budget)

    def num_cache_points(self) -> int:
        """The number of restore points requested."""
        blocks: list[Any] = [block for message in self.messages for block in message.content]
        inner = [part for block in blocks if isinstance(block, ToolResultBlock) for part in block.content or ()]
        marked = [self, *(self.tools or ()), *(self.system or ()), *blocks, *inner]
        return sum(getattr(one, "cache_control", None) is not None for one in marked)


class MessagesBody(PromptBody):
    """Body of `POST /v1/messages`."""

    messages: Annotated[list[InputMessage], BeforeValidator(mark_new_images), Field(min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=0)]
    """0 only evaluates the prompt."""
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    """0 keeps all tokens."""
    metadata: RequestMetadata | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    context_management: dict[str, Any] | None = None
    """Without effect, as the answer says."""


IN_PROMPT: Rules = refused("""
    tools run where the client runs, and none on the server: container mcp_servers=[]
    a request holds its whole conversation: thread previous_response_id conversation
    the prompt is made of system, messages and tools only: prompt input instructions=""
    its newer names are tools and tool_choice: functions=[] function_call="none"
    its name here is output_config.effort: reasoning_effort reasoning={}
    its name here is output_config.format: response_format
""")

IN_MESSAGES: Rules = IN_PROMPT | refused("""
    its name here is max_tokens: max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample n_predict
    its name here is stop_sequences: stop=[]
    this API samples by temperature, top_p and top_k only; /v1/chat/completions has more: min_p=0 seed=-1
        repetition_penalty=1 repeat_penalty=1 presence_penalty=0 frequency_penalty=0 logit_bias={} ignore_eos=false
        typical_p=1 top_n_sigma=0|-1 xtc_probability=0 dry_multiplier=0 allowed_token_ids bad_words=[]
        stop_token_ids=[] min_tokens=0 min_new_tokens=0
    a request has one answer: n=1
    answers hold text, without data on single tokens: logprobs=false top_logprobs=0
    this API has no field for it; /v1/chat/completions has: cache_prompt=true speculate=true priority=0
""")

_ERROR_PREFIX = "Error: "


def read_conversation(
    body: PromptBody, model: ServedModel, namespace: str, healed: ShownAsBefore | None = None
) -> Conversation:
    """The prompt's source; raises ApiError."""
    last = body.messages[-1]
    # The answer continues after the results of its own search, as after any result.
    ends_with = [block.type for block in last.content[-1:]]
    continues = last.role == "assistant" and ends_with != ["tool_search_tool_result"]
    if continues:
        _check_begun(body, model)
    num_points = body.num_cache_points()
    if num_points > MAX_CACHE_POINTS:
        raise wrong("messages", f"at most {MAX_CACHE_POINTS} blocks may hold cache_control, and {num_points} do")
    # Forms of clients send an empty text for no system prompt.
    has_system = any(block.text for block in body.system or ())
    system = [{"role": "system", "content": _parts(body.system or ())}] if has_system else []
    shows = shows_tools(model, body.tools, forbids_calls=body.forbids_calls)
    texts = [block.text for block in body.messages[0].content if isinstance(block, TextBlock)]
    key = namespace, hashlib.sha256(repr(texts).encode()).digest()
    reader = _Reader(body.tools or (), model.renderer.definitions, key)
    messages = [*system, *reader.read(body.messages)]
    return Conversation(
        model.renderer,
        tools=[as_function(tool) for tool in body.tools or () if shows and not tool.defer_loading],
        changed_tools=reader.callable_tools(),
        forbids_calls=body.forbids_calls,
        messages=messages,
        template_arguments=body.thinking_wish().template_arguments(),
        namespace=namespace,
        continues=continues,
    ).prepared_for(model, healed)


def _check_begun(body: PromptBody, model: ServedModel) -> None:
    """Raises ApiError."""
    check_continuable(model)
    blocks = body.messages[-1].content
    kinds, text = {one.type for one in blocks}, "".join(one.text for one in blocks if isinstance(one, TextBlock))
    faults = {
        "it holds tool_use, whose tool_result is to follow in a message of the user's": "tool_use" in kinds,
        "it holds no text": not text,
        "its text ends with white space, after which models go on badly": text[-1:].isspace(),
        "tool_choice has the answer begin with a call": body.tool_choice is not None and body.tool_choice.is_forced,
    }
    for why, is_so in faults.items():
        if is_so:
            raise wrong("messages", f"the last one is the assistant's, and cannot be continued: {why}")


_RESULTS: Final = (ToolResultBlock, ToolSearchResultBlock)


class _Reader:
    """Converts messages, and tracks which tools may be called."""

    def __init__(self, tools: Sequence[ToolDefinition], definitions: ToolDefinitions, key: tuple[str, bytes]) -> None:
        """`key` tells this conversation's definitions from those of others."""
        self._tools = {tool.name: tool for tool in tools}
        self._definitions, self._key = definitions, key
        self._callable = {name for name, tool in self._tools.items() if not tool.defer_loading}

    def callable_tools(self) -> list[Tool]:
        return [as_function(tool) for name, tool in self._tools.items() if name in self._callable]

    def read(self, messages: Sequence[InputMessage]) -> Iterator[Message]:
        """Yields messages for templates: each result of a tool is one of its own."""
        for place, message in enumerate(messages):
            for is_result, group in groupby(enumerate(message.content), lambda one: isinstance(one[1], _RESULTS)):
                if is_result:
                    yield from (self._result(block) for _, block in group)
                else:
                    said = [self._changed(block, f"{place}.{number}") for number, block in group]
                    yield _message(message.role, said)
            if not message.content:
                yield _message(message.role, [])

    def _changed(self, block: Any, place: str) -> Any:
        """The text that tells of a change of tools; any other block as it is."""
        if not isinstance(block, ToolChangeBlock):
            return block
        tool = block.tool
        name = tool.name if isinstance(tool, KnownTool) else tool.definition.name
        if block.type == "tool_removal":
            self._callable.discard(name)
            return TextBlock(type="text", text=f"{name} is no longer available.", cache_control=block.cache_control)
        if isinstance(tool, DefinedTool):
            self._tools[name] = tool.definition
            place += tool.definition.model_dump_json()
        return TextBlock(type="text", text=self._loaded([name], place), cache_control=block.cache_control)

    def _loaded(self, names: Sequence[str], place: str) -> str:
        tools = {name: as_function(self._tools[name]) for name in names if name in self._tools}
        self._callable.update(tools)
        return self._definitions.block(names, tools, (*self._key, place))

    def _result(self, block: Any) -> Message:
        if isinstance(block, ToolResultBlock):
            parts = self._result_parts(block)
            first, *others = parts or [{"text": ""}]
            if block.is_error and not first["text"].lstrip().lower().startswith("error"):
                # Templates have no field for an error.
                beside = [{"text": _ERROR_PREFIX.strip()}, first] if "image" in first else None
                parts = [*(beside or [{**first, "text": _ERROR_PREFIX + first["text"]}]), *others]
        else:
            names, error = [one.tool_name for one in block.content.tool_references], block.content.error_code
            failed = f"{_ERROR_PREFIX}{error}" if error else "No tool was found."
            parts = [{"text": self._loaded(names, block.tool_use_id) if names else failed}]
        return _marked({"role": "tool", "content": parts, "tool_call_id": block.tool_use_id}, [block])

    def _result_parts(self, block: ToolResultBlock) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, group in groupby(block.content or (), type):
            references: list[Any] = list(group)
            if kind is TextBlock:
                parts += _parts(references)
                continue
            text = self._loaded([part.tool_name for part in references], f"{block.tool_use_id}.{len(parts)}")
            parts.append(_marked({"text": text}, references))
        return parts


def _message(role: str, blocks: Sequence[Any]) -> Message:
    return assistant_message(blocks) if role == "assistant" else {"role": role, "content": _parts(blocks)}


def assistant_message(blocks: Sequence[Any]) -> Message:
    """The assistant's blocks, but for results of searches, for templates."""
    reasoning = [reasoning_of(one.thinking, one.signature or "") for one in blocks if isinstance(one, ThinkingBlock)]
    texts = [one.text for one in blocks if isinstance(one, TextBlock)]
    calls = [_call(one) for one in blocks if isinstance(one, ToolUseBlock)]
    # Text may be split into blocks anywhere, so its parts are joined unchanged.
    message: dict[str, Any] = {"role": "assistant", "content": [{"text": "".join(texts)}] if texts else []}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return _marked(message, blocks)


def _call(use: ToolUseBlock) -> dict[str, Any]:
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}}


def _marked(made: dict[str, Any], blocks: Sequence[Any]) -> dict[str, Any]:
    marks = [mark for one in blocks if (mark := getattr(one, "cache_control", None)) is not None]
    return {**made, "cache_control": marks[-1].model_dump()} if marks else made


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [block.model_dump(include={"text", "cache_control", "image"}, exclude_none=True) for block in blocks]


def as_function(tool: ToolDefinition) -> dict[str, Any]:
    """A tool for chat templates."""
    fields = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    known = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **known}}


_OWN_NAMES = "claude-"


def find_model(context: ApiContext, name: str | None) -> ServedModel:
    """The named model; raises ApiError (404, 400).

    An unknown name of Anthropic's, which clients send by default, means the model of requests without a name.
    """
    try:
        return context.pool.find(name)
    except ModelUnknown:
        if name is None or not name.startswith(_OWN_NAMES):
            raise
        return context.pool.find(None)


def read_params(body: MessagesBody, model: ServedModel) -> GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    choice = body.tool_choice or ToolChoiceOption(type="auto")
    names = (choice.name,) if choice.type == "tool" and choice.name else None
    forced = ForcedCalls(names, choice.is_single) if choice.is_forced else None
    return GenerationParams(
        sampling=changed_sampling(model.sampling, body, model.vocab_size),
        limit=Limit(body.max_tokens),
        stop=tuple(body.stop_sequences or ()),
        max_thinking_tokens=body.thinking_wish().max_tokens,
        is_single_call=choice.is_single,
        grammar=forced or _output_format(body),
    )


def _output_format(body: MessagesBody) -> AnswerGrammar | None:
    newer = body.output_config.format if body.output_config is not None else None
    wanted, param = newer or body.output_format, "output_format" if newer is None else "output_config.format"
    if newer is not None and body.output_format is not None:
        raise wrong("output_format", "it is another name of output_config.format, which is given too")
    return None if wanted is None else AnswerGrammar(f"{param}.schema", json_grammar(wanted.schema_))
