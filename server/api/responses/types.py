"""Bodies of the Responses API, and its tools as functions.

A custom tool gets one argument `input`, a namespace is a prefix, a tool search that the client runs is `tool_search`.
Tools that OpenAI runs are left out or refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.api.bodies import BodyModel, Rules, Whole, refused, validated
from server.api.errors import Code, wrong
from server.api.openai import types
from server.api.params import AnswerGrammar
from server.api.responses.output import INPUT, SEARCH, ClientTool, ToolSet, joined_name

MAX_METADATA = 16


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "Input should be a text or a list of items")


def _conversation(value: Any) -> Any:
    return value.get("id") if isinstance(value, dict) else value


class TextFormat(BodyModel):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[types.Schema, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BodyModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningWish(BodyModel):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    """Any value makes reasoning its own summary."""
    generate_summary: str | None = None
    """Older name of `summary`."""


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)]
Items = Annotated[list[Any], BeforeValidator(_as_items)]


class InputBody(types.CallingBody):
    """The fields that make the prompt."""

    model: str | None = None
    """Optional if only one model is served."""
    input: Items = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_conversation)] = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, types.tool_choice_reader(["function", "custom"], is_nested=False)] = None
    reasoning: ReasoningWish | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesBody(InputBody, types.SharedBody):
    """Body of `POST /v1/responses`."""

    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    include: list[str] | None = None
    """`reasoning.encrypted_content`: reasoning in the form in which clients send it back."""
    metadata: Metadata | None = None
    max_tool_calls: Whole | None = None
    background: bool | None = None
    """The response outlives its client."""

    def answer_grammar(self) -> AnswerGrammar | None:
        """The answer's grammar."""
        if self.text is None or (wanted := self.text.format) is None:
            return None
        return types.format_grammar("text.format", wanted.type, wanted.schema_, wanted.strict)


LEFT_OUT: Final = ("web_search", "web_search_preview", "image_generation")
"""Coding agents offer these to every server."""
_QUERY: Final = {"query": {"type": "string"}, "limit": {"type": "integer"}}


class InputFormat(BodyModel):
    """A custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(types.NamedTool):
    """A tool that takes a text."""

    format: InputFormat | None = None


class NamespaceTool(types.NamedTool):
    """Tools under one name."""

    tools: list[dict[str, Any]]


class SearchTool(BodyModel):
    """A search for tools that the client runs."""

    description: str = "Searches the tools that are not loaded yet. What it finds may be called from then on."
    parameters: dict[str, Any] = Field(default={"type": "object", "properties": _QUERY, "required": ["query"]})


def read_tools(tools: Sequence[Any], param: str = "tools", *, defers: bool = True) -> ToolSet:
    """A list's tools; raises ApiError (400).

    `defers`: tools that ask for it are left out until a search finds them.
    """
    shown: list[Mapping[str, Any]] = []
    defers = defers and any(map(_is_client_search, tools))
    by_name: dict[str, ClientTool] = {}
    for place, tool, namespace in _flattened(tools, param):
        function, found = _read(tool, place, namespace)
        name = function["name"]
        if name in by_name:
            raise wrong(f"{place}.name", f"there are two tools named {name!r}")
        by_name[name] = found
        if not (defers and tool.get("defer_loading") is True):
            shown.append({"type": "function", "function": function})
    return ToolSet(shown, by_name=by_name)


def _flattened(tools: Sequence[Any], param: str) -> Iterator[tuple[str, Mapping[str, Any], NamespaceTool | None]]:
    for index, tool in enumerate(tools):
        place = f"{param}[{index}]"
        if _type_of(tool) == "namespace":
            namespace = validated(NamespaceTool, tool, param, index)
            for number, inner in enumerate(namespace.tools):
                if not _is_left_out(inner):
                    yield f"{place}.tools[{number}]", inner, namespace
        elif not _is_left_out(tool):
            yield place, tool, None


def _is_client_search(tool: Any) -> bool:
    return bool(_type_of(tool) == "tool_search" and tool.get("execution") == "client")


def _is_left_out(tool: Any) -> bool:
    if _type_of(tool) == "tool_search":
        return not _is_client_search(tool)
    # Previews of tools end with a date.
    return any(_type_of(tool) in (name, f"{name}_2025_03_11", f"{name}_2025_08_26") for name in LEFT_OUT)


def _type_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else None


def _read(tool: Mapping[str, Any], place: str, namespace: NamespaceTool | None) -> tuple[dict[str, Any], ClientTool]:
    own_name = namespace.name if namespace is not None else None
    match _type_of(tool):
        case "function":
            shown = _dumped(validated(types.FunctionSpec, tool, place))
            called = ClientTool(shown["name"], own_name)
        case "custom":
            custom = validated(CustomTool, tool, place)
            parameters = {"type": "object", "properties": {INPUT: _input_schema(custom.format)}, "required": [INPUT]}
            shown = {**_dumped(custom), "parameters": {**parameters, "additionalProperties": False}}
            called = ClientTool(custom.name, own_name, "custom_tool_call")
        case "tool_search":
            given = {name: value for name, value in tool.items() if value is not None}
            shown = _dumped(validated(SearchTool, given, place))
            return {"name": SEARCH, **shown}, ClientTool(SEARCH, kind="tool_search_call")
        case kind:
            why = (
                f"{str(kind)[:40]!r} is no tool that is offered here: functions, custom tools and "
                "namespaces of them run where the client runs, and none on the server"
            )
            raise wrong(f"{place}.type", why, Code.UNSUPPORTED_PARAMETER)
    return {**shown, "name": joined_name(own_name, called.name)}, called


def _dumped(tool: BodyModel) -> dict[str, Any]:
    return tool.model_dump(include=type(tool).model_fields.keys() - {"format"}, exclude_none=True)


def _input_schema(wanted: InputFormat | None) -> dict[str, Any]:
    """A pattern binds forced calls; a Lark grammar is only shown."""
    if wanted is None or wanted.type == "text" or not wanted.definition:
        return {"type": "string"}
    if wanted.syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{wanted.definition})$"}
    shown = f"A text of this {wanted.syntax or 'lark'} grammar:\n{wanted.definition}"
    return {"type": "string", "description": shown}


IN_INPUT: Rules = refused("""
    prompts are not kept here; send instructions and input: prompt
    its name here is input: messages=[]
""")

IN_RESPONSES: Rules = IN_INPUT | refused("""
    nothing is looked up or judged on the side: moderation
    answers hold text, without data on single tokens: top_logprobs=0
    its name here is max_output_tokens: max_tokens max_completion_tokens
    its name here is text.format: response_format
    its name here is reasoning.effort: reasoning_effort
    this API samples by temperature, top_p and seed only; /v1/chat/completions has more: top_k=0|-1 min_p=0
        stop=[] presence_penalty=0 frequency_penalty=0 repetition_penalty=1 logit_bias={} n=1
""")

WITHOUT_EFFECT: Final = (
    *("personality", "client_metadata", "prompt_cache_options", "context_management", "access_programs", "image"),
    "background_options",
)
KNOWN: Final = frozenset((*ResponsesBody.model_fields, *IN_RESPONSES, *WITHOUT_EFFECT))
