"""An answer's texts, thoughts and calls as they grow, one after the other, and their events in a dialect. Pure."""

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

from models.output import pieces
from models.output.pieces import Piece

PartEvent: TypeAlias = dict[str, Any]
PartBody: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ReplyPart(ABC):
    """A text, a thought or a call."""

    index = 0
    """Of all parts that events told of, failed calls included."""
    text = ""

    @abstractmethod
    def body(self, status: Status) -> PartBody:
        """The part so far, with a `type`."""

    @abstractmethod
    def begin(self) -> list[PartEvent]:
        """The events of a new part."""

    @abstractmethod
    def grow(self, text: str) -> list[PartEvent]:
        """Adds to the part; returns the events."""

    @abstractmethod
    def end(self, status: Status) -> list[PartEvent]:
        """The events of an ended part."""

    def fail(self) -> list[PartEvent]:
        """The events of a call whose text is part of the answer's."""
        return []


class AnswerParts(ABC):
    """The parts of one answer."""

    def __init__(self) -> None:
        self.ended: list[PartBody] = []
        self._open: ReplyPart | None = None
        self._open_kind: type[Piece] | None = None
        self._num_begun = 0

    @abstractmethod
    def part_of(self, piece: pieces.Text | pieces.Reasoning | pieces.ToolCallStarted) -> ReplyPart:
        """A new part that `piece` begins."""

    @abstractmethod
    def joined(self, first: PartBody, second: PartBody) -> PartBody:
        """Two texts around a failed call as one."""

    @property
    def so_far(self) -> list[PartBody]:
        """All parts, the open one included."""
        return self.ended if self._open is None else self._with(self._open.body("in_progress"))

    def add(self, piece: Piece) -> list[PartEvent]:
        """Takes a piece; returns its events."""
        match piece:
            case pieces.Text(text) | pieces.Reasoning(text):
                begun = [] if self._open_kind is type(piece) else self.begin(self.part_of(piece), type(piece))
                return [*begun, *self._grow(text)]
            case pieces.ToolCallStarted():
                return self.begin(self.part_of(piece))
            case pieces.ToolArguments(text):
                return self._grow(text)
            case pieces.ToolCallEnded():
                return self.close()
            case pieces.ToolCallCut():
                return []  # the end of the answer ends the call too, as incomplete
            case pieces.ToolCallFailed(text):
                assert self._open is not None, "a call that fails has begun"
                failed, self._open = self._open.fail(), None
                return [*failed, *self.add(pieces.Text(text))]

    def begin(self, part: ReplyPart, kind: type[Piece] | None = None) -> list[PartEvent]:
        """Ends the open part and begins another, of a text's or thought's kind of piece; returns the events."""
        ended = self.close()
        part.index = self._num_begun
        self._num_begun += 1
        self._open, self._open_kind = part, kind
        return [*ended, *part.begin()]

    def close(self, status: Status = "completed") -> list[PartEvent]:
        """Ends the open part; returns its events."""
        if self._open is None:
            return []
        events = self._open.end(status)
        self.ended = self._with(self._open.body(status))
        self._open = self._open_kind = None
        return events

    def _grow(self, text: str) -> list[PartEvent]:
        assert self._open is not None, "what grows has begun"
        return self._open.grow(text)

    def _with(self, body: PartBody) -> list[PartBody]:
        last = self.ended[-1] if self.ended else None
        if last is not None and last["type"] == body["type"] and body["type"] in ("text", "message"):
            return [*self.ended[:-1], self.joined(last, body)]
        return [*self.ended, body]
