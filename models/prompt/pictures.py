"""Pictures in a prompt: which ids stand for them, at which places, and which positions follow them. Pure.

A picture takes one place for each of its tokens. The places hold negative ids, made of a digest of the file and of
how the file is processed, so that trie, slots and disk share the state of pictures like the state of words. Different
pictures differ at their first place (31 bits), and a match that ends inside a picture counts up to its start.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenArray: TypeAlias = NDArray[np.int32]

RESERVED = 16
"""From -1 down to this number, ids mean other things: `NO_TOKEN`, `SEPARATOR`."""
NUM_IDS = 2**31 - RESERVED
_DIGEST_BYTES = 16


def digest_of(data: bytes, processing: str) -> bytes:
    """16 bytes that differ for other files, and for other `processing`: all that decides what the model gets."""
    inner = hashlib.blake2b(data, digest_size=32).digest()
    return hashlib.blake2b(inner + processing.encode(), digest_size=_DIGEST_BYTES).digest()


def ids_of(digest: bytes, count: int) -> TokenArray:
    """The ids of a picture's places, all below `-RESERVED`."""
    numbers = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), "<u4").astype(np.int64)
    return (-(numbers % NUM_IDS) - RESERVED - 1).astype(np.int32)


@dataclass(frozen=True)
class Placeholder:
    """The text and the token that stand for a picture in a prompt until its places are inserted."""

    text: str
    """What the chat template shows."""
    token: int
    """The token whose place the picture takes."""
    framed: str
    """What `text` becomes before it is tokenized, with `token` in it once."""
    spelled: tuple[str, ...]
    """What no other text may say."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What a message shows."""

    digest: bytes
    data: bytes
    """The encoded file."""
    width: int
    height: int
    """In pixels, as the file says, turned as it is shown."""
    grid: tuple[int, int]
    """Rows and columns of its tokens."""
    has_axes: bool = True
    """A place has a position by row and column; else it has one as a word has."""
    is_whole: bool = False
    """All places of the picture attend to each other, so one chunk holds them all."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def label(self) -> str:
        """What logs, sessions and diagnosis show."""
        return f"[image {self.digest.hex()[:8]}…, {self.width}x{self.height}]"


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture, and the offset of its first place."""

    start: int
    picture: Picture

    @property
    def stop(self) -> int:
        return self.start + self.picture.num_tokens

    @property
    def ids(self) -> TokenArray:
        """The ids of its places."""
        return ids_of(self.picture.digest, self.picture.num_tokens)

    @property
    def shift(self) -> int:
        """Positions after a picture with axes go on after its longer side (Qwen2-VL, 2024, M-RoPE)."""
        return max(self.picture.grid) - self.picture.num_tokens if self.picture.has_axes else 0


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of one prompt, in order."""

    placed: tuple[PlacedPicture, ...] = ()
    placeholder: int = 0
    """The token that stands for a place where ids must be words."""

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The places of each."""
        return tuple((one.start, one.stop) for one in self.placed)

    def shift(self, offset: int) -> int:
        """Added to the offset of a word after all pictures before `offset`, it gives the word's position."""
        return sum(one.shift for one in self.placed if one.stop <= offset)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions of the tokens `[start, stop)` by time, row and column: int64 `[3, stop - start]`."""
        places = np.tile(np.arange(start, stop), (3, 1)) + self.shift(start)
        for picture in self.placed:
            first, last = max(start, picture.start), min(stop, picture.stop)
            if first < last:
                rows, columns = np.divmod(np.arange(first, last) - picture.start, picture.picture.grid[1])
                inside = np.stack([np.zeros_like(rows), rows, columns])
                places[:, first - start : last - start] = inside + picture.start + self.shift(picture.start)
            if (after := max(start, picture.stop)) < stop:
                places[:, after - start :] = np.arange(after, stop) + self.shift(picture.stop)
        return places

    def chunk_end(self, offset: int, stop: int) -> int:
        """The end of a chunk that was to end at `stop`: no later than either end of a picture, after a whole one.

        So a restored prompt and a new one evaluate a picture in the same chunks.
        """
        inside = self.at(offset)
        if inside is not None and inside.picture.is_whole:
            return inside.stop
        ends = (end for one in self.placed for end in (one.start, one.stop) if offset < end < stop)
        return min(ends, default=stop)

    def at(self, offset: int) -> PlacedPicture | None:
        """The picture that has the place at `offset`, if any."""
        return next((one for one in self.placed if one.start <= offset < one.stop), None)

    def next(self, offset: int) -> PlacedPicture | None:
        """The first picture with a place at or after `offset`, if any."""
        return next((one for one in self.placed if one.stop > offset), None)

    def until(self, stop: int) -> "Pictures":
        """The pictures before `stop`."""
        return Pictures(tuple(one for one in self.placed if one.stop <= stop), self.placeholder)

    def in_words(self, tokens: TokenArray) -> TokenArray:
        """The prompt's tokens with the placeholder at each place of a picture."""
        return np.where(tokens < -RESERVED, self.placeholder, tokens).astype(np.int32) if self.placed else tokens


NO_PICTURES = Pictures()


@dataclass(frozen=True, eq=False)
class SeenChunk:
    """Where a chunk of a prompt with pictures begins, and the features of the picture in which the chunk lies."""

    pictures: Pictures
    start: int
    features: Any = None
    """None for a chunk of words."""


def words_at_end(tokens: TokenArray) -> TokenArray:
    """The tokens after the last place of the last picture."""
    places = np.flatnonzero(tokens < -RESERVED)
    return tokens[places[-1] + 1 :] if places.size else tokens
