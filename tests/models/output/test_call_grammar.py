"""Grammars of calls agree with writer and reader: what templates write is allowed, and what is allowed is read."""

import functools
import json
import random
import re
from typing import Any

import pytest

from models.inference.grammar import GrammarCompiler
from models.output.call_formats import DSML, FORMATS, HARMONY, KIMI_K2, MINIMAX, CallFormat, Tags
from models.output.call_grammar import ANY_OBJECT, BoundTool, CallGrammar
from models.output.call_reader import CallReader
from models.output.call_values import types_of
from models.output.grammar import Grammar, GrammarKind, allows
from models.output.pieces import Text, ToolArguments, ToolCallEnded, ToolCallStarted
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
        {
            "type": "object",
            "properties": properties,
            "required": [*properties][:2],
            "additionalProperties": False,
        },
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
