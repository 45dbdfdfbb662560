"""A chat template comes from a stranger: it reaches nothing of Python, comes to an end, and takes little memory."""

import copy
import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from models.names import DEMO_FOLDER
from models.prompt import chat_template, template_sandbox
from models.prompt.chat_template import ChatRenderer, ChatTemplateError
from models.prompt.tokenize import Abandoned, PromptParts, abandoned_when
from tests.support import tiny_models

ASK = {"role": "user", "content": "hello"}


@cache
def parts() -> PromptParts | None:
    tokenizer = tiny_models.tokenizer()
    return chat_template._parts_of(tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder, "")


@pytest.fixture(autouse=True)
def tokenizer_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are asked for their text alone: all share one tokenizer, whose cut places are tried once."""
    shared = parts()
    monkeypatch.setattr(chat_template, "_parts_of", lambda *_: shared)


def render(template: Any, *messages: dict[str, Any], **arguments: Any) -> str:
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer).render(messages or [ASK], template_kwargs=arguments).text


def render_once(template: str) -> str:
    """Returns what a template shows, which is not tried on samples first."""
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = template
    return chat_template._apply(tokenizer, [ASK], None, generation_prompt=True)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('__cl' ~ 'ass__')|attr('__mro__') }}",
    "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list | first | list }}",
    "{{ [''] | map('attr', '__class__') | map('attr', '__mro__') | list | first | list }}",
    "{{ [{'a': 1}] | groupby('__class__.__mro__') | list | first | first | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "{{ ('{0.__class__.__mro__}' | string).format('') }}",
    "{{ ''.format.__self__.__class__.__base__.__subclasses__() }}",
    "{{ [''.format] | map('attr', '__globals__') | list | first | list }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ raise_exception.__globals__.json }}",
    "{{ self.__init__.__globals__ | list }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ | list }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ | list }}",
    "{% macro m() %}{{ caller.__init__.__globals__ | list }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
    "{{ undefined_name.__class__.__mro__ | list }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}{{ x }}",
    "{% extends '/etc/passwd' %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ environment.from_string('x') }}",
    "{% for x in [].__iter__() %}{{ x }}{% endfor %}",
    "{% do messages %}",
    "{{ take_step.__globals__ | list }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(template: str) -> None:
    try:
        shown = render(template)
    except ChatTemplateError:
        return
    # What is forbidden may also be undefined, which is shown as nothing and is no list of anything.
    assert shown in ("", "[]")


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ ''.__class__ }}", ""),
        ("{{ messages[0].content.__len__ }}", ""),
        ("{{ messages[0]['__class__'] }}", ""),
        ("{{ environment }}{{ context }}{{ os }}", ""),
        ("{{ messages[0].get('__class__') }}", "None"),
    ],
)
def test_what_is_forbidden_is_not_there(template: str, shown: str) -> None:
    assert render(template) == shown


ENDLESS = [
    "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{% set r = range(100000) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "{% set r = range(100000) %}{% for a in r %}{% set x = r | sum %}{% set y = r | list %}{% endfor %}",
    "{% set r = range(100000) | list %}{{ ([r] * 100000) | map('join') | list | length }}",
    "{% set r = range(100000) | list %}{{ ([r] * 100000) | map('list') | list | length }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set l = ['a'] %}{% for i in range(99) %}{% set _ = l.extend(l) %}{% endfor %}",
    "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s.translate({97: ns.s}) %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='a\\na') %}{% for i in range(99) %}{% set ns.s = ns.s | indent(ns.s) %}{% endfor %}",
    "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "{% set x = 'a' * 4000 %}{% set y = 'b' * 4000 %}{% for i in range(500) %}{% set _ = x.strip(y) %}{% endfor %}",
    "{% set x = 'a' * 4000 %}{% set y = 'b' * 4000 %}{% for i in range(500) %}{% set _ = x | trim(y) %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% set l = [] %}{% for i in range(9999) %}{% set _ = l.append(x ~ i) %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_comes_to_an_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100_000)
    with pytest.raises(ChatTemplateError, match=r"does not come to an end|too long|recursion|unsafe|not safely"):
        render(template)


GIANTS = [
    "{{ 10 ** (10 ** 8) }}",
    "{{ (10 ** 9) ** (10 ** 9) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * 'a' }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ (0,) * 10 ** 10 }}",
    "{{ range(10 ** 9) | list }}",
    "{{ range(10 ** 9) | length }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a'.rjust(width=10 ** 10) }}",
    "{{ 'a'.center(10 ** 10, 'b') }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ ('\\t' * 1000).expandtabs(10 ** 9) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a\nb' | indent(10 ** 10) }}",
    "{{ 'a' | indent(width=10 ** 10, first=true) }}",
    "{{ {'a': 1} | tojson(indent=10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{{ [1] | slice(10 ** 10) | list }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%(x)10000000000d' % {'x': 1} }}",
    "{{ '%.10000000000f' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ '{0:>{w}}'.format(1, w=10 ** 10) }}",
    "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{{ lipsum(n=10 ** 8) }}",
    "{{ ([range(100000) | list] * 100000) | sum(start=[]) | length }}",
]


@pytest.mark.parametrize("template", GIANTS)
def test_nothing_giant_is_made(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(template)


DOUBLED = (
    "{% set ns = namespace(x=['a'], y=['a'], t=('a',), d={'k': 1}) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% endfor %}"
)
USES_OF_ALL = [
    "{{ ns.x == ns.y }}",
    "{{ ns.x < ns.y }}",
    "{{ ns.x <= ns.y < ns.x }}",
    "{{ ns.x in [ns.y] }}",
    "{{ ns.x not in [ns.y] }}",
    "{{ ns.x }}",
    "{{ ns }}",
    "{{ ns.x ~ 'a' }}",
    "{{ ns.x | string }}",
    "{{ ns.d | tojson }}",
    "{{ [ns.x, ns.y] | sort }}",
    "{{ [ns.x, ns.y] | min }}",
    "{{ [ns.t, ns.t] | unique | list }}",
    "{{ [{'a': ns.x}, {'a': ns.y}] | groupby('a') }}",
    "{{ [ns.x] | select('eq', ns.y) | list | length }}",
    "{{ {ns.t: 1} }}",
    "{{ {'a': 1}[ns.t] }}",
    "{{ {'a': 1}.get(ns.t) }}",
    "{{ messages[0][ns.x].foo }}",
    "{{ '%s' % ns.x }}",
    "{{ '{}'.format(ns.x) }}",
    "{{ [ns.x].index(ns.y) }}",
    "{% set l = [ns.x, ns.y] %}{% set _ = l.sort() %}",
    "{{ ns.x is eq ns.y }}",
    "{{ {'a': 1}.keys() - [ns.t] }}",
    "{{ raise_exception(ns.x) }}",
    "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(ns.x) }}",
    "{% for x in [ns.x, ns.y] %}{{ loop.changed(x) }}{% endfor %}",
    "{% set z = namespace(unsafe_callable=1, v=ns.x) %}{{ z() }}",
    "{{ ns.d.items() }}",
]


@pytest.mark.parametrize("use", USES_OF_ALL)
def test_a_part_that_stands_in_many_places_counts_in_each(use: str) -> None:
    with pytest.raises(ChatTemplateError, match="too long"):
        render_once(DOUBLED + use)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ([[1] * 20] * 20000) | sum(start=[]) | length }}",
        "{{ ('\ufb03' * 60000000).upper() | length }}",
        "{{ ('a ' * 30000000).split() | length }}",
        "{{ ('f' * 60000) | int(base=16) }}",
        "{{ '%1000000000d' is even }}",
        "{{ 'a'.encode() * 10 ** 10 }}",
        "{{ [1, 2] | tojson(separators=('a' * 60000000, ':')) }}",
        "{% set l = [1] %}{% set f = l.extend %}{% for i in range(40) %}{% set _ = f(l) %}{% endfor %}",
        "{% set b = 'a' * 6000000 %}{% set c = b ~ 'b' %}{{ c in [b ~ 'c'] * 1000000 }}",
        "{{ ('%(a)s' * 1000000) % {'a': 'b' * 4000000} }}",
        "{{ ('%(a)s' * 100) % {'a': 'b' * 4000000} }}",
        "{{ ('%99999d' * 40000) % 1 }}",
        "{{ '%.999999999d' % 1 }}",
        "{{ ('%' ~ '0' * 4000000) % 1 }}",
        "{{ true.to_bytes(3000000000, 'big') | length }}",
        "{{ range(50000) | list | replace(',', 'y' * 40000) | length }}",
        "{{ {'a': 'x' * 50000} | replace('x', 'y' * 40000) | length }}",
        "{{ ('1' * 50000) | replace(1, 'y' * 40000) | length }}",
        "{{ ('1' * 50000) | replace(new='y' * 40000, old='1') | length }}",
        "{{ '%(a)999999999d' % {'a': 1} }}",
        "{{ ('{0:99999}' * 10000).format(1) }}",
        "{{ ('{:99999}' * 40000).format(*([1] * 40000)) }}",
        "{{ '{0[}]:999999999}'.format({'}': 1}) }}",
        "{{ '{0::>999999999}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 999999999) }}",
        "{{ ('{' + 'a' * 4000000).format(1) }}",
        "{{ ('%(a' * 40000 + 'a' * 4000000) % {'a': 1} }}",
        "{% set d = {} %}{% for i in range(60000) %}{% set _ = d.setdefault(i * (2 ** 61 - 1)) %}{% endfor %}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% autoescape true %}{{ '<' * 9 }}{% endautoescape %}",
        " " * 300_000,
    ],
)
def test_no_single_work_is_long(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_once(template)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("(x < ", " < x)"), ("(x in ", " in x)"), ("[x == ", " not in x]"), ("f(x in ", " == x)")],
)
def test_chains_of_comparisons_inside_each_other_do_not_make_a_template_longer(opening: str, closing: str) -> None:
    def num_nodes(depth: int) -> int:
        node = environment.parse("{% if " + opening * depth + "y" + closing * depth + " %}{% endif %}")
        try:
            return sum(1 for _ in template_sandbox._Bounded().visit(node).find_all(nodes.Node))
        except SecurityError:
            return 0

    environment = template_sandbox._compile("").environment
    assert num_nodes(9) - num_nodes(8) == num_nodes(5) - num_nodes(4)


@pytest.mark.parametrize(
    "use",
    ["title", "wordcount", "min", "max", "unique", "groupby(0)", "reject('string') | list", "select('none') | first"],
)
@pytest.mark.parametrize("times", [1000, 100_000])
def test_work_in_python_on_each_character_of_a_text_takes_steps(use: str, times: int) -> None:
    compiled = template_sandbox._compile("{% set x = text | " + use + " %}")
    text = "ab \n" * times
    with template_sandbox.bounded_steps(len(text)):
        compiled.render(text=text)
    with template_sandbox.bounded_steps(len(text) // 32), pytest.raises(SecurityError, match="come to an end"):
        compiled.render(text=text)


def test_what_a_template_is_given_counts_too() -> None:
    template = "{{ {'a': 1} | tojson(indent=width) }}{{ 'a' * times }}"
    with pytest.raises(ChatTemplateError, match="too long"):
        render(template, width=10**10, times=1)
    with pytest.raises(ChatTemplateError, match="too long"):
        render(template, width=1, times=10**10)
    assert render(template, width=1, times=3) == '{\n "a": 1\n}aaa'


def test_a_rendering_ends_when_nobody_waits() -> None:
    calls = iter([False, False, True])
    template = "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    with abandoned_when(lambda: next(calls)), pytest.raises(Abandoned):
        render(template)


def test_long_conversations_of_known_models_are_far_from_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", template_sandbox.MAX_STEPS // 6)
    template = (DEMO_FOLDER / "chat_template.jinja").read_text()
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"text {n} " * 20} for n in range(4001)]
    assert "text 4000" in render(template, *talk)


WORKING = [
    ("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}", "a1None[2]"),
    ("{{ 2 + 3 * 4 - 5 % 3 }} {{ 2 ** 10 }} {{ 'a' * 3 + 'b' }} {{ [1] + [2] }}", "12 1024 aaab [1, 2]"),
    ("{{ ('-' * 5000).join(['a' * 9000, 'b' * 9000]) | length }}", "23000"),
    ("{{ '%s=%05.1f' % ('x', 2) }} {{ '%d %%' | format(7) }}", "x=002.0 7 %"),
    ("{{ '{:>5}|{:,}|{x}'.format(1, 1700000000, x='y') }}", "    1|1,700,000,000|y"),
    ("{{ 1700000000000 | default(0) | string | length }}", "13"),
    ("{% for x in [1, 2, 3] if x > 1 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}", "1223"),
    ("{% for x in [] if x %}{% else %}none{% endfor %}", "none"),
    ("{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% break %}{% endfor %}", "a1"),
    ("{% set l = [] %}{% for x in [1, 2] %}{% set _ = l.append(x) %}{% endfor %}{{ l | join(',') }}", "1,2"),
    (
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
        "{{ m(1) }}{% call m(3) %}c{% endcall %}",
        "1232c",
    ),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ("{{ [3, 1] | sort | map('string') | list | tojson }} {{ 'a\nb' | indent(2) }}", '["1", "3"] a\n  b'),
    ("{{ 'x' if messages | selectattr('role', 'equalto', 'user') | list }}", "x"),
    ("{% generation %}g{% endgeneration %}", "g"),
    (
        "{% set g = ['a', 'b'] | map('upper') %}{{ g == 1 }}{{ g != messages }}{{ g is eq [g] }}{{ g | join }}",
        "FalseTrueFalseAB",
    ),
    ("{% set g = [1, 2, 3] | map('abs') %}{{ 2 in g }}{{ g | join }}", "True3"),
    ("{% set g = [1, 2] | map('abs') %}{{ g in [g] }}{{ g not in [[1, 2]] }}{{ g | join }}", "TrueTrue12"),
    ("{% set l = [1, 3, 2] %}{{ 0 < l.pop() < l.pop() }}{{ l }}{{ 2 < 1 < missing.x }}", "True[1]False"),
    ("{% set l = [1] %}{{ 1 in l == true }}{{ 1 in l in [l] }}{{ 2 not in l != [2] }}", "FalseTrueTrue"),
    ("{% for n in [[1, [2]]] recursive %}{{ n[0] }}{% endfor %}", "1"),
]


@pytest.mark.parametrize(("template", "shown"), WORKING)
def test_all_else_is_rendered_as_ever(template: str, shown: str) -> None:
    assert render(template) == shown


@pytest.mark.parametrize("file", ["processor_config.json", "chat_template.json"])
def test_a_template_of_a_processor_is_in_the_same_sandbox(file: str, tmp_path: Path) -> None:
    from models.loader import load

    folder = tiny_models.write("llama", tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ ''.__class__.__mro__ }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps({"chat_template": "{{ ''.__class__.__mro__ }}"}))
    with pytest.raises(ChatTemplateError):
        ChatRenderer(load(folder, "x").tokenizer_wrapper).render([ASK])


def test_many_threads_render_at_once_each_with_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = "{% for x in range(400) %}{% endfor %}{{ messages[0].content }}"
    renderer, texts = ChatRenderer(tokenizer), list[str]()
    assert {renderer.render([ASK]).text for _ in range(20)} == {"hello"}, "each rendering has all its steps"
    threads = [threading.Thread(target=lambda: texts.append(renderer.render([ASK]).text)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert texts == ["hello"] * 20
