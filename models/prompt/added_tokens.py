"""Where a tokenizer first cuts a text: at its added tokens (such as `<|im_start|>`). Pure.

The library finds them in the raw text, leftmost and longest first, with the white space that they strip. A *border*
is found in any surroundings, so texts between borders are tokenized alike together and apart. Not borders: normalized
tokens, searched for later; single words, which depend on neighbours; tokens whose white space a neighbour may strip.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from tokenizers import AddedToken

_SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")
"""Unicode's White_Space, which the library strips; Python has four more."""
_SURELY_NO_WORD = re.compile(r"[\t\n\r !-/:-@\[-^`{-~]")
_NEVER = "(?!)"

_Trie: TypeAlias = "dict[str, _Trie]"


class Cut(NamedTuple):
    """Range `[start, stop)` of a text; its added token, if a border."""

    start: int
    stop: int
    token_id: int | None


@dataclass(frozen=True, slots=True)
class _Border:
    token_id: int
    lstrip: bool
    rstrip: bool


class Borders:
    """One tokenizer's borders. Any thread."""

    def __init__(self, added: "Mapping[int, AddedToken]", template: str = "") -> None:
        """Borders are the special ones of `added`, by id, and those in `template`, if any.

        Some tokenizers add thousands of tokens common in code; cutting there gains nothing.
        """
        raw = {number: token for number, token in added.items() if not token.normalized and token.content}
        exact = _exact(raw)
        shown = {n for n, token in exact.items() if token.content in template and not token.content.isspace()}
        marks = {n: token for n, token in exact.items() if token.special or n in shown} or exact
        self._borders = {
            token.content: _Border(number, token.lstrip, token.rstrip) for number, token in marks.items()
        }
        texts = [token.content for token in raw.values()]
        self._pattern = re.compile(_any_of(_entangled(self._borders, texts)))
        self.token_ids = frozenset(marks)
        self.opener = self._choose_opener(texts)
        """Text that, put before any part, leaves the part's tokens unchanged."""

    def __bool__(self) -> bool:
        return bool(self._borders)

    @property
    def texts(self) -> Mapping[int, str]:
        return {border.token_id: text for text, border in self._borders.items()}

    def _choose_opener(self, texts: Sequence[str]) -> str | None:
        all_strip = all(border.rstrip for border in self._borders.values())
        for text, border in self._borders.items():
            goes_on = any(other != text and other.startswith(text) for other in texts)
            # If all include the white space after them, no part after a border begins with any.
            if not goes_on and (all_strip or not border.rstrip):
                return text
        return None

    def cut(self, text: str) -> list[Cut]:
        """Borders with stripped white space, and text between."""
        cuts, position = list[Cut](), 0
        for match in self._pattern.finditer(text):
            border = self._borders.get(match[0])
            if border is None:
                continue
            start = max(position, _spaces_before(text, match.start())) if border.lstrip else match.start()
            stop = _spaces_after(text, match.end()) if border.rstrip else match.end()
            if position < start:
                cuts.append(Cut(position, start, None))
            cuts.append(Cut(start, stop, border.token_id))
            position = stop
        if position < len(text):
            cuts.append(Cut(position, len(text), None))
        return cuts

    def cut_ids(self, ids: Sequence[int]) -> list[list[int]]:
        """`ids` cut before and after every border."""
        runs = list[list[int]]()
        for token in ids:
            if not runs or token in self.token_ids or runs[-1][0] in self.token_ids:
                runs.append([])
            runs[-1].append(token)
        return runs


def _exact(tokens: "Mapping[int, AddedToken]") -> "dict[int, AddedToken]":
    some_are_words = any(token.single_word for token in tokens.values())
    some_strip = any(token.lstrip or token.rstrip for token in tokens.values())
    some_may_be_stripped = any(_has_space_at_edge(token.content) for token in tokens.values())

    def is_exact(token: "AddedToken") -> bool:
        text = token.content
        separates_words = _SURELY_NO_WORD.match(text[0]) and _SURELY_NO_WORD.match(text[-1])
        if token.single_word or (some_are_words and not separates_words):
            return False
        if not (some_strip and some_may_be_stripped):
            return True
        return not (token.lstrip or token.rstrip or _has_space_at_edge(token.content))

    return {number: token for number, token in tokens.items() if is_exact(token)}


def _has_space_at_edge(text: str) -> bool:
    return _spaces_after(text, 0) > 0 or _spaces_before(text, len(text)) < len(text)


def _spaces_after(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    assert match is not None, "the pattern matches no characters as well"
    return match.end()


def _spaces_before(text: str, position: int) -> int:
    while position and _SPACES.fullmatch(text, position - 1, position):
        position -= 1
    return position


def _entangled(borders: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Borders, and all texts whose overlaps can hide one."""
    found, left = list(borders), set(texts) - set(borders)
    fresh = found
    while fresh:
        overlaps = _Overlaps(fresh)
        fresh = [text for text in left if overlaps.any_with(text)]
        found, left = found + fresh, left.difference(fresh)
    return found


class _Overlaps:
    def __init__(self, texts: Sequence[str]) -> None:
        self._heads = {text[:size] for text in texts for size in range(1, len(text) + 1)}
        self._tails = {text[-size:] for text in texts for size in range(1, len(text) + 1)}
        self._inside = "\0".join(texts)
        self._any = re.compile(_any_of(texts))

    def any_with(self, text: str) -> bool:
        sizes = range(1, len(text) + 1)
        if any(text[-size:] in self._heads or text[:size] in self._tails for size in sizes):
            return True
        return text in self._inside or self._any.search(text) is not None


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of `texts`; its cost does not grow with their number."""
    trie: _Trie = {}
    for text in texts:
        node = trie
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(trie) if trie else _NEVER


def _pattern(node: _Trie) -> str:
    branches = list[str]()
    for letter, below in node.items():
        if letter:
            chain, end = _chain(letter, below)
            branches.append(re.escape(chain) + _pattern(end))
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _chain(letter: str, node: _Trie) -> tuple[str, _Trie]:
    while len(node) == 1 and "" not in node:
        follower, node = next(iter(node.items()))
        letter += follower
    return letter, node
