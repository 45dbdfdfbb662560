"""What a chat shows at a terminal, wrapped at words while it streams in, and reads there.

Lines are edited, kept as history, and pasted lines are one message: `readline` cannot do the last everywhere, since
the libedit of Python on macOS knows no bracketed paste.
"""

import contextlib
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.cells import cell_len

from models.output.pieces import Reasoning, Text

logger = logging.getLogger(__name__)

_DIM = "\x1b[2m"
_RESET = "\x1b[0m"


class Screen:
    """Wraps answers and dims reasoning; without `columns` plain answers only."""

    def __init__(
        self, write: Callable[[str], object], columns: Callable[[], int] | None = None, *, is_coloured: bool = False
    ) -> None:
        self._write, self._is_plain = write, columns is None
        self._columns = columns or (lambda: sys.maxsize)
        self._dim, self._reset = (_DIM, _RESET) if is_coloured else ("", "")
        self._wrap = WordWrap(self._columns)
        self._is_reasoning = False

    def note(self, text: str, *, is_quiet: bool = False) -> None:
        """Shows the program's own lines."""
        if not self._is_plain:
            wrap = WordWrap(self._columns)
            text = wrap.feed(text) + wrap.finish()
        self._write(f"{self._dim}{text}{self._reset}\n" if is_quiet else f"{text}\n")

    def complain(self, text: str) -> None:
        """Shows an error on standard error."""
        if self._is_plain:
            sys.stderr.write(f"mlx-serve: {text}\n")
        else:
            self.note(f"mlx-serve: {text}")

    def show(self, said: Text | Reasoning) -> None:
        """Shows the next part of an answer."""
        is_reasoning = isinstance(said, Reasoning)
        if self._is_plain:
            if not is_reasoning:
                self._write(said.text)
            return
        if is_reasoning is not self._is_reasoning:
            rest, gap = self._wrap.finish(), "" if self._wrap.is_at_start else "\n\n"
            self._write(f"{rest}{gap}{self._dim if is_reasoning else self._reset}")
            self._wrap, self._is_reasoning = WordWrap(self._columns), is_reasoning
        self._write(self._wrap.feed(said.text))

    def end(self, mark: str = "") -> None:
        """Ends an answer's line, with `mark` after the last word."""
        self._write(f"{self._wrap.finish()}{mark}{self._reset if self._is_reasoning else ''}\n")
        self._wrap, self._is_reasoning = WordWrap(self._columns), False


FENCE = "```"

_JOINER = "\u200d"
_CLOSING = frozenset("、。，．！？：；）」』】〉》〕〗…ー々っッゃゅょャュョ")
"""Wide letters that begin no line."""
_TAB = " " * 4


class WordWrap:
    """Breaks text at words while it streams in.

    A word is shown once it is complete, so that it never has to move. Lines are broken at spaces, and beside wide
    letters such as Chinese ones. A word wider than the terminal is left to the terminal. Text between lines of ``` is
    unchanged, since people copy it.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = self._word = ""
        self._is_verbatim = self._is_fence = False

    def feed(self, text: str) -> str:
        """What can be shown now."""
        # No model may move the cursor or change the title.
        return "".join(
            self._take(letter) for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc"
        )

    @property
    def is_at_start(self) -> bool:
        return self._column == 0 and not self._word and not self._spaces

    def _take(self, letter: str) -> str:
        if letter == "\n":
            return self._end_line()
        if letter in " \t":
            shown = self.finish()
            self._spaces += " " if letter == " " else _TAB
            return shown
        shown = self.finish() if self._may_break_before(letter) else ""
        self._word += letter
        self._is_fence |= self._column == 0 and self._word == FENCE
        return shown

    def _may_break_before(self, letter: str) -> bool:
        if not self._word or _is_joined(self._word[-1], letter) or letter in _CLOSING:
            return False
        base = next((written for written in reversed(self._word) if cell_len(written)), "")
        return cell_len(letter) > 1 or cell_len(base) > 1

    def finish(self) -> str:
        """The text held back."""
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        needed, width = cell_len(spaces) + cell_len(word), self._columns()
        if self._column and self._column + needed > width and not self._is_verbatim:
            self._column = cell_len(word) % width if cell_len(word) > width else cell_len(word)
            return "\n" + word
        column = self._column + needed
        self._column = (column - 1) % width + 1 if column > width else column
        return spaces + word

    def _end_line(self) -> str:
        shown = self.finish()
        self._is_verbatim ^= self._is_fence
        self._is_fence, self._spaces, self._column = False, "", 0
        return shown + "\n"


def _is_joined(before: str, letter: str) -> bool:
    """Whether two letters are one sign: accents, emoji of several parts, skin tones, flags."""
    if _JOINER in (before, letter) or cell_len(letter) == 0 or "\U0001f3fb" <= letter <= "\U0001f3ff":
        return True
    return all("\U0001f1e6" <= symbol <= "\U0001f1ff" for symbol in (before, letter))


# ---------------------------------------------------------------------------------------------------- what is typed

MAX_BYTES = 2**20
"""A longer history is cut to half."""
_ENTRY = b"\n# "


def history_file(environment: Mapping[str, str]) -> Path:
    """A path that need not exist."""
    return Path(environment.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "mlx-serve" / "history"


def open_history(path: Path | None) -> History:
    """Without a usable file nothing is kept."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_size > MAX_BYTES:
            kept = path.read_bytes()[-MAX_BYTES // 2 :]
            path.write_bytes(kept[max(kept.find(_ENTRY), 0) :])
    except OSError as error:
        logger.debug("what is typed is not kept in %s: %s", path, error)
        return InMemoryHistory()
    return _PatientHistory(str(path))


class _PatientHistory(FileHistory):
    """Ignores a full disk."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def line_reader(history: Path | None) -> Callable[[str], str]:
    """Reads a line, or pasted lines; raises EOFError and KeyboardInterrupt."""
    # Standard output may be a file; the prompt then goes to standard error.
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # The library would complain about a terminal that does not report its cursor.
        output.enable_cpr = False
    session: PromptSession[str] = PromptSession(
        history=open_history(history), output=output, enable_suspend=True, reserve_space_for_menu=0
    )
    return lambda prompt: session.prompt(prompt, prompt_continuation="... ".rjust(len(prompt)))
