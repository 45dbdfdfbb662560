"""Calls that are all of an answer, without an end marker, and often without a marker at all.

Whether an answer is such a call shows with its first letters. One that may be is held back to its end, and is text
where it is none after all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.output.pieces import Piece, Text
from models.output.tool_calls import pieces_of
from models.output.tool_format import checked_calls


@dataclass(frozen=True)
class BareFormat:
    """How a model writes calls that are all of its answer."""

    may_be_call: Callable[[str], bool]
    """Whether an answer that begins with this text, no white space before it, may be calls."""
    parse: Callable[[str, Any], Any]
    """(text, tools) to a list of `{"name", "arguments"}`; raises where the text is anything else."""
    call_start: str
    """A regular expression: how an answer begins that is calls, behind white space and the first of the frames."""
    frames: tuple[str, ...] = ()
    """Markers that may stand around the calls and belong to the format."""


class BareCallParser:
    """Reads one answer: as calls if all of it is, else as text."""

    def __init__(self, bare_format: BareFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        self.made_calls = False
        self._format = bare_format
        self._tools = list(tools)
        self._held: str | None = ""
        """The answer so far, while it may be calls; None once it is text."""

    def feed(self, text: str) -> list[Piece]:
        """Returns text that is certain to be no call."""
        if self._held is None:
            return [Text(text)] if text else []
        self._held += text
        if not self._held or self._may_be_call(self._held):
            return []
        held, self._held = self._held, None
        return [Text(held)]

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """Returns the calls that the answer is, or what was held back of it."""
        if not self._held:
            return []
        written = self._without_frames(self._held)
        calls = checked_calls(lambda: self._format.parse(written, self._tools)) if is_complete else []
        if not calls:
            return [Text(self._held)]
        self.made_calls = True
        return [piece for call in calls for piece in pieces_of(call)]

    def _may_be_call(self, text: str) -> bool:
        text = text.lstrip()
        if any(text.startswith(frame) or frame.startswith(text) for frame in self._format.frames):
            return True
        return self._format.may_be_call(text)

    def _without_frames(self, text: str) -> str:
        text = text.strip()
        for frame in self._format.frames:
            text = text.removeprefix(frame).removesuffix(frame).strip()
        return text
