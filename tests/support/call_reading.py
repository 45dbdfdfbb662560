"""What the pieces of an answer mean, and the tools that its calls name."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from models.output.call_formats import HARMONY, CallFormat
from models.output.call_reader import CallReader, DeclaredTools, HarmonyReader
from models.output.pieces import (
    OutputParser,
    Piece,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallStarted,
)


def parser_of(call_format: CallFormat, tools: DeclaredTools) -> OutputParser:
    """The parser of an answer without reasoning, or in channels."""
    return HarmonyReader(tools) if call_format is HARMONY else CallReader(call_format, tools)


def pieces_of(parser: OutputParser, texts: Sequence[str], *, is_complete: bool = True) -> list[Piece]:
    """All pieces, those of one kind that follow each other joined, without ids; fails for an impossible order.

    It fails as well if the arguments of a call are complete before its end.
    """
    fed = [piece for text in texts for piece in parser.feed(text)]
    fed += parser.finish(is_complete=is_complete)
    pieces, call = list[Piece](), None
    for piece in fed:
        match piece:
            case ToolCallStarted(call_id, name):
                assert call is None and call_id and name
                call, piece = "", ToolCallStarted("", name)
            case ToolArguments(text):
                assert call is not None and text
                call += text
            case ToolCallEnded():
                assert call is not None and isinstance(json.loads(call), dict)
                assert is_open(call[:-1])
                call = None
            case ToolCallCut(text):
                assert call and text and is_open(call)
                call = None
            case Text(text) | Reasoning(text):
                assert text and call is None
        last = pieces[-1] if pieces else None
        if isinstance(piece, Text | Reasoning | ToolArguments) and type(last) is type(piece):
            pieces[-1] = type(piece)(last.text + piece.text)
        else:
            pieces.append(piece)
    assert call is None
    assert parser.made_calls == any(isinstance(piece, ToolCallEnded) for piece in pieces)
    assert parser.is_cut == any(isinstance(piece, ToolCallCut) for piece in pieces)
    return pieces


def is_open(arguments: str) -> bool:
    """Whether arguments are no whole JSON text."""
    try:
        json.loads(arguments)
    except ValueError:
        return True
    return False


def meaning(pieces: Sequence[Piece]) -> list[Any]:
    """Texts, `("thought", text)`, calls as `(name, arguments)`, and cut ones as `("cut", name, arguments)`."""
    parts: list[Any] = []
    for piece in pieces:
        match piece:
            case Text(text):
                parts.append(text)
            case Reasoning(text):
                parts.append(("thought", text))
            case ToolCallStarted(_, name):
                parts.append((name, ""))
            case ToolArguments(text):
                parts[-1] = (parts[-1][0], parts[-1][1] + text)
            case ToolCallEnded():
                parts[-1] = (parts[-1][0], json.loads(parts[-1][1]))
            case ToolCallCut():
                parts[-1] = ("cut", *parts[-1])
    return parts


def cuts_of(text: str, places: Sequence[int]) -> list[str]:
    """`text` cut at places, those outside of it ignored."""
    edges = sorted({0, len(text), *(place for place in places if 0 < place < len(text))})
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


def every_cut(text: str) -> Iterator[list[str]]:
    """The text letter by letter, and cut in two at each place."""
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
