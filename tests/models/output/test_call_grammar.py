"""Formats of calls are found, and their grammars agree with writer and reader on what is written."""

import functools
import json
import random
import re
from typing import Any

import pytest

from models.inference.grammar import GrammarCompiler
from models.output import call_formats
from models.output.call_formats import DSML, FORMATS, HARMONY, KIMI_K2, MINIMAX, CallFormat, Tags, find_call_format
from models.output.call_grammar import ANY_OBJECT, BoundTool, CallGrammar
from models.output.call_reader import CallReader
from models.output.call_values import types_of
from models.output.grammar import BOUNDS, Grammar, GrammarKind, allows, close_objects
from models.output.pieces import Text, ToolArguments, ToolCallEnded, ToolCallStarted
from server.api.binding import json_grammar
from tests.support import tiny_models
from tests.support.call_writer import kind_of, written

BOUND = [form for form in FORMATS if form is not HARMONY]
STRING, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {"a": STRING},
    "get_weather": {
        "city": STRING,
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "share": {"type": "number"},
        "is_new": {"type": "boolean"},
        "old": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
    },
    "run-it": {"env": {"type": "object", "additionalProperties": STRING}, "args_2": TEXTS},
    "now": {},
}
TOOLS = [
    BoundTool(
        name,
        {"type": "object", "properties": properties, "required": [*properties][:2], "additionalProperties": False},
    )
    for name, properties in SCHEMAS.items()
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"days": 3, "note": "b", "city": "a < b </div> é😀\n\n", "unit": "f", "old": None}),
    ("get", {"a": '</parameter> x </arg_value> y <|"|> </tool'}),
    ("now", {}),
]


@functools.cache
def compiler() -> GrammarCompiler:
    tokenizer: Any = tiny_models.tokenizer()
    return GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])


@functools.cache
def compiled(form: CallFormat, is_lazy: bool, with_any: bool = False) -> Any:
    tools = [*TOOLS, BoundTool("other", ANY_OBJECT)] if with_any else TOOLS
    grammar = CallGrammar(form, tools, compiler().spell)
    lines = grammar.lazy() if is_lazy else ["start: calls", *grammar.forced(is_single=False)]
    return compiler().compile(Grammar(GrammarKind.LARK, "\n".join(lines)))


def tokens_of(text: str) -> list[int]:
    return list(tiny_models.tokenizer().encode(text, add_special_tokens=False))


def refused(form: CallFormat, text: str, *, is_lazy: bool, with_any: bool = False) -> str | None:
    """What of a text is allowed, if not all of it is; with a mark where it may not end."""
    matcher, tokens = compiled(form, is_lazy, with_any).begin(), tokens_of(text)
    for place, token in enumerate(tokens):
        if not allows(matcher.mask(), token):
            return str(tiny_models.tokenizer().decode(tokens[: place + 1]))
        matcher.accept(token)
    may_end = matcher.is_complete or (not is_lazy and allows(matcher.mask(), tiny_models.tokenizer().eos_token_id))
    return None if may_end else text + "…"


def opener_of(form: CallFormat) -> str:
    return form.open.rstrip() or form.head.partition("{}")[0]


@pytest.mark.parametrize("form", BOUND, ids=lambda form: form.name)
def test_what_a_template_writes_is_allowed_in_any_order_of_arguments(form: CallFormat) -> None:
    calls = [(name, {**arguments}) for name, arguments in CALLS]
    if not isinstance(form.body, Tags) and form.body.has_bare_keys:
        calls[1] = ("get", {"a": "x </parameter> y"})
    for seed in range(4):
        chance = random.Random(seed)
        shuffled = [(name, dict(chance.sample([*one.items()], len(one)))) for name, one in calls]
        whole = written(form, shuffled)
        whole = re.sub(r"<\|python_(start|end|tag)\|>", "", whole) if form.is_bare else whole
        assert refused(form, whole, is_lazy=False) is None
        for one in [shuffled] if not form.repeats_open else [[call] for call in shuffled]:
            if not form.is_bare:
                assert refused(form, written(form, one)[len(opener_of(form)) :], is_lazy=True) is None


@pytest.mark.parametrize("form", [DSML, MINIMAX, KIMI_K2], ids=lambda form: form.name)
def test_calls_between_other_spellings_of_the_markers_are_bound_too(form: CallFormat) -> None:
    """DeepSeek V4 writes `tool_calls` where V3.2 wrote `function_calls`."""
    half = len(form.aliases) // 2
    for (opener, _), (closer, _) in zip(form.aliases[:half], form.aliases[half:], strict=True):
        whole = written(form, CALLS).replace(form.open.strip(), opener).replace(form.close.strip(), closer)
        assert refused(form, whole, is_lazy=False) is None
        assert refused(form, whole[len(opener) :], is_lazy=True) is None
        assert refused(form, whole.replace("get_weather", "drop"), is_lazy=False) is not None


@pytest.mark.parametrize("form", BOUND, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "wrong",
    [
        ("getx", {"a": "b"}),
        ("get", {}),
        ("get", {"b": "c"}),
        ("get_weather", {"city": "a"}),
        ("get_weather", {"city": "a", "days": "x"}),
        ("get_weather", {"city": "a", "days": 1, "unit": "k"}),
        ("now", {"a": 1}),
    ],
)
def test_other_names_and_arguments_are_refused(form: CallFormat, wrong: Any) -> None:
    whole = written(form, [wrong])
    whole = re.sub(r"<\|python_(start|end|tag)\|>", "", whole) if form.is_bare else whole
    assert refused(form, whole, is_lazy=False) is not None


@pytest.mark.parametrize("form", BOUND, ids=lambda form: form.name)
def test_a_tool_whose_schema_is_unknown_takes_any_arguments_beside_others(form: CallFormat) -> None:
    whole = written(form, [("other", {"k": "v", "n": 5})])
    whole = re.sub(r"<\|python_(start|end|tag)\|>", "", whole) if form.is_bare else whole
    assert refused(form, whole, is_lazy=False, with_any=True) is None


def walked(form: CallFormat, chance: random.Random) -> str | None:
    """A random text that masks allow, or None if it has no end."""
    matcher, tokens, queue = compiled(form, True).begin(), list[int](), list[int]()
    body, eos = form.body, tiny_models.tokenizer().eos_token_id
    ends = [body.end, "\n" + body.end] if isinstance(body, Tags) else [body.quote, '"', body.close, ", "]
    while not matcher.is_complete:
        words = matcher.mask()
        if not queue and chance.random() < 0.3:
            queue = tokens_of(chance.choice(ends))
        if queue and allows(words, queue[0]):
            token = queue.pop(0)
        else:
            may_come = [one for one in range(32 * len(words)) if allows(words, one) and one != eos]
            token, queue = chance.choice(may_come), []
        matcher.accept(token)
        tokens.append(token)
        if len(tokens) > 400:
            return None
    return str(tiny_models.tokenizer().decode(tokens))


def fits(value: Any, schema: Any) -> bool:
    types = types_of(schema)
    return kind_of(value) in types or (kind_of(value) == "integer" and "number" in types)


@pytest.mark.parametrize("form", [form for form in BOUND if not form.is_bare], ids=lambda form: form.name)
def test_what_masks_allow_is_read_as_calls_that_fit_their_schemas(form: CallFormat) -> None:
    declared = [{"function": {"name": tool.name, "parameters": tool.schema}} for tool in TOOLS]
    num_calls = 0
    for seed in range(12):
        text = walked(form, random.Random(f"{form.name} {seed}"))
        if text is None or re.search(r"\ufffd|[eE][+-]?\d{3}", text):
            continue  # cut within a character, or with a number that no computer holds
        parser = CallReader(form, declared)
        pieces = [*parser.feed("So: " + opener_of(form) + text), *parser.finish(is_complete=True)]
        assert [piece.text.strip() for piece in pieces if isinstance(piece, Text)] in ([], ["So:"]), text
        name, arguments = "", ""
        for piece in pieces:
            match piece:
                case ToolCallStarted(_, name):
                    arguments = ""
                case ToolArguments(more):
                    arguments += more
                case ToolCallEnded():
                    given, properties = json.loads(arguments), SCHEMAS[name]
                    assert {*[*properties][:2]} <= given.keys() <= properties.keys(), text
                    assert all(fits(value, properties[key]) for key, value in given.items()), text
                    num_calls += 1
    assert num_calls >= 3


TWO_CALLS = [("f", {"a": "x\ny", "n": [1]}), ("g", {})]

WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\ny</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x\ny</parameter>\n'
    '<parameter name="n">[1]</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x\ny'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "minicpm": '<function name="f"><param name="a"><![CDATA[x\ny]]></param><param name="n">[1]</param></function>'
    '<function name="g"></function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="0"<|sep|>'
    '<|open|>argument key="a" type="string"<|sep|>'
    'x\ny<|close|>argument<|sep|><|open|>argument key="n" type="array"<|sep|>[1]<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "gemma4": '<|tool_call>call:f{a:<|"|>x\ny<|"|>,n:[1]}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "lfm2": "<|tool_call_start|>[f(a='x\\ny', n=[1]), g()]<|tool_call_end|>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x\\ny", "n": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": "x\\ny", "n": [1]}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "x\\ny", "n": [1]}[TOOL_CALLS]g[ARGS]{}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "x\\ny", "n": [1]}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "x\\ny", "n": [1]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3.1": "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x\\ny", "n": [1]}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""As the families' templates write these calls; other families differ from one of these in names only."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_description_says_what_the_template_writes(name: str) -> None:
    form = next(one for one in FORMATS if one.name == name)
    assert written(form, TWO_CALLS) == WRITTEN[name]


@pytest.mark.parametrize(
    ("vocabulary", "template", "name"),
    [
        ({"<|channel|>", "<|message|>", "<|start|>"}, "tools", "harmony"),
        ({"<|channel|>"}, "", "harmony"),
        ({"<｜tool▁call▁begin｜>"}, "tools", "deepseek_v3.1"),
        ((), "tools '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3"),
        ({"｜DSML｜", "<｜tool▁call▁begin｜>"}, "", "dsml"),
        ({"<|python_tag|>"}, "if tools", "llama"),
        ({"<|python_tag|>"}, "messages only", None),
        ({"<|python_start|>", "<|python_tag|>"}, "if tools", "pythonic"),
        ((), "if tools: [func_name1(params_name1=params_value1)]", "pythonic"),
        ((), 'tools {"name": function name, "parameters": dictionary}', "llama"),
        ({"<tool_call>"}, r"tools <tool_call>\n<function=example>", "qwen3_coder"),
        ({"<tool_call>"}, 'tools <tool_call>\\n{"name": ', "hermes"),
        ({"<tool_call>"}, "messages only", None),
        ({"<|tool_call_start|>"}, "tools", "lfm2"),
        ((), "tools <|tool_list_start|>", "lfm2"),
        ({"<|open|>", "<|end_of_msg|>"}, "tools", "kimi_k3"),
        ((), """tools '<function name="' + name + '"><param name="'""", "minicpm"),
        ((), "if tools", None),
    ],
)
def test_a_format_is_found_by_template_or_vocabulary(vocabulary: set[str], template: str, name: str | None) -> None:
    found = find_call_format(vocabulary, template)
    assert (found and found.name) == name


def test_what_a_configuration_declares_comes_first() -> None:
    assert find_call_format((), "tools <tool_call>", "laguna") is call_formats.GLM
    assert find_call_format((), "tools <tool_call>", "of tomorrow") is call_formats.HERMES


CITY = {"properties": {"city": {"type": "string"}}}
CLOSED_CITY = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED_CITY),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED_CITY}),
        ({"prefixItems": [CITY]}, {"prefixItems": [CLOSED_CITY]}),
        ({"$defs": {"a": CITY}, "$ref": "#/$defs/a"}, {"$defs": {"a": CLOSED_CITY}, "$ref": "#/$defs/a"}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED_CITY, {"type": "null"}]}),
        ({"additionalProperties": CITY}, {"additionalProperties": CLOSED_CITY}),
        (
            {"properties": {"properties": CITY}},
            {"properties": {"properties": CLOSED_CITY}, "additionalProperties": False},
        ),
    ],
)
def test_named_members_are_all(schema: Any, closed: Any) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"properties": {}},
        {**CITY, "additionalProperties": True},
        {**CITY, "patternProperties": {"^x": True}},
        {**CITY, "anyOf": [{"properties": {"other": {"type": "string"}}}, {"required": ["city"]}]},
        {**CITY, "$ref": "#/$defs/more"},
        {"$defs": {"a": CITY}, "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": True}}]},
        {"enum": [CITY]},
        {"const": CITY, "default": CITY, "examples": [CITY]},
    ],
)
def test_what_speaks_of_others_or_describes_none_stays(schema: Any) -> None:
    assert close_objects(schema) == schema


TWO = {"minLength": 2.0}
VALUES = {"const": {"maxItems": 3.0}, "enum": [TWO], "default": TWO, "minimum": 2.0}


@pytest.mark.parametrize(
    ("written", "whole"),
    [
        *((f'{{"{word}": 2.0}}', f'{{"{word}": 2}}') for word in sorted(BOUNDS)),
        ('{"maxItems": 2.5, "minItems": "2.0"}', '{"maxItems": 2.5, "minItems": "2.0"}'),
        ('{"properties": {"default": {"minLength": 2.0}}, "allOf": [{"items": {"minItems": 1.0}}]}', None),
        ('{"properties": {"minLength": {"minLength": 2.0}}, "patternProperties": {"x": {"maxItems": 1e2}}}', None),
        (json.dumps(VALUES), json.dumps(VALUES)),
    ],
)
def test_bounds_are_integers_however_they_are_written(written: str, whole: str | None) -> None:
    expected = whole or written.replace("2.0", "2").replace("1.0", "1").replace("1e2", "100")
    assert json.dumps(close_objects(json.loads(written))) == expected


@pytest.mark.parametrize("bounds", [{"type": "string", "minLength": 2.0}, {"type": "array", "maxItems": 2.0}])
def test_a_grammar_is_made_of_a_schema_with_bounds_in_the_other_spelling(bounds: Any) -> None:
    tokenizer: Any = tiny_models.tokenizer()
    GrammarCompiler(tokenizer.backend_tokenizer.to_str, [0]).compile(json_grammar({"properties": {"a": bounds}}))
