"""Breaks a line of the log where a terminal ends, between its parts first. Pure."""

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size

from server.log_events import EntryPart, Tone

GAP = "  "

_BREAK = re.compile(r" (?!(?<=\d )(?:\d{3}\b|%|s\b|min\b))")
"""A space where a line may end: not within a number, and not before its unit."""

Paint = Callable[[str, Tone], str]
"""Colours a piece of text."""


def lay_out(head: str, parts: Sequence[EntryPart], width: int, paint: Paint) -> str:
    """Returns `head` and the parts on lines of at most `width` cells, further lines indented below the first part.

    A part is broken, at spaces, only if it is longer than a line of its own. Words are never broken.
    """
    indent = " " * cell_len(head + GAP)
    columns = max(width - len(indent), 1)
    lines: list[list[str]] = [[]]
    used = 0
    for part in parts:
        for text in _fit(part.text, columns):
            length = cell_len(text)
            if lines[-1] and used + len(GAP) + length > columns:
                lines.append([])
                used = 0
            used += length + (len(GAP) if lines[-1] else 0)
            lines[-1].append(paint(text, part.tone))
    return head + GAP + f"\n{indent}".join(GAP.join(line) for line in lines)


def one_line(text: str, width: int) -> str:
    """Returns a text cut to `width` cells."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"


def _fit(text: str, columns: int) -> list[str]:
    """Returns the text as it is if it fits, else filled into lines."""
    if cell_len(text) <= columns:
        return [text]
    lines = [""]
    for word in _BREAK.split(text):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(longer) > columns:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
