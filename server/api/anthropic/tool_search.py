"""The Messages API's searches for deferred tools: by a regular expression, and by words (BM25).

Both search names and descriptions. A pattern may take exponential time, so a search is bounded in time.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import regex

MAX_QUERY_CHARACTERS: Final = 200
MAX_FOUND: Final = 5
MAX_SEARCHED_CHARACTERS: Final = 32_768
"""Most characters of a tool: a search goes through a text at once, and holds Python's lock."""
REGEX: Final = "tool_search_tool_regex"
BM25: Final = "tool_search_tool_bm25"
VERSION: Final = "_20251119"

MAX_SECONDS: Final = 1.0
_SECONDS_PER_TEXT: Final = 0.05
_MAX_COPIES: Final = 1000
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")
_Functions: TypeAlias = Sequence[Mapping[str, Any]]
_SATURATION, _LENGTH_WEIGHT = 1.2, 0.75
"""k1 and b of BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009)."""


def _shown_as(how: str, query: str) -> Mapping[str, Any]:
    argument = {"type": "string", "description": query}
    return {
        "description": f"Searches the names, descriptions and arguments of tools that are not loaded yet, {how}. "
        f"Returns the definitions of up to {MAX_FOUND} tools, which may be called from then on.",
        "input_schema": {"type": "object", "properties": {"query": argument}, "required": ["query"]},
    }


SEARCH_TOOLS: Final[Mapping[str, Mapping[str, Any]]] = {
    REGEX: _shown_as("by a regular expression", "a regular expression of Python, upper and lower case alike"),
    BM25: _shown_as("by words", "what the tool shall do, in words"),
}


class SearchFailed(Exception):
    """A search that cannot be run, in Anthropic's word for why."""


def find_tools(
    search: str, arguments: Mapping[str, Any], tools: _Functions, now: Callable[[], float] = time.monotonic
) -> list[str]:
    """The functions that `search` finds, best first; raises SearchFailed.

    The search fails after `MAX_SECONDS`.
    """
    query = arguments.get("query", arguments.get("pattern"))
    if not isinstance(query, str) or not query or len(query) > MAX_QUERY_CHARACTERS:
        raise SearchFailed("invalid_tool_input")
    functions = [tool["function"] for tool in tools]
    end = now() + MAX_SECONDS

    def seconds_left() -> float:
        left = end - now()
        if left <= 0:
            raise SearchFailed("execution_time_exceeded")
        return left

    scores = (_matches if search == REGEX else _relevance)(query, functions, seconds_left)
    ranked = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
    return [functions[number]["name"] for _, number in ranked[:MAX_FOUND]]


def _texts(function: Mapping[str, Any]) -> Iterator[str]:
    yield function["name"]
    yield str(function.get("description") or "")
    properties = (function.get("parameters") or {}).get("properties")
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        yield name
        yield str(schema.get("description") or "") if isinstance(schema, Mapping) else ""


def _matches(pattern: str, functions: _Functions, seconds_left: Callable[[], float]) -> list[float]:
    """2 for a matching name, 1 for another matching text, else 0."""
    # A compiled pattern holds a copy of a repeated part for each required repetition, multiplied when nested, so a
    # short pattern could fill the memory.
    least = re.findall(r"\{[^}\d]*(\d+)", re.sub(r"\s", "", pattern))
    if math.prod([2 ** pattern.count("+"), *(int(number) + 1 for number in least)]) > _MAX_COPIES:
        raise SearchFailed("invalid_tool_input")

    def matches(text: str) -> bool:
        # A pattern may take exponential time; other threads go on meanwhile.
        timeout = min(_SECONDS_PER_TEXT, seconds_left())
        return compiled.search(text[:MAX_SEARCHED_CHARACTERS], timeout=timeout, concurrent=True) is not None

    try:
        compiled = regex.compile(pattern, regex.IGNORECASE)
        texts = map(_texts, functions)
        return [2.0 if matches(name) else float(matches("\n".join(others))) for name, *others in texts]
    except regex.error as error:
        raise SearchFailed("invalid_tool_input") from error
    except TimeoutError as error:
        raise SearchFailed("execution_time_exceeded") from error


def _relevance(query: str, functions: _Functions, seconds_left: Callable[[], float]) -> list[float]:
    documents = [Counter(_words(" ".join(_texts(function)))) for function in functions if seconds_left()]
    mean = sum(document.total() for document in documents) / max(len(documents), 1)
    num_with = Counter(word for document in documents for word in document)
    rarity = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in num_with.items()}

    def score(document: Counter[str]) -> float:
        norm = _SATURATION * (1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * document.total() / max(mean, 1))
        counts = {word: document[word] for word in set(_words(query)) if word in document}
        return sum(rarity[word] * n * (_SATURATION + 1) / (n + norm) for word, n in counts.items())

    return [score(document) for document in documents]


def _words(text: str) -> list[str]:
    """Lower-case words; `readFile` and `read_file` are two."""
    return [word.lower() for word in _WORD.findall(text[:MAX_SEARCHED_CHARACTERS])]
