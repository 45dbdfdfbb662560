"""Log entries about requests, for programs and in words. Pure.

`logging` gets an entry as its message: `str` is one line for a file, `parts` are pieces of a line for a terminal,
which breaks between parts first. An entry holds no text of a prompt and no key.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size

from models.texts import grouped

SHORT_ID_LENGTH = 6
MAX_SESSION_LENGTH = 24
MAX_REASON_LENGTH = 300
MAX_PATH_LENGTH = 200


class Tone(StrEnum):
    """How a part of a line is coloured: what begins the colour on a terminal."""

    PLAIN = ""
    QUIET = "\x1b[2m"
    WARNING = "\x1b[33m"
    ERROR = "\x1b[31m"


@dataclass(frozen=True)
class EntryPart:
    """Words that belong together."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class LogEntry:
    """One event of a request; `--log-format json` writes its fields."""

    event: ClassVar[str]

    request_id: str

    def parts(self) -> list[EntryPart]:
        """The line for people, without its time."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Known figures, ready for JSON."""
        return {"event": self.event, **asdict(self)}

    def __str__(self) -> str:
        return "  ".join([*(part.text for part in self.parts()), *self.names()])

    def names(self) -> list[str]:
        """The full names that `parts` abbreviates."""
        return [self.request_id]


@dataclass(frozen=True)
class PrefillProgress(LogEntry):
    """A prompt evaluated for seconds."""

    event: ClassVar[str] = "prefill"

    session_id: str | None
    evaluated_tokens: int
    prompt_tokens: int
    tokens_per_second: float
    number: int

    def parts(self) -> list[EntryPart]:
        """Progress, time left, request and speed."""
        share, left = percent_text(self.evaluated_tokens, self.prompt_tokens), ""
        amount = f"{grouped(self.evaluated_tokens)} of {grouped(self.prompt_tokens)} tokens"
        if self.tokens_per_second > 0:
            seconds = (self.prompt_tokens - self.evaluated_tokens) / self.tokens_per_second
            left = f", {seconds_text(seconds)} to go"
            amount += f", {rate_text(self.tokens_per_second)} tokens/s"
        name = label(self.request_id, self.session_id)
        return [EntryPart(f"prefill {share}{left}", Tone.QUIET), EntryPart(name), EntryPart(amount, Tone.QUIET)]


@dataclass(frozen=True)
class MissFigures:
    """Why a prompt was evaluated again, and where."""

    reason: str
    cause: str
    message_index: int | None
    role: str | None
    token: int | None
    lost_tokens: int
    lost_seconds: float


@dataclass(frozen=True)
class RequestEnded(LogEntry):
    """An accepted request that has ended. Times are milliseconds from its arrival."""

    event: ClassVar[str] = "request"

    session_id: str | None
    model: str
    turn: int | None
    """From 1."""
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    predicted_tokens: int
    first_token_ms: float | None
    total_ms: float
    tokens_per_second: float | None
    """From the answer's first token to its last."""
    finish: str
    error: str | None
    kept: float | None
    """Part of the previous prompt that was reused, 0 to 1."""
    tier: str | None
    miss: MissFigures | None
    key: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """How many of `drafted_tokens` the answer holds."""

    def parts(self) -> list[EntryPart]:
        """Client, reuse, speed and error of the request."""
        reused = percent_text(self.cached_tokens, self.prompt_tokens)
        parts = _head(label(self.request_id, self.session_id), self.key)
        if self.turn is not None:
            parts.append(EntryPart(f"turn {self.turn}"))
        parts += [EntryPart(f"{grouped(self.prompt_tokens)} tokens, {reused} reused"), EntryPart(self._speed())]
        return parts + self._end() + self._broken()

    def names(self) -> list[str]:
        """The request's id, and the session's name if `parts` cuts it."""
        is_cut = self.session_id is not None and len(self.session_id) > MAX_SESSION_LENGTH
        return [self.request_id, *([f"session {self.session_id}"] if is_cut else [])]

    def _speed(self) -> str:
        if self.first_token_ms is None:
            return f"{seconds_text(self.total_ms / 1000)} without a token"
        first = f"{seconds_text(self.first_token_ms / 1000)} to first token"
        if self.tokens_per_second is None:
            return first
        num_steps = max(self.predicted_tokens - self.accepted_tokens, 1)
        a_step = f", {rate_text(self.predicted_tokens / num_steps)} a step" if self.drafted_tokens else ""
        return f"{first}, {rate_text(self.tokens_per_second)} tokens/s{a_step}"

    def _end(self) -> list[EntryPart]:
        if self.error is not None:
            return [EntryPart(f"failed: {self.error}", Tone.ERROR)]
        if self.finish == "cancelled":
            return [EntryPart(f"stopped by the client after {grouped(self.predicted_tokens)} tokens", Tone.QUIET)]
        return [] if self.finish == "stop" else [EntryPart(f"ended by {self.finish}", Tone.QUIET)]

    def _broken(self) -> list[EntryPart]:
        miss = self.miss
        if miss is None or (miss.reason == "cold" and not miss.lost_tokens):
            return []
        where = "" if miss.role is None else f" in message {miss.message_index} ({miss.role})"
        why = miss.cause + where
        if not miss.lost_tokens:
            return [EntryPart(why, Tone.QUIET)]
        cost = f"{grouped(miss.lost_tokens)} tokens evaluated again, {seconds_text(miss.lost_seconds)}"
        return [EntryPart(f"{why}: {cost}", Tone.WARNING)]


@dataclass(frozen=True)
class RequestRefused(LogEntry):
    """A request answered with an error only."""

    event: ClassVar[str] = "refused"

    method: str
    path: str
    """The path without the query, which may hold a key."""
    status: int
    code: str
    reason: str
    key: str | None = None

    def parts(self) -> list[EntryPart]:
        """The request, and why it was refused."""
        tone = Tone.ERROR if self.status >= 500 else Tone.WARNING
        asked = f"{self.method[: SHORT_ID_LENGTH * 2]} {cut(self.path, MAX_PATH_LENGTH)}"
        refusal = EntryPart(f"{self.status} {self.reason}", tone)
        return [*_head(short_id(self.request_id), self.key), EntryPart(asked), refusal]


@dataclass(frozen=True)
class TextsEmbedded(LogEntry):
    """A request for vectors, or an order of texts."""

    event: ClassVar[str] = "embedded"

    path: str
    model: str
    num_texts: int
    prompt_tokens: int
    total_ms: float
    key: str | None = None

    def parts(self) -> list[EntryPart]:
        """The request, and its cost."""
        texts = "1 text" if self.num_texts == 1 else f"{grouped(self.num_texts)} texts"
        cost = f"{texts}, {grouped(self.prompt_tokens)} tokens"
        parts = map(EntryPart, (f"POST {self.path}", cost, seconds_text(self.total_ms / 1000)))
        return [*_head(short_id(self.request_id), self.key), *parts]


# ------------------------------------------------------------------------------------------------------- words


def _head(name: str, key: str | None) -> list[EntryPart]:
    return [EntryPart(name)] + ([] if key is None else [EntryPart(f"key {printable(key)}")])


def label(request_id: str, session_id: str | None) -> str:
    """The session, else the id's beginning."""
    return cut(session_id, MAX_SESSION_LENGTH) if session_id else short_id(request_id)


def short_id(request_id: str) -> str:
    """The first unique letters of `chatcmpl-3f9a…`."""
    return request_id.replace("_", "-").rpartition("-")[2][:SHORT_ID_LENGTH]


def cut(text: str, length: int) -> str:
    """Cuts to `length` letters, `…` included."""
    return text if len(text) <= length else text[: length - 1] + "…"


def percent_text(part: int, whole: int) -> str:
    """A share: 100 % for the whole only, 0 % for nothing only."""
    percent = 100 * part / whole if whole else 0.0
    rounded = round(percent)
    if part and rounded == 0:
        return "under 1 %"
    return f"{min(rounded, 99) if part < whole else rounded} %"


def seconds_text(seconds: float) -> str:
    """`0.03 s`, `0.3 s`, `41 s`, `3 min 20 s`, `5 h 3 min`, `2.5 days`."""
    if 0 < seconds < 0.095:
        return f"{max(seconds, 0.01):.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes / 1440:.1f} days"


def rate_text(per_second: float) -> str:
    """Shows as many digits as are certain."""
    return f"{per_second:.1f}" if per_second < 9.95 else grouped(round(per_second))


def printable(text: str) -> str:
    """Escapes characters that move a cursor or reverse a direction."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


GAP = "  "

_BREAK = re.compile(r" (?!(?<=\d )(?:\d{3}\b|%|s\b|min\b|h\b))")
"""Spaces at which a line may end: not in a number, nor before a unit."""

Paint = Callable[[str, Tone], str]


def lay_out(head: str, parts: Sequence[EntryPart], width: int, paint: Paint) -> str:
    """Lines of at most `width` cells; later lines are indented.

    A part is broken, at spaces, only if it is longer than a line; a word never.
    """
    indent = " " * cell_len(head + GAP)
    columns, pieces = max(width - len(indent), 1), list[EntryPart]()
    for part in parts:
        words = [EntryPart(word) for word in _BREAK.split(part.text)]
        pieces += (
            EntryPart(" ".join(piece.text for piece in line), part.tone) for line in _lines(words, " ", columns)
        )
    lines = [GAP.join(paint(piece.text, piece.tone) for piece in line) for line in _lines(pieces, GAP, columns)]
    return head + GAP + f"\n{indent}".join(lines)


def _lines(parts: Sequence[EntryPart], gap: str, columns: int) -> list[list[EntryPart]]:
    lines, used = [list[EntryPart]()], 0
    for part in parts:
        length = cell_len(part.text)
        if lines[-1] and used + len(gap) + length > columns:
            lines.append([])
            used = 0
        used += length + (len(gap) if lines[-1] else 0)
        lines[-1].append(part)
    return lines


def one_line(text: str, width: int) -> str:
    """Cuts a text to `width` cells."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"
