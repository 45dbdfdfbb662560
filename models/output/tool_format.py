"""How a model writes tool calls, and the reading of complete ones.

The parser of each format is the model's own (mlx-lm has one per format); it takes the text between the markers. What
it returns is checked: a call has a name and the JSON text of an object as its arguments.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.unicode_text import read_object, well_formed, well_formed_json

_PARSER_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""What a parser may raise on malformed text. Python's own parser raises MemoryError for an expression too deep."""


@dataclass(frozen=True)
class ToolCall:
    """One complete call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


JSON_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call in JSON up to its arguments."""


@dataclass(frozen=True)
class ToolFormat:
    """The markers around a call, and the parser of the text between them."""

    start: str
    end: str
    """May be empty: the call then ends with the answer."""
    parse: Callable[[str, Any], Any]
    """(text, tools) to one `{"name", "arguments"}` or a list of them; raises where the text is malformed."""
    head: re.Pattern[str] = JSON_HEAD
    """What stands before the arguments of a call whose arguments are a JSON object, with the group `name`."""
    frames: tuple[str, ...] = ()
    """Markers around all calls of an answer; they belong to the format like white space."""
    writes_json: bool = False
    """Whether the model writes a call as `{"name", "arguments"}` in JSON, one between two markers."""

    def find_arguments(self, text: str) -> tuple[str, int] | None:
        """Returns the name of a call that has begun, and where the JSON text of its arguments begins."""
        found = self.head.match(text)
        if found is None:
            return None
        name = found["name"]
        try:
            read = json.loads(name) if name.startswith('"') else name.strip()
        except ValueError:
            return None
        return (well_formed(read), found.end()) if read else None

    def read_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Returns the calls that stand between two markers; none where the text is malformed."""
        return checked_calls(lambda: self._written_calls(text, tools))

    def _written_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the calls as the model wrote them.

        Calls in plain JSON are read here whatever the model's format: models use names for the fields that some
        parsers do not know, and those parsers lose what they do not know.
        """
        written = _json_calls(text)
        if written is not None:
            return written
        return self.parse(text, tools)


def checked_calls(parse: Callable[[], Any]) -> list[ToolCall]:
    """Returns the calls that `parse` returns, one or a list; none where it raises or returns anything else."""
    try:
        parsed = parse()
        return [_tool_call(fields) for fields in (parsed if isinstance(parsed, list) else [parsed])]
    except _PARSER_FAULTS:
        return []


def _json_calls(text: str) -> list[Any] | None:
    """Returns the calls of a JSON text with one or a list of them; None where it holds anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    return calls if all(isinstance(call, dict) and "name" in call for call in calls) else None


def _tool_call(fields: Any) -> ToolCall:
    """Returns a call; raises where a parser returned something else."""
    name, given = fields["name"], fields.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    call_id = given if isinstance(given, str) and given else new_call_id()
    return ToolCall(well_formed(call_id), well_formed(name), _arguments_text(fields))


def _arguments_text(fields: Any) -> str:
    """Returns a call's arguments as the JSON text of an object; raises where they are anything else.

    Arguments that are missing, null or empty are `{}`. Some models call them `parameters`.
    """
    arguments = fields.get("arguments")
    if arguments is None:
        arguments = fields.get("parameters")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text = well_formed_json(arguments)
    if read_object(text) is None:
        raise ValueError("arguments that are no JSON object")
    return text


def new_call_id() -> str:
    """Returns a name that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"
