"""Token arrays, and types shared in the cache without knowing their implementation. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

LayerCache: TypeAlias = Any
"""mlx-lm has no useful base type."""


class LayerKinds(Protocol):
    """The kinds of state in a model's layers."""

    @property
    def window(self) -> int:
        """Rows before an offset that restoring window layers needs; 0 without any."""

    @property
    def has_recurrent(self) -> bool:
        """Some state is valid at single offsets only."""

    @property
    def needs_snapshots(self) -> bool:
        """Restoring needs more than spans: offsets are chosen ahead."""


class SharedBuffers(Protocol):
    """Buffers in which running sequences are evaluated together: their layer caches hold no arrays then."""

    @property
    def head_tokens(self) -> float | None:
        """Tokens from which a shared head makes steps faster; inf if none does, None if a head is not proven."""

    @property
    def padding_bytes(self) -> int:
        """Bytes beyond those that each sequence's own buffers would take."""

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Bytes that a sequence's own buffers would take; 0 if it shares none."""

    def separate(self, caches: Sequence[LayerCache]) -> None:
        """Gives a sequence its state back, evaluated, in its layer caches. An error changes nothing."""

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """Forgets a sequence whose state nobody wants; evaluates nothing."""

    def separate_all(self) -> None:
        """Gives all sequences their state back; after an error some share buffers still."""


TokenArray: TypeAlias = NDArray[np.int32]
TOKEN_BYTES = 4


def common_prefix_length(left: TokenArray, right: TokenArray) -> int:
    """How many leading tokens two arrays share."""
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num


class TokenLog:
    """A live sequence's tokens, without a Python object per token."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def view(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """A view of `[start, stop)`, valid until the log changes."""
        return self._tokens[start : self._length if stop is None else stop]

    def append(self, tokens: TokenArray) -> None:
        """Adds tokens at the end."""
        needed = self._length + len(tokens)
        if needed > len(self._tokens):
            grown = np.empty(max(needed, 2 * len(self._tokens)), np.int32)
            grown[: self._length] = self.view()
            self._tokens = grown
        self._tokens[self._length : needed] = tokens
        self._length = needed

    def truncate(self, length: int) -> None:
        """Forgets tokens from `length` on."""
        self._length = min(length, self._length)
