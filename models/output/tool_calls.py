"""Tool calls between markers: found while the text streams, parsed once complete, left as text where malformed.

Arguments that are JSON are passed on while they arrive (`open_call.py`); the parser of the format has the last word
when the call is complete. White space around calls belongs to the format, not to the answer. It is dropped before a
call, and at the end of an answer that holds one; around a malformed call it stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from models.output.marker import MarkerSearch
from models.output.open_call import OpenCall
from models.output.pieces import (
    Piece,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.output.tool_format import ToolCall, ToolFormat

MAX_HEAD_CHARACTERS = 2048
"""A call whose arguments have not begun by then is read when it is complete."""


class ToolCallParser:
    """Splits one answer's text into text and calls."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, is_forced: bool = False
    ) -> None:
        """`is_forced`: the answer can be nothing but calls, so what is cut off is the beginning of one."""
        self.made_calls = False
        self._is_forced = is_forced
        self._format = tool_format
        self._tools = list(tools)
        self._starts = MarkerSearch([tool_format.start, *tool_format.frames])
        self._ends = MarkerSearch([tool_format.end] if tool_format.end else [])
        self._space = ""
        """White space and frames that are held back: they end the text so far, or stand before the open call."""
        self._call: list[str] | None = None
        """The text of the open call so far; None outside of calls."""
        self._streamed: OpenCall | None = None
        """The open call, once its arguments are passed on."""
        self._head = ""
        """The text of the open call so far, until its arguments are passed on."""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes; holds back what may become a marker."""
        pieces: list[Piece] = []
        while text:
            read = self._read_text if self._call is None else self._read_call
            text = read(text, pieces)
        return pieces

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns the rest. The open call of an answer that is complete may be complete too, without its marker."""
        if self._call is None:
            rest = "" if self._is_forced else self._space + self._starts.flush()
            return [] if not rest or (self.made_calls and not self._without_frame(rest)) else [Text(rest)]
        inner = "".join(self._call) + self._ends.flush()
        pieces = self._end_call(inner, "", is_complete=is_complete)
        if self._is_forced and isinstance(pieces[-1], Text | ToolCallFailed):
            return [ToolCallCut()] if isinstance(pieces[-1], ToolCallFailed) else []
        return pieces

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        """Reads up to the start of a call; returns what follows it."""
        before, marker, after = self._starts.push(text)
        before = self._space + before
        visible = self._without_frame(before)
        self._space = before[len(visible) :]
        if visible:
            pieces.append(Text(visible))
        if marker == self._format.start:
            self._call = []
        elif marker is not None:
            self._space += marker
        return after

    def _without_frame(self, text: str) -> str:
        """Returns a text up to the white space and the frames that it ends with."""
        while True:
            shorter = text.rstrip()
            for frame in self._format.frames:
                shorter = shorter.removesuffix(frame)
            if shorter == text:
                return text
            text = shorter

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        """Reads up to the end of the open call; returns what follows it."""
        assert self._call is not None
        inner, marker, after = self._ends.push(text)
        self._call.append(inner)
        if marker is None or self._streamed is not None:
            pieces += self._pass_on(inner)
        if marker is not None:
            pieces += self._end_call("".join(self._call), marker, is_complete=True)
        return after

    def _end_call(self, inner: str, marker: str, *, is_complete: bool) -> list[Piece]:
        """Closes the open call; returns its calls, or all of its text where it is none."""
        calls = self._format.read_calls(inner, self._tools) if is_complete else []
        space, self._space, self._call = self._space, "", None
        streamed, self._streamed, self._head = self._streamed, None, ""
        written = f"{space}{self._format.start}{inner}{marker}"
        if streamed is not None:
            pieces = streamed.end(calls[0] if len(calls) == 1 else None, written)
            self.made_calls = self.made_calls or isinstance(pieces[-1], ToolCallEnded)
            return pieces
        if not calls:
            return [Text(written)]
        self.made_calls = True
        return [piece for call in calls for piece in pieces_of(call)]

    def _pass_on(self, text: str) -> list[Piece]:
        """Returns what became certain of the open call's arguments with a part of its text."""
        if self._streamed is not None:
            return self._streamed.push(text)
        if len(self._head) > MAX_HEAD_CHARACTERS:
            return []
        self._head += text
        found = self._format.find_arguments(self._head)
        if found is None:
            return []
        name, start = found
        self._streamed = OpenCall(name)
        return [self._streamed.started, *self._streamed.push(self._head[start:])]


def pieces_of(call: ToolCall) -> tuple[Piece, Piece, Piece]:
    """Returns the pieces of a call that came at once."""
    return ToolCallStarted(call.id, call.name), ToolArguments(call.arguments), ToolCallEnded()
