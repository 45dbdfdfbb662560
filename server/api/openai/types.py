"""Types of the bodies and answers of OpenAI's generation endpoints, and of fields that similar servers add.

All fields that the endpoints share are optional, and null means absent. A body binds its answer by at most one field,
whichever server's name it has. DRY's sequence breakers and bad words are turned into tokens here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo
from typing_extensions import TypedDict

from models.inference.sampling_params import MAX_REPEATED, MAX_TOP_LOGPROBS, MAX_WINDOW
from models.output.grammar import Grammar, GrammarKind
from models.prompt.chat_template import Message
from models.texts import read_object
from server.api.conversation import ThinkingWish
from server.api.dialect import BodyModel, Whole, as_whole
from server.api.errors import ApiError, Code
from server.api.ollama.dialect import Options
from server.api.openai.dialect import ErrorObject
from server.api.openai.usage import AnswerHead, ChatLogprobs, PromptIds, TokenIds, Usage
from server.api.params import ANY_OBJECT, AnswerGrammar, choice_grammar, json_grammar
from server.api.record import CacheBody, TimingsBody
from server.pool.served import ServedModel

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Texts that end a repetition, the defaults of llama.cpp and koboldcpp."""


def breaker_tokens(texts: Sequence[str] | None, model: ServedModel) -> tuple[int, ...]:
    """Returns the tokens that hold one of `texts`, or of the defaults for None, in ascending order.

    A text that no single token holds is represented by its last token.
    """
    wanted = DEFAULT_BREAKERS if texts is None else texts
    return tuple(sorted({token for text in wanted if text for token in _tokens_of(text, model)}))


def _tokens_of(text: str, model: ServedModel) -> Sequence[int]:
    last = model.renderer.tokenize(text)[-1:]
    return model.token_search.containing(text) or [token for token in last if token < model.vocab_size]


def bad_word_tokens(texts: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Returns each text's tokens, both at the start of a line and after a blank."""
    forms = {form: None for text in texts for form in (text.lstrip(), " " + text.lstrip()) if text.strip()}
    found = dict.fromkeys(tuple(model.renderer.tokenize(form)) for form in forms)
    return tuple(ids for ids in found if ids and max(ids) < model.vocab_size)


def _schema(value: Any) -> Any:
    """Some clients send a schema as JSON text, an empty text for none."""
    if value in (None, ""):
        return None
    schema = read_object(value) if isinstance(value, str) else value
    if isinstance(schema, dict):
        return schema
    raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")


def _grammar_text(value: Any) -> Any:
    """Returns None for an empty text, which forms of clients send."""
    return None if value == "" else value


def _ollama_format(value: Any) -> Any:
    return dict(ANY_OBJECT) if value == "json" else _schema(value)


def _required_schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")
    return value


Schema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]
GrammarText = Annotated[str | None, BeforeValidator(_grammar_text)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class SchemaFormat(BodyModel):
    """`json_schema` of a `response_format`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(_required_schema), Field(alias="schema")]
    strict: bool | None = None
    """True: an unknown keyword in the schema is an error; else it binds nothing."""


class ResponseFormat(BodyModel):
    """`response_format`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = None
    """With `json_object`: the object's schema, as in llama.cpp."""


class StructuredOutputs(BodyModel):
    """`structured_outputs`, as vLLM has it."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: GrammarText = None
    choice: Choices | None = None
    grammar: GrammarText = None
    json_object: bool | None = None
    structural_tag: None = None


class BoundBody(BodyModel):
    """The fields that bind an answer. At most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema = None
    guided_json: Schema = None
    format: Annotated[dict[str, Any] | None, BeforeValidator(_ollama_format)] = None
    """"json" for any object, or a schema."""
    guided_regex: GrammarText = None
    regex: GrammarText = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText = None
    grammar: GrammarText = None
    ebnf: GrammarText = None

    def answer_grammar(self) -> AnswerGrammar | None:
        """Returns the grammar of the answer; raises ApiError if several fields bind it."""
        wanted = [*self._of_response_format(), *self._of_structured_outputs(), *self._of_plain_fields()]
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            message = f"{second}: an answer is bound by one field only, and {first} is given too"
            raise ApiError(Code.INVALID_VALUE, message, second)
        return wanted[0] if wanted else None

    def _of_response_format(self) -> Iterator[AnswerGrammar]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return
        if wanted.type == "json_object":
            yield AnswerGrammar("response_format", json_grammar(wanted.schema_ or ANY_OBJECT))
        elif wanted.json_schema is None:
            message = "response_format.json_schema: Field required with this type"
            raise ApiError(Code.MISSING_PARAMETER, message, "response_format.json_schema")
        else:
            schema = json_grammar(wanted.json_schema.schema_, is_strict=wanted.json_schema.strict is True)
            yield AnswerGrammar("response_format.json_schema.schema", schema)

    def _of_structured_outputs(self) -> Iterator[AnswerGrammar]:
        wanted = self.structured_outputs or StructuredOutputs()
        schema = dict(ANY_OBJECT) if wanted.json_object else wanted.json_
        yield from _read("structured_outputs", schema, wanted.regex, wanted.choice, wanted.grammar)

    def _of_plain_fields(self) -> Iterator[AnswerGrammar]:
        for name in ("json_schema", "guided_json", "format"):
            yield from _read(name, schema=getattr(self, name))
        for name in ("guided_regex", "regex"):
            yield from _read(name, regex=getattr(self, name))
        yield from _read("guided_choice", choice=self.guided_choice)
        for name in ("guided_grammar", "grammar", "ebnf"):
            yield from _read(name, grammar=getattr(self, name))


def _read(
    param: str,
    schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Iterator[AnswerGrammar]:
    if schema is not None:
        yield AnswerGrammar(param, json_grammar(schema))
    if regex is not None:
        yield AnswerGrammar(param, Grammar(GrammarKind.REGEX, regex))
    if choice is not None:
        yield AnswerGrammar(param, choice_grammar(choice))
    if grammar is not None:
        yield AnswerGrammar(param, Grammar(GrammarKind.GBNF_OR_LARK, grammar))


MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 128
MAX_BREAKERS = 64
MAX_BREAKER_CHARACTERS = 64
RANDOM_SEED = -1
"""Clients send this for "no seed"."""

NO_LIMIT = -1
"""Clients send this for "until the context is full"."""


def as_limit(value: Any) -> Any:
    """Returns a token limit, which may be written as 16.0; None for "no limit"."""
    whole = as_whole(value)
    return None if whole == NO_LIMIT else whole


def _stop_strings(value: Any) -> Any:
    """Returns one text as a list, and leaves out empty texts, which forms of clients send."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _priority(value: Any) -> Any:
    """Returns a priority; other servers number them, and 0 is the default."""
    return None if value == 0 and not isinstance(value, bool) else value


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Breaker = Annotated[str, Field(max_length=MAX_BREAKER_CHARACTERS)]
_BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_NonzeroShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
_Window = Annotated[Whole, Field(ge=-1, le=MAX_WINDOW)]
_MinTokens = Annotated[Whole, Field(ge=0, lt=2**63)] | None
_Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(as_limit)]


class StreamOptions(BodyModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """Send a chunk with the token counts before the end."""
    include_obfuscation: bool | None = None
    """Without effect: nothing is obfuscated here."""
    continuous_usage_stats: bool | None = None
    """Where usage is included, send the counts so far in every chunk."""


class GenerationBody(BoundBody):
    """Fields of a request for text, whatever the prompt looks like."""

    model: str | None = None
    """Id of a served model; may be left out where only one is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Limit = None
    """-1 means no limit."""
    max_completion_tokens: _Limit = None
    max_new_tokens: _Limit = None
    n_predict: _Limit = None
    """Other names of `max_tokens`; the smallest counts."""
    n: Annotated[Whole, Field(ge=1)] | None = None
    """Number of answers to each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: _Share | None = None
    typical_p: _NonzeroShare | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100, allow_inf_nan=False)] | None = None
    """0 and below keep all tokens."""
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    seed: Annotated[Whole, Field(ge=RANDOM_SEED, lt=2**63)] | None = None
    """-1 means no seed."""
    repetition_penalty: _RepetitionPenalty | None = None
    repeat_penalty: _RepetitionPenalty | None = None
    """Another name of `repetition_penalty`; the two must not differ."""
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_last_n: _Window | None = None
    """How many of the last tokens the penalties look at; -1 is all, 0 none."""
    repetition_context_size: _Window | None = None
    presence_context_size: _Window | None = None
    frequency_context_size: _Window | None = None
    """mlx-lm's windows, one for each penalty; the windows of active penalties must not differ."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """0 switches DRY off."""
    dry_base: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None
    dry_allowed_length: Annotated[Whole, Field(ge=1, le=MAX_REPEATED)] | None = None
    dry_penalty_last_n: _Window | None = None
    dry_sequence_breakers: Annotated[list[_Breaker], Field(max_length=MAX_BREAKERS)] | None = None
    """Texts that end a repetition."""
    logit_bias: dict[str, _Bias] | None = None
    """Maps token ids, as texts, to biases."""
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    """Only these tokens are sampled."""
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts excluded from the answer, as far as it spells them with the tokenizer's usual tokens."""
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_stop_strings)] | None = (
        None
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    return_token_ids: bool | None = None
    """Send the tokens of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in `logprobs` by their ids: `token_id:42`."""
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """Another name of it."""
    min_tokens: _MinTokens = None
    """Neither the model nor a stop text or token ends the answer earlier."""
    min_new_tokens: _MinTokens = None
    """Another name of `min_tokens`; the larger counts."""
    ignore_eos: bool | None = None
    """Generate until `max_tokens`, whatever is sampled."""
    session_id: str | None = None
    cache_prompt: bool | None = None
    """False: neither reuse nor keep this prompt's state."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Only requests with the same salt share state."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Annotated[Literal["interactive", "background"] | None, BeforeValidator(_priority)] = None
    service_tier: str | None = None
    """"flex" means `priority: background`."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    options: Options | None = None
    """Ollama's fields, from clients that expect Ollama; fields of the body itself take precedence."""

    def num_top_logprobs(self) -> int | None:
        """Returns how many likeliest tokens to send with each token; None for no log-probabilities."""
        return None

    def wants_usage(self) -> bool:
        """Whether a stream shall hold the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def wants_usage_always(self) -> bool:
        """Whether each chunk shall hold the token counts so far."""
        options = self.stream_options
        return options is not None and self.wants_usage() and options.continuous_usage_stats is True

    def keeps_stop(self) -> bool:
        """Whether the stop text that ends an answer is part of it."""
        return self.include_stop_str_in_output is True or self.no_stop_trim is True

    def least(self) -> int:
        """Returns the fewest tokens to generate; raises ApiError if above the limit."""
        least, limit = max(self.min_tokens or 0, self.min_new_tokens or 0), self.limit()
        if limit is not None and least > limit:
            param = "min_tokens" if self.min_tokens == least else "min_new_tokens"
            message = f"{param}: {least} tokens are more than the {limit} that the answer may have"
            raise ApiError(Code.INVALID_VALUE, message, param)
        return least

    def limit(self) -> int | None:
        """Returns the most tokens to generate; None if the request does not say."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_new_tokens, self.n_predict)
        return min(
            (limit for limit in given if limit is not None),
            default=None if self.options is None else self.options.limit,
        )


def _as_parts(value: Any, info: ValidationInfo) -> Any:
    """Returns a text as one part, and a refusal of the assistant as its text."""
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
    """Returns None for -1."""
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
    """The tools that may be called; None for all."""
    is_named: bool = False
    """Whether exactly one call of a named function is wanted."""


def _tool_choice(value: Any) -> Any:
    """Returns the choice from a mode, `{"type": "function"}` or `{"type": "allowed_tools"}`."""
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
    """Returns arguments as an object, which templates write out.

    Clients send JSON text, an object, null or an empty text; other text stays text.
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
    """Any object makes the prompt restorable at the end of this part."""


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
    """A text or a list of text parts; null only from the assistant, and from a tool without a result."""
    name: str | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which takes precedence."""
    refusal: str | None = None
    prefix: bool | None = None
    """On the last message only: the answer continues it."""
    cache_control: dict[str, Any] | None = None
    """Any object makes the prompt restorable at the end of this message."""
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
    """Whether calls follow the schema even if not forced; unknown keywords are then refused."""


class ToolSpec(BodyModel):
    """One tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec
    cache_control: dict[str, Any] | None = None
    """Without effect: the end of the tools is always a restore point."""


class ReasoningOptions(BodyModel):
    """`reasoning`, as OpenRouter's and OpenAI's newer interface have it."""

    effort: str | None = None
    max_tokens: _Budget = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    """Thoughts are always returned."""
    summary: str | None = None
    """Without effect: thoughts are returned whole."""


class ThinkingOptions(BodyModel):
    """`thinking`, as Anthropic's clients and others have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: _Budget = None


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolSpec] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    """"auto", "required", "none", a function, or "allowed_tools"."""
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`; null leaves it to that."""
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
    """Other names of `max_thinking_tokens`; the smallest limit counts."""
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the model's chat template."""
    prediction: dict[str, Any] | None = None
    logprobs: bool | None = None
    """Send the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Also send this many of the likeliest tokens."""

    @property
    def forbids_calls(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.mode == "none"

    def num_top_logprobs(self) -> int | None:
        """Returns how many likeliest tokens to send with each token; raises ApiError without `logprobs`."""
        if not self.logprobs and self.top_logprobs:
            raise ApiError(Code.INVALID_VALUE, "top_logprobs: it needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def thinking_wish(self) -> ThinkingWish:
        """Returns the body's wishes for thoughts, under all names; the plainest name takes precedence."""
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
        """Whether the answer continues the last message; raises ApiError for contradicting fields."""
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
        """Returns the number of restore points requested."""
        marked = sum(message.cache_control is not None for message in self.messages)
        return marked + sum(
            part.cache_control is not None for message in self.messages for part in message.content or ()
        )


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(Code.INVALID_VALUE, f"{param}: {why}", param)


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Returns the messages in the form of chat templates."""
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> Message:
    # Templates know no developer role; it is the new name of system.
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
    """Same as `reasoning_content`, for clients that look for this name."""
    refusal: str | None
    tool_calls: list[ToolCallDelta]


class MessageBody(TypedDict):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    """Same as `reasoning_content`, for clients that look for this name."""
    tool_calls: NotRequired[list[ToolCallBody]]


class ChunkChoice(TokenIds):
    """What a chunk adds to one choice."""

    index: int
    delta: DeltaBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    """What ended a successful choice: see `StopFound`."""
    error: NotRequired[ErrorObject]
    """The error of a failed choice, if others succeeded."""


class ChatChoice(TokenIds):
    """One choice of an answer."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    """What ended a successful choice: see `StopFound`."""
    error: NotRequired[ErrorObject]
    """The error of a failed choice, if others succeeded."""


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
