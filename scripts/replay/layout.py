"""Layer state without a device: objects that know how long they are and what they would weigh.

`SizedLayout` stands in for `cache.layers.layout.Layout` for a model with attention and recurrent layers, as the cache
sees it: rows for every token, and whole state at single offsets. It checks what it is asked to do, so that a
replay also fails where a real layout would have restored something else than asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from cache.layers.layout import EXACT, Layout, StoredForm
from cache.layers.state import Rounded


@dataclass
class SizedCache:
    """The live state of one sequence, or of a head. A model call is `num_tokens += …`."""

    num_tokens: int = 0
    head: "SizedCache | None" = None
    is_head: bool = False
    """It has rows only."""

    @property
    def origin(self) -> int:
        """Where its own rows begin."""
        return self.head.num_tokens if self.head is not None else 0


@dataclass(frozen=True)
class SizedSegment:
    """Rows of the tokens `[start, stop)`."""

    start: int
    stop: int
    bytes_per_token: float
    is_rounded: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows would take."""
        return int((self.stop - self.start) * self.bytes_per_token)

    @property
    def can_round(self) -> bool:
        """Whether the rows are exact."""
        return not self.is_rounded

    def split(self, offset: int) -> "tuple[SizedSegment, SizedSegment]":
        """Returns `[start, offset)` and `[offset, stop)`."""
        assert self.start < offset < self.stop, f"[{self.start}, {self.stop}) split at {offset}"
        return replace(self, stop=offset), replace(self, start=offset)

    def between(self, start: int, stop: int) -> "SizedSegment":
        """The rows of `[start, stop)`."""
        return replace(self, start=max(start, self.start), stop=min(stop, self.stop))

    def join(self, *later: "SizedSegment") -> "SizedSegment":
        """Returns one segment of this one and `later`."""
        stop = self.stop
        for part in later:
            assert stop == part.start, f"[…, {stop}) joined with [{part.start}, …)"
            stop = part.stop
        return replace(self, stop=stop)


@dataclass(frozen=True)
class SizedRecurrent:
    """Recurrent state at one offset."""

    offset: int
    num_bytes: int
    is_rounded: bool = False

    @property
    def can_round(self) -> bool:
        """Whether the state is exact."""
        return not self.is_rounded


def _rounded_bytes(num_bytes: int, dtype: mx.Dtype) -> int:
    return Rounded.size_of(mx.zeros((1, 1, 1, num_bytes // dtype.size), dtype))


class SizedLayout(Layout):
    """Like `Layout`, over one `SizedCache` per sequence. Counts the states that were taken."""

    def __init__(self, bytes_per_token: int, snapshot_bytes: int, form: StoredForm = EXACT) -> None:
        """Rows are bfloat16, whole state is float32."""
        self.form = form
        row_bytes = _rounded_bytes(bytes_per_token, mx.bfloat16) if form.rows else bytes_per_token
        self.stored_bytes_per_token = float(row_bytes)
        self.stored_snapshot_bytes = _rounded_bytes(snapshot_bytes, mx.float32) if form.recurrent else snapshot_bytes
        self._bytes_per_token = bytes_per_token
        self._snapshot_bytes = snapshot_bytes
        self.has_recurrent = snapshot_bytes > 0
        self.window = 0
        self.num_taken = 0

    def make_caches(self) -> list[Any]:
        """Returns the layer caches of an empty sequence."""
        return [SizedCache()]

    @property
    def needs_snapshots(self) -> bool:
        """True for a model with recurrent layers."""
        return self._snapshot_bytes > 0

    @property
    def can_share_heads(self) -> bool:
        """True: rows can be cut anywhere."""
        return True

    def origin(self, caches: Sequence[Any]) -> int:
        """Where a sequence's own rows begin."""
        return caches[0].origin if caches else 0

    def split_at_head(self, caches: list[Any], head: Sequence[Any], num_tokens: int) -> None:
        """Moves the first rows of a sequence into an empty head, or into one that holds them."""
        assert caches[0].head is None and num_tokens <= caches[0].num_tokens, f"{caches[0]} split at {num_tokens}"
        assert head[0].num_tokens in (0, num_tokens), f"a head of {head[0].num_tokens} rows for {num_tokens}"
        head[0].num_tokens, head[0].is_head, caches[0].head = num_tokens, True, head[0]

    def put_on_head(self, caches: list[Any], head: Sequence[Any]) -> None:
        """Makes an empty sequence begin with a head."""
        assert caches[0] == SizedCache() and head[0].is_head, f"{caches[0]} put on {head[0]}"
        caches[0].head, caches[0].num_tokens = head[0], head[0].num_tokens

    def live_bytes(self, caches: Sequence[Any]) -> int:
        """Returns the bytes of a live sequence: its own rows, and one whole state; of a head's rows."""
        live = caches[0] if caches else SizedCache()
        num_state_bytes = self._snapshot_bytes if live.num_tokens and not live.is_head else 0
        return int(live.num_tokens - live.origin) * self._bytes_per_token + num_state_bytes

    def calibrate(self, caches: Sequence[Any]) -> None:
        """Takes what it was told."""
        self.bytes_per_token, self._recurrent_bytes = float(self._bytes_per_token), self._snapshot_bytes

    def capacity(self, caches: Sequence[Any]) -> int | None:
        """Returns a head's rows; else None: there are no buffers."""
        return caches[0].num_tokens if caches and caches[0].is_head else None

    def resize(self, caches: Sequence[Any], capacity_tokens: int) -> None:
        """Nothing grows here."""

    def bound_growth(self, caches: Sequence[Any]) -> None:
        """Nothing grows here."""

    def live_rows(self, caches: Sequence[Any], start: int, stop: int) -> Any:
        """Returns rows of a live sequence."""
        assert caches[0].origin <= start < stop <= caches[0].num_tokens, f"[{start}, {stop}) of {caches[0]}"
        return SizedSegment(start, stop, self._bytes_per_token)

    def cut_spans(
        self, caches: Sequence[Any], ranges: Sequence[tuple[int, int]], *, consume: bool = False
    ) -> list[Any]:
        """Returns one segment per range of a live sequence."""
        return [self.live_rows(caches, start, stop) for start, stop in ranges]

    def load_spans(
        self, caches: Sequence[Any], sources: Sequence[Any], *, keep: int, offset: int, capacity: int
    ) -> None:
        """Makes a live sequence hold `[0, offset)` of its first `keep` rows and the sources' rows."""
        reached = keep
        assert caches[0].origin <= keep <= caches[0].num_tokens, f"{keep} rows kept of {caches[0]}"
        for source in sources:
            assert source.start == reached < source.stop, f"[{source.start}, {source.stop}) loaded after {reached}"
            reached = source.stop
        assert reached == offset, f"{reached} rows loaded, {offset} wanted"
        caches[0].num_tokens = offset

    def rounding(self, rows: Any, piece_bytes: int = 0) -> Iterator[tuple[int, Any]]:
        """Rounds a segment in one piece."""
        if self.can_round(rows, None):
            yield rows.num_bytes, replace(rows, bytes_per_token=self.stored_bytes_per_token, is_rounded=True)

    def rounded_recurrent(self, state: Any) -> Any:
        """Stored whole state in its last form."""
        if not self.form.recurrent:
            return state
        return replace(state, num_bytes=self.stored_snapshot_bytes, is_rounded=True)

    def truncate_spans(self, caches: Sequence[Any], offset: int) -> None:
        """Forgets rows from `offset` on."""
        assert caches[0].origin <= offset, f"{caches[0]} truncated to {offset}"
        caches[0].num_tokens = min(offset, caches[0].num_tokens)

    def take_recurrent(self, caches: Sequence[Any]) -> Any:
        """Returns the recurrent state of a live sequence."""
        self.num_taken += 1
        return SizedRecurrent(caches[0].num_tokens, self._snapshot_bytes)

    def put_recurrent(self, caches: Sequence[Any], state: Any) -> None:
        """Restores recurrent state; it must belong where the rows end."""
        assert state.offset == caches[0].num_tokens, f"state of {state.offset} put at {caches[0].num_tokens}"
