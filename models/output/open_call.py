"""A call whose arguments are passed on while they arrive.

They are JSON, and each letter is passed on once it is certain to be valid so far (`json_prefix.py`). Only the end of
a call shows whether all of it is valid; until then, only what was passed on is certain.
"""

from models.output.json_prefix import JsonPrefix
from models.output.pieces import Piece, ToolArguments, ToolCallEnded, ToolCallFailed, ToolCallStarted
from models.output.tool_format import ToolCall, new_call_id
from models.unicode_text import read_object, well_formed_json


class OpenCall:
    """One call from the beginning of its arguments on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._id = new_call_id()
        self._object = JsonPrefix()
        self._written: list[str] = []
        self._passed_on: list[str] = []

    @property
    def started(self) -> ToolCallStarted:
        """The piece that the call begins with."""
        return ToolCallStarted(self._id, self.name)

    def push(self, text: str) -> list[Piece]:
        """Takes what follows in the output; returns the arguments that have become certain."""
        self._written.append(text)
        certain = self._object.push(text)
        self._passed_on.append(certain)
        return [ToolArguments(certain)] if certain else []

    def end(self, call: ToolCall | None, text: str) -> list[Piece]:
        """Ends the call: `call` is what its whole text means, None for nothing; `text` is that text."""
        rest = self._rest(call) if call is not None else None
        if rest is None:
            return [ToolCallFailed(text)]
        return [*([ToolArguments(rest)] if rest else []), ToolCallEnded()]

    def _rest(self, call: ToolCall) -> str | None:
        """Returns the arguments that were not passed on yet; None where those that were are not the call's."""
        if call.name != self.name:
            return None
        passed_on = "".join(self._passed_on)
        if self._object.is_complete:
            return "" if read_object(passed_on) == read_object(call.arguments) else None
        # Halves of characters were left alone: here the whole text is known, and they are replaced in it.
        written = well_formed_json(_object_in("".join(self._written)))
        is_same = read_object(written) == read_object(call.arguments) and written.startswith(passed_on)
        return written[len(passed_on) :] if is_same else None


def _object_in(text: str) -> str:
    """Returns the JSON object that a text begins with."""
    depth, is_in_string, position = 0, False, 0
    while position < len(text):
        letter = text[position]
        if is_in_string:
            position += letter == "\\"
            is_in_string = letter != '"'
        else:
            is_in_string = letter == '"'
            depth += (letter in "{[") - (letter in "}]")
            if depth == 0 and letter in "}]":
                return text[: position + 1]
        position += 1
    return text
