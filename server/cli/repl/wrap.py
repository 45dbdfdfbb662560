"""Breaks text at words while it streams in, for a terminal of a given width. Pure.

A word is shown once it is complete, so that it never has to move. Lines are broken at spaces, and beside wide letters
such as Chinese ones. A word that is wider than the terminal is left to it. What stands between lines of ``` is shown
as it is, for it is to be copied.
"""

import unicodedata

from rich.cells import cell_len

FENCE = "```"

_JOINER = "\u200d"
_CLOSING = frozenset("、。，．！？：；）」』】〉》〕〗…ー々っッゃゅょャュョ")
"""Wide letters that no line may begin with."""
_TAB = " " * 4


class WordWrap:
    """The state of one text: where its line is, and the word that is not complete yet."""

    def __init__(self) -> None:
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._is_verbatim = False
        self._is_fence = False
        """Whether the line began with a fence."""

    def feed(self, text: str, width: int) -> str:
        """Returns what can be shown now of all text so far, for lines of `width` cells."""
        return "".join(self._take(letter, width) for letter in text if _is_shown(letter))

    def finish(self, width: int) -> str:
        """Returns what was held back."""
        return self._end_word(width)

    @property
    def is_at_start(self) -> bool:
        """Whether nothing stands on the line yet."""
        return self._column == 0 and not self._word and not self._spaces

    def _take(self, letter: str, width: int) -> str:
        if letter == "\n":
            return self._end_line(width)
        if letter in " \t":
            shown = self._end_word(width)
            self._spaces += " " if letter == " " else _TAB
            return shown
        shown = self._end_word(width) if self._may_break_before(letter) else ""
        self._word += letter
        if self._column == 0 and self._word == FENCE:
            self._is_fence = True
        return shown

    def _may_break_before(self, letter: str) -> bool:
        if not self._word or _is_joined(self._word[-1], letter) or letter in _CLOSING:
            return False
        return _is_wide(letter) or _is_wide(_base(self._word))

    def _end_word(self, width: int) -> str:
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        needed = cell_len(spaces) + cell_len(word)
        if self._column and self._column + needed > width and not self._is_verbatim:
            self._column = cell_len(word) % width if cell_len(word) > width else cell_len(word)
            return "\n" + word
        column = self._column + needed
        self._column = (column - 1) % width + 1 if column > width else column
        return spaces + word

    def _end_line(self, width: int) -> str:
        shown = self._end_word(width)
        self._is_verbatim ^= self._is_fence
        self._is_fence, self._spaces, self._column = False, "", 0
        return shown + "\n"


def _is_shown(letter: str) -> bool:
    """Returns whether a letter is safe on a terminal: no model may move the cursor or change the title."""
    return letter in "\n\t" or unicodedata.category(letter) != "Cc"


def _is_wide(letter: str) -> bool:
    return cell_len(letter) > 1


def _is_joined(before: str, letter: str) -> bool:
    """Returns whether two letters are parts of one sign: accents, emoji of several parts, skin tones, flags."""
    if _JOINER in (before, letter) or cell_len(letter) == 0 or "\U0001f3fb" <= letter <= "\U0001f3ff":
        return True
    return all("\U0001f1e6" <= one <= "\U0001f1ff" for one in (before, letter))


def _base(word: str) -> str:
    """Returns the last letter of a word that takes place of its own."""
    return next((letter for letter in reversed(word) if cell_len(letter)), word[-1])
