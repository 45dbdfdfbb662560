"""Refuses what a chat template would compute at too great a length, before it is made. Pure.

Comparing, printing or sorting a value cannot be interrupted and holds Python's lock, so it is refused if it would
take long. All raise jinja2's SecurityError.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARACTERS: Final = 1 << 26
"""Length of one text; a prompt is shorter, since request bodies are."""
MAX_ITEMS: Final = 1_000_000
MAX_WORKED_ITEMS: Final = 250_000
MAX_WORKED_CHARACTERS: Final = 1 << 22
"""Length of all texts in a function that does more than search or copy."""
MAX_INTEGER_BITS: Final = 4096
MAX_WIDTH: Final = 100_000
"""Length of a padded text."""

_FORMAT_FIELD = re.compile(r":[^{}:]*[{}]")
_PERCENT_FIELD = re.compile(r"%[-+ #\d.]*\*?|\)[-+ #\d.]*")
_MAX_FIELDS: Final = 100_000
_SHORT_CHARACTERS: Final = 1300
"""Length of the longest printed number."""
_CONTAINERS: Final[tuple[type[Collection[Any]], ...]] = (
    *(list, tuple),
    *(type(dict[str, str]().keys()), type(dict[str, str]().values()), type(dict[str, str]().items())),
)
_SLOW_KEY_ITEMS: Final = 100
"""A template can find many tuples or large numbers with one hash."""
_KEY_BITS: Final = 60
_TAKES_LONG_TEXTS = frozenset(
    {
        *("count", "endswith", "find", "index", "join", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "string", "strip"),
        "trim",
    }
)
"""Methods of texts, and filters, that cost no more than a copy."""
_LOOKS_AT = {
    **dict.fromkeys(("clear", "copy", "items", "keys", "popitem", "reverse", "values", "append", "insert"), 0),
    **dict.fromkeys(("get", "pop", "setdefault"), 1),
}
"""Methods that look at no member, and how many arguments they look at."""
SHALLOW_FILTERS = frozenset(
    {
        *("attr", "batch", "items", "list", "map", "random"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    }
)
_ITEMS_COPIED_AT_ONCE: Final = 8
_MAX_STRFTIME_CHARACTERS: Final = 1 << 14
_TAKES_WIDTHS = frozenset(
    {"batch", "center", "indent", "ljust", "rjust", "round", "slice", "tojson", "truncate", "zfill"}
)


class Weight(NamedTuple):
    """What Python traverses in a value; repeated parts count again."""

    num_items: int = 0
    num_characters: int = 0
    depth: int = 0


def weigh(*values: Any) -> Weight:
    """The total weight of values."""
    level, depth, num_items, num_characters = list[Any](values), 0, 0, 0
    while level:
        inner = list[Any]()
        for part in level:
            kind = type(part)
            if kind is str:
                num_characters += len(part)
            elif kind is dict:
                num_items += len(part)
                inner += part
                inner += part.values()
            elif isinstance(part, _CONTAINERS):
                num_items += len(part) + (_SLOW_KEY_ITEMS if isinstance(part, tuple) else 0)
                if num_items <= MAX_WORKED_ITEMS:
                    inner += part
            elif isinstance(part, int):
                bound(part.bit_length(), MAX_INTEGER_BITS)
                num_items += _SLOW_KEY_ITEMS if part.bit_length() > _KEY_BITS else 0
            elif isinstance(part, range):
                num_items += len(part)
            elif isinstance(part, Namespace):
                num_items += 1
                inner.append(part._Namespace__attrs)
        bound(num_items, MAX_WORKED_ITEMS)
        level, depth = inner, depth + 1
    bound(num_characters, MAX_CHARACTERS)
    return Weight(num_items, num_characters, depth)


def weigh_key(container: Any, *key: Any) -> Weight:
    """The weight of finding a key: for some types, all keys may share a hash."""
    weight = weigh(*key)
    is_slow = isinstance(container, dict) and weight.num_items > 0
    return weight._replace(num_items=weight.num_items + len(container)) if is_slow else weight


def joined(parts: Iterable[str], spend: Callable[[int], None]) -> str:
    """`parts` as one text; `spend` receives each one's cost."""
    gathered, num_characters = list[str](), 0
    for part in parts:
        spend(1)
        num_characters += len(part)
        bound(num_characters, MAX_CHARACTERS)
        gathered.append(part)
    return "".join(gathered)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuses `left operator right` if too long; a product of numbers is bounded by what made them."""
    if operator == "%" and isinstance(left, str):
        check_percent(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        bound(left.bit_length() * max(right, 0), MAX_INTEGER_BITS)
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        bound(len(left) + len(right), MAX_ITEMS)
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(many, str | list | tuple):
                bound(len(many) * count, MAX_CHARACTERS if isinstance(many, str) else MAX_ITEMS)


def check_contains(container: Any, item: Any) -> Weight:
    """The weight of finding `item`."""
    if isinstance(container, str):
        return Weight(0, len(container))
    weight = weigh_key(container, item)
    if not isinstance(container, list | tuple):
        return weight if isinstance(container, dict) else weigh(item, container)
    bound(len(container) * (weight.num_items + weight.num_characters // 256), MAX_ITEMS)
    return Weight(len(container) * (1 + weight.num_items), len(container) * weight.num_characters)


def check_call(function: Any, args: Sequence[Any], named: Sequence[Any]) -> Weight:
    """A call's weight; refuses a too long text."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, dict | list) and name in _LOOKS_AT:
        return weigh_key(owner, *args[: _LOOKS_AT[name]])
    values = [*args, *named]
    weight = weigh(owner, *values)
    if not isinstance(owner, str):
        is_short = name == "strftime_now"
        bound(weight.num_characters, _MAX_STRFTIME_CHARACTERS if is_short else MAX_WORKED_CHARACTERS)
    elif name == "join" and args:
        _check_result(name, args[0], [owner], weight)
    else:
        _check_result(name, owner, values, weight)
    return weight


def check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Weight:
    """A filter's weight on `args[0]`; refuses like `check_call`."""
    if not args:
        return Weight()
    # `old` before `new`, however they are named.
    value, rest = args[0], [*args[1:], *(kwargs[key] for key in sorted(kwargs, key="old".__ne__))]
    if name in SHALLOW_FILTERS:
        num_items = len(value) if isinstance(value, Sized) else 0
        bound(num_items if name == "list" else 0, MAX_ITEMS)
        _check_result(name, "", rest, Weight())
        return Weight(num_items if isinstance(value, list | tuple | range) else 0)
    weight = weigh(*args, *kwargs.values())
    _check_result(name, value, rest, weight)
    if name == "format":
        check_percent(str(value), *rest)
    return weight


def _check_result(name: str, value: Any, rest: Sequence[Any], weight: Weight) -> None:
    """Refuses a too long result of a filter or text method."""
    if name not in _TAKES_LONG_TEXTS:
        bound(weight.num_characters, MAX_WORKED_CHARACTERS)
    widest = max((number for number in rest if isinstance(number, int)), default=0)
    if name in _TAKES_WIDTHS:
        bound(widest, MAX_WIDTH)
    text = str(value) if name == "replace" else value if isinstance(value, str) else ""
    match name, rest:
        case "replace", [old, new, *_]:
            bound(len(text) + text.count(str(old)) * len(str(new)), MAX_CHARACTERS)
        case "split" | "rsplit", _:
            separator = next((one for one in rest if isinstance(one, str) and one), None)
            bound(text.count(separator) if separator else len(text) // 2, MAX_ITEMS)
        case "join", [separator, *_] if isinstance(value, Sized):
            bound(weight.num_characters + len(value) * len(str(separator)), MAX_CHARACTERS)
        case "indent", _:
            bound((str(value).count("\n") + 1) * (max(widest, 4) + weigh(*rest).num_characters), MAX_CHARACTERS)
        case "tojson", _:
            bound(weight.num_items * weight.depth * (widest + weigh(*rest).num_characters), MAX_CHARACTERS)
        case "sum", _ if any(isinstance(start, list | tuple) for start in rest):
            bound(len(value) * weight.num_items // _ITEMS_COPIED_AT_ONCE, MAX_ITEMS)


def check_test(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Weight:
    """A test's weight; refuses like `check_call`."""
    if name == "in" and len(args) == 2:
        return check_contains(args[1], args[0])
    if args and isinstance(args[0], str) and name in ("divisibleby", "even", "odd"):
        check_percent(*args)
    return weigh(*args, *kwargs.values())


def check_format(text: str, *values: Any) -> None:
    """Refuses a text for `str.format` with a long result or a width from a value."""
    _check_fields(text, "{", _FORMAT_FIELD, values)


def check_percent(text: str, *values: Any) -> None:
    """Like `check_format`, for `%`."""
    _check_fields(text, "%", _PERCENT_FIELD, values)


def _check_fields(text: str, opener: str, field: re.Pattern[str], values: Sequence[Any]) -> None:
    """Each field could hold all of `values`."""
    num_fields = text.count(opener)
    bound(num_fields, _MAX_FIELDS)
    fields = field.findall(text)
    bound(sum(one[-1] in "{*" for one in fields), 0)
    widths = re.findall(r"\d+", " ".join(fields))
    width = max((int(digits) if len(digits) < 7 else MAX_CHARACTERS for digits in widths), default=0)
    bound(width, MAX_WIDTH)
    weight = weigh(*values)
    longest = _SHORT_CHARACTERS * (1 + weight.num_items // 8) + weight.num_characters
    bound(num_fields * (width + longest), MAX_CHARACTERS)


def bound(count: int, most: int) -> None:
    """Raises SecurityError above `most`."""
    if count > most:
        raise SecurityError("the model's chat template makes a text, a list or a number that is too long")
