"""The sandbox that chat templates are rendered in: transformers' own, which keeps them from Python, and bounds on it.

A template comes with a model that anyone may have made. transformers renders it in Jinja's immutable sandbox, where
it reaches no attribute that begins with `_` and no file. Two things are changed here, for all templates of a process.

*Own lists.* Some models' templates gather what they show in a list (`{% set _ = shown.append(x) %}`). The sandbox
forbids it since a template could change what it was given. Here it cannot: transformers copies messages, tools and
arguments anew for every rendering, so all that a template can reach is its own.

*Bounds.* Nothing keeps a template from `{% for a in r %}{% for b in r %}` or `'a' * 10 ** 10`. So each turn of a
loop, call and filter costs steps, of which a rendering has `MAX_STEPS`; what would be too long is refused before it
is made (`template_sizes`); and nothing is evaluated while a template is compiled. A rendering that nobody waits for
ends.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from models.prompt import template_sizes
from models.prompt.abandonment import stop_if_abandoned

MAX_OWN_ITEMS: Final = 100_000
"""As long as the longest range that the sandbox makes."""
MAX_STEPS: Final = 3_000_000
"""Of one rendering: about ten seconds. 4 000 messages take a sixth of them."""
MAX_SAMPLE_STEPS: Final = 20_000
"""Of the rendering of a few short messages."""
_STEPS_PER_LOOK: Final = 4096
_CHARACTERS_PER_STEP: Final = 256
_ITEMS_PER_STEP: Final = 8
"""Of a list that a filter goes through."""

_CHANGES: Final[Mapping[type, frozenset[str]]] = {
    list: frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}),
    dict: frozenset({"clear", "pop", "popitem", "setdefault", "update"}),
}


class _Steps:
    """What a rendering may still do."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        self._next_look = num_left - _STEPS_PER_LOOK

    def spend(self, count: int) -> None:
        """Raises SecurityError if there are not so many steps left, and Abandoned where nobody waits any more."""
        self._num_left -= count
        if self._num_left < 0:
            raise SecurityError("the model's chat template does not come to an end")
        if self._num_left < self._next_look:
            self._next_look = self._num_left - _STEPS_PER_LOOK
            stop_if_abandoned()


_steps: ContextVar[_Steps | None] = ContextVar("template_steps", default=None)


@contextmanager
def bounded_steps(max_steps: int) -> Iterator[None]:
    """Within, what a template does counts: SecurityError ends it after `max_steps`."""
    token = _steps.set(_Steps(max_steps))
    try:
        yield
    finally:
        _steps.reset(token)


def _spend(count: int = 1) -> None:
    steps = _steps.get()
    if steps is not None:
        steps.spend(count)


def _spend_on(result: Any) -> Any:
    """Returns what was made, after counting it."""
    steps = _steps.get()
    if steps is None:
        return result
    if isinstance(result, str):
        steps.spend(1 + len(result) // _CHARACTERS_PER_STEP)
    elif isinstance(result, (list, tuple, dict)):  # this is the quickest way to ask
        steps.spend(1 + len(result))
    else:
        steps.spend(1)
    return result


def _take_step() -> bool:
    _spend()
    return True


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with bounds and lists of the template's own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    optimized = False
    """A constant would be computed while the template is compiled, whatever it takes."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may use an attribute: as the sandbox says, and what changes its own lists."""
        if attr in _CHANGES.get(type(obj), ()):
            return len(obj) < MAX_OWN_ITEMS
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls what a template calls."""
        if __obj is _take_step:
            return _take_step()
        template_sizes.check_call(__obj, args, kwargs)
        return _spend_on(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Returns what an operator makes of two values."""
        template_sizes.check_operator(operator, left, right)
        return _spend_on(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a bounded `str.format`; None for anything else."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text = value.__self__

        @wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:
            template_sizes.check_format(text)
            return str(_spend_on(formatted(*args, **kwargs)))

        return checked

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Returns the text of an output, a macro or a block."""
        return str(_spend_on(template_sizes.joined(parts, _spend)))

    @property
    def take_step(self) -> Callable[[], bool]:
        """What a template calls in each turn of a loop."""
        return _take_step

    @staticmethod
    def concat_texts(*parts: Any) -> str:
        """Returns what `~` makes of values."""
        return template_sizes.joined(map(str, parts), _spend)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Counted().visit(source), name, filename, defer_init)


class _Counted(NodeTransformer):
    """Has each turn of a loop take a step, whether its condition holds or not, and bounds what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Returns the loop with a step at the head of its body, and in its condition."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("take_step", []), node.test).set_lineno(node.lineno)
        node.body = [nodes.ExprStmt(_call("take_step", [])).set_lineno(node.lineno), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        """Returns the call that joins the same values."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concat_texts"), node.nodes, [], None, None, lineno=node.lineno)


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that checks what it is asked to make, and counts it."""
    num_own = 1 if hasattr(apply, "jinja_pass_arg") else 0

    @wraps(apply)  # which keeps what Jinja notes on a filter
    def checked(*args: Any, **kwargs: Any) -> Any:
        template_sizes.check_filter(name, args[num_own:], kwargs)
        if len(args) > num_own and isinstance(args[num_own], list | tuple | range):
            _spend(len(args[num_own]) // _ITEMS_PER_STEP)
        return _spend_on(apply(*args, **kwargs))

    return checked


@lru_cache
def _compile(template: str) -> jinja2.Template:
    """Returns a compiled chat template, as transformers' function of this purpose does."""
    environment = chat_template_utils._cached_compile_jinja_template("").environment
    # The environment is transformers', with its own filters and names; only what it does about them is replaced.
    environment.__class__ = BoundedEnvironment
    environment.optimized = False
    environment.filters = {name: _bounded(name, apply) for name, apply in environment.filters.items()}
    del environment.globals["lipsum"]
    compiled: jinja2.Template = environment.from_string(template)
    return compiled


chat_template_utils._compile_jinja_template = _compile
