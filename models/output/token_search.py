"""Which of a model's tokens hold a text. Knows no tokenizer but the bytes of single tokens."""

import threading
from collections.abc import Callable

MAX_KEPT = 256
"""Texts whose tokens are kept."""


class TokenSearch:
    """Looks for texts in one model's tokens. For any thread. The first search reads all tokens and takes a while."""

    def __init__(self, piece: Callable[[int], bytes], vocab_size: int) -> None:
        """`piece` returns the bytes of one token."""
        self._piece = piece
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._pieces: list[bytes] | None = None
        self._found: dict[str, tuple[int, ...]] = {}

    def containing(self, text: str) -> tuple[int, ...]:
        """Returns the tokens whose text holds all of `text`, which is not empty, in ascending order."""
        with self._lock:
            if self._pieces is None:
                self._pieces = [self._piece(token_id) for token_id in range(self._vocab_size)]
            if text not in self._found:
                if len(self._found) >= MAX_KEPT:
                    self._found.clear()
                wanted = text.encode()
                self._found[text] = tuple(index for index, piece in enumerate(self._pieces) if wanted in piece)
            return self._found[text]
