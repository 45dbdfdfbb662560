"""The sandbox of chat templates: transformers' own, which keeps them from Python, and bounds on it.

Two things of Jinja's immutable sandbox change for all templates of a process. A template may gather what it shows in
a list, since transformers copies all that it can reach. Each turn of a loop, call and filter costs one of
`MAX_STEPS`; what would be too long is refused before it is made. A value that an operation goes through at once is
weighed first: the operation cannot be stopped, and holds Python's lock. All raise jinja2's SecurityError.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape
from transformers.utils import chat_template_utils

from models.prompt.tokenize import stop_if_abandoned

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


MAX_OWN_ITEMS: Final = 100_000
"""Length of a range that the sandbox makes."""
MAX_STEPS: Final = 3_000_000
"""Steps of one rendering: about ten seconds, six times what 4 000 messages take."""
MAX_SAMPLE_STEPS: Final = 20_000
_STEPS_PER_LOOK: Final = 4096
_CHARACTERS_PER_STEP: Final = 256
_ITEMS_PER_STEP: Final = 8

MAX_TEMPLATE_CHARACTERS: Final = 1 << 18
"""A hundred times a usual template; Python compiles without interruption."""
_FEW: Final = 256
_LIGHT_CHARACTERS: Final = 4096
_LIGHT: Final = frozenset({bool, float, type(None), jinja2.Undefined})
_COMPARISONS: Final = {"gteq": "ge", "lteq": "le"}
_PLAIN: Final = frozenset({str, int, list, dict})
_NEEDLESS_METHODS: Final = frozenset({"encode", "expandtabs", "to_bytes", "translate"})
"""Methods that make bytes, or texts far longer."""
_DICT_METHODS: Final = frozenset(dir(dict))
_LOOP_FACTS: Final = frozenset({"first", "index", "index0", "last", "length"})
_JINJAS_OWN: Final = frozenset({"_block_vars", "_loop_vars"})
_LIGHT_FILTERS: Final = frozenset({"count", "d", "default", "first", "last", "length"})
_NEEDLESS_FILTERS: Final = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
_LIGHT_TESTS: Final = frozenset(
    {
        *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
        *("number", "sameas", "sequence", "string", "true", "undefined"),
    }
)

_CHANGES: Final[Mapping[type, frozenset[str]]] = {
    list: frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}),
    dict: frozenset({"clear", "pop", "popitem", "setdefault", "update"}),
}


class _Steps:
    def __init__(self, num_left: float) -> None:
        self._num_left = num_left
        self._next_look = num_left - _STEPS_PER_LOOK

    def spend(self, count: int) -> None:
        self._num_left -= count
        if self._num_left < 0:
            raise SecurityError("the model's chat template does not come to an end")
        if self._num_left < self._next_look:
            self._next_look = self._num_left - _STEPS_PER_LOOK
            stop_if_abandoned()


_steps: ContextVar[_Steps] = ContextVar("template_steps", default=_Steps(math.inf))  # noqa: B039  # this one never runs out


@contextmanager
def bounded_steps(max_steps: int) -> Iterator[None]:
    """Raises SecurityError after `max_steps` in the block."""
    token = _steps.set(_Steps(max_steps))
    try:
        yield
    finally:
        _steps.reset(token)


def _spend(count: int = 1) -> None:
    _steps.get().spend(count)


def _spend_on(result: Any) -> Any:
    count = 1
    if type(result) is str:
        count += len(result) // _CHARACTERS_PER_STEP
    elif isinstance(result, (list, tuple, dict)):  # this is the quickest way to ask
        count += len(result)
    elif type(result) is int:
        bound(result.bit_length(), MAX_INTEGER_BITS)
    _spend(count)
    return result


def _spend_for(weight: Weight) -> None:
    _spend(weight.num_items // _ITEMS_PER_STEP + weight.num_characters // _CHARACTERS_PER_STEP)


def _are_light(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is str:
            if len(value) > _LIGHT_CHARACTERS:
                return False
        elif kind not in _LIGHT and (kind is not int or abs(value) > _LIGHT_CHARACTERS):
            return False
    return True


def _weighed(value: Any) -> Any:
    if not _are_light((value,)):
        _spend_for(weigh(value))
    return value


def _drawn(values: Iterable[Any]) -> list[Any]:
    return [list(_drawing(value)) if isinstance(value, Iterator) else value for value in values]


def _drawing(items: Iterator[Any]) -> Iterator[Any]:
    for count, item in enumerate(items):
        bound(count, MAX_ITEMS)
        _spend()
        yield item


def _take_step() -> bool:
    _spend()
    return True


class _BoundedCode(CodeGenerator):
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """A comparison with the template's own text or number is cheap."""
        (first, *more), left = node.ops, node.expr
        if more:
            pairs = nodes.Compare(left, [first]), nodes.Compare(first.expr, more)
            self.visit(nodes.And(*pairs).set_lineno(node.lineno), frame)
        elif first.op not in ("in", "notin") and isinstance(left, nodes.Const) | isinstance(first.expr, nodes.Const):
            super().visit_Compare(node, frame)
        else:
            if first.op in ("in", "notin"):
                self.write("(not " if first.op == "notin" else "(")
                self._ask("contains(", first.expr, frame, left)
                self.write(")")
            else:
                self._ask(f"compare({first.op!r}, ", left, frame, first.expr)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write(f"environment.{node.node.name}()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._ask("concat_texts(", node.nodes[0], frame, *node.nodes[1:])

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        sliced = isinstance(node.arg, nodes.Slice)
        self.write("environment.sliced(" if sliced else "")
        super().visit_Getitem(node, frame)
        self.write(")" if sliced else "")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for item in node.items:
            self._ask("weighed(", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:  # noqa: N802
        """`autoescape` makes texts longer than their parts."""
        self.fail("a chat template has no use for autoescape", node.lineno)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.shown(")

    def _ask(self, call: str, first: nodes.Expr, frame: Frame, *more: nodes.Expr) -> None:
        self.write(f"environment.{call}")
        self.visit(first, frame)
        for node in more:
            self.write(", ")
            self.visit(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment, with bounds."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    code_generator_class = _BoundedCode
    weighed = staticmethod(_weighed)
    take_step = staticmethod(_take_step)
    optimized = False
    """Off, since constants would be computed in compiling, at any cost."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or member, common cases first."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_FACTS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

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
        """Calls what a template calls."""
        if isinstance(__obj, (Macro, LoopContext)):
            return _spend_on(super().call(__context, __obj, *args, **kwargs))
        owner = getattr(__obj, "__self__", None)
        named = [value for name, value in kwargs.items() if name not in _JINJAS_OWN] if kwargs else []
        if type(owner) is not str or named or not _are_light((owner, *args)):
            args = tuple(_drawn(args))
            _spend_for(check_call(__obj, args, named))
        if type(owner) in _CHANGES and not __self.is_safe_attribute(owner, __obj.__name__, __obj):
            raise SecurityError("the model's chat template gathers a list that is unsafe to add to: it is too long")
        return _spend_on(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator's result."""
        if operator == "+" and type(left) is type(right) is str:
            bound(len(left) + len(right), MAX_CHARACTERS)
            return _spend_on(left + right)
        if operator not in ("+", "*"):
            _weighed(right)
        check_operator(operator, left, right)
        return _spend_on(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A member."""
        if type(argument) is not str and not _are_light((argument,)):
            _spend_for(weigh_key(obj, argument))
        return super().getitem(obj, argument)

    @staticmethod
    def contains(container: Any, item: Any) -> bool:
        """Whether a container holds an item."""
        is_quick = type(container) is dict or len(container) < _FEW if type(container) in _PLAIN else False
        if not is_quick or not _are_light((item,)):
            (container,) = _drawn([container])
            _spend_for(check_contains(container, item))
        return item in container

    @staticmethod
    def compare(name: str, left: Any, right: Any) -> Any:
        """A comparison's result."""
        # Both sides are traversed together, so the smaller one bounds the work.
        if not _are_light((right,)):
            _weighed(left)
        return getattr(operator, _COMPARISONS.get(name, name))(left, right)

    @staticmethod
    def sliced(part: Any) -> Any:
        """Counts a value's part and returns it."""
        if isinstance(part, (str, list, tuple)):
            _spend(1 + len(part) // (_CHARACTERS_PER_STEP if isinstance(part, str) else _ITEMS_PER_STEP))
        return part

    @staticmethod
    def shown(value: Any) -> str:
        """A value as text."""
        return value if type(value) is str else str(_weighed(value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A bounded `str.format`; None for anything else."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text = value.__self__

        @wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(text, *args, *kwargs.values())
            return str(_spend_on(formatted(*args, **kwargs)))

        return checked

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Text of an output, a macro or a block."""
        return str(_spend_on(joined(parts, _spend)))

    @classmethod
    def concat_texts(cls, *parts: Any) -> str:
        """Values joined by `~`."""
        return str(_spend_on(joined(map(cls.shown, parts), _spend)))

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Counted().visit(source), name, filename, defer_init)


class _Counted(NodeTransformer):
    """Each turn of a loop takes a step, whether its condition holds or not."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("take_step", []), node.test).set_lineno(node.lineno)
        node.body = [nodes.ExprStmt(_call("take_step", [])).set_lineno(node.lineno), *node.body]
        return node


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _bounded(name: str, apply: Callable[..., Any], check: Callable[..., Weight]) -> Callable[..., Any]:
    num_own = 1 if hasattr(apply, "jinja_pass_arg") else 0
    formats = name in ("format", "divisibleby", "even", "odd")  # a short text makes a long one
    is_shallow = name in SHALLOW_FILTERS

    @wraps(apply)  # keeps what Jinja notes on a filter
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs or formats or not _are_light(args[num_own:]):
            if not is_shallow:
                args = (*args[:num_own], *_drawn(args[num_own:]))
            _spend_for(check(name, args[num_own:], kwargs))
        return _spend_on(apply(*args, **kwargs))

    return checked


@lru_cache
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise SecurityError(f"the model's chat template has {len(template)} characters of {MAX_TEMPLATE_CHARACTERS}")
    environment = chat_template_utils._cached_compile_jinja_template("").environment
    # The environment is transformers', with its own filters and names; only the way it applies them is replaced.
    environment.__class__ = BoundedEnvironment
    environment.optimized = False
    filters = {name: apply for name, apply in environment.filters.items() if name not in _NEEDLESS_FILTERS}
    # A text marked as escaped escapes what it is joined with, which makes it longer than its parts.
    filters |= dict.fromkeys(("e", "escape", "forceescape"), lambda value: str(escape(str(value)))) | {"safe": str}
    environment.filters = {
        name: apply if name in _LIGHT_FILTERS else _bounded(name, apply, check_filter)
        for name, apply in filters.items()
    }
    environment.tests = {
        name: apply if name in _LIGHT_TESTS else _bounded(name, apply, check_test)
        for name, apply in environment.tests.items()
    }
    del environment.globals["lipsum"]
    compiled: jinja2.Template = environment.from_string(template)
    return compiled


chat_template_utils._compile_jinja_template = _compile
