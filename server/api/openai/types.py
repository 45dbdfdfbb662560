"""Bodies of OpenAI's generation endpoints, with fields that similar servers add, and the parameters that these hold.

All fields that the endpoints share are optional, and null means absent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from models.inference.sampling_params import MAX_REPEATED, MAX_TOP_LOGPROBS, SamplingParams
from models.output.grammar import Grammar, GrammarKind
from models.prompt.shapes import Message
from models.texts import read_object
from server.api import params
from server.api.bodies import BodyModel, FormatBody, Whole, as_whole, media_of, part_text, tool_result
from server.api.conversation import ThinkingWish, media_in_words, refuse_new_media
from server.api.errors import Code, wrong
from server.api.params import AnswerGrammar, ForcedCalls
from server.engine.request import LoopRule, Priority
from server.pool.served import ServedModel


def _schema(value: Any) -> Any:
    """Takes JSON text too, and an empty text for none."""
    if value in (None, ""):
        return None
    schema = read_object(value) if isinstance(value, str) else value
    if isinstance(schema, dict):
        return schema
    raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")


Schema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]
_Json = Annotated[Schema, AfterValidator(lambda schema: None if schema is None else params.json_grammar(schema))]
Format = Annotated[_Json, BeforeValidator(lambda value: dict(params.ANY_OBJECT) if value == "json" else value)]
_AnyObject = Annotated[bool | None, AfterValidator(lambda on: params.json_grammar(params.ANY_OBJECT) if on else None)]
_Regex = Annotated[str | None, AfterValidator(lambda text: Grammar(GrammarKind.REGEX, text) if text else None)]
_Gbnf = Annotated[str | None, AfterValidator(lambda text: Grammar(GrammarKind.GBNF_OR_LARK, text) if text else None)]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(params.choice_grammar)
]


def format_grammar(param: str, kind: str, schema: Any, strict: bool | None = None) -> AnswerGrammar | None:
    """The grammar of the format `param`, whose type is `kind`."""
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerGrammar(param, params.json_grammar(schema or params.ANY_OBJECT))
    return AnswerGrammar(f"{param}.schema", params.json_grammar(schema or {}, is_strict=strict is True))


class ResponseFormat(FormatBody):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")] = None
    """With `json_object` too, as in llama.cpp."""
    strict: bool | None = None
    """True: an unknown keyword is an error; else it binds nothing."""

    def answer_grammar(self) -> AnswerGrammar | None:
        """The grammar; raises ApiError without the schema that the type needs."""
        if self.type != "json_schema":
            return format_grammar("response_format", self.type, self.schema_)
        if self.schema_ is None:
            raise wrong("response_format.json_schema", "Field required with this type", Code.MISSING_PARAMETER)
        return format_grammar("response_format.json_schema", self.type, self.schema_, self.strict)


class StructuredOutputs(BodyModel):
    """`structured_outputs`, as vLLM has it."""

    json_: Annotated[_Json, Field(alias="json")] = None
    regex: _Regex = None
    choice: _Choices | None = None
    grammar: _Gbnf = None
    json_object: _AnyObject = None
    structural_tag: None = None


class BoundBody(BodyModel):
    """The fields that bind an answer, of which at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: _Json = None
    guided_json: _Json = None
    format: Format = None
    guided_regex: _Regex = None
    regex: _Regex = None
    guided_choice: _Choices | None = None
    guided_grammar: _Gbnf = None
    grammar: _Gbnf = None
    ebnf: _Gbnf = None

    def answer_grammar(self) -> AnswerGrammar | None:
        """The answer's grammar; raises ApiError if several fields bind it."""
        fields = [*(("structured_outputs", value) for _, value in self.structured_outputs or ()), *self]
        made = [AnswerGrammar(name, value) for name, value in fields if isinstance(value, Grammar)]
        formatted = self.response_format and self.response_format.answer_grammar()
        wanted = [formatted, *made] if formatted else made
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            raise wrong(second, f"an answer is bound by one field only, and {first} is given too")
        return wanted[0] if wanted else None


def as_limit(value: Any) -> Any:
    """A limit, as a whole number; None for -1."""
    whole = as_whole(value)
    return None if whole == -1 else whole


def _stop_strings(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _priority(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


class RepetitionDetection(BodyModel):
    """vLLM's `repetition_detection`."""

    max_pattern_size: Annotated[Whole, Field(ge=0, le=2048)] = 0
    """0 detects nothing."""
    min_pattern_size: Annotated[Whole, Field(ge=0)] = 0
    min_count: Annotated[Whole, Field(ge=0, le=1000)] = 0

    @model_validator(mode="after")
    def _check(self) -> "RepetitionDetection":
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is above max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be at least 2")
        return self

    def rule(self) -> LoopRule:
        """What ends an answer."""
        return LoopRule(self.max_pattern_size, self.min_pattern_size, self.min_count)


_Breaker = Annotated[str, Field(max_length=64)]
_BadWord = Annotated[str, Field(max_length=128)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Mass = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Seed = Annotated[Whole, Field(ge=-1, lt=2**63)]
_MinTokens = Annotated[Whole, Field(ge=0, lt=2**63)] | None
_Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(as_limit)]


class StreamOptions(BodyModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: also send the counts so far in every chunk."""


class SharedBody(BodyModel):
    """Fields that the Responses API has, too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: params.Temperature | None = None
    top_p: params.Share | None = None
    seed: _Seed | None = None
    """-1 means no seed."""
    session_id: str | None = None
    cache_prompt: bool | None = None
    """False: neither reuse nor keep this prompt's state."""
    speculate: bool | None = None
    cache_salt: params.CacheSalt | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Annotated[Literal["interactive", "background"] | None, BeforeValidator(_priority)] = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None


class GenerationBody(BoundBody, params.SampledBody, SharedBody):
    """Fields of a request for text."""

    max_tokens: _Limit = None
    """-1 means no limit."""
    max_completion_tokens: _Limit = None
    max_new_tokens: _Limit = None
    n_predict: _Limit = None
    """Other names of `max_tokens`; the smallest counts."""
    speculative_n_max: Annotated[Whole, Field(ge=-1)] | None = Field(default=None, alias="speculative.n_max")
    n: Annotated[Whole, Field(ge=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    typical_p: _Mass | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100, allow_inf_nan=False)] | None = None
    """0 and below keep all tokens."""
    xtc_probability: params.Share | None = None
    xtc_threshold: params.Share | None = None
    repetition_penalty: params.RepetitionPenalty | None = None
    """`repeat_penalty` is another name; the two must not differ."""
    repetition_context_size: params.Window | None = None
    presence_context_size: params.Window | None = None
    frequency_context_size: params.Window | None = None
    """mlx-lm's windows; those of active penalties must not differ."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None
    dry_allowed_length: Annotated[Whole, Field(ge=1, le=MAX_REPEATED)] | None = None
    dry_penalty_last_n: params.Window | None = None
    dry_sequence_breakers: Annotated[list[_Breaker], Field(max_length=64)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=256)] | None = None
    """Texts excluded, as far as the answer spells them with the usual tokens."""
    stop: Annotated[params.StopStrings, BeforeValidator(_stop_strings)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    """With `stream`: also send how much of the prompt is evaluated."""
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """Another name of `include_stop_str_in_output`."""
    min_tokens: _MinTokens = None
    min_new_tokens: _MinTokens = None
    """Another name of `min_tokens`; the larger counts."""
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    metadata: dict[str, Any] | None = None
    options: params.Options | None = None
    """Ollama's fields; those of the body itself take precedence."""

    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to send with each, if any."""
        return None

    def least(self) -> int:
        """The fewest tokens; raises ApiError if above the limit."""
        least, limit = max(self.min_tokens or 0, self.min_new_tokens or 0), self.limit()
        if limit is not None and least > limit:
            param = "min_tokens" if self.min_tokens == least else "min_new_tokens"
            raise wrong(param, f"{least} tokens are more than the {limit} that the answer may have")
        return least

    def limit(self) -> int | None:
        """The most tokens, if the request says."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_new_tokens, self.n_predict)
        limits = [limit for limit in given if limit is not None]
        return min(limits, default=None if self.options is None else self.options.num_predict)


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
    if (shown := media_in_words(part)) is not None:
        return {"type": "text", "text": shown, "cache_control": part.get("cache_control")}
    text = part_text(part)
    if text is None or (part["type"] == "refusal" and role != "assistant"):
        return part
    kind = "thinking" if part["type"] == "thinking" and role == "assistant" else "text"
    return {**part, "type": kind, "text": text}


_Budget = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(as_limit)]


class CallingBody(BodyModel):
    """Which calls are wanted, and how many."""

    tool_choice: Any = None
    """As `tool_choice_reader` returns it."""
    parallel_tool_calls: bool | None = None

    @property
    def forbids_calls(self) -> bool:
        return bool(self.tool_choice == "none")

    def calls(self) -> dict[str, Any]:
        """The parameters of calls."""
        is_single, forced = self.parallel_tool_calls is False, self.tool_choice
        if isinstance(forced, ForcedCalls):
            return {"forced": replace(forced, is_single=forced.is_single or is_single), "is_single_call": is_single}
        return {"is_single_call": is_single}


def tool_choice_reader(*kinds: str | None) -> BeforeValidator:
    """Reads a mode; or a tool of `kinds`, or several of `allowed_tools`, as calls that are forced.

    A name may stand beside the type or in a field of its own, as the two APIs have it.
    """

    def inner(value: Any, field: str) -> dict[str, Any]:
        held = value.get(field, value) if isinstance(value, dict) else value
        return held if isinstance(held, dict) else {}

    def read(value: Any) -> Any:
        if value in (None, "auto", "none"):
            return value
        if value in ("required", "any"):
            return ForcedCalls()
        kind = value.get("type") if isinstance(value, dict) else None
        tools: Any = [value] if kind in kinds else None
        if kind == "allowed_tools" and inner(value, kind).get("mode") == "required":
            tools = inner(value, kind).get("tools")
        names: list[Any] = [inner(tool, "function").get("name") for tool in tools] if isinstance(tools, list) else []
        if names and all(isinstance(name, str) for name in names):
            return ForcedCalls(tuple(names), is_single=kind in kinds)
        why = 'Input should be "auto", "required", "none", a named tool, or allowed_tools with the mode "required"'
        raise PydanticCustomError("tool_choice", why)

    return BeforeValidator(read)


def _arguments(value: Any) -> Any:
    """Arguments as an object for templates; a text that is no object stays a text."""
    if isinstance(value, str):
        parsed = read_object(value, allow_nan=True) if value.strip() else {}
        return value if parsed is None else parsed
    if value is None or isinstance(value, dict):
        return value or {}
    raise PydanticCustomError("string_type", "Input should be a JSON text")


class ContentPart(BodyModel):
    """A part of a message's content."""

    type: Literal["text", "thinking"]
    text: str
    cache_control: dict[str, Any] | None = None
    """Any object makes the prompt restorable behind this."""


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


class NamedTool(BodyModel):
    """What all tools have that the client names."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None


class FunctionSpec(NamedTool):
    """A tool as the model is shown it."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether unforced calls follow the schema, too."""


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
    max_tokens: _Budget = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    """Only false: reasoning is always returned."""
    summary: str | None = None
    """Without effect."""


class ThinkingOptions(BodyModel):
    """`thinking`, as Anthropic's clients and others have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: _Budget = None


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

    messages: Annotated[list[ChatMessage], BeforeValidator(refuse_new_media), Field(min_length=1)]
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
    max_thinking_tokens: _Budget = None
    thinking_budget: _Budget = None
    thinking_budget_tokens: _Budget = None
    thinking_token_budget: _Budget = None
    reasoning_budget: _Budget = None
    reasoning_budget_tokens: _Budget = None
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
    if told := [text for text in reasoning if text is not None]:
        fields["reasoning_content"] = told[0]
    parts = [part.model_dump(include={"text", "cache_control"}) for part in content if part.type == "text"]
    if message.content is None and message.refusal:
        parts = [{"text": message.refusal}]
    return {"role": role, "content": parts, **fields}


# ---------------------------------------------------------------------------------------- the engine's parameters

BACKGROUND_TIER = "flex"
IN_MEMORY = ("in_memory", "in-memory")
"""Values of `prompt_cache_retention` that keep state off the disk."""
_WINDOWS = {
    "repetition_context_size": ("repetition_penalty", 1.0),
    "presence_context_size": ("presence_penalty", 0.0),
    "frequency_context_size": ("frequency_penalty", 0.0),
}
"""mlx-lm's windows: each one's penalty, and the value that switches the penalty off."""
_BREAKERS = ("\n", ":", '"', "*")
"""DRY's default, that of llama.cpp."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def read_params(body: GenerationBody, model: ServedModel) -> params.GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    sampling = _with_one_window(_sampling(body, model), body)
    params.check_token_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    grammar = body.answer_grammar()
    if grammar is not None:
        refuse_going_on(body, f"an answer that {grammar.param} binds ends where nothing may follow")
    is_background = body.priority == "background" or (body.priority is None and body.service_tier == BACKGROUND_TIER)
    return params.GenerationParams(
        sampling=sampling,
        max_tokens=body.limit(),
        stop=tuple(body.stop or (body.options is not None and body.options.stop) or ()),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keeps_stop=body.include_stop_str_in_output is True or body.no_stop_trim is True,
        cache_prompt=body.cache_prompt is not False,
        speculates=body.speculate is not False and body.speculative_n_max != 0,
        is_volatile=body.store is False or body.prompt_cache_retention in IN_MEMORY,
        priority=Priority.BACKGROUND if is_background else Priority.INTERACTIVE,
        ignore_eos=body.ignore_eos is True,
        loops=None if body.repetition_detection is None else body.repetition_detection.rule(),
        grammar=grammar,
    )


def refuse_lone_stream_options(body: GenerationBody) -> None:
    """Raises ApiError (400) for stream options without a stream."""
    if body.stream_options is not None and body.stream_options.model_fields_set and body.stream is not True:
        raise wrong("stream_options", "they are for streams only, and stream is not true")


def refuse_going_on(body: GenerationBody, why: str) -> None:
    """Raises ApiError (400) for fields that continue an answer."""
    for name in ("ignore_eos", "min_tokens", "min_new_tokens"):
        if getattr(body, name):
            raise wrong(name, why)


def _sampling(body: GenerationBody, model: ServedModel) -> SamplingParams:
    given: dict[str, Any] = {"min_tokens": body.least(), "top_logprobs": body.num_top_logprobs()}
    value, other = body.repeat_penalty, body.repetition_penalty
    if value is not None:
        if other not in (None, value):
            raise wrong("repeat_penalty", f"it is another name of repetition_penalty, and {value} is not {other}")
        given["repetition_penalty"] = value
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias, model.vocab_size)
    if body.allowed_token_ids:
        params.check_token_ids(body.allowed_token_ids, model.vocab_size, "allowed_token_ids")
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.bad_words:
        # Each text at a line's start and after a blank.
        forms = [form for text in body.bad_words for form in (text.lstrip(), " " + text.lstrip()) if text.strip()]
        found = dict.fromkeys(tuple(model.renderer.tokenize(form)) for form in forms)
        given["bad_words"] = tuple(ids for ids in found if ids and max(ids) < model.vocab_size)
    if body.dry_multiplier:
        given["dry_breakers"] = _breaker_tokens(body.dry_sequence_breakers, model)
    return params.changed_sampling(params.options_sampling(body.options, model), body, model.vocab_size, **given)


def _with_one_window(sampling: SamplingParams, body: GenerationBody) -> SamplingParams:
    """The sampling with mlx-lm's windows, which must be one; raises ApiError."""
    in_force = [name for name, (penalty, off) in _WINDOWS.items() if getattr(sampling, penalty) != off]
    named = {name: getattr(body, name) for name in ("repeat_last_n", *in_force) if getattr(body, name) is not None}
    for name, value in named.items():
        window = next(iter(named.values()))
        if value != window:
            raise wrong(name, f"all penalties look at the same tokens here, and {value} is not {window}")
    return replace(sampling, repeat_last_n=value) if named else sampling


def _biases(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise wrong("logit_bias", f"{key[:40]!r} is no token id from 0 to {vocab_size - 1}")
    return tuple((int(key), bias) for key, bias in biases.items())


def _breaker_tokens(texts: Sequence[str] | None, model: ServedModel) -> tuple[int, ...]:
    """Sorted tokens that hold one of `texts`, or the last token of a text that none holds."""
    found: set[int] = set()
    for text in _BREAKERS if texts is None else filter(None, texts):
        last = model.renderer.tokenize(text)[-1:]
        found.update(model.tokens_containing(text) or [token for token in last if token < model.vocab_size])
    return tuple(sorted(found))
