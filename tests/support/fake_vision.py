"""A vision tower whose features are the ids of a picture's places, so that another picture's are noticed."""

from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.types import TokenArray
from models.errors import InvalidImage
from models.prompt import pictures
from models.prompt.pictures import Picture, Pictures, PlacedPicture, SeenChunk, ids_of
from models.vision.features import Encoder, Features

DAMAGED = b"damaged"
"""A file whose pixels cannot be decoded."""
BLOCKS = 3


def use_small_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has pictures get ids that the fake model's rows, float32, can hold."""
    monkeypatch.setattr(pictures, "NUM_IDS", 1 << 20)


class FakeTower:
    """The features of a picture are its ids. Counts in `num_blocks`, in all, the blocks evaluated."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def pixels(self, picture: Picture) -> bytes:
        """Returns the file."""
        if picture.data == DAMAGED:
            raise InvalidImage("an image is damaged")
        return picture.data

    def steps(self, picture: Picture, pixels: Any) -> Generator[mx.array, None, Features]:
        """Yields a number for each block."""
        for _ in range(BLOCKS):
            self.num_blocks += 1
            yield mx.array(self.num_blocks)
        digest = pictures.digest_of(pixels, str(picture.grid))
        return Features(mx.array(ids_of(digest, picture.num_tokens))[:, None])

    def step_operations(self, picture: Picture) -> float:
        """Returns the cost of two tokens."""
        return 2.0


class Inline(Executor):
    """Runs what is submitted at once, or, once `is_held`, when `release` is called."""

    def __init__(self) -> None:
        self.is_held = False
        self._held: list[Callable[[], None]] = []

    def submit(self, function: Any, /, *given: Any, **named: Any) -> "Future[Any]":
        """Returns the result."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*given, **named))
            except Exception as error:
                future.set_exception(error)

        self._held.append(run)
        if not self.is_held:
            self.release()
        return future

    def release(self) -> None:
        """Runs what was held."""
        while self._held:
            self._held.pop(0)()


def encoder() -> Encoder:
    """Returns an encoder over the fake tower."""
    return Encoder(FakeTower(), 1.0, Inline())


def picture_of(data: bytes, rows: int = 2, columns: int = 4) -> Picture:
    """Returns a picture with `data` as its file."""
    grid = rows, columns
    return Picture(pictures.digest_of(data, str(grid)), data, 32 * columns, 32 * rows, grid)


def prompt_of(*parts: Picture | list[int]) -> tuple[list[int], Pictures]:
    """Returns the tokens of words and pictures, and where the pictures stand."""
    tokens, placed = list[int](), list[PlacedPicture]()
    for part in parts:
        if isinstance(part, Picture):
            placed.append(PlacedPicture(len(tokens), part))
            tokens += ids_of(part.digest, part.num_tokens).tolist()
        else:
            tokens += part
    return tokens, Pictures(tuple(placed), placeholder=49)


def tokens_of(seen: SeenChunk, tokens: TokenArray) -> TokenArray:
    """Returns the ids that a chunk's features stand for; of words, the tokens."""
    placed, stop = seen.pictures.at(seen.start), seen.start + len(tokens)
    assert seen.pictures.chunk_end(seen.start, stop) == stop, "a chunk reaches over an end of a picture"
    if placed is None:
        assert (tokens >= 0).all()
        return tokens
    rows = np.asarray(seen.features.rows)[:, 0]
    return rows[seen.start - placed.start : stop - placed.start].astype(np.int32)
