"""The words that an edge of the cache begins with. For any thread."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cache.types import TokenArray

MAX_REMEMBERED = 16_384
"""Most readers ask again and again for the same edges."""


class Previews:
    """Texts of one model's tokens, remembered."""

    def __init__(self, text_of: Callable[[Sequence[int]], str], max_characters: int) -> None:
        self._text_of = text_of
        self._max_characters = max_characters
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def texts(self, beginnings: Iterable[TokenArray]) -> list[str]:
        """Returns the text of each, cut short."""
        return [self._text(tokens) for tokens in beginnings]

    def _text(self, tokens: TokenArray) -> str:
        key = tokens.tobytes()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        text = self._text_of(tokens.tolist())[: self._max_characters]
        with self._lock:
            self._known[key] = text
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return text
