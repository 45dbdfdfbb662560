"""What a body of the Responses API may hold."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from server.api.openai.chat_types import ToolChoice
from server.api.openai.output_format import Schema
from server.api.structured_output import ANY_OBJECT, AnswerGrammar, json_grammar
from server.api.thinking import ThinkingWish
from server.api.typed_body import BodyModel

MAX_METADATA = 16
ENCRYPTED_THOUGHTS = "reasoning.encrypted_content"
"""In `include`: thoughts are to be repeated in the form in which clients send them back."""
_SHARED = (
    "temperature",
    "top_p",
    "store",
    "prompt_cache_retention",
    "service_tier",
    "priority",
    "cache_prompt",
)
"""Fields that mean the same as in Chat Completions."""


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "Input should be a text or a list of items")


def _conversation(value: Any) -> Any:
    return value.get("id") if isinstance(value, dict) else value


def _tool_choice(value: Any) -> Any:
    """Takes a mode, `{"type": "function" | "custom", "name"}` and `{"type": "allowed_tools"}`."""
    if value is None or value in ("auto", "required", "none"):
        return None if value is None else ToolChoice(mode=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return ToolChoice(mode="required", names=(_named(value),), is_named=True)
    tools = value.get("tools") if kind == "allowed_tools" and value.get("mode") == "required" else None
    if isinstance(tools, list) and tools:
        return ToolChoice(mode="required", names=tuple(map(_named, tools)))
    modes = '"auto", "required", "none", a function, a custom tool, or allowed_tools with the mode "required"'
    raise PydanticCustomError("tool_choice", "Input should be {modes}", {"modes": modes})


def _named(tool: Any) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("tool_choice", "A tool should be named")
    return name


class TextFormat(BodyModel):
    """`text.format`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BodyModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningWish(BodyModel):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    """With any value, thoughts are returned as their own summary."""
    generate_summary: str | None = None
    """Its older name."""


class ResponseStreamOptions(BodyModel):
    """`stream_options`."""

    include_obfuscation: bool | None = None
    """Taken and without effect: nothing is obfuscated here."""


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)]
Items = Annotated[list[Any], BeforeValidator(_as_items)]


class InputBody(BodyModel):
    """What a prompt is made of."""

    model: str | None = None
    """Id of a served model; may be left out where only one is served."""
    input: Items = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_conversation)] = None
    """An id, or an object with one."""
    tools: list[Any] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def forbids_calls(self) -> bool:
        """Whether the body forbids that tools are called."""
        return self.tool_choice is not None and self.tool_choice.mode == "none"

    def thinking_wish(self) -> ThinkingWish:
        """Returns what the body wants of thoughts."""
        return ThinkingWish(effort=self.reasoning.effort if self.reasoning else None)


class ResponsesBody(InputBody):
    """Body of `POST /v1/responses`."""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    session_id: str | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: str | int | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the answer is kept."""
        return self.store is not False

    @property
    def wants_summary(self) -> bool:
        """Whether thoughts are to be returned as their own summary."""
        options = self.reasoning or ReasoningWish()
        return (options.summary or options.generate_summary or "none") != "none"

    def generation(self) -> dict[str, Any]:
        """Returns the fields that Chat Completions has too, under its names."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return {**shared, "max_tokens": self.max_output_tokens}

    def answer_grammar(self) -> AnswerGrammar | None:
        """Returns what the answer is bound to."""
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return AnswerGrammar("text.format", json_grammar(ANY_OBJECT))
        schema = wanted.schema_ if wanted.schema_ is not None else {}
        return AnswerGrammar("text.format.schema", json_grammar(schema, is_strict=wanted.strict is True))
