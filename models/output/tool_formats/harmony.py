"""gpt-oss's harmony format: each message says in its header which channel it is for, and to whom.

`<|channel|>analysis<|message|>` begins a thought, `final` the answer, and `commentary` with a recipient a call, whose
body is the JSON text of its arguments. A message ends with `<|end|>`, or with the token that ends the answer, which
has no text. (OpenAI, "harmony response format".)
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.output.marker import MarkerSearch
from models.output.open_call import OpenCall
from models.output.pieces import Piece, Reasoning, Text, ToolCallEnded
from models.output.reasoning_format import ReasoningFormat
from models.output.tool_calls import pieces_of
from models.output.tool_format import checked_calls

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_REASONING = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADERS: Final = (CHANNEL, "to=", _START)
_NOBODY: Final = ("assistant", "user", "all")


@dataclass(frozen=True)
class HarmonyFormat:
    """Says that a model writes harmony; thoughts, text and calls are read together then."""

    frames: tuple[str, ...] = (CHANNEL, MESSAGE, _START, *_ENDS, "<|constrain|>")
    """All markers of the format."""


class HarmonyParser:
    """Splits one answer's text into thoughts, text and calls."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Without `tools`, what is addressed to one stays text."""
        self.made_calls = False
        self._has_tools = bool(tools)
        self._search = MarkerSearch([MESSAGE])
        self._header: str | None = ""
        """The header of the next message so far; None within its body."""
        self._is_thought = False
        self._call: _HarmonyCall | None = None

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes; holds back what may become a marker."""
        pieces: list[Piece] = []
        while text:
            text = self._read_body(text, pieces) if self._header is None else self._read_header(text, pieces)
        return pieces

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns the rest. The open call of an answer that is complete is complete too."""
        rest, pieces = self._search.flush(), list[Piece]()
        if self._header is None:
            self._take(rest, pieces)
            return pieces + self._end_message("", is_complete=is_complete)
        header = self._header + rest
        return [Text(header)] if header.strip() not in ("", _START, f"{_START}assistant") else []

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        assert self._header is not None
        found = self._search.push(text)
        self._header += found.before
        if found.marker is not None:
            self._begin_message(self._header)
            return found.after
        if not self._may_be_header(self._header):
            # The model does without headers: what it says is the answer.
            said = self._header + self._search.flush()
            self._begin_message("")
            return said
        return ""

    def _may_be_header(self, header: str) -> bool:
        begun = header.lstrip()
        return not begun or any(one.startswith(begun) or begun.startswith(one) for one in _HEADERS)

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._is_thought = channel is not None and channel[1] == "analysis"
        if recipient is not None and recipient[1] not in _NOBODY:
            name = recipient[1].removeprefix("functions.") if self._has_tools else ""
            self._call = _HarmonyCall(name, header + MESSAGE)
        self._header, self._search = None, MarkerSearch([*_ENDS, _START])

    def _read_body(self, text: str, pieces: list[Piece]) -> str:
        found = self._search.push(text)
        self._take(found.before, pieces)
        if found.marker is not None:
            pieces += self._end_message(found.marker, is_complete=True)
        return found.after

    def _take(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._call is not None:
            pieces += self._call.push(text)
        else:
            pieces.append(Reasoning(text) if self._is_thought else Text(text))

    def _end_message(self, marker: str, *, is_complete: bool) -> list[Piece]:
        call, self._call = self._call, None
        self._header, self._search = marker if marker == _START else "", MarkerSearch([MESSAGE])
        if call is None:
            return []
        pieces = call.end(marker, is_complete=is_complete)
        self.made_calls = self.made_calls or isinstance(pieces[-1], ToolCallEnded)
        return pieces


class _HarmonyCall:
    """The body of a message to a tool. One without a name is no call, and comes as text at its end."""

    def __init__(self, name: str, header: str) -> None:
        self._name = name
        self._header = header
        self._body = ""
        self._open = OpenCall(name)
        self._is_open = False

    def push(self, text: str) -> list[Piece]:
        self._body += text
        if self._is_open:
            return self._open.push(text)
        if not self._name or not self._body.lstrip().startswith("{"):
            return []
        self._is_open = True
        return [self._open.started, *self._open.push(self._body.lstrip())]

    def end(self, marker: str, *, is_complete: bool) -> list[Piece]:
        """Returns the rest of the call, or all that was written of it as text."""
        written = self._header + self._body + ("" if marker == _START else marker)
        calls = checked_calls(self._read) if self._name and is_complete else []
        if self._is_open:
            return self._open.end(calls[0] if calls else None, written)
        if not calls:
            return [Text(written)]
        return list(pieces_of(calls[0]))

    def _read(self) -> dict[str, Any]:
        """Returns the call; raises where the body is neither the JSON text of arguments nor nothing at all."""
        return {"name": self._name, "arguments": json.loads(self._body or "{}")}
