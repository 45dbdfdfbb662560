"""What an output consists of in any format: typed pieces in the order of writing, and parts that grow by them. Pure.

Reasoning begins an answer or is begun by the prompt, and lasts to its end marker. White space around markers is
dropped; a marker elsewhere is text.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """The answer's text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call begins; its arguments follow, then its end."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next part of the open call's JSON text of arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The open call is complete: its joined arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """The open call is malformed or cut off: its arguments end here, without their last brace."""

    text: str
    """The call so far as the model wrote it."""


Piece: TypeAlias = Text | Reasoning | ToolCallStarted | ToolArguments | ToolCallEnded | ToolCallCut


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An output token's log-probability, and other tokens' in its place."""

    token_id: int
    logprob: float
    """Natural logarithm, before anything that changes sampling."""
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens, the likeliest first; may include this token."""


class MarkerSearch:
    """Finds the first marker to be completed; of two ending together, the longer."""

    def __init__(self, markers: Sequence[str]) -> None:
        """`markers` may be empty; none is an empty string."""
        self._markers = markers
        self._first_letters = {marker[0] for marker in markers}
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """The text that is certainly no marker, the first complete marker, if any, and what follows, not yet read."""
        if not self._held and self._first_letters.isdisjoint(text):
            return text, None, ""
        read, self._held = self._held + text, ""
        ends = [(read.find(marker) + len(marker), -len(marker), marker) for marker in self._markers if marker in read]
        if ends:
            stop, _, marker = min(ends)
            return read[: stop - len(marker)], marker, read[stop:]
        num_safe = len(read) - max(_num_begun(marker, read) for marker in self._markers)
        self._held = read[num_safe:]
        return read[:num_safe], None, ""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def flush(self) -> str:
        """The text held back, which is no marker since the text has ended."""
        text, self._held = self._held, ""
        return text


def _num_begun(marker: str, text: str) -> int:
    """How many letters of `marker` end the text."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


class OutputParser:
    """Splits one answer's text into pieces; this one takes all of it as text. On the event loop."""

    made_calls = False
    """A complete tool call was returned."""
    is_cut = False
    """A call was returned in part: the answer ends like one that was cut off."""

    def __init__(self, markers: Sequence[str] = ()) -> None:
        self._search = MarkerSearch(markers)

    @property
    def call_counts(self) -> Counter[str]:
        """How many calls were `read`, `repaired`, `cut` and `refused`."""
        return Counter()

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        pieces: list[Piece] = []
        while text:
            before, marker, text = self._search.push(text)
            pieces += self._take(before, marker)
        return self._noted(pieces)

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """The pieces held back. `is_complete`: the model ended the answer by itself."""
        return self._noted(self._rest(self._search.flush(), is_complete=is_complete))

    def _take(self, text: str, marker: str | None) -> Iterator[Piece]:
        """Yields the pieces of the next text, which ends at a marker, or where a marker may begin."""
        if text:
            yield Text(text)

    def _rest(self, text: str, *, is_complete: bool) -> list[Piece]:
        return []

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self.made_calls = self.made_calls or any(isinstance(piece, ToolCallEnded) for piece in pieces)
        return pieces


KNOWN_MARKERS: Final = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
)

HARMONY_END: Final = "<|end|>"
"""End of reasoning of gpt-oss, which then names the answer's channel."""

_IN_LINES: Final = "</"
"""How end markers begin that stand on a line of their own, with an empty line after."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning."""

    start: str
    end: str
    closing_ids: tuple[int, ...] = ()
    start_id: int | None = None

    @property
    def closing(self) -> str:
        """The text of `closing_ids`: end marker and line breaks."""
        if self.end == HARMONY_END:
            return f"{self.end}<|start|>assistant<|channel|>final<|message|>"
        return f"\n{self.end}\n\n" if self.end.startswith(_IN_LINES) else self.end

    def is_opened_by(self, prompt: str, begun: str = "") -> bool:
        """Whether a prompt, perhaps its continued message `begun`, began reasoning."""
        return prompt.rstrip().endswith(self.start) or begun.rfind(self.start) > begun.rfind(self.end)


@dataclass(frozen=True)
class Thinking:
    """The engine's knowledge of a request's reasoning."""

    reasoning_format: ReasoningFormat
    is_open: bool = False
    max_tokens: int | None = None


def find_reasoning_format(vocabulary: Container[str], template: str) -> ReasoningFormat | None:
    """The first known markers in vocabulary or template."""
    for start, end in KNOWN_MARKERS:
        has_start = start in vocabulary or (start.startswith("<|channel>") and "<|channel>" in vocabulary)
        if (has_start and end in vocabulary) or end in template:
            return ReasoningFormat(start, end)
    return None


HARMONY_REASONING: Final = ReasoningFormat("<|channel|>analysis<|message|>", HARMONY_END)


class _Phase(Enum):
    BEFORE = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningParser(OutputParser):
    """Splits an answer into reasoning and the rest, for another parser."""

    def __init__(
        self, reasoning_format: ReasoningFormat, answer: OutputParser, thought: OutputParser, *, is_open: bool
    ) -> None:
        """`thought` takes the reasoning, and finds calls at its end, which count if it is the answer's end."""
        super().__init__([reasoning_format.end if is_open else reasoning_format.start])
        self._end = reasoning_format.end
        self._answer, self._thought = answer, thought
        self._phase = _Phase.REASONING if is_open else _Phase.BEFORE
        self._space = ""
        self._reasoning: list[str] = []

    @property
    def call_counts(self) -> Counter[str]:
        """Calls by outcome, of the answer and of the reasoning together."""
        return self._answer.call_counts + self._thought.call_counts

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self.is_cut = self._answer.is_cut
        return super()._noted(pieces)

    def _rest(self, text: str, *, is_complete: bool) -> list[Piece]:
        if self._phase is _Phase.REASONING:
            return self._unclosed(text, is_complete=is_complete)
        pieces = self._answer.feed(self._space + text) if self._phase is _Phase.BEFORE else []
        return pieces + self._answer.finish(is_complete=is_complete)

    def _unclosed(self, text: str, *, is_complete: bool) -> list[Piece]:
        """A model that ends by itself within a thought has called at its end, or has answered there."""
        ended = [*self._thought.feed(text), *self._thought.finish(is_complete=is_complete)]
        pieces = [*self._told(ended)]
        if self._thought.made_calls:
            return pieces
        pieces += [Reasoning(self._space)] if self._space else []
        return [*pieces, Text("".join(self._reasoning))] if is_complete and self._reasoning else pieces

    def _take(self, text: str, marker: str | None) -> Iterator[Piece]:
        match self._phase:
            case _Phase.BEFORE:
                yield from self._begin(self._space + text, marker)
            case _Phase.REASONING:
                yield from self._told(self._thought.feed(text))
                if marker is not None:
                    yield from self._told(self._thought.finish(is_complete=False))
                    self._space, self._phase, self._search = "", _Phase.GAP, MarkerSearch(())
            case _Phase.GAP if text.isspace():
                pass
            case _Phase.GAP | _Phase.ANSWER:
                yield from self._answer.feed(text.lstrip() if self._phase is _Phase.GAP else text)
                self._phase = _Phase.ANSWER

    def _begin(self, text: str, marker: str | None) -> Iterator[Piece]:
        self._space = ""
        if text.strip():
            # The answer has begun without reasoning; a marker in it is text.
            said = text + self._search.flush() + (marker or "")
            self._phase, self._search = _Phase.ANSWER, MarkerSearch(())
            yield from self._answer.feed(said)
        elif marker is not None:
            self._phase, self._search = _Phase.REASONING, MarkerSearch([self._end])
        else:
            self._space = text

    def _told(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """The thought's texts as reasoning, without white space at its beginning and end."""
        for piece in pieces:
            if not isinstance(piece, Text):
                yield piece
                continue
            text = self._space + piece.text
            text = text if self._reasoning else text.lstrip()
            visible = text.rstrip()
            self._space = text[len(visible) :]
            if visible:
                self._reasoning.append(visible)
                yield Reasoning(visible)


class ReasoningWatch:
    """Counts reasoning tokens, without markers; ends the reasoning at the limit."""

    def __init__(self, thinking: Thinking) -> None:
        self.num_tokens = 0
        self._format = thinking.reasoning_format
        self._max_tokens = thinking.max_tokens
        self._phase = _Phase.REASONING if thinking.is_open else _Phase.BEFORE
        self._search = MarkerSearch([self._format.end if thinking.is_open else self._format.start])
        self._num_held = 0
        self._num_forced = 0

    @property
    def is_thinking(self) -> bool:
        return self._phase is _Phase.REASONING

    def accept(self, text: str) -> str:
        """Takes the next token's text; returns the part of it after the reasoning."""
        if self.forced():
            self._num_forced += 1
            if self._num_forced == len(self._format.closing_ids):
                self._phase = _Phase.ANSWER
            return ""
        if self._phase is _Phase.BEFORE:
            before, marker, after = self._search.push(text)
            if before.strip():
                self._phase = _Phase.ANSWER
            elif marker is not None:
                self._phase, self._search = _Phase.REASONING, MarkerSearch([self._format.end])
                return self._count(after) if after else ""
        return self._count(text) if self.is_thinking else text

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next."""
        limit = self._max_tokens
        if limit is None or not self.is_thinking or self.num_tokens + self._num_held < limit:
            return ()
        return self._format.closing_ids[self._num_forced :]

    def close(self) -> bool:
        """Ends the reasoning, as at its limit; False outside it, and where no tokens close it."""
        if not self.is_thinking or not self._format.closing_ids:
            return False
        self._max_tokens = 0
        return True

    def finish(self) -> None:
        """Counts the tokens held back."""
        self.num_tokens, self._num_held = self.num_tokens + self._num_held, 0

    def _count(self, text: str) -> str:
        before, marker, after = self._search.push(text)
        if marker is not None:
            # A token may contain the end of the reasoning and the marker.
            self.num_tokens += 1 if before else 0
            self._num_held, self._phase = 0, _Phase.ANSWER
            return after.lstrip()
        if before or not self._search.is_holding:
            self.finish()
        if self._search.is_holding:
            self._num_held += 1
        else:
            self.num_tokens += 1
        return ""


PartEvent: TypeAlias = dict[str, Any]
PartBody: TypeAlias = dict[str, Any]
PartStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputPart(ABC):
    """A text, a thought or a call."""

    index = 0
    """Among all parts."""
    text = ""

    @abstractmethod
    def body(self, status: PartStatus) -> PartBody:
        """The part so far, with a `type`."""

    @abstractmethod
    def begin(self) -> list[PartEvent]:
        """The events of a new part."""

    @abstractmethod
    def grow(self, text: str) -> list[PartEvent]:
        """Adds to the part; returns the events."""

    @abstractmethod
    def end(self, status: PartStatus) -> list[PartEvent]:
        """The events of an ended part."""


class OutputParts(ABC):
    """The parts of one answer."""

    def __init__(self) -> None:
        self.ended: list[PartBody] = []
        self._open: OutputPart | None = None
        self._open_kind: type[Piece] | None = None
        self._num_begun = 0

    @abstractmethod
    def part_of(self, piece: Text | Reasoning | ToolCallStarted) -> OutputPart:
        """A new part that `piece` begins."""

    @property
    def so_far(self) -> list[PartBody]:
        """All parts, the open one included."""
        return self.ended if self._open is None else [*self.ended, self._open.body("in_progress")]

    def add(self, piece: Piece) -> list[PartEvent]:
        """Takes a piece; returns its events."""
        match piece:
            case Text(text) | Reasoning(text):
                begun = [] if self._open_kind is type(piece) else self.begin(self.part_of(piece), type(piece))
                return [*begun, *self._grow(text)]
            case ToolCallStarted():
                return self.begin(self.part_of(piece))
            case ToolArguments(text):
                return self._grow(text)
            case ToolCallEnded():
                return self.close()
            case ToolCallCut():
                return self.close("incomplete")

    def begin(self, part: OutputPart, kind: type[Piece] | None = None) -> list[PartEvent]:
        """Ends the open part and begins another, of a text's or thought's kind of piece; returns the events."""
        ended = self.close()
        part.index = self._num_begun
        self._num_begun += 1
        self._open, self._open_kind = part, kind
        return [*ended, *part.begin()]

    def close(self, status: PartStatus = "completed") -> list[PartEvent]:
        """Ends the open part; returns its events."""
        if self._open is None:
            return []
        events = self._open.end(status)
        self.ended = [*self.ended, self._open.body(status)]
        self._open = self._open_kind = None
        return events

    def _grow(self, text: str) -> list[PartEvent]:
        assert self._open is not None, "what grows has begun"
        return self._open.grow(text)
