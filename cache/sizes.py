"""How many bytes a live sequence takes: estimated from a short one, before any memory is allocated."""

import math
from collections.abc import Sequence

from cache.layers.layout import Layout
from cache.types import LayerCache

CHUNK_TOKENS = 256
"""Prompt tokens evaluated in one model call at most, unless something else is configured."""


class SequenceSizes:
    """Bytes of the sequences of one model. Worker thread only."""

    def __init__(self, layout: Layout, chunk_tokens: int) -> None:
        """Prompts are evaluated in calls of up to `chunk_tokens`."""
        self.bytes_per_token = 0.0
        """Bytes of span state per token; 0 until `calibrate`."""
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._window_bytes_per_token = 0.0
        self._point_bytes = 0

    def calibrate(self, caches: Sequence[LayerCache]) -> None:
        """Measures `caches`, which hold a few evaluated tokens. Until then all estimates are 0."""
        self.bytes_per_token = self._layout.span_bytes_per_token(caches)
        self._window_bytes_per_token = self._layout.window_bytes_per_token(caches)
        self._point_bytes = self._layout.point_bytes(caches)

    def bytes_for(self, num_tokens: int) -> int:
        """Returns about how many bytes a live sequence takes at most until it has `num_tokens`.

        A window layer counts with the rows that it holds right after a prefill chunk, which are more than its window.
        Point state counts twice: while rows decode together, the runner holds a merged copy of it.
        """
        in_windows = self._layout.max_window_rows(num_tokens, self._chunk_tokens)
        rows = num_tokens * self.bytes_per_token + in_windows * self._window_bytes_per_token
        return int(rows) + 2 * self._point_bytes

    def tokens_without(self, excess_bytes: int, num_tokens: int) -> int:
        """Returns how many of `num_tokens` are left when their rows must take `excess_bytes` less.

        All of them if nothing is in excess or nothing has been measured; negative if the rows are not enough.
        """
        if excess_bytes <= 0 or not self.bytes_per_token:
            return num_tokens
        return num_tokens - math.ceil(excess_bytes / self.bytes_per_token)
