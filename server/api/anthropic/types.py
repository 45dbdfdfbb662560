"""Bodies of the Messages API."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from server.api.anthropic.tool_search import SEARCH_TOOLS, VERSION
from server.api.conversation import ThinkingWish
from server.api.dialect import BodyModel, Rules, Whole, no_effect, read_by, refused
from server.api.params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, CacheSalt, Share

MAX_CACHE_POINTS: Final = 4
"""Blocks with `cache_control`."""

_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Levels that chat templates do not know."""


class CacheControl(BodyModel):
    """Makes the prompt restorable behind what holds this."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Without effect."""


class MarkedBody(BodyModel):
    """What the prompt may be restorable behind."""

    cache_control: CacheControl | None = None


class TextBlock(MarkedBody):
    """A text."""

    type: Literal["text"]
    text: str


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_NOT_TEXT: Final = ("image", "document", "file", "audio", "video")
_BLOCKS_OF: Final = {
    "user": ("text", "tool_result"),
    "assistant": (
        *("text", "tool_use", "thinking", "redacted_thinking"),
        *("server_tool_use", "tool_search_tool_result"),
    ),
    "system": ("text", "tool_addition", "tool_removal"),
}
_READ: Final = {"tool_reference"}.union(*_BLOCKS_OF.values())


def _known(value: Any) -> Any:
    """An unknown block as its text; refuses any other."""
    kind = value.get("type") if isinstance(value, dict) else None
    is_elsewhere = kind == "server_tool_use" and value.get("name") not in SEARCH_TOOLS
    if not isinstance(kind, str) or (kind in _READ and not is_elsewhere):
        return value
    if kind in _NOT_TEXT:
        raise PydanticCustomError("no_images", "this model takes no images and no documents, only text")
    if kind == "server_tool_use" or kind.endswith("_tool_result"):
        reason = "{kind} is of a tool that runs on Anthropic's servers, and here there is none"
        raise PydanticCustomError("no_server_tools", reason, {"kind": kind[:100]})
    text = _text_of(value)
    if text is None:
        raise PydanticCustomError("unknown_block", "{kind} is no block that is known here", {"kind": kind[:100]})
    return {"type": "text", "text": text, "cache_control": value.get("cache_control")}


def _text_of(block: dict[str, Any]) -> str | None:
    held = block.get("text", block.get("content"))
    if isinstance(held, str):
        return held
    parts = [_text_of(part) if isinstance(part, dict) else None for part in held] if isinstance(held, list) else []
    texts = [part for part in parts if part is not None]
    return "\n".join(texts) if texts and len(texts) == len(parts) else None


class ToolReferenceBlock(MarkedBody):
    """A tool that was found."""

    type: Literal["tool_reference"]
    tool_name: str


ResultContent: TypeAlias = Annotated[
    Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")], BeforeValidator(_known)
]
TextOnly: TypeAlias = Annotated[TextBlock, BeforeValidator(_known)]


class ToolResultBlock(MarkedBody):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultContent] | None, BeforeValidator(_as_blocks)] = None
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


def _own_tool(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom" and kind not in SEARCH_TOOLS:
        message = "{kind} is known to Anthropic's servers and models only; give the tool a name and an input_schema"
        raise PydanticCustomError("no_server_tools", message, {"kind": kind[:100]})
    return kind


class ToolDefinition(MarkedBody):
    """A tool of the client, or a search that runs here."""

    type: Annotated[str | None, BeforeValidator(_own_tool)] = None
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
        name = kind.removesuffix(VERSION) if isinstance(kind, str) else ""
        if name not in SEARCH_TOOLS:
            return value
        return {"cache_control": value.get("cache_control"), **SEARCH_TOOLS[name], "type": name, "name": name}

    @property
    def is_search(self) -> bool:
        return self.type in SEARCH_TOOLS


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


class ChangedTool(BodyModel):
    """A tool by its name or definition."""

    type: Literal["tool_reference", "tool_definition"]
    name: str | None = None
    definition: ToolDefinition | None = None

    @property
    def tool_name(self) -> str:
        return self.definition.name if self.definition is not None else self.name or ""

    @model_validator(mode="after")
    def _is_named(self) -> "ChangedTool":
        if (self.name if self.type == "tool_reference" else self.definition) is None:
            needed = "name" if self.type == "tool_reference" else "definition"
            raise PydanticCustomError("missing", "A {type} needs a {needed}", {"type": self.type, "needed": needed})
        return self


class ToolChangeBlock(MarkedBody):
    """A tool becomes callable, or stops being so."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool


_Block: TypeAlias = (
    TextBlock
    | ToolResultBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolSearchResultBlock
    | ToolChangeBlock
)
ContentBlock: TypeAlias = Annotated[Annotated[_Block, Field(discriminator="type")], BeforeValidator(_known)]


class InputMessage(BodyModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_as_blocks)]

    @field_validator("content")
    @classmethod
    def _fits_its_role(cls, blocks: list[Any], info: ValidationInfo) -> list[Any]:
        role = info.data.get("role", "user")
        for index, block in enumerate(blocks):
            if block.type not in _BLOCKS_OF[role]:
                message = "block {index} is a {kind}, which no message of the role {role} holds"
                raise PydanticCustomError("wrong_role", message, {"index": index, "kind": block.type, "role": role})
        return blocks


class ToolChoiceOption(BodyModel):
    """Whether and which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(validate_default=True)] = None
    disable_parallel_tool_use: bool | None = None

    @property
    def is_single(self) -> bool:
        return self.type == "tool" or self.disable_parallel_tool_use is True

    @field_validator("name")
    @classmethod
    def _is_named(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None and info.data.get("type") == "tool":
            raise PydanticCustomError("missing", "Field required with this type")
        return name


class ThinkingOption(BodyModel):
    """Whether and for how long the model thinks."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Whole, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(BodyModel):
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
    def effort(self) -> str | None:
        effort = self.output_config.effort if self.output_config is not None else None
        return _EFFORTS.get(effort, effort) if effort is not None else None

    @property
    def forbids_calls(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type == "none"

    def thinking_wish(self) -> ThinkingWish:
        """The body's wishes for thinking."""
        option = self.thinking
        is_enabled = {"enabled": True, "disabled": False}.get(option.type) if option is not None else None
        budget = option.budget_tokens if option is not None and option.type == "enabled" else None
        return ThinkingWish(is_enabled, self.effort, budget)

    def num_cache_points(self) -> int:
        """The number of restore points requested."""
        return sum(marked.cache_control is not None for marked in [self, *(self.tools or ()), *self._blocks()])

    def _blocks(self) -> Iterator[Any]:
        yield from self.system or ()
        for message in self.messages:
            for block in message.content:
                if isinstance(block, MarkedBody):
                    yield block
                if isinstance(block, ToolResultBlock):
                    yield from block.content or ()


_StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class MessagesBody(PromptBody):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[Whole, Field(ge=0)]
    """0 only evaluates the prompt."""
    stream: bool | None = None
    stop_sequences: Annotated[list[_StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    """0 keeps all tokens."""
    metadata: RequestMetadata | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    context_management: dict[str, Any] | None = None
    """Without effect, as the answer says."""

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


IN_PROMPT: Rules = {
    **read_by(PromptBody),
    **no_effect("the turn before is found by what it holds", "diagnostics"),
    **no_effect("it only says who asks and who pays", "user_profile_id workspace_id billing_policy"),
    **no_effect(
        "it only says where and how fast a request runs, and there is one engine",
        "service_tier speed inference_geo fallbacks fallback_credit_token",
    ),
    **no_effect("what is in a beta there is either served here or not", "betas anthropic_beta anthropic_version"),
    **no_effect("nothing is removed from a conversation by the server", "compaction"),
    **refused("tools run where the client runs, and none on the server", "container mcp_servers=[]"),
    **refused("a request holds its whole conversation", "thread previous_response_id conversation"),
    **refused("the prompt is made of system, messages and tools only", 'prompt input instructions=""'),
    **refused("its newer names are tools and tool_choice", 'functions=[] function_call="none"'),
    **refused("its name here is output_config.effort", "reasoning_effort reasoning={}"),
    **refused("its name here is output_config.format", "response_format"),
}

IN_MESSAGES: Rules = {
    **read_by(MessagesBody),
    **IN_PROMPT,
    **refused(
        "its name here is max_tokens",
        "max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample n_predict",
    ),
    **refused("its name here is stop_sequences", "stop=[]"),
    **refused(
        "this API samples by temperature, top_p and top_k only; /v1/chat/completions has more",
        """
        min_p=0 seed=-1 repetition_penalty=1 repeat_penalty=1 presence_penalty=0 frequency_penalty=0 logit_bias={}
        ignore_eos=false
        """,
    ),
    **refused("a request has one answer", "n=1"),
    **refused("answers hold text, without data on single tokens", "logprobs=false top_logprobs=0"),
    **refused(
        "this API has no field for it; /v1/chat/completions has", "cache_prompt=true speculate=true priority=0"
    ),
}

IN_COUNT: Rules = {
    **IN_PROMPT,
    **no_effect("no answer is given", " ".join(name for name in MessagesBody.model_fields if name not in IN_PROMPT)),
}
