"""How long the things are that a chat template asks for: what would be too long is refused before it is made.

Pure. Raises jinja2's SecurityError, as the sandbox does for what is forbidden.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from jinja2.exceptions import SecurityError

MAX_CHARACTERS: Final = 1 << 26
"""Of one text; a prompt is shorter, since bodies are."""
MAX_ITEMS: Final = 1_000_000
MAX_INTEGER_BITS: Final = 4096
MAX_WIDTH: Final = 100_000
"""What a text may be filled up to."""

_WIDE = re.compile(r"\d{6,}")
_FORMAT_FIELD = re.compile(r"\{([^{}]*(?:\{[^{}]*\})?[^{}]*)\}")
_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{6,}|\d*\.(?:\*|\d{6,}))")
_WIDTHS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_FILTER_NUMBERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"})
"""Filters whose numbers say how long their result is."""


def joined(parts: Iterable[str], spend: Callable[[int], None]) -> str:
    """Returns `parts` as one text; `spend` is told of each."""
    gathered, num_characters = list[str](), 0
    for part in parts:
        spend(1)
        num_characters += len(part)
        _check_characters(num_characters)
        gathered.append(part)
    return "".join(gathered)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if `left operator right` is too long."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            _check_characters(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _check_items(len(left) + len(right))
    elif isinstance(left, str):
        check_percent(left)


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises SecurityError if a method of a text makes a text that is too long."""
    text = getattr(function, "__self__", None)
    if not isinstance(text, (str, int)):  # this is the quickest way to ask
        return
    name = function.__name__
    if isinstance(text, str):
        if name in _WIDTHS:
            _check_widths([*args, *kwargs.values()])
            if name == "expandtabs":
                _check_characters(len(text) + text.count("\t") * max(map(int, args), default=8))
        elif name == "join" and args:
            _check_join(text, args[0])
        elif name == "replace" and len(args) >= 2:
            _check_replace(text, args[0], args[1])
        elif name == "translate" and args and isinstance(args[0], Mapping):
            _check_characters(len(text) * max((len(to) for to in args[0].values() if isinstance(to, str)), default=1))
    else:
        _check_widths([*args, *kwargs.values()])


def check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises SecurityError if a filter makes something that is too long; `args[0]` is what it is applied to."""
    if not args:
        return
    value, rest = args[0], [*args[1:], *kwargs.values()]
    if name in _FILTER_NUMBERS:
        _check_widths(rest)
    if name == "indent":
        width = rest[0] if rest else 4
        _check_characters((str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width)))
    elif name == "tojson":
        _check_widths([len(text) for text in rest if isinstance(text, str)])
    elif name == "replace" and len(rest) >= 2:
        _check_replace(str(value), rest[0], rest[1])
    elif name == "join" and isinstance(value, list | tuple):
        _check_join(str(rest[0]) if rest else "", value)
    elif name == "format":
        check_percent(str(value))
    elif name == "sum" and isinstance(value, list | tuple):
        _check_items(sum(len(part) for part in value if isinstance(part, list | tuple)))


def check_format(text: str) -> None:
    """Raises SecurityError for a text for `str.format` that fills up to a great width, or one that it is told."""
    for field in _FORMAT_FIELD.findall(text):
        _, colon, spec = field.partition(":")
        if colon and ("{" in spec or _WIDE.search(spec)):
            raise _too_long()


def check_percent(text: str) -> None:
    """Raises SecurityError for a text for `%` that fills up to a great width, or one that it is told."""
    if _PERCENT_WIDTH.search(text):
        raise _too_long()


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(many, str):
            _check_characters(len(many) * count)
        elif isinstance(count, int) and isinstance(many, list | tuple):
            _check_items(len(many) * count)


def _check_join(separator: str, parts: Any) -> None:
    if isinstance(parts, list | tuple):
        lengths = (len(part) for part in parts if isinstance(part, str))
        _check_characters(sum(lengths) + len(separator) * len(parts))
    elif isinstance(parts, str):
        _check_characters(len(parts) * (1 + len(separator)))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_characters(len(text) + text.count(old) * len(new))


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise _too_long()


def _check_characters(count: int) -> None:
    if count > MAX_CHARACTERS:
        raise _too_long()


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise _too_long()


def _check_bits(count: int) -> None:
    if count > MAX_INTEGER_BITS:
        raise _too_long()


def _too_long() -> SecurityError:
    return SecurityError("the model's chat template makes a text, a list or a number that is too long")
