"""The sandbox of chat templates: transformers' own, which keeps them from Python, and bounds on it.

Two things of Jinja's immutable sandbox change for all templates of a process. A template may gather what it shows in
a list, since transformers copies all that it can reach. Each turn of a loop, call, filter and test costs one of
`MAX_STEPS`; what would be too long is refused before it is made. A value that an operation goes through at once is
weighed first: the operation cannot be stopped, and holds Python's lock. All raise jinja2's SecurityError.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, reduce, wraps
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape
from transformers.utils import chat_template_utils

from models.prompt.tokenize import stop_if_abandoned

MAX_STEPS: Final = 3_000_000
"""Steps of one rendering: about ten seconds, six times what 4 000 messages take."""
MAX_SAMPLE_STEPS: Final = 20_000
_STEPS_PER_LOOK: Final = 4096
_CHARACTERS_PER_STEP: Final = 256
_ITEMS_PER_STEP: Final = 8

_MAX_TEMPLATE_CHARACTERS: Final = 1 << 18
"""A hundred times a usual template; Python compiles without interruption."""
MAX_CHARACTERS: Final = 1 << 26
"""Length of one text; a prompt is shorter, since request bodies are."""
_MAX_ITEMS: Final = 1_000_000
MAX_OWN_ITEMS: Final = 100_000
"""Length of a list to which a template adds."""
_MAX_WORKED_ITEMS: Final = 250_000
_MAX_WORKED_CHARACTERS: Final = 1 << 22
"""Length of all texts in a function that does more than search or copy."""
_MAX_INTEGER_BITS: Final = 4096
_MAX_WIDTH: Final = 100_000
"""Length of a padded text."""
_MAX_STRFTIME_CHARACTERS: Final = 1 << 14
_MAX_FIELDS: Final = 100_000
_NUMBER_CHARACTERS: Final = 1300
"""Length of the longest printed number."""
_LIGHT_CHARACTERS: Final = 4096
_SLOW_KEY_ITEMS: Final = 100
"""A template can find many tuples or large numbers with one hash."""
_KEY_BITS: Final = 60
_ITEMS_COPIED_AT_ONCE: Final = 8

_FORMAT_FIELD = re.compile(r":[^{}:]*[{}]")
_PERCENT_FIELD = re.compile(r"%[-+ #\d.]*\*?|\)[-+ #\d.]*")
_CONTAINERS: Final[Any] = (list, tuple, *(type(getattr({}, view)()) for view in ("keys", "values", "items")))
_PLAIN: Final = frozenset({str, int, list, dict})
_LIGHT: Final = frozenset({bool, float, type(None), jinja2.Undefined})


def _names(text: str) -> Set[str]:
    return frozenset(text.split())


_DICT_METHODS: Final = frozenset(dir(dict))
_LOOP_FACTS: Final = _names("first index index0 last length")
_JINJAS_OWN: Final = _names("_block_vars _loop_vars")
_TEST_OF_OPERATOR: Final = {"gteq": "ge", "lteq": "le", "notin": "not in"}
_COMPARISONS: Final = _names("eq ne lt le gt ge == != < <= > >= equalto")
_TAKES_LONG_TEXTS: Final = _COMPARISONS | _names(
    "count endswith find index join lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
    "rsplit rstrip split startswith string strip trim"
)
"""Methods of texts, filters and tests that cost no more than a copy."""
_TAKES_WIDTHS: Final = _names("batch center indent ljust rjust round slice tojson truncate zfill")
_LOOKS_AT: Final = {
    **dict.fromkeys(_names("clear copy items keys popitem reverse values append insert"), 0),
    **dict.fromkeys(_names("get pop setdefault"), 1),
}
"""Methods of lists and dicts that look at no member, and how many arguments they look at."""
_SHALLOW_FILTERS: Final = _names("attr batch items list map random reject rejectattr reverse select selectattr slice")
_FORMATS: Final = _names("format divisibleby even odd")
"""A short text makes a long one."""
_SLOW_FILTERS: Final = _names("groupby max min title unique wordcount")
"""Each character of a text costs what an item of a list does."""
_PRODUCTS: Final = _names("lstrip rfind rindex rpartition rsplit rstrip strip trim")
"""Each character of a text may be compared with each of the argument."""
_CHARACTERS_COMPARED_AT_ONCE: Final = 16
_LIGHT_FILTERS: Final = _names("count d default first last length")
_NEEDLESS_FILTERS: Final = _names("pprint striptags urlize wordwrap xmlattr")
_LIGHT_TESTS: Final = _names(
    "boolean callable defined escaped false float integer iterable mapping none number sameas sequence string true "
    "undefined"
)
_NEEDLESS_METHODS: Final = _names("encode expandtabs to_bytes translate")
"""Methods that make bytes, or texts far longer."""
_CHANGES: Final[Mapping[type, Set[str]]] = {
    list: _names("append clear extend insert pop remove reverse sort"),
    dict: _names("clear pop popitem setdefault update"),
}


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(slots=True)
class _Steps:
    num_left: int
    next_look: float = math.inf


_steps: ContextVar[_Steps] = ContextVar("template_steps", default=_Steps(1 << 62))  # noqa: B039  # never runs out


@contextmanager
def bounded_steps(max_steps: int) -> Iterator[None]:
    """Raises SecurityError after `max_steps` in the block."""
    token = _steps.set(_Steps(max_steps))
    try:
        yield
    finally:
        _steps.reset(token)


def _spend(count: int = 1) -> None:
    steps = _steps.get()
    steps.num_left -= count
    if steps.num_left < steps.next_look:
        if steps.num_left < 0:
            raise SecurityError("the model's chat template does not come to an end")
        steps.next_look = max(steps.num_left - _STEPS_PER_LOOK, 0)
        stop_if_abandoned()


def _spend_on(result: Any) -> Any:
    count = 1
    if type(result) is str:
        count += len(result) // _CHARACTERS_PER_STEP
    elif isinstance(result, (list, tuple, dict)):  # this is the quickest way to ask
        count += len(result)
    elif type(result) is int:
        _bound(result.bit_length(), _MAX_INTEGER_BITS)
    _spend(count)
    return result


def _bound(count: int, most: int) -> None:
    if count > most:
        raise SecurityError("the model's chat template makes a text, a list or a number that is too long")


# ---------------------------------------------------------------------------------------------------------- weights


class _Weight(NamedTuple):
    """What Python traverses in a value; repeated parts count again."""

    num_items: int = 0
    num_characters: int = 0
    depth: int = 0

    def spend(self) -> None:
        _spend(self.num_items // _ITEMS_PER_STEP + self.num_characters // _CHARACTERS_PER_STEP)


def _weigh(*values: Any) -> _Weight:
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
                if num_items <= _MAX_WORKED_ITEMS:
                    inner += part
            elif isinstance(part, int):
                _bound(part.bit_length(), _MAX_INTEGER_BITS)
                num_items += _SLOW_KEY_ITEMS if part.bit_length() > _KEY_BITS else 0
            elif isinstance(part, range):
                num_items += len(part)
            elif isinstance(part, Namespace):
                num_items += 1
                inner.append(part._Namespace__attrs)
        _bound(num_items, _MAX_WORKED_ITEMS)
        level, depth = inner, depth + 1
    _bound(num_characters, MAX_CHARACTERS)
    return _Weight(num_items, num_characters, depth)


def _is_light(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return len(value) <= _LIGHT_CHARACTERS
    return kind in _LIGHT or (kind is int and abs(value) <= _LIGHT_CHARACTERS)


def _weighed(value: Any) -> Any:
    if not (_is_light(value) or (type(value) is int and value.bit_length() <= _KEY_BITS)):
        _weigh(value).spend()
    return value


def _drawn(values: Iterable[Any]) -> list[Any]:
    return [list(_drawing(value)) if isinstance(value, Iterator) else value for value in values]


def _drawing(items: Iterator[Any]) -> Iterator[Any]:
    for count, item in enumerate(items):
        _bound(count, _MAX_ITEMS)
        _spend()
        yield item


def _weigh_key(container: Any, *key: Any) -> _Weight:
    """The weight of finding a key: for some types, all keys may share a hash."""
    weight = _weigh(*key)
    is_slow = isinstance(container, dict) and weight.num_items > 0
    return weight._replace(num_items=weight.num_items + len(container)) if is_slow else weight


def _weigh_search(item: Any, container: Any) -> _Weight:
    if isinstance(container, str):
        return _Weight(0, len(container))
    weight = _weigh_key(container, item)
    if not isinstance(container, list | tuple):
        return weight if isinstance(container, dict) else _weigh(item, container)
    _bound(len(container) * (weight.num_items + weight.num_characters // 256), _MAX_ITEMS)
    return _Weight(len(container) * (1 + weight.num_items), len(container) * weight.num_characters)


def _check_call(function: Any, args: Sequence[Any], named: Sequence[Any]) -> _Weight:
    """A call's weight; refuses a too long text."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, dict | list) and name in _LOOKS_AT:
        return _weigh_key(owner, *args[: _LOOKS_AT[name]])
    if name == "join" and args:
        owner, args = args[0], (owner, *args[1:])
    return _check(name, owner, [*args, *named])


def _check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Weight:
    # `old` before `new`, however they are named.
    value, rest = args[0], [*args[1:], *(kwargs[key] for key in sorted(kwargs, key="old".__ne__))]
    if name in _SHALLOW_FILTERS:
        num_items = len(value) if isinstance(value, Sized) else 0
        _bound(num_items if name == "list" else 0, _MAX_ITEMS)
        _check(name, "", rest)
        return _Weight(num_items if isinstance(value, str | list | tuple | range) else 0)
    if name in _FORMATS and (name == "format" or isinstance(value, str)):
        _check_fields(str(value), "%", _PERCENT_FIELD, rest)
    return _check(name, value, rest)


def _check(name: str, value: Any, rest: Sequence[Any]) -> _Weight:
    """The weight of a function, method, filter or test; refuses a too long result."""
    weight = _weigh(value, *rest)
    if name not in _TAKES_LONG_TEXTS:
        _bound(weight.num_characters, _MAX_STRFTIME_CHARACTERS if name == "strftime_now" else _MAX_WORKED_CHARACTERS)
    widest = max((number for number in rest if isinstance(number, int)), default=0)
    if name in _TAKES_WIDTHS:
        _bound(widest, _MAX_WIDTH)
    match name, rest:
        case "replace", [old, new, *_]:
            text = str(value)
            _bound(len(text) + text.count(str(old)) * len(str(new)), MAX_CHARACTERS)
        case "split" | "rsplit", _ if isinstance(value, str):
            separator = next((argument for argument in rest if isinstance(argument, str) and argument), None)
            _bound(value.count(separator) if separator else len(value) // 2, _MAX_ITEMS)
        case "join", [separator, *_] if isinstance(value, Sized):
            _bound(weight.num_characters + len(value) * len(str(separator)), MAX_CHARACTERS)
        case "indent", _:
            _bound((str(value).count("\n") + 1) * (max(widest, 4) + _weigh(*rest).num_characters), MAX_CHARACTERS)
        case "tojson", _:
            _bound(weight.num_items * weight.depth * (widest + _weigh(*rest).num_characters), MAX_CHARACTERS)
        case "sum", _ if any(isinstance(start, list | tuple) for start in rest):
            _bound(len(value) * weight.num_items // _ITEMS_COPIED_AT_ONCE, _MAX_ITEMS)
    num_items, num_characters, depth = weight
    if name in _SLOW_FILTERS:
        num_items += num_characters
    if name in _PRODUCTS and isinstance(value, str):
        num_characters += len(value) * _weigh(*rest).num_characters // _CHARACTERS_COMPARED_AT_ONCE
    return _Weight(num_items, num_characters, depth)


def _check_fields(text: str, opener: str, field: re.Pattern[str], values: Sequence[Any]) -> None:
    """Refuses a format with a long result or a width from a value; each field could hold all of `values`."""
    num_fields = text.count(opener)
    _bound(num_fields, _MAX_FIELDS)
    fields = field.findall(text)
    _bound(sum(field[-1] in "{*" for field in fields), 0)
    widths = re.findall(r"\d+", " ".join(fields))
    width = max((int(digits) if len(digits) < 7 else MAX_CHARACTERS for digits in widths), default=0)
    _bound(width, _MAX_WIDTH)
    weight = _weigh(*values)
    longest = _NUMBER_CHARACTERS * (1 + weight.num_items // 8) + weight.num_characters
    _bound(num_fields * (width + longest), MAX_CHARACTERS)


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuses `left operator right` if too long; a product of numbers is bounded by what made them."""
    if operator == "%" and isinstance(left, str):
        _check_fields(left, "%", _PERCENT_FIELD, [right])
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _bound(left.bit_length() * max(right, 0), _MAX_INTEGER_BITS)
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        _bound(len(left) + len(right), _MAX_ITEMS)
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(many, str | list | tuple):
                _bound(len(many) * count, MAX_CHARACTERS if isinstance(many, str) else _MAX_ITEMS)


# ------------------------------------------------------------------------------------------------------ environment


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or member, common cases first."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_FACTS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is not str and not _is_light(argument):
            _weigh_key(obj, argument).spend()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's rule, and methods that change the template's own lists."""
        if attr in _CHANGES.get(type(obj), ()):
            return len(obj) < MAX_OWN_ITEMS
        if attr in _NEEDLESS_METHODS and isinstance(obj, str | int):  # `true` is a number too
            return False
        if type(obj) in _PLAIN:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if not isinstance(__obj, (Macro, LoopContext)):
            owner = getattr(__obj, "__self__", None)
            named = [value for name, value in kwargs.items() if name not in _JINJAS_OWN] if kwargs else []
            is_product = bool(args) and getattr(__obj, "__name__", "") in _PRODUCTS
            if type(owner) is not str or named or is_product or not all(map(_is_light, (owner, *args))):
                args = tuple(_drawn(args))
                _check_call(__obj, args, named).spend()
            if type(owner) in _CHANGES and not __self.is_safe_attribute(owner, __obj.__name__, __obj):
                raise SecurityError("the model's chat template adds to a list that is too long")
        return _spend_on(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:
            _bound(len(left) + len(right), MAX_CHARACTERS)
            return _spend_on(left + right)
        if operator not in ("+", "*"):
            _weighed(right)
        _check_operator(operator, left, right)
        return _spend_on(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A bounded `str.format`; None for anything else."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_fields(value.__self__, "{", _FORMAT_FIELD, [*args, *kwargs.values()])
            return str(_spend_on(formatted(*args, **kwargs)))

        return checked

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        gathered, num_characters = list[str](), 0
        for part in parts:
            _spend()
            num_characters += len(part)
            _bound(num_characters, MAX_CHARACTERS)
            gathered.append(part)
        return str(_spend_on("".join(gathered)))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounded().visit(source), *args, **kwargs)


class _Bounded(NodeTransformer):
    """Puts filters and tests of our own in the place of what Jinja compiles to Python that cannot be intercepted."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Each turn of a loop takes a step, whether its condition holds or not."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_filtered("step", nodes.Const(True)), node.test).set_lineno(node.lineno)
        node.body = [nodes.ExprStmt(_filtered("step", nodes.Const(True))).set_lineno(node.lineno), *node.body]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Weighs each side once; a comparison with the template's own text or number is cheap."""
        self.generic_visit(node)
        sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        if any(operand.op in ("in", "notin") for operand in node.ops):
            if any(any(operand.find_all((nodes.Call, nodes.Compare, nodes.Test))) for operand in node.ops[:-1]):
                raise SecurityError("a chat template has no use for `in` in a chain of long comparisons")
            return reduce(nodes.And, map(_tested, sides, node.ops))
        weighed = [operand for operand in sides if not isinstance(operand.expr, nodes.Const)]
        for operand in weighed if len(weighed) > 1 else ():
            operand.expr = _filtered("weighed", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered("~", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered("slice of", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        return nodes.Pair(_filtered("weighed", node.key), node.value)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:  # noqa: N802
        """`autoescape` makes texts longer than their parts."""
        raise SecurityError("a chat template has no use for autoescape")


def _filtered(name: str, value: nodes.Expr, *more: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(more), [], None, None)


def _tested(left: nodes.Compare | nodes.Operand, right: nodes.Operand) -> nodes.Expr:
    name = _TEST_OF_OPERATOR.get(right.op, right.op)
    return nodes.Test(left.expr, name, [right.expr], [], None, None)


def _slice_of(part: Any) -> Any:
    if isinstance(part, (str, list, tuple)):
        _spend(1 + len(part) // (_CHARACTERS_PER_STEP if isinstance(part, str) else _ITEMS_PER_STEP))
    return part


def _shown(value: Any) -> str:
    return value if type(value) is str else str(_weighed(value))


def _is_in(item: Any, container: Any) -> bool:
    """`item in container`, which draws from an iterator no more than Python does."""
    if isinstance(container, Iterator):
        container = map(_weighed, _drawing(container))
    elif not (_is_light(item) and _is_light(container)):
        _weigh_search(item, container).spend()
    _spend()
    return item in container


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    num_own = 1 if hasattr(apply, "jinja_pass_arg") else 0
    is_light = name not in _FORMATS | _SLOW_FILTERS | _SHALLOW_FILTERS | _PRODUCTS

    @wraps(apply)  # keeps what Jinja notes on a filter
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not (is_light and all(map(_is_light, args[num_own:]))):
            if name not in _SHALLOW_FILTERS | _COMPARISONS:
                args = (*args[:num_own], *_drawn(args[num_own:]))
            _check_filter(name, args[num_own:], kwargs).spend()
        return _spend_on(apply(*args, **kwargs))

    return checked


_OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    # A text marked as escaped escapes what it is joined with, which makes it longer than its parts.
    **dict.fromkeys(("e", "escape", "forceescape"), _bounded("e", lambda value: str(escape(str(value))))),
    "safe": _bounded("safe", str),
    "step": _spend_on,
    "slice of": _slice_of,
    "weighed": _weighed,
    "~": lambda *parts: _BoundedEnvironment.concat(map(_shown, parts)),
}


@lru_cache
def _compile(template: str) -> jinja2.Template:
    if len(template) > _MAX_TEMPLATE_CHARACTERS:
        raise SecurityError(f"the model's chat template has {len(template)} characters of {_MAX_TEMPLATE_CHARACTERS}")
    environment = chat_template_utils._cached_compile_jinja_template("").environment
    # The environment is transformers', with its own filters and names; only the way it applies them is replaced.
    environment.__class__ = _BoundedEnvironment
    environment.optimized = False  # constants would be computed in compiling, at any cost
    environment.finalize = _shown
    filters = environment.filters.items()
    environment.filters = {
        name: apply if name in _LIGHT_FILTERS else _bounded(name, apply)
        for name, apply in filters
        if name not in _NEEDLESS_FILTERS
    } | _OWN_FILTERS
    tests = environment.tests.items()
    environment.tests = {name: apply if name in _LIGHT_TESTS else _bounded(name, apply) for name, apply in tests}
    environment.tests |= {"in": _is_in, "not in": lambda *pair: not _is_in(*pair)}
    del environment.globals["lipsum"]
    compiled: jinja2.Template = environment.from_string(template)
    return compiled


chat_template_utils._compile_jinja_template = _compile
