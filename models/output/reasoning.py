"""Separates reasoning from the answer, in streamed text and by tokens. Pure.

Reasoning begins an answer or is begun by the prompt, and lasts to its end marker. White space around markers is
dropped; a marker elsewhere is text.
"""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from models.output.pieces import MarkerSearch, OutputParser, Piece, Reasoning

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

    def is_closed_by(self, prompt: str) -> bool:
        """Whether a prompt holds closed reasoning: the answer has none."""
        return prompt.rstrip().endswith(self.end)


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


class _Phase(Enum):
    BEFORE = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits an answer into reasoning and the rest, for another parser."""

    def __init__(self, reasoning_format: ReasoningFormat, answer: OutputParser, *, is_open: bool) -> None:
        self._format = reasoning_format
        self._answer = answer
        self._phase = _Phase.REASONING if is_open else _Phase.BEFORE
        self._search = MarkerSearch([reasoning_format.end if is_open else reasoning_format.start])
        self._space = ""
        self._has_reasoning = False

    @property
    def made_calls(self) -> bool:
        return self._answer.made_calls

    def feed(self, text: str) -> list[Piece]:
        """As `OutputParser.feed`."""
        pieces: list[Piece] = []
        while text:
            text = self._read(text, pieces)
        return pieces

    def finish(self, *, is_complete: bool) -> list[Piece]:
        """The rest of unclosed reasoning, or of the answer."""
        rest, pieces = self._space + self._search.flush(), list[Piece]()
        if self._phase is _Phase.REASONING and rest and (self._has_reasoning or not rest.isspace()):
            pieces.append(Reasoning(rest))
        elif self._phase is _Phase.BEFORE:
            pieces += self._answer.feed(rest)
        return pieces + self._answer.finish(is_complete=is_complete)

    def _read(self, text: str, pieces: list[Piece]) -> str:
        match self._phase:
            case _Phase.BEFORE:
                return self._read_before(text, pieces)
            case _Phase.REASONING:
                return self._read_reasoning(text, pieces)
            case _Phase.GAP:
                text = text.lstrip()
                self._phase = _Phase.ANSWER if text else _Phase.GAP
                return text
            case _Phase.ANSWER:
                pieces += self._answer.feed(text)
                return ""

    def _read_before(self, text: str, pieces: list[Piece]) -> str:
        found = self._search.push(text)
        before, self._space = self._space + found.before, ""
        if before and not before.isspace():
            # The answer has begun without reasoning; a marker in it is text.
            self._phase = _Phase.ANSWER
            pieces += self._answer.feed(before + self._search.flush() + (found.marker or ""))
        elif found.marker is not None:
            self._phase, self._search = _Phase.REASONING, MarkerSearch([self._format.end])
        else:
            self._space = before
        return found.after

    def _read_reasoning(self, text: str, pieces: list[Piece]) -> str:
        found = self._search.push(text)
        reasoning = self._space + found.before
        if not self._has_reasoning:
            reasoning = reasoning.lstrip()
        visible = reasoning.rstrip()
        self._space = reasoning[len(visible) :]
        if visible:
            self._has_reasoning = True
            pieces.append(Reasoning(visible))
        if found.marker is not None:
            self._space, self._phase = "", _Phase.GAP
        return found.after


class ReasoningWatch:
    """Counts reasoning tokens, without markers; ends the reasoning at the limit.

    Takes every token in order.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.num_tokens = 0
        self._thinking = thinking
        self._phase = _Phase.REASONING if thinking.is_open else _Phase.BEFORE
        markers = thinking.reasoning_format
        self._search = MarkerSearch([markers.end if thinking.is_open else markers.start])
        self._num_held = 0
        self._num_forced = 0
        self.answer_begun = ""
        """Text that came with the token that ended the reasoning."""

    @property
    def is_thinking(self) -> bool:
        return self._phase is _Phase.REASONING

    def accept(self, token: int, text: str) -> None:
        """Takes the next token and its text."""
        if self.forced():
            self._num_forced += 1
            if self._num_forced == len(self._closing_ids):
                self._phase = _Phase.ANSWER
        elif self._phase is _Phase.REASONING:
            self._count(text)
        elif self._phase is _Phase.BEFORE:
            self._look_for_start(text)

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next."""
        limit = self._thinking.max_tokens
        if limit is None or self._phase is not _Phase.REASONING or self.num_tokens + self._num_held < limit:
            return ()
        return self._closing_ids[self._num_forced :]

    def finish(self) -> None:
        """Counts the tokens held back."""
        self.num_tokens, self._num_held = self.num_tokens + self._num_held, 0

    @property
    def _closing_ids(self) -> tuple[int, ...]:
        return self._thinking.reasoning_format.closing_ids

    def _look_for_start(self, text: str) -> None:
        found = self._search.push(text)
        if found.before.strip():
            self._phase = _Phase.ANSWER
        elif found.marker is not None:
            self._phase, self._search = _Phase.REASONING, MarkerSearch([self._thinking.reasoning_format.end])
            if found.after:
                self._count(found.after)

    def _count(self, text: str) -> None:
        found = self._search.push(text)
        if found.marker is not None:
            # A token may contain the end of the reasoning and the marker.
            self.num_tokens += 1 if found.before else 0
            self._num_held, self._phase = 0, _Phase.ANSWER
            self.answer_begun = found.after.lstrip()
        elif not self._search.is_holding:
            self.num_tokens, self._num_held = self.num_tokens + self._num_held + 1, 0
        elif found.before:
            self.num_tokens, self._num_held = self.num_tokens + self._num_held, 1
        else:
            self._num_held += 1
