"""What clients send is rendered by templates of every strictness, in order and complete, and stays put as it grows.

The templates are written for these tests. Each is strict, or forgetful, in a way that templates of known models are.
"""

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import models.prompt.template_sandbox
from models.prompt.chat_template import ChatRenderer, ChatTemplateError
from models.prompt.shapes import SHAPES, Reshape, late_system_in_words, users_joined
from tests.support import tiny_models

PLAIN_CALLS = """\
{%- macro show(m) %}{{ m.content }}{% for c in m.tool_calls or [] %}
<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}{% endmacro %}
"""
TAKES_ALL = """\
{%- for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ show(m) }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES: dict[str, str] = {
    "takes all": PLAIN_CALLS + TAKES_ALL,
    # One system message, at the beginning; arguments gone through one by one; thoughts of old turns dropped.
    "system first, arguments by key": """\
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no query') }}{% endif %}
{%- for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
<call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}</call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}""",
    # Users and assistants in turn, calls and results apart; ids of nine characters.
    "in turn, short ids": PLAIN_CALLS
    + """\
{%- set ns = namespace(n=0) %}{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('only the first may be system') }}{% endif %}
{{- '[SYS]' + m.content + '[/SYS]' }}
{%- else %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}
{%- for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}
{{- raise_exception('ids have nine characters') }}{% endif %}{% endfor %}
{%- if m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('ids have nine characters') }}{% endif %}{% endif %}
{{- '[' + m.role + ']' + show(m) + '</s>' }}{% endif %}{% endfor %}""",
    # No system message at all; roles in turn; no tools.
    "no system": """\
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<turn>' + m.role + ' ' + m.content | trim + '</turn>' }}{% endfor %}
{%- if add_generation_prompt %}<turn>model {% endif %}""",
    # One call in a message.
    "one call": PLAIN_CALLS
    + """\
{%- for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<|{{ 'ipython' if m.role == 'tool' else m.role }}|>{{ show(m) }}<|eot|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # The first call only.
    "the first call": """\
{%- for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # All system messages at the head; arguments taken for a text.
    "system gathered, arguments joined": """\
{%- set ns = namespace(head='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.head = ns.head + '\\n\\n' + m.content %}{% endfor %}
{{- '<bos>' + ns.head }}{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # The first system message counts, others are dropped without a word; arguments as Python writes them.
    "system dropped, arguments as they are": """\
{%- if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}
{%- for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # What is optional in a tool is not here, and a result has a name.
    "tools described": PLAIN_CALLS
    + """\
{%- for t in tools or [] %}{{ '// ' + t.function.description + '\\n' + t.function.name + '(' }}
{%- for k, v in t.function.parameters.properties.items() %}{{ k }}: {{ v.type }}, {% endfor %}){% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}{{ show(m) }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # Gathers what it shows in a list and a dict of its own.
    "gathers": PLAIN_CALLS
    + """\
{%- set shown = [] %}{% set counts = {} %}{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}
{%- for m in messages %}{% set _ = shown.append(m) %}{% set _ = counts.update({m.role: loop.index}) %}{% endfor %}
{%- for m in shown %}<|{{ m.role }}|>{{ show(m) }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
}
WITHOUT_TOOLS = {"no system"}

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "wfirst", "description": "d", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "wbare"}},
    {"type": "function", "function": {"name": "wnull", "description": None, "parameters": None}},
]
ID = "call_0123456789abcdef01234567"


def says(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def calls(*arguments: Any, text: str | None = None, first_id: int = 0) -> dict[str, Any]:
    listed = [
        {"id": f"{ID}{first_id + i}", "type": "function", "function": {"name": f"wcall{i}", "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, "tool_calls": listed}


def result(number: int, text: str) -> dict[str, Any]:
    return says("tool", text, tool_call_id=f"{ID}{number}")


SYSTEM, ASK, ANSWER, NEXT = (
    says("system", "wrule"),
    says("user", "wask"),
    says("assistant", "wanswer"),
    says("user", "wnext"),
)
LATE = says("system", "wlate")

TALKS: dict[str, list[dict[str, Any]]] = {
    "plain": [SYSTEM, ASK, ANSWER, NEXT],
    "late system": [SYSTEM, ASK, ANSWER, LATE, NEXT, says("assistant", "wagain"), says("user", "wmore")],
    "system after the user": [SYSTEM, ASK, LATE, ANSWER, NEXT],
    "system at the end": [SYSTEM, ASK, ANSWER, NEXT, LATE],
    "only a late system": [ASK, ANSWER, LATE, NEXT],
    "late systems in a row": [SYSTEM, ASK, ANSWER, LATE, says("system", "wlater"), NEXT],
    "title": [SYSTEM, ASK, NEXT],
    "two systems first": [SYSTEM, says("system", "wother"), ASK],
    "silent assistant": [SYSTEM, ASK, says("assistant", ""), NEXT],
    "silent user": [SYSTEM, says("user", ""), ANSWER, NEXT],
    "assistant last": [SYSTEM, ASK, ANSWER],
    "reasoning": [SYSTEM, ASK, says("assistant", "wanswer", reasoning_content="whidden"), NEXT],
}
TOOL_TALKS: dict[str, list[dict[str, Any]]] = {
    "one call": [SYSTEM, ASK, calls({"wkey": "wvalue"}), result(0, "wresult"), ANSWER, NEXT],
    "no arguments": [SYSTEM, ASK, calls({}), result(0, "wresult"), ANSWER, NEXT],
    "arguments that are none": [ASK, calls("{woops"), result(0, "wresult"), ANSWER, NEXT],
    "text and call": [ASK, calls({"wkey": "wvalue"}, text="wlook"), result(0, "wresult")],
    "two calls": [SYSTEM, ASK, calls({"wkey": 1}, {}), result(0, "wresult"), result(1, "wother"), ANSWER, NEXT],
    "two calls, text": [ASK, calls({}, {"wkey": 1}, text="wlook"), result(0, "wresult"), result(1, "wother"), ANSWER],
    "results the other way": [ASK, calls({}, {}), result(1, "wother"), result(0, "wresult"), ANSWER, NEXT],
    "rounds": [ASK, calls({}), result(0, "wresult"), calls({}, first_id=5), result(5, "wother"), ANSWER, NEXT],
    "late system after a result": [SYSTEM, ASK, calls({}), result(0, "wresult"), LATE, ANSWER, NEXT],
    "the user after a result": [SYSTEM, ASK, calls({}), result(0, "wresult"), NEXT, says("user", "wmore"), ANSWER],
    "no ids": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "wcall0", "arguments": {}}}]},
        says("tool", "wresult"),
        ANSWER,
    ],
}
WITH_TOOLS = {**TOOL_TALKS, **{talk: TALKS[talk] for talk in ("plain", "late system", "two systems first", "title")}}
of_every_template = pytest.mark.parametrize("name", TEMPLATES)


def cases_of(name: str) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """The talks of a template, each with its name and the tools given with it."""
    yield from ((talk, messages, None) for talk, messages in TALKS.items())
    if name not in WITHOUT_TOOLS:
        yield from ((f"{talk}, tools", messages, TOOLS) for talk, messages in WITH_TOOLS.items())


def renderer_of(template: str) -> ChatRenderer:
    tokenizer = copy.copy(tiny_models.tokenizer())
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


RENDERERS = {name: renderer_of(template) for name, template in TEMPLATES.items()}


def words(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The words of the messages, those of calls and the other way round included: none may be lost."""
    found = [str(message["content"]) for message in messages if message["content"]]
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            found += [call["function"]["name"], *(given if isinstance(given, dict) else [given])]
    return found


@of_every_template
def test_every_word_reaches_the_model_and_text_keeps_its_order(name: str) -> None:
    for case, talk, tools in cases_of(name):
        for thinking in ({}, {"enable_thinking": False}):
            text = RENDERERS[name].render(talk, tools, thinking).text
            assert all(word in text for word in words(talk)), case
            assert all(tool["function"]["name"] in text for tool in tools or ()), case
            spoken = [m["content"] for m in talk if m["role"] != "tool" and m["content"] and m is not SYSTEM]
            positions = [text.index(word) for word in spoken]
            assert positions == sorted(positions), case


@of_every_template
def test_a_conversation_that_grows_keeps_its_prompt(name: str) -> None:
    asks = generation_prompt(name)
    for case, talk, tools in cases_of(name):
        turns = [stop for stop, message in enumerate(talk) if message["role"] == "assistant" and stop] + [len(talk)]
        texts = [RENDERERS[name].render(talk[:stop], tools).text for stop in turns]
        for earlier, later in itertools.pairwise(texts):
            assert later.startswith(earlier.removesuffix(asks)), case


def generation_prompt(name: str) -> str:
    with_it, without = (
        tiny_models.tokenizer().apply_chat_template(
            [ASK], chat_template=TEMPLATES[name], add_generation_prompt=wanted, tokenize=False
        )
        for wanted in (True, False)
    )
    return str(with_it).removeprefix(str(without))


def test_every_shape_has_a_template_that_needs_it() -> None:
    needed = {
        id(shape)
        for renderer in RENDERERS.values()
        for with_tools in (False, True)
        for shape in renderer._adaptation(with_tools=with_tools).shapes
    }
    assert needed == {id(shape) for shape in SHAPES}


def test_messages_are_not_changed_in_place() -> None:
    for name, renderer in RENDERERS.items():
        for _, talk, tools in cases_of(name):
            before = json.dumps([talk, tools])
            renderer.render(talk, tools)
            assert json.dumps([talk, tools]) == before


def test_a_list_that_grows_while_it_is_gone_through_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.prompt.template_sandbox, "MAX_OWN_ITEMS", 1000)
    with pytest.raises(ChatTemplateError, match="unsafe"):
        renderer_of("{% set l = [1] %}{% for x in l %}{% set _ = l.append(x) %}{% endfor %}").render([ASK])


def test_what_a_template_changes_is_its_own() -> None:
    renderer = renderer_of(
        "{% set _ = messages.append({'role': 'user', 'content': 'wadded'}) %}"
        "{% set _ = messages[0].update(content='wx') %}"
        "{% set _ = (tools or []).clear() %}{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    talk, tools = [dict(ASK)], [dict(TOOLS[0])]
    assert renderer.render(talk, tools).text == renderer.render(talk, tools).text == "wx wadded "
    assert (talk, tools) == ([ASK], [TOOLS[0]])


class Text(str):
    """Counts the characters that are copied to put something behind it."""

    copied = 0

    def __add__(self, other: str) -> "Text":
        Text.copied += len(self) + len(other)
        return Text(str.__add__(self, other))


@pytest.mark.parametrize(("role", "change"), [("user", users_joined), ("system", late_system_in_words)])
def test_many_messages_are_joined_once(role: str, change: Reshape) -> None:
    said = [{"role": "user", "content": Text("x" * 100)}, *[{"role": role, "content": Text("z" * 100)}] * 500]
    (joined,) = change(said)
    assert joined["content"].count("z") == 50_000 and Text.copied < 200_000
