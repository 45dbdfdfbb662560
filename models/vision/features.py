"""A model's vision: pictures become features, which take the place of embeddings.

Pixels are decoded on a thread of their own; a vision tower is evaluated on the worker thread, a block at a time, so
that other sequences go on meanwhile. Finished features are kept beside the state of tokens, by namespace and digest.
"""

import math
import weakref
from collections.abc import Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import mlx.core as mx

from cache.budget import UNBOUNDED_BYTES, Ledger
from cache.memory_tier import KeptFeatures
from cache.slots import RequestClock
from models.prompt.pictures import Picture


@dataclass(frozen=True, eq=False)
class Features:
    """What a text model gets of one picture, evaluated."""

    rows: mx.array
    """`[num_tokens, width]`, in place of the embeddings of its tokens."""
    deepstack: tuple[mx.array, ...] = ()
    """Each `[num_tokens, width]`, to be added after the model's first layers (DeepStack, 2024)."""

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + sum(rows.nbytes for rows in self.deepstack)


class Tower(Protocol):
    """A model family's way from an image to features."""

    def pixels(self, picture: Picture) -> Any:
        """What `steps` takes. Any thread; raises InvalidImage."""

    def steps(self, picture: Picture, pixels: Any) -> Generator[mx.array, None, Features]:
        """Yields what is to be evaluated next; returns the features. Worker thread only."""

    def step_operations(self, picture: Picture) -> float:
        """The floating-point operations of one step."""


class Encoding:
    """A picture on its way to features. Whoever waits for these holds it. Worker thread only."""

    def __init__(self, picture: Picture, encoder: "Encoder", namespace: str) -> None:
        self._picture, self._encoder, self._namespace = picture, encoder, namespace
        self.features: Features | None = encoder.kept.recall((namespace, picture.digest), self)
        """None until the last step."""
        self._num_tokens = 0
        """Prompt tokens that take as long as all steps so far."""
        self._pixels: Future[Any] | None = None
        self._steps: Generator[mx.array, None, Features] | None = None
        if self.features is None:
            self._pixels = encoder.thread.submit(encoder.tower.pixels, picture)
            weakref.finalize(self, self._pixels.cancel)

    @property
    def is_ready(self) -> bool:
        """Whether `step` would not wait for pixels."""
        return self._pixels is None or self._pixels.done()

    def step(self) -> int:
        """Evaluates a part; returns how many prompt tokens take as long. Raises InvalidImage."""
        assert self._pixels is not None, "the features are there already"
        tower = self._encoder.tower
        steps = self._steps or tower.steps(self._picture, self._pixels.result())
        self._steps = None  # after an error all is evaluated again
        num_tokens = max(1, math.ceil(tower.step_operations(self._picture) / self._encoder.token_operations))
        self._num_tokens += num_tokens
        try:
            mx.eval(next(steps))
            self._steps = steps
        except StopIteration as end:
            self._finish(end.value)
        return num_tokens

    def _finish(self, features: Features) -> None:
        self.features, self._pixels = features, None
        self._encoder.num_encoded += 1
        key = self._namespace, self._picture.digest
        self._encoder.kept.keep(key, features, features.num_bytes, self._num_tokens, self)


class Encoder:
    """Makes and keeps features. Worker thread only."""

    def __init__(self, tower: Tower, token_operations: float, thread: Executor | None = None) -> None:
        """`token_operations`: of a prompt token in the text model; `thread` decodes pixels."""
        self.tower, self.token_operations = tower, token_operations
        self.thread = thread or ThreadPoolExecutor(1, thread_name_prefix="mlx-serve-pixels")
        self.kept = KeptFeatures(Ledger(UNBOUNDED_BYTES), RequestClock())
        """Features made before; those of the worker's cache, once there is one."""
        self.num_encoded = 0
        """Pictures that the tower was evaluated for."""
        self._begun = WeakValueDictionary[tuple[str, bytes], Encoding]()

    def begin(self, picture: Picture, namespace: str) -> Encoding:
        """The picture's encoding, shared by all sequences of the namespace that wait for it."""
        key = namespace, picture.digest
        encoding = self._begun.get(key)
        if encoding is None:
            encoding = self._begun[key] = Encoding(picture, self, namespace)
        return encoding

    def close(self) -> None:
        """Ends the thread."""
        self.thread.shutdown(wait=False, cancel_futures=True)
