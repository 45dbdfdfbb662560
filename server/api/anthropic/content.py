"""The blocks of an answer as they grow from pieces, the stream's events, thoughts' signatures, and tool searches.
Pure.

Clients keep a signature beside a thought and send both back. A signature proves nothing: a returned thought is
accepted, whoever wrote it. The signature of a hidden thought holds its text, so that clients send the thought back.

The Messages API runs two searches for tools on the server: by a regular expression, and by words (BM25). They look at
names and descriptions of deferred tools and their arguments, and return the best matches.
"""

import base64
import binascii
import hashlib
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import regex
from typing_extensions import TypedDict

from models.output.pieces import (
    Piece,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallCut,
    ToolCallEnded,
    ToolCallFailed,
    ToolCallStarted,
)
from models.texts import read_object

_DIGEST: Final = "mlx-serve-1:"
_TEXT: Final = "mlx-serve-text-1:"


def sign(thought: str) -> str:
    """Returns the signature of a visible thought."""
    return _DIGEST + base64.b64encode(hashlib.sha256(_encoded(thought)).digest()).decode()


def enclose(thought: str) -> str:
    """Returns the signature of a hidden thought, which holds its text."""
    return _TEXT + base64.b64encode(_encoded(thought)).decode()


def thought_of(shown: str, signature: str) -> str:
    """Returns the thought of a returned block: the visible text, or the text in its signature."""
    if shown or not signature.startswith(_TEXT):
        return shown
    try:
        return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _encoded(thought: str) -> bytes:
    return thought.encode(errors="replace")


BlockEvent: TypeAlias = dict[str, Any]
"""An event of a stream; its `type` is its name."""


class TextBlockBody(TypedDict):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlockBody(TypedDict):
    """What the model thinks before it answers."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockBody(TypedDict):
    """A call of a tool. One that was cut off has no input here, and in a stream a part of it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ServerToolUseBody(TypedDict):
    """A complete call of a search for tools, which ran on the server."""

    type: Literal["server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolSearchResultBody(TypedDict):
    """What a search for tools has found, or Anthropic's word for why it failed."""

    type: Literal["tool_search_tool_result"]
    tool_use_id: str
    content: dict[str, Any]


BlockBody: TypeAlias = TextBlockBody | ThinkingBlockBody | ToolUseBlockBody | ServerToolUseBody | ToolSearchResultBody


@dataclass
class _OpenText:
    parts: list[str] = field(default_factory=list)

    def body(self) -> TextBlockBody:
        return {"type": "text", "text": "".join(self.parts)}


@dataclass
class _OpenThought:
    is_shown: bool
    parts: list[str] = field(default_factory=list)

    def body(self) -> ThinkingBlockBody:
        thought = "".join(self.parts)
        if not self.is_shown:
            return {"type": "thinking", "thinking": "", "signature": enclose(thought) if thought else ""}
        return {"type": "thinking", "thinking": thought, "signature": sign(thought) if thought else ""}


@dataclass
class _OpenCall:
    id: str
    name: str
    is_search: bool = False
    parts: list[str] = field(default_factory=list)
    """Pieces of the JSON text of the input."""

    def body(self) -> ToolUseBlockBody | ServerToolUseBody:
        given = read_object("".join(self.parts)) or {}
        if self.is_search:
            return {"type": "server_tool_use", "id": self.id, "name": self.name, "input": given}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": given}


class AnswerContent:
    """The content of one answer."""

    def __init__(self, *, shows_thoughts: bool = True, searches: Container[str] = ()) -> None:
        """If `shows_thoughts` is False, thoughts are empty blocks whose signatures hold their text.

        `searches` are the names of tool searches that the server runs.
        """
        self._shows_thoughts = shows_thoughts
        self._searches = searches
        self._ended: list[BlockBody] = []
        self._open: _OpenText | _OpenThought | _OpenCall | None = None
        self._num_streamed = 0
        """Blocks begun in the stream, failed calls included."""

    @property
    def blocks(self) -> list[BlockBody]:
        """All blocks so far. Texts around a failed call are joined."""
        blocks = list(self._ended)
        if self._open is not None:
            _append(blocks, self._open.body())
        return blocks

    def add(self, piece: Piece) -> list[BlockEvent]:
        """Takes a piece; returns its events."""
        match piece:
            case Text(text):
                events = [] if isinstance(self._open, _OpenText) else self._begin(_OpenText())
                return [*events, self._grow(text, {"type": "text_delta", "text": text})]
            case Reasoning(text):
                is_open = isinstance(self._open, _OpenThought)
                events = [] if is_open else self._begin(_OpenThought(self._shows_thoughts))
                delta = self._grow(text, {"type": "thinking_delta", "thinking": text})
                return [*events, delta] if self._shows_thoughts else events
            case ToolCallStarted(call_id, name):
                is_search = name in self._searches
                prefix = "srvtoolu_" if is_search else "toolu_"
                return self._begin(_OpenCall(_own_id(call_id, prefix), name, is_search))
            case ToolArguments(text):
                return [self._grow(text, {"type": "input_json_delta", "partial_json": text})]
            case ToolCallEnded() | ToolCallCut():
                return self.close()
            case ToolCallFailed(text):
                self._open = None
                return [self._stop(), *self.add(Text(text))]

    def close(self) -> list[BlockEvent]:
        """Ends the open block, if any; returns its events."""
        if self._open is None:
            return []
        body, self._open = self._open.body(), None
        _append(self._ended, body)
        if body["type"] != "thinking":
            return [self._stop()]
        return [self._delta({"type": "signature_delta", "signature": body["signature"]}), self._stop()]

    def add_results(self, results: Sequence[ToolSearchResultBody]) -> list[BlockEvent]:
        """Adds search results after all blocks; returns their events."""
        events = self.close()
        for result in results:
            self._ended.append(result)
            self._num_streamed += 1
            start = {"type": "content_block_start", "index": self._index, "content_block": result}
            events += [start, self._stop()]
        return events

    def _begin(self, block: _OpenText | _OpenThought | _OpenCall) -> list[BlockEvent]:
        events = self.close()
        self._open = block
        self._num_streamed += 1
        # The block as it is now, without content.
        start = {"type": "content_block_start", "index": self._index, "content_block": block.body()}
        return [*events, start]

    def _grow(self, text: str, delta: dict[str, str]) -> BlockEvent:
        assert self._open is not None, "a part belongs to a block"
        self._open.parts.append(text)
        return self._delta(delta)

    def _delta(self, delta: dict[str, str]) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> BlockEvent:
        return {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return self._num_streamed - 1


def _append(blocks: list[BlockBody], block: BlockBody) -> None:
    last = blocks[-1] if blocks else None
    if last is not None and last["type"] == "text" and block["type"] == "text":
        blocks[-1] = {"type": "text", "text": last["text"] + block["text"]}
    else:
        blocks.append(block)


def _own_id(call_id: str, prefix: str) -> str:
    """Returns a call's id in Anthropic's form; an id that the model wrote stays."""
    return f"{prefix}{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


MAX_QUERY_CHARACTERS: Final = 200
MAX_FOUND: Final = 5
REGEX: Final = "tool_search_tool_regex"
BM25: Final = "tool_search_tool_bm25"
VERSION: Final = "_20251119"
"""May follow the name in a tool's type."""

_SECONDS_PER_TOOL: Final = 0.05
_MAX_COPIES: Final = 1000
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")
_SATURATION, _LENGTH_WEIGHT = 1.2, 0.75
"""k1 and b of BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009)."""


def _shown_as(how: str, query: str) -> Mapping[str, Any]:
    schema = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": query}},
        "required": ["query"],
    }
    return {
        "description": f"Searches the names, descriptions and arguments of tools that are not loaded yet, {how}. "
        f"Returns the definitions of up to {MAX_FOUND} tools, which may be called from then on.",
        "input_schema": schema,
    }


SEARCH_TOOLS: Final[Mapping[str, Mapping[str, Any]]] = {
    REGEX: _shown_as("by a regular expression", "a regular expression of Python, upper and lower case alike"),
    BM25: _shown_as("by words", "what the tool shall do, in words"),
}
"""What the model sees of each search, by name."""


class SearchFailed(Exception):
    """A search that cannot be run; the message is Anthropic's word for why."""


def find_tools(search: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the functions that `search` finds among `tools`, best first; raises SearchFailed."""
    query = arguments.get("query", arguments.get("pattern"))
    if not isinstance(query, str) or not query or len(query) > MAX_QUERY_CHARACTERS:
        raise SearchFailed("invalid_tool_input")
    functions = [tool["function"] for tool in tools]
    scores = _matches(query, functions) if search == REGEX else _relevance(query, functions)
    found = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
    return [functions[number]["name"] for _, number in found[:MAX_FOUND]]


def _texts(function: Mapping[str, Any]) -> Iterator[str]:
    yield function["name"]
    yield str(function.get("description") or "")
    properties = (function.get("parameters") or {}).get("properties")
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        yield name
        yield str(schema.get("description") or "") if isinstance(schema, Mapping) else ""


def _matches(pattern: str, functions: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns 2 for each function whose name matches, 1 if only another text matches, else 0."""
    # A compiled pattern holds a copy of a repeated part for each required repetition, multiplied when nested, so a
    # short pattern could fill the memory.
    least = re.findall(r"\{[^}\d]*(\d+)", re.sub(r"\s", "", pattern))
    if math.prod([2 ** pattern.count("+"), *(int(number) + 1 for number in least)]) > _MAX_COPIES:
        raise SearchFailed("invalid_tool_input")
    try:
        compiled = regex.compile(pattern, regex.IGNORECASE)
        return [_match(compiled, list(_texts(function))) for function in functions]
    except regex.error as error:
        raise SearchFailed("invalid_tool_input") from error
    except TimeoutError as error:
        raise SearchFailed("execution_time_exceeded") from error


def _match(pattern: Any, texts: Sequence[str]) -> float:
    name, others = texts[0], "\n".join(texts[1:])
    # A pattern may take exponential time; other threads go on meanwhile.
    limits = {"timeout": _SECONDS_PER_TOOL, "concurrent": True}
    return 2.0 if pattern.search(name, **limits) else 1.0 if pattern.search(others, **limits) else 0.0


def _relevance(query: str, functions: Sequence[Mapping[str, Any]]) -> list[float]:
    documents = [Counter(_words(" ".join(_texts(function)))) for function in functions]
    mean = sum(document.total() for document in documents) / max(len(documents), 1)
    num_with = Counter(word for document in documents for word in document)
    rarity = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in num_with.items()}

    def score(document: Counter[str]) -> float:
        norm = _SATURATION * (1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * document.total() / max(mean, 1))
        counts = {word: document[word] for word in set(_words(query)) if word in document}
        return sum(rarity[word] * n * (_SATURATION + 1) / (n + norm) for word, n in counts.items())

    return [score(document) for document in documents]


def _words(text: str) -> list[str]:
    """Returns a text's words in lower case; `readFile` and `read_file` are two words."""
    return [word.lower() for word in _WORD.findall(text)]
