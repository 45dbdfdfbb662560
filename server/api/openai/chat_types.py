"""Types of OpenAI's chat endpoint: what a body may hold and what an answer holds."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.prompt.chat_template import Message
from models.texts import read_object
from server.api.errors import ApiError, Code
from server.api.openai.errors import ErrorObject
from server.api.openai.generation_body import GenerationBody
from server.api.openai.logprobs import ChatLogprobs
from server.api.openai.usage import AnswerHead, PromptIds, TokenIds, Usage
from server.api.thinking import ThinkingWish
from server.api.typed_body import BodyModel
from server.api.usage import CacheBody, TimingsBody


def _as_parts(value: Any, info: ValidationInfo) -> Any:
    """Takes a text as one part, and what the assistant refused to do as what it said."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and info.data.get("role") == "assistant":
        return [_refusal_as_text(part) for part in value]
    return value


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {**part, "type": "text", "text": part["refusal"]} if is_refusal else part


def _no_image(kind: Any) -> Any:
    if kind in ("image_url", "input_image", "image"):
        raise PydanticCustomError("no_images", "this model takes no images, only text")
    return kind


def _budget(value: Any) -> Any:
    """-1 is the same as none."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return None if whole == -1 else whole


_Budget = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_budget)]
_BUDGETS = (
    "max_thinking_tokens",
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
    "reasoning_budget_tokens",
)


class ToolChoice(BodyModel):
    """What a body says of the calls that it wants."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: tuple[str, ...] | None = None
    """The tools that may be called; None for all of them."""
    is_named: bool = False
    """Whether one function is named, of which there is one call then."""


def _tool_choice(value: Any) -> Any:
    """Takes a mode, `{"type": "function"}` and `{"type": "allowed_tools"}`."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("auto", "required", "none"):
        return ToolChoice.model_validate({"mode": value})
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return ToolChoice(mode="required", names=(_named(value),), is_named=True)
    allowed = value.get("allowed_tools") if kind == "allowed_tools" else None
    tools = allowed.get("tools") if isinstance(allowed, dict) and allowed.get("mode") == "required" else None
    if isinstance(tools, list) and tools:
        return ToolChoice(mode="required", names=tuple(_named(tool) for tool in tools))
    modes = '"auto", "required", "none", a function, or allowed_tools with the mode "required"'
    raise PydanticCustomError("tool_choice", "Input should be {modes}", {"modes": modes})


def _named(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("tool_choice", "A function should be named as function.name")
    return name


def _arguments(value: Any) -> Any:
    """Templates write arguments out as an object; clients send its JSON text, some the object itself, and none or an
    empty text for a call without arguments. What is no object stays text.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a JSON text")
    if not value.strip():
        return {}
    parsed = read_object(value, allow_nan=True)
    return value if parsed is None else parsed


class ContentPart(BodyModel):
    """A part of a message's content; only text is understood."""

    type: Annotated[Literal["text"], BeforeValidator(_no_image)]
    text: str
    cache_control: dict[str, Any] | None = None
    """Any object: the prompt shall be restorable at the end of this part."""


class FunctionCall(BodyModel):
    """A call that the assistant made earlier."""

    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = Field(default=None, validate_default=True)


class ToolCallEntry(BodyModel):
    """One entry of a message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


_TakesText = BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart])


class ChatMessage(BodyModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[ContentPart], _TakesText] | None = Field(default=None, validate_default=True)
    """A text or a list of text parts; null only from the assistant, and from a tool that returned nothing."""
    name: str | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which counts where both are given."""
    refusal: str | None = None
    prefix: bool | None = None
    """The last message only: the answer goes on with it."""
    cache_control: dict[str, Any] | None = None
    """Any object: the prompt shall be restorable at the end of this message."""
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _only_assistant_and_tool_may_be_silent(
        cls, value: list[ContentPart] | None, info: ValidationInfo
    ) -> list[ContentPart] | None:
        if value is None and info.data.get("role", "assistant") not in ("assistant", "tool"):
            raise PydanticCustomError("missing", "Field required in a message of this role")
        return value


class FunctionSpec(BodyModel):
    """What a tool does and takes, as the model is shown it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls are bound to the schema though none is forced; a keyword that is not known is refused then."""


class ToolSpec(BodyModel):
    """One tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec
    cache_control: dict[str, Any] | None = None
    """Taken and without effect: the end of the tools is always a restore point."""


class ReasoningOptions(BodyModel):
    """`reasoning`, as OpenRouter's and OpenAI's newer interface have it."""

    effort: str | None = None
    max_tokens: _Budget = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    """Thoughts are always returned."""
    summary: str | None = None
    """Taken, without effect: thoughts come whole, not summarised."""


class ThinkingOptions(BodyModel):
    """`thinking`, as Anthropic's clients and others have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: _Budget = None


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolSpec] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    """"auto", "required", "none", a function, or "allowed_tools" of which one is to be called."""
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite; null leaves it to the other."""
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    think: bool | str | None = None
    """Whether to think, or how hard."""
    max_thinking_tokens: _Budget = None
    thinking_budget: _Budget = None
    thinking_budget_tokens: _Budget = None
    thinking_token_budget: _Budget = None
    reasoning_budget: _Budget = None
    reasoning_budget_tokens: _Budget = None
    """Other names of `max_thinking_tokens`; of several limits the smallest counts."""
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the model's chat template."""
    prediction: dict[str, Any] | None = None
    logprobs: bool | None = None
    """Tell how likely the model held each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """And so many of the likeliest tokens in its place."""

    @property
    def forbids_calls(self) -> bool:
        """Whether the body forbids that tools are called."""
        return self.tool_choice is not None and self.tool_choice.mode == "none"

    def num_top_logprobs(self) -> int | None:
        """Returns how many of the likeliest tokens are told with each token; raises ApiError for some with none."""
        if not self.logprobs and self.top_logprobs:
            raise ApiError(Code.INVALID_VALUE, "top_logprobs: it needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def thinking_wish(self) -> ThinkingWish:
        """Returns what the body wants of thoughts, under whichever names; the plainest counts."""
        options, limits = self.reasoning or ReasoningOptions(), self.thinking or ThinkingOptions()
        by_type = {"enabled": True, "disabled": False}.get(limits.type or "")
        by_think = self.think if isinstance(self.think, bool) else None
        enabled = (self.enable_thinking, by_think, by_type, options.enabled)
        effort = self.reasoning_effort or options.effort or (self.think if isinstance(self.think, str) else None)
        budgets = (options.max_tokens, limits.budget_tokens, *(getattr(self, name) for name in _BUDGETS))
        return ThinkingWish(
            is_enabled=next((value for value in enabled if value is not None), None),
            effort=effort,
            max_tokens=min((limit for limit in budgets if limit is not None), default=None),
        )

    def continues(self) -> bool:
        """Whether the answer goes on with the last message; raises ApiError where the body contradicts itself."""
        last = self.messages[-1]
        for index, message in enumerate(self.messages):
            if message.prefix and (message is not last or message.role != "assistant"):
                param = f"messages[{index}].prefix"
                raise _wrong(param, "only the last message is continued, and only if it is the assistant's")
        if not (self.continue_final_message or last.prefix):
            if self.add_generation_prompt is False:
                why = "a prompt asks for an answer, so false is only taken with continue_final_message"
                raise _wrong("add_generation_prompt", why)
            return False
        if self.add_generation_prompt:
            raise _wrong("add_generation_prompt", "a message is either continued or answered")
        if last.role != "assistant":
            raise _wrong("continue_final_message", "the last message is not the assistant's")
        if last.tool_calls:
            raise _wrong("messages", "the last message holds tool_calls, and cannot be continued")
        return True

    def num_explicit_points(self) -> int:
        """Returns how many restore points the client asks for."""
        marked = sum(message.cache_control is not None for message in self.messages)
        return marked + sum(
            part.cache_control is not None for message in self.messages for part in message.content or ()
        )


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(Code.INVALID_VALUE, f"{param}: {why}", param)


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Returns the messages as chat templates read them."""
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> Message:
    # Templates know no developer; it is what a system message became under another name.
    role = "system" if message.role == "developer" else message.role
    fields = message.model_dump(
        include={"name", "tool_calls", "tool_call_id", "reasoning_content", "cache_control"}, exclude_none=True
    )
    if message.reasoning_content is None and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    parts = [part.model_dump(include={"text", "cache_control"}) for part in message.content or ()]
    if message.content is None and message.refusal:
        parts = [{"text": message.refusal}]
    return {"role": role, "content": parts, **fields}


class FunctionBody(TypedDict):
    """A call's function: its name and its arguments as a JSON text."""

    name: str
    arguments: str


class ToolCallBody(TypedDict):
    """A complete tool call."""

    id: str
    type: str
    function: FunctionBody


class FunctionDelta(TypedDict):
    """What a chunk says of a call's function: its name in the first, then more of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What a chunk says of a tool call; `id` and `type` stand in the first."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


class DeltaBody(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: str
    content: str
    reasoning_content: str
    reasoning: str
    """The same text under the other name that clients look for."""
    refusal: str | None
    tool_calls: list[ToolCallDelta]


class MessageBody(TypedDict):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """The same text under the other name that clients look for."""
    tool_calls: NotRequired[list[ToolCallBody]]


class ChunkChoice(TokenIds):
    """What a chunk adds to one choice."""

    index: int
    delta: DeltaBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    """What ended the choice, where it has ended well: see `StopFound`."""
    error: NotRequired[ErrorObject]
    """What went wrong with this choice, where others were completed."""


class ChatChoice(TokenIds):
    """One choice of an answer."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    """What ended the choice, where it has ended well: see `StopFound`."""
    error: NotRequired[ErrorObject]
    """What went wrong with this choice, where others were completed."""


class ChatChunk(AnswerHead, PromptIds):
    """One `data:` line of a stream."""

    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


class ChatAnswer(AnswerHead, PromptIds):
    """What the model answered."""

    choices: list[ChatChoice]


class ChatCompletion(ChatAnswer):
    """The body of an answer that is not streamed."""

    usage: Usage
    timings: TimingsBody
    cache: CacheBody | None
