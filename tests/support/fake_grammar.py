"""A grammar over the tokens of the fake runner: each token must lie after the one before it, on a circle."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.errors import GrammarFailed
from models.output.grammar import Grammar, MaskWords
from tests.support.fake_runner import EOS, VOCABULARY

STRIDE = 7
"""How far behind the last a token may lie, at most."""


def words_of(tokens: list[int]) -> MaskWords:
    bits = np.zeros(64, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_after(output: list[int]) -> list[int]:
    last = output[-1] if output else 1
    return [token for token in ((last + step) % VOCABULARY for step in range(1, STRIDE)) if token != EOS]


@dataclass
class CircleMatcher:
    """Follows one output; complete after `num_tokens`, fails at the mask after `fails_after`."""

    num_tokens: int
    fails_after: int | None = None
    output: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.output) == self.num_tokens

    def accept(self, token: int) -> None:
        assert token in allowed_after(self.output), "a token was sampled that was not allowed"
        self.output.append(token)

    def accept_text(self, text: str) -> None:
        for word in text.split():
            self.accept(int(word))

    def mask(self) -> MaskWords:
        if self.fails_after == len(self.output):
            raise GrammarFailed("too much work")
        return words_of(allowed_after(self.output))

    def mask_without_end(self) -> MaskWords:
        return words_of([token for token in range(VOCABULARY) if token != EOS])

    def forced(self) -> list[int]:
        return []

    def copy(self) -> "CircleMatcher":
        return replace(self, output=[*self.output])


@dataclass(frozen=True)
class Circle:
    """Satisfies `CompiledGrammar`."""

    num_tokens: int = 1000
    fails_after: int | None = None

    def begin(self) -> CircleMatcher:
        return CircleMatcher(self.num_tokens, self.fails_after)


@dataclass
class FakeCompiler:
    """Satisfies `GrammarCompiler`: compiles a grammar to its own text. No marker is a token."""

    asked: list[Grammar] = field(default_factory=list)

    def compile(self, grammar: Grammar) -> Any:
        self.asked.append(grammar)
        return grammar.text

    def accepts(self, name: str, grammar: Grammar) -> bool:
        return True

    def spell(self, text: str) -> str:
        return json.dumps(text)

    def token_of(self, text: str) -> int | None:
        return None

    def remember(self, write: Callable[..., Any], *key: Any) -> Any:
        return write(self, *key)
