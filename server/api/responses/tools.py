"""The tools of a request: how the model is shown them, and what a call of the model is for the client.

A model knows functions only. A custom tool, whose input is a text, is shown as a function with one argument
`input`; a namespace as functions whose names begin with its own; a search for tools that the client runs as the
function `tool_search`. Tools that OpenAI runs itself are left out or refused.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from server.api.errors import ApiError, Code
from server.api.responses.client_tools import INPUT, SEARCH, ClientTool, ToolSet, joined_name
from server.api.typed_body import BodyModel, validated

LEFT_OUT: Final = ("web_search", "web_search_preview", "image_generation")
"""Tools that coding agents offer on every server; the model is not shown them."""
_QUERY: Final = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}
"""What a search for tools takes unless the client says otherwise."""


class FunctionTool(BodyModel):
    """A function of the client."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(BodyModel):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(BodyModel):
    """A tool of the client that takes a text."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(BodyModel):
    """Tools under one name."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    tools: list[dict[str, Any]]


class SearchTool(BodyModel):
    """A search for tools that the client runs."""

    description: str = "Searches the tools that are not loaded yet. What it finds may be called from then on."
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(_QUERY))


def read_tools(tools: Sequence[Any], param: str = "tools", *, defers: bool = True) -> ToolSet:
    """Returns the tools of a checked or unchecked list; raises ApiError (400).

    It `defers` tools that say so, where the client has a search by which the model can find them.
    """
    shown: list[Mapping[str, Any]] = []
    defers = defers and any(map(_is_client_search, tools))
    by_name: dict[str, ClientTool] = {}
    for place, tool, namespace in _flattened(tools, param):
        function, found = _read(tool, place, namespace)
        name = function["name"]
        if name in by_name:
            raise ApiError(Code.INVALID_VALUE, f"{place}.name: there are two tools named {name!r}", f"{place}.name")
        by_name[name] = found
        if not (defers and tool.get("defer_loading") is True):
            shown.append({"type": "function", "function": function})
    return ToolSet(shown, by_name=by_name)


def _flattened(tools: Sequence[Any], param: str) -> list[tuple[str, Mapping[str, Any], NamespaceTool | None]]:
    """Returns each tool with its place and its namespace; those that are left out are missing."""
    found: list[tuple[str, Mapping[str, Any], NamespaceTool | None]] = []
    for index, tool in enumerate(tools):
        place, kind = f"{param}[{index}]", _type_of(tool)
        if kind == "namespace":
            namespace = validated(NamespaceTool, tool, param, index)
            inner = enumerate(namespace.tools)
            found += [(f"{place}.tools[{number}]", one, namespace) for number, one in inner if not _is_left_out(one)]
        elif not _is_left_out(tool):
            found.append((place, tool, None))
    return found


def _is_client_search(tool: Any) -> bool:
    return bool(_type_of(tool) == "tool_search" and tool.get("execution") == "client")


def _is_left_out(tool: Any) -> bool:
    if _type_of(tool) == "tool_search":
        return not _is_client_search(tool)
    # Previews of tools end with their date.
    return any(_type_of(tool) in (name, f"{name}_2025_03_11", f"{name}_2025_08_26") for name in LEFT_OUT)


def _type_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else None


def _read(tool: Mapping[str, Any], place: str, namespace: NamespaceTool | None) -> tuple[dict[str, Any], ClientTool]:
    """Returns the function that the model is shown, and the tool that it stands for."""
    own_name = namespace.name if namespace is not None else None
    match _type_of(tool):
        case "function":
            given_function = validated(FunctionTool, tool, place)
            shown = given_function.model_dump(include=set(FunctionTool.model_fields), exclude_none=True)
            is_custom = False
        case "custom":
            custom = validated(CustomTool, tool, place)
            shown, is_custom = _as_function(custom), True
        case "tool_search":
            given = {name: value for name, value in tool.items() if value is not None}
            search = validated(SearchTool, given, place)
            function = {"name": SEARCH, "description": search.description, "parameters": search.parameters}
            return function, ClientTool(SEARCH, is_search=True)
        case kind:
            message = (
                f"{place}.type: {str(kind)[:40]!r} is no tool that is offered here: functions, custom tools and "
                "namespaces of them run where the client runs, and none on the server"
            )
            raise ApiError(Code.UNSUPPORTED_PARAMETER, message, f"{place}.type")
    name = shown["name"]
    return {**shown, "name": joined_name(own_name, name)}, ClientTool(name, own_name, is_custom)


def _as_function(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    parameters = {"type": "object", "properties": {INPUT: _input_schema(tool.format)}, "required": [INPUT]}
    return {**function, "parameters": {**parameters, "additionalProperties": False}}


def _input_schema(wanted: InputFormat | None) -> dict[str, Any]:
    """Returns the schema of an input. A pattern binds calls that are forced; a Lark grammar is only shown."""
    if wanted is None or wanted.type == "text" or not wanted.definition:
        return {"type": "string"}
    if wanted.syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{wanted.definition})$"}
    return {
        "type": "string",
        "description": f"A text of this {wanted.syntax or 'lark'} grammar:\n{wanted.definition}",
    }
