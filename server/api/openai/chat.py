"""The body of a chat completion: its messages and tools, and the conversation that they make."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from models.inference.sampling_params import MAX_TOP_LOGPROBS
from models.prompt.shapes import Message
from server.api.binding import CallingBody, FunctionSpec, shows_tools, tool_choice_reader
from server.api.bodies import BodyModel, Rules, media_of, part_text, refuse_fields, refused, tool_result
from server.api.conversation import (
    Conversation,
    ThinkingWish,
    check_continuable,
    check_template_arguments,
    mark_new_images,
    media_part,
    read_arguments,
)
from server.api.errors import wrong
from server.api.generation import IN_BOTH, GenerationBody, LimitOrZero
from server.api.params import Incoming
from server.pool.served import ServedModel

MAX_EXPLICIT_POINTS = 16

IN_CHAT: Rules = IN_BOTH | refused("""
    what the model thinks is returned apart from what it says: include_reasoning=true separate_reasoning=true
        stream_reasoning=true reasoning_format="auto"|"deepseek"|"parsed"
    prompts and answers hold no sounds: audio modalities=["text"]
    messages become the prompt by the model's own template, which ends with the beginning of an answer: prompt
        add_special_tokens=false chat_template="" documents=[]
    an answer does not repeat the conversation: echo=false
    calls of tools are always told apart from text: parse_tool_calls=true
""")

IN_MESSAGE: Rules = refused("""
    images stand in content, as parts of it: images=[]
    its name here is reasoning_content: thinking=""
    tools stand in the body, not in a message: tools=[]
""")

_OF_TOOLS = ("tool", "function")


def _as_parts(value: Any, info: ValidationInfo) -> Any:
    """The content as parts; null only from the assistant, and from a tool."""
    role = info.data.get("role", "assistant")
    if value is None and role not in ("assistant", *_OF_TOOLS):
        raise PydanticCustomError("missing", "Field required in a message of this role")
    value = tool_result(value) if role in _OF_TOOLS else value
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        return value
    is_message = "role" in info.data  # a prediction holds no media
    return [_as_text(part, role) if is_message or media_of(part) is None else part for part in value]


def _as_text(part: Any, role: str) -> Any:
    """A part of another API, or the assistant's refusal, as a text; the assistant's thought as it is."""
    if (shown := media_part(part)) is not None:
        return shown
    text = part_text(part)
    if text is None or (part["type"] == "refusal" and role != "assistant"):
        return part
    kind = "thinking" if part["type"] == "thinking" and role == "assistant" else "text"
    return {**part, "type": kind, "text": text}


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        return read_arguments(value)
    if value is None or isinstance(value, dict):
        return value or {}
    raise PydanticCustomError("string_type", "Input should be a JSON text")


class ContentPart(BodyModel):
    """A part of a message's content."""

    type: Literal["text", "thinking"]
    text: str
    cache_control: dict[str, Any] | None = None
    """Any object makes the prompt restorable after this."""


class FunctionCall(BodyModel):
    """A call that the assistant made earlier."""

    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = Field(default=None, validate_default=True)


def _named_call(value: Any) -> Any:
    if value is None or (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return value
    raise PydanticCustomError("function_call", "Input should be an object with name and arguments")


class ToolCallEntry(BodyModel):
    """One entry of a message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


_TakesText = BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None)


class ChatMessage(BodyModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[ContentPart] | None, _TakesText, Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which takes precedence."""
    refusal: str | None = None
    prefix: bool | None = None
    """On the last message: the answer continues it."""
    cache_control: dict[str, Any] | None = None
    audio: None = None
    function_call: Annotated[FunctionCall | None, BeforeValidator(_named_call)] = None
    """An older form of `tool_calls`, of one call."""

    @property
    def calls(self) -> list[ToolCallEntry]:
        """The calls in either form."""
        older = self.function_call
        return self.tool_calls or ([] if older is None else [ToolCallEntry(type="function", function=older)])


def _function_only(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        why = f"{kind[:40]!r} is not offered here: functions are; custom tools are taken by /v1/responses"
        raise PydanticCustomError("no_function", "{why}", {"why": why})
    return kind


class ToolSpec(BodyModel):
    """One tool that the model may call."""

    type: Annotated[Literal["function"], BeforeValidator(_function_only)]
    function: FunctionSpec
    cache_control: dict[str, Any] | None = None
    """Without effect."""


class ReasoningOptions(BodyModel):
    """`reasoning`, as OpenRouter and OpenAI have it."""

    effort: str | None = None
    max_tokens: LimitOrZero = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    """Only false: reasoning is always returned."""
    summary: str | None = None
    """Without effect."""


class ThinkingOptions(BodyModel):
    """`thinking`, as Anthropic's clients and others have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: LimitOrZero = None


class Prediction(BodyModel):
    """`prediction`: text that the answer is expected to repeat, for drafts."""

    type: Literal["content"]
    content: Annotated[list[ContentPart], _TakesText]


def offered_tools(fields: Mapping[str, Any]) -> list[Any]:
    """The tools of an unchecked body, in their newer form."""
    return list(
        fields.get("tools") or [{"type": "function", "function": one} for one in fields.get("functions") or ()]
    )


class ChatBody(GenerationBody, CallingBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], BeforeValidator(mark_new_images), Field(min_length=1)]
    tools: list[ToolSpec] | None = None
    tool_choice: Annotated[Any, tool_choice_reader("function")] = None
    functions: list[FunctionSpec] | None = None
    """An older form of `tools`: the answer has one call at most, as `function_call`."""
    function_call: Annotated[Any, tool_choice_reader("function", None)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`."""
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    think: bool | str | None = None
    max_thinking_tokens: LimitOrZero = None
    thinking_budget: LimitOrZero = None
    thinking_budget_tokens: LimitOrZero = None
    thinking_token_budget: LimitOrZero = None
    reasoning_budget: LimitOrZero = None
    reasoning_budget_tokens: LimitOrZero = None
    """Other names of `max_thinking_tokens`; the smallest counts."""
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _in_newer_form(self) -> "ChatBody":
        if self.functions and self.tools:
            raise wrong("functions", "it is the older form of tools, which are given too; send one of them")
        if self.function_call not in (None, "none") and not self.functions:
            raise wrong("function_call", "it goes with functions; beside tools send tool_choice")
        newer = {"tool_choice": self.function_call, "parallel_tool_calls": False}
        return self.model_copy(update=newer) if self.functions else self

    def num_top_logprobs(self) -> int | None:
        """Raises ApiError without `logprobs`."""
        if not self.logprobs and self.top_logprobs:
            raise wrong("top_logprobs", "it needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def thinking_wish(self) -> ThinkingWish:
        """The wishes for reasoning; the plainest name takes precedence."""
        options, limits = self.reasoning or ReasoningOptions(), self.thinking or ThinkingOptions()
        by_type = {"enabled": True, "disabled": False}.get(limits.type or "")
        by_think = self.think if isinstance(self.think, bool) else None
        enabled = (self.enable_thinking, by_think, by_type, options.enabled)
        effort = self.reasoning_effort or options.effort or (self.think if isinstance(self.think, str) else None)
        budgets = [options.max_tokens, limits.budget_tokens, self.max_thinking_tokens, self.thinking_budget]
        budgets += [self.thinking_budget_tokens, self.thinking_token_budget]
        budgets += [self.reasoning_budget, self.reasoning_budget_tokens]
        is_enabled = next((value for value in enabled if value is not None), None)
        return ThinkingWish(is_enabled, effort, min((limit for limit in budgets if limit is not None), default=None))

    def continues(self) -> bool:
        """Whether the last message is continued; raises ApiError for contradicting fields."""
        last = self.messages[-1]
        for index, message in enumerate(self.messages):
            if message.prefix and (message is not last or message.role != "assistant"):
                raise wrong(f"messages[{index}].prefix", "only a last message of the assistant is continued")
        if not (self.continue_final_message or last.prefix):
            if self.add_generation_prompt is False:
                raise wrong("add_generation_prompt", "false is only taken with continue_final_message")
            return False
        if self.add_generation_prompt:
            raise wrong("add_generation_prompt", "a message is either continued or answered")
        if last.role != "assistant":
            raise wrong("continue_final_message", "the last message is not the assistant's")
        if last.calls:
            raise wrong("messages", "the last message holds tool_calls, and cannot be continued")
        return True


def template_message(message: ChatMessage) -> Message:
    """A message for chat templates."""
    # Templates know no developer role, the new name of system, and no function, the old one of tool.
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    fields = message.model_dump(include={"name", "tool_call_id", "cache_control"}, exclude_none=True)
    if message.calls:
        fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.calls]
    content = message.content or ()
    thoughts = [part.text for part in content if part.type == "thinking"]
    reasoning = (message.reasoning_content, message.reasoning, "\n".join(thoughts) if thoughts else None)
    if given := [text for text in reasoning if text is not None]:
        fields["reasoning_content"] = given[0]
    parts = [part.model_dump(include={"text", "cache_control", "image"}) for part in content if part.type == "text"]
    if message.content is None and message.refusal:
        parts = [{"text": message.refusal}]
    return {"role": role, "content": parts, **fields}


def read_conversation(body: ChatBody, incoming: Incoming, model: ServedModel) -> Conversation:
    """The prompt's source; raises ApiError."""
    continues = body.continues()
    if continues:
        check_continuable(model)
    shows = shows_tools(model, body.tools or body.functions, forbids_calls=body.forbids_calls)
    for index, message in enumerate(body.messages):
        refuse_fields(message.model_extra or {}, IN_MESSAGE, f"messages[{index}].")
    marked = (one.cache_control is not None for said in body.messages for one in (said, *(said.content or ())))
    if sum(marked) > MAX_EXPLICIT_POINTS:
        raise wrong("messages", f"at most {MAX_EXPLICIT_POINTS} may carry cache_control")
    arguments = body.chat_template_kwargs or {}
    check_template_arguments(arguments, "chat_template_kwargs")
    return Conversation(
        model.renderer,
        tools=offered_tools(incoming.fields) if shows else [],
        forbids_calls=body.forbids_calls,
        messages=list(map(template_message, body.messages)),
        template_arguments={**arguments, **body.thinking_wish().template_arguments()},
        namespace=incoming.namespace(body.cache_salt),
        continues=continues,
    ).prepared_for(model, incoming.healed)
