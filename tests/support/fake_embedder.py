"""A stand-in for what makes vectors: it records what it was asked for, and tells texts apart by their sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.formats import Reading, Vector
from server.engine.request import TokenArray


def vector_of(tokens: TokenArray) -> Vector:
    """The vector that the fake gives a text."""
    return np.array([len(tokens), int(tokens.sum())], np.float32)


@dataclass
class FakeLongText:
    """One text, fed in pieces that `log` gets to know."""

    log: list[tuple[int, ...]]
    tokens: list[int] = field(default_factory=list)

    def feed(self, tokens: TokenArray) -> None:
        self.log.append((len(tokens),))
        self.tokens.extend(tokens.tolist())

    def vector(self) -> Vector:
        return vector_of(np.array(self.tokens, np.int32))


@dataclass
class FakeEmbedder:
    """In place of an `Embedder`. `log` holds, for each piece, the lengths of the texts in it."""

    log: list[tuple[int, ...]] = field(default_factory=list)
    fault: Callable[[Sequence[TokenArray]], Exception | None] = lambda texts: None
    """Returns what is raised instead of vectors."""

    def embed(self, texts: Sequence[TokenArray], reading: Reading, adapter: int = 0) -> list[Vector]:
        self.log.append(tuple(len(text) for text in texts))
        error = self.fault(texts)
        if error is not None:
            raise error
        return [vector_of(text) for text in texts]

    def begin(self, reading: Reading, adapter: int = 0) -> FakeLongText:
        return FakeLongText(self.log)
