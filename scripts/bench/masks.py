"""What masks of bound calls cost, in each format, with many tools and the words of a real tokenizer.

Usage: python -m scripts.bench.masks TOKENIZER_JSON [FORMAT]…

Markers that the tokenizer lacks are added as special tokens, as in a model of the format. Each place of a call that
writes a file is masked with a cold lexer and again with a warm one. Times are of this thread, in CPU time.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from models.inference.grammar import GrammarCompiler
from models.output.call_formats import FORMATS, HARMONY, CallFormat
from models.output.call_grammar import BoundTool, CallGrammar
from models.output.grammar import Grammar, GrammarKind, TokenMatcher, allows
from tests.support.call_writer import written

NUM_TOOLS, END_OF_TURN = 60, 151_645
CODE = (
    "def f(x):\n    if x < 3 and y > 'a':\n        return {'k': [1, 2]}\n    # then </parameter> here\n<div>\n" * 12
)
ARGUMENTS = {"path": "src/app/main.py", "content": CODE, "num_lines": 3, "mode": "create", "edits": [1, 2]}
_KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["a", "b", "c"]},
    {"type": ["string", "null"]},
    {"type": "object", "properties": {"x": {"type": "string"}}, "additionalProperties": False},
)
_SPECIAL = ("<|", "<｜", "[TOOL", "[ARGS", "<tool", "</tool", "<arg", "</arg")
"""How markers begin that are tokens in models of their format."""
_LINE = "{:16}" + "{:>10}" * 6


def tools() -> Iterator[BoundTool]:
    """One that writes a file, and others as of agents with several servers of tools."""
    kinds = {"path": _KINDS[0], "content": _KINDS[0], "num_lines": _KINDS[1], "mode": {"enum": ["create", "append"]}}
    yield BoundTool("write_file", _schema({**kinds, "edits": {"type": "array", "items": {"type": "integer"}}}))
    for number in range(NUM_TOOLS - 1):
        own = {f"arg_{place}": _KINDS[(number + place) % len(_KINDS)] for place in range(2 + number % 7)}
        yield BoundTool(f"mcp__server{number % 7}__tool_{number}", _schema(own))


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    required = [*properties][:2]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def with_markers(described: str, form: CallFormat) -> str:
    """A `tokenizer.json` with the format's special tokens."""
    tokenizer = json.loads(described)
    added = tokenizer["added_tokens"]
    known, following = {token["content"] for token in added}, max(token["id"] for token in added) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    markers = [marker for marker in form.markers if marker.startswith(_SPECIAL) and marker not in known]
    added += [{"id": following + number, "content": marker, **flags} for number, marker in enumerate(markers)]
    return json.dumps(tokenizer)


def measure(form: CallFormat, described: str) -> str:
    """A line of the table."""
    compiler = GrammarCompiler(lambda: with_markers(described, form), [END_OF_TURN])
    compiler.token_of(form.name)  # reads the tokenizer
    begun = time.thread_time()
    grammar = CallGrammar(form, [*tools()], compiler.spell)
    lark = "\n".join(["start: calls", *grammar.forced(is_single=True)] if form.is_bare else grammar.lazy())
    written_ms, begun = 1000 * (time.thread_time() - begun), time.thread_time()
    compiled = compiler.compile(Grammar(GrammarKind.LARK, lark))
    compiled_ms = 1000 * (time.thread_time() - begun)
    opener, call = grammar.opener()[0], written(form, [("write_file", ARGUMENTS)])
    bound = re.sub(r"<\|.*?\|>", "", call) if form.is_bare else call[len(opener) :]
    tokens, cold = _follow(compiled.begin(), bound.encode())
    matcher, warm = compiled.begin(), list[float]()
    for token in tokens:
        warm.append(_mask_us(matcher))
        matcher.accept(token)
    p95 = sorted(warm)[int(0.95 * len(warm))]
    return _LINE.format(form.name, *map(round, (written_ms, compiled_ms, len(tokens), mean(cold), mean(warm), p95)))


def _mask_us(matcher: TokenMatcher) -> float:
    begun = time.thread_time()
    matcher.mask()
    return 1e6 * (time.thread_time() - begun)


def _follow(matcher: Any, rest: bytes) -> tuple[list[int], list[float]]:
    """The tokens of a text, as masks allow them, and what the masks took."""
    tokenizer, tokens, took = matcher._grammar.tokenizer, list[int](), list[float]()
    while rest:
        took.append(_mask_us(matcher))
        words, starts = matcher.mask(), (rest[:size] for size in (400, *range(12, 0, -1)))
        firsts = (tokenizer.tokenize_bytes(start, parse_special=len(start) > 12)[0] for start in starts)
        tokens.append(next(token for token in firsts if allows(words, token)))
        rest = rest[len(tokenizer.decode_bytes(tokens[-1:])) :]
        matcher.accept(tokens[-1])
    return tokens, took


def main() -> None:
    """Prints a line for each format."""
    described, names = Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2:]
    print(_LINE.format("format", "Lark, ms", "compile", "tokens", "cold, us", "warm", "p95"))
    for form in FORMATS:
        if form is not HARMONY and (not names or form.name in names):
            print(measure(form, described), flush=True)


if __name__ == "__main__":
    main()
