"""Follows a JSON object while its text arrives, and says how much of it is certain to be valid so far. Pure."""

import re
from enum import Enum, auto

_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u(?:[0-9a-cA-CeEfF][0-9a-fA-F]{0,3}|[dD](?:[0-7][0-9a-fA-F]{0,2})?)?)?")
_SPACE = " \t\r\n"


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


class JsonPrefix:
    """Reads the text of one object from its first brace on. What follows the object is not looked at."""

    def __init__(self) -> None:
        self.is_broken = False
        """Whether no continuation can make the text an object, or it holds half a character, so that it is not passed
        on."""
        self._text = ""
        """What was pushed and is not certain yet."""
        self._at = 0
        """How much of it has been read."""
        self._open: list[str] = []
        self._expects = _Expects.VALUE
        self._is_in_string = False

    @property
    def is_complete(self) -> bool:
        """Whether the object was closed."""
        return self._expects is _Expects.NOTHING

    def push(self, text: str) -> str:
        """Returns the text that has become certain."""
        self._text, self._at = self._text + text, 0
        before = -1
        while before < self._at < len(self._text) and not self.is_broken and not self.is_complete:
            before = self._at
            read = self._read_string if self._is_in_string else self._read_one
            read()
        certain, self._text = self._text[: self._at], self._text[self._at :]
        return certain

    def _read_string(self) -> None:
        letter = self._text[self._at]
        if letter == "\\":
            self._read_escape()
        elif letter < " ":
            self.is_broken = True
        else:
            self._at += 1
            self._is_in_string = letter != '"'

    def _read_escape(self) -> None:
        found = _ESCAPE.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        elif len(self._text) - self._at >= len("\\u0000") or not _may_be_escape(self._text[self._at :]):
            self.is_broken = True

    def _read_one(self) -> None:
        letter = self._text[self._at]
        if letter in _SPACE:
            self._at += 1
        elif self._expects in (_Expects.VALUE, _Expects.VALUE_OR_END) and letter not in "]}":
            self._read_value(letter)
        elif letter == '"' and self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
            self._take(_Expects.COLON)
            self._is_in_string = True
        elif letter == ":" and self._expects is _Expects.COLON:
            self._take(_Expects.VALUE)
        elif letter == "," and self._expects is _Expects.COMMA_OR_END:
            self._take(_Expects.KEY if self._open[-1] == "}" else _Expects.VALUE)
        elif self._may_end() and letter == self._open[-1]:
            self._open.pop()
            self._take(_Expects.COMMA_OR_END if self._open else _Expects.NOTHING)
        else:
            self.is_broken = True

    def _may_end(self) -> bool:
        return self._expects in (_Expects.COMMA_OR_END, _Expects.KEY_OR_END, _Expects.VALUE_OR_END)

    def _read_value(self, letter: str) -> None:
        if letter == "{":
            self._open.append("}")
            self._take(_Expects.KEY_OR_END)
        elif not self._open:
            self.is_broken = True
        elif letter == "[":
            self._open.append("]")
            self._take(_Expects.VALUE_OR_END)
        elif letter == '"':
            self._take(_Expects.COMMA_OR_END)
            self._is_in_string = True
        else:
            self._read_literal()

    def _read_literal(self) -> None:
        """Reads a literal once what ends it is there: a number may go on with every digit."""
        stop = next((i for i in range(self._at, len(self._text)) if self._text[i] in ",]}" + _SPACE), None)
        if stop is None:
            return
        if _LITERAL.fullmatch(self._text, self._at, stop) is None:
            self.is_broken = True
            return
        self._at = stop
        self._expects = _Expects.COMMA_OR_END

    def _take(self, expects: _Expects) -> None:
        self._at += 1
        self._expects = expects


def _may_be_escape(text: str) -> bool:
    return (
        re.fullmatch(r"\\(?:u(?:[0-9a-cA-CeEfF][0-9a-fA-F]{0,3}|[dD](?:[0-7][0-9a-fA-F]{0,2})?)?)?", text) is not None
    )
