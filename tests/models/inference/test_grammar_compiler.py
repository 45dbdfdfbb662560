"""Grammars against the tokens of real tokenizers: what a mask allows is what the grammar allows."""

import contextlib
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import decoders

from models.errors import GrammarFailed, InvalidGrammar
from models.inference import grammar as grammar_compiler
from models.inference.grammar import MAX_CHARACTERS, MAX_KEPT, GrammarCompiler
from models.output.grammar import Grammar, GrammarKind
from tests.support import tiny_models, tiny_tokenizers

END_OF_TURN = tiny_models.tokenizer().eos_token_id


def compiler() -> GrammarCompiler:
    tokenizer: Any = tiny_models.tokenizer()
    return GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])


def ids(text: str) -> list[int]:
    return list(tiny_models.tokenizer().encode(text, add_special_tokens=False))


def allowed(words: NDArray[np.int32]) -> list[int]:
    return [int(each) for each in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def texts(words: NDArray[np.int32]) -> set[str]:
    return {tiny_models.tokenizer().decode([token]) for token in allowed(words)}


def after(grammar: Grammar, tokens: Sequence[int]) -> Any:
    matcher = compiler().compile(grammar).begin()
    for token in tokens:
        matcher.accept(token)
    return matcher


def test_a_mask_holds_the_tokens_that_may_follow_and_the_end_only_where_it_may() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a[bc]{0,1}")
    end = tiny_models.tokenizer().eos_token_id
    assert texts(after(grammar, []).mask()) == {"a"}
    assert {*allowed(after(grammar, ids("a")).mask())} == {*ids("b"), *ids("c"), end}
    assert not after(grammar, ids("a")).is_complete
    complete = after(grammar, [*ids("a"), *ids("b")])
    assert complete.is_complete
    assert allowed(complete.mask()) == [end]


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar(GrammarKind.CHOICE, json.dumps(['say "x"', "no\n"])), ['say "x"', "no\n"], ["say", "yes"]),
        (Grammar(GrammarKind.GBNF_OR_LARK, 'root ::= "a" [0-9]+ tail?\ntail ::= ";"'), ["a12;", "a1"], ["a", ";"]),
        (Grammar(GrammarKind.GBNF_OR_LARK, 'start: "a" B\nB: /[0-9]+/'), ["a12"], ["a", "b"]),
        (Grammar(GrammarKind.LARK, 'start: "a" "b"?'), ["a", "ab"], ["b"]),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["ä", 5]}'), ['"ä"', "5"], ["ä", "6"]),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items": {"type": "null"}, "type": "array"}'), ["[null, null]"], ["[1]"]),
    ],
)
def test_each_language_allows_what_it_says(grammar: Grammar, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert tiny_models.tokenizer().eos_token_id in allowed(after(grammar, ids(text)).mask()), text
    for text in wrong:
        matcher = after(grammar, ids(text))
        with contextlib.suppress(GrammarFailed):
            assert tiny_models.tokenizer().eos_token_id not in allowed(matcher.mask()), text


def test_a_strict_schema_holds_no_keyword_that_binds_nothing() -> None:
    schema = json.dumps({"type": "array", "uniqueItems": True})
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        compiler().compile(Grammar(GrammarKind.JSON_SCHEMA, schema))
    compiler().compile(Grammar(GrammarKind.LENIENT_JSON_SCHEMA, schema))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/none"}'),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, "false"),
        (GrammarKind.REGEX, "(("),
        (GrammarKind.GBNF_OR_LARK, "root ::= missing"),
        (GrammarKind.GBNF_OR_LARK, "\x00"),
        (GrammarKind.LARK, "start: start start"),
        (GrammarKind.REGEX, "a" * (MAX_CHARACTERS + 1)),
        (GrammarKind.REGEX, "((b{100}){100}){100}"),
        (GrammarKind.LARK, 'start: "a" B\nB: /((b{100}){100}){100}/'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^((b{100}){100}){100}$"}'),
        (GrammarKind.CHOICE, json.dumps([f"choice {number * 7919 % 100_003}" for number in range(3000)])),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidGrammar) as error:
        compiler().compile(Grammar(kind, text))
    assert 0 < len(str(error.value)) < 500


def test_the_latest_grammars_are_kept() -> None:
    keeping = compiler()
    first = keeping.compile(Grammar(GrammarKind.REGEX, "0"))
    for number in range(1, MAX_KEPT):
        keeping.compile(Grammar(GrammarKind.REGEX, str(number)))
    assert keeping.compile(Grammar(GrammarKind.REGEX, "0")) is first
    second = keeping.compile(Grammar(GrammarKind.REGEX, "1"))
    keeping.compile(Grammar(GrammarKind.REGEX, "x"))
    assert keeping.compile(Grammar(GrammarKind.REGEX, "1")) is second
    assert keeping.compile(Grammar(GrammarKind.LARK, "start: /1/")) is not second


def test_a_grammar_that_cannot_be_followed_is_not_kept_and_takes_little() -> None:
    limits = grammar_compiler._LIMITS
    keeping = compiler()
    for letter in "abcdefghij":
        with pytest.raises(InvalidGrammar, match="too large to be followed"):
            keeping.compile(Grammar(GrammarKind.REGEX, f"(({letter}{{100}}){{100}}){{100}}"))
    assert keeping._compiled.cache_info().currsize == 0
    # What the library says that a state and an expression take, times these, for all that are kept.
    assert MAX_KEPT * (limits.max_lexer_states * 400 + limits.initial_lexer_fuel * 150) < 300e6


def test_outputs_that_fill_the_lexer_leave_later_and_other_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    keeping = compiler()
    branches = Grammar(GrammarKind.REGEX, "x|" + "|".join(f"{letter}[0-9]{{300}}{letter}" for letter in "abcdef"))
    beside = keeping.compile(branches).begin()
    for letter in "abcdef":
        matcher = keeping.compile(branches).begin()
        for token in ids(letter + "1" * 300 + letter):
            matcher.mask()
            matcher.accept(token)
        assert matcher.is_complete
    assert ids("x")[0] in allowed(beside.mask())


def test_an_output_that_fills_a_lexer_by_itself_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    compiled = compiler().compile(Grammar(GrammarKind.REGEX, "[a-c]{2000}"))
    matcher = compiled.begin()

    def follow() -> None:
        for _ in range(2000):
            matcher.mask()
            matcher.accept(ids("a")[0])

    with pytest.raises(GrammarFailed, match=r"any further: .*states"):
        follow()
    assert ids("a")[0] in allowed(compiled.begin().mask())


def test_many_threads_compile_and_begin_at_once() -> None:
    shared = compiler()

    def work(number: int) -> bool:
        matcher = shared.compile(Grammar(GrammarKind.REGEX, "ab" * (1 + number % 3))).begin()
        matcher.accept_text("ab" * (1 + number % 3))
        return bool(matcher.is_complete)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(200)))


def test_a_tokenizer_that_is_not_known_refuses_grammars() -> None:
    def missing() -> str:
        raise AttributeError("no backend")

    with pytest.raises(InvalidGrammar, match="tokenizer"):
        GrammarCompiler(missing, [0]).compile(Grammar(GrammarKind.REGEX, "a"))


def test_tokens_of_sentencepiece_are_matched_by_their_text() -> None:
    built = tiny_tokenizers.tokenizer("replaced", {"<eos>": tiny_tokenizers.Flags(special=True)})
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    end = built.get_vocab()["<eos>"]
    matcher = GrammarCompiler(built.to_str, [end]).compile(Grammar(GrammarKind.REGEX, " ab\x01")).begin()
    seen = []
    while not matcher.is_complete:
        token = allowed(matcher.mask())[-1]
        seen.append(token)
        matcher.accept(token)
    assert built.decode(seen) == " ab\x01"


@pytest.mark.parametrize("text", ["<tool_call>", "a</think>b<|im_end|>c", "<|im_start|>"])
def test_text_that_looks_like_a_special_token_is_spelled_out(text: str) -> None:
    for grammar in (
        Grammar(GrammarKind.CHOICE, json.dumps([text])),
        Grammar(GrammarKind.CHOICE, json.dumps([text, "z"])),
    ):
        matcher, seen = compiler().compile(grammar).begin(), list[int]()
        while not matcher.is_complete:
            seen.append(next(each for each in allowed(matcher.mask()) if not seen or each != END_OF_TURN))
            if tiny_models.tokenizer().decode(seen) == "z":
                seen = [ids(text[0])[0]]
            matcher.accept(seen[-1])
        assert tiny_models.tokenizer().decode(seen) == text
        assert not {*seen} & {*tiny_models.tokenizer().all_special_ids}


def test_a_marker_that_is_a_token_is_named_by_its_number() -> None:
    number = tiny_models.tokenizer().convert_tokens_to_ids("<tool_call>")
    assert compiler().spell("<tool_call>") == f"<[{number}]>"
    assert compiler().spell("<call>") == '"<call>"'


def test_a_copy_looks_ahead_and_changes_nothing() -> None:
    grammar, text = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}'), "[1, 23, 4]"
    matcher, tokens = compiler().compile(grammar).begin(), ids(text)
    for number, token in enumerate(tokens):
        ahead = matcher.copy()
        for following in tokens[number:]:
            ahead.mask()
            ahead.accept(following)
        assert ahead.is_complete and not matcher.is_complete
        assert (matcher.mask() == after(grammar, tokens[:number]).mask()).all()
        assert token in allowed(matcher.mask())
        matcher.accept(token)
    assert matcher.is_complete


@pytest.mark.parametrize("shape", [*tiny_tokenizers.SHAPES])
def test_forced_tokens_are_those_that_masks_allow_alone_and_asking_for_them_changes_nothing(shape: str) -> None:
    built = tiny_tokenizers.tokenizer(shape, {"<eos>": tiny_tokenizers.Flags(special=True)})
    spaces: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.ByteLevel() if shape in ("bytes", "composed") else decoders.Sequence(spaces)
    compiled = GrammarCompiler(built.to_str, [built.get_vocab()["<eos>"]]).compile(
        Grammar(GrammarKind.REGEX, r"(ab+|xa) ab ab xa ss\|\[\]=aba?b*")
    )
    num_forced = 0
    for seed in range(20):
        asked, silent, chance = compiled.begin(), compiled.begin(), random.Random(seed)
        for _ in range(20):
            forced, ahead = asked.forced(), asked.copy()
            for token in forced:
                assert allowed(ahead.mask()) == [token]
                ahead.accept(token)
            num_forced += len(forced)
            may_follow = allowed(silent.mask())
            assert allowed(asked.mask()) == may_follow
            token = chance.choice(may_follow)
            asked.accept(token)
            silent.accept(token)
            assert asked.is_complete == silent.is_complete
            if silent.is_complete:
                assert not asked.forced()
                break
    assert num_forced > 100


def scored(pattern: str, *names: str) -> Grammar:
    properties = {name: {"type": "integer"} for name in names}
    schema = {
        "properties": properties,
        "patternProperties": {pattern: {"type": "integer"}},
        "additionalProperties": False,
    }
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "required": [*names], **schema}))


def test_a_pattern_of_names_that_only_declared_ones_match_is_refused_before_the_first_token() -> None:
    for pattern, names in (("^score$", ["score"]), ("^level_[12]$", ["level_1", "level_2"]), ("^a/b$", ["a/b"])):
        with pytest.raises(InvalidGrammar, match="only properties that are declared") as told:
            compiler().compile(scored(pattern, *names))
        assert "NAME" not in str(told.value)
    for pattern in ("^(score|grade)$", "^s", "score$", "^x$"):
        matcher = after(scored(pattern, "score"), ids('{"score": 5, '))
        assert texts(matcher.mask()), pattern


def test_a_schema_that_cannot_be_bound_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    keeping, wrong = compiler(), Grammar(GrammarKind.LENIENT_JSON_SCHEMA, '{"type": "any"}')
    assert [keeping.accepts("the tool 'x'", wrong) for _ in range(3)] == [False] * 3
    assert [record.getMessage().count("the tool 'x'") for record in caplog.records] == [1]


def test_special_tokens_within_a_text_are_spelled_by_number() -> None:
    number = tiny_models.tokenizer().convert_tokens_to_ids("<tool_call>")
    assert compiler().spell("a\n<tool_call>\n<x>") == f'"a\\n" <[{number}]> "\\n<x>"'
    assert (compiler().spell(""), compiler().token_of("<tool_call>"), compiler().token_of("<x>")) == (
        "",
        number,
        None,
    )
