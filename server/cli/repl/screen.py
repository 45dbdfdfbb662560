"""Where answers and notes are shown: wrapped and with dim thoughts on a terminal, as plain text anywhere else."""

import os
import re
import sys
import textwrap
from collections.abc import Callable

from server.cli.repl.speech import Manner, Said
from server.cli.repl.wrap import WordWrap

_DIM = "\x1b[2m"
_RESET = "\x1b[0m"
DEFAULT_COLUMNS = 80

_TWO_COLUMNS = re.compile(r"\S.*?\s{2,}")


class Screen:
    """Shows one answer after another. Not for several threads.

    Without `columns` the text is left as it is, and thoughts are left out: what is kept is the answer.
    """

    def __init__(
        self, write: Callable[[str], object], columns: Callable[[], int] | None = None, *, is_coloured: bool = False
    ) -> None:
        """`columns` returns the width of the terminal, asked again and again since it may change."""
        self._write = write
        self._columns = columns
        self._is_coloured = is_coloured
        self._wrap = WordWrap()
        self._manner = Manner.ANSWER

    def note(self, text: str, *, is_quiet: bool = False) -> None:
        """Shows lines of the program's own."""
        if self._columns is not None:
            text = "\n".join(fold(line, self._columns()) for line in text.split("\n"))
        self._write(f"{_DIM}{text}{_RESET}\n" if is_quiet and self._is_coloured else f"{text}\n")

    def complain(self, text: str) -> None:
        """Shows what went wrong, apart from the answer where that goes to a file."""
        if self._columns is None:
            sys.stderr.write(f"mlx-serve: {text}\n")
        else:
            self.note(f"mlx-serve: {text}")

    def show(self, said: Said) -> None:
        """Shows the next part of an answer."""
        if self._columns is None:
            if said.manner is Manner.ANSWER:
                self._write(said.text)
            return
        if said.manner is not self._manner:
            self._change_manner(said.manner, self._columns())
        self._write(self._wrap.feed(said.text, self._columns()))

    def end(self, mark: str = "") -> None:
        """Ends an answer and its line; `mark` is shown behind its last word."""
        rest = self._wrap.finish(self._columns()) if self._columns is not None else ""
        reset = _RESET if self._manner is Manner.THOUGHT and self._is_coloured else ""
        self._write(f"{rest}{mark}{reset}\n")
        self._wrap, self._manner = WordWrap(), Manner.ANSWER

    def _change_manner(self, manner: Manner, columns: int) -> None:
        """Begins a paragraph, dim for thoughts."""
        rest = self._wrap.finish(columns)
        gap = "" if self._wrap.is_at_start else "\n\n"
        colour = (_DIM if manner is Manner.THOUGHT else _RESET) if self._is_coloured else ""
        self._write(f"{rest}{gap}{colour}")
        self._wrap, self._manner = WordWrap(), manner


def fold(line: str, width: int) -> str:
    """Returns a line broken at words; of a line of two columns the second stays one, where there is space for it."""
    column = _TWO_COLUMNS.match(line)
    if column is None or 2 * column.end() > width:
        wrap = WordWrap()
        return wrap.feed(line, width) + wrap.finish(width)
    indent = " " * column.end()
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, replace_whitespace=False)


def standard_screen(*, is_coloured: bool) -> Screen:
    """Returns the screen of standard output, a terminal or not."""
    return Screen(_write_at_once, _num_columns if sys.stdout.isatty() else None, is_coloured=is_coloured)


def _write_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _num_columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or DEFAULT_COLUMNS
    except OSError:
        return DEFAULT_COLUMNS
