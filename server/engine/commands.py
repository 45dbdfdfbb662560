"""Commands to a running engine: what they report and change is one namespace's part of the prefix cache.

Gives memory that nothing uses any more back to the system.

MLX keeps freed buffers for the next ones, and the C library keeps freed blocks, between others or in the arenas of
threads that have ended: after many requests together that is more than all that is in use. Worker thread only.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from cache.pins import PinName
from cache.types import TokenArray
from cache.views import CacheView, EdgeDetail, NamespaceView, StateBytes
from server.engine.worker import Worker


def give_back() -> None:
    """Gives back what MLX and the C library keep. Takes some milliseconds, in which other threads may wait."""
    mx.clear_cache()
    _trim()()


@cache
def _trim() -> Callable[[], object]:
    """Returns the C library's function for it: glibc's, macOS's, or one that does nothing."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        return lambda: library.malloc_trim(0)
    if hasattr(library, "malloc_zone_pressure_relief"):
        library.malloc_zone_pressure_relief.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.malloc_zone_pressure_relief.restype = ctypes.c_size_t
        return lambda: library.malloc_zone_pressure_relief(None, 0)
    return lambda: None


HOLD_SECONDS = 120.0
"""How long a turn that ended in tool calls is held: most tools answer within that time."""


@dataclass(frozen=True)
class DescribeCache:
    """What is held for a namespace, with `max_nodes` edges at most."""

    namespace: str
    max_nodes: int

    def run(self, worker: Worker) -> CacheView:
        """Returns it, copied."""
        return worker.prefix_cache.reports.view(self.namespace, self.max_nodes)


@dataclass(frozen=True)
class DescribeEdge:
    """One edge in memory of a namespace, with `max_tokens` of its tokens at most."""

    namespace: str
    number: int
    max_tokens: int

    def run(self, worker: Worker) -> EdgeDetail | None:
        """Returns it, copied; None if it is there no more."""
        return worker.prefix_cache.reports.edge(self.namespace, self.number, self.max_tokens)


@dataclass(frozen=True)
class ListNamespaces:
    """What each namespace holds, in sums."""

    def run(self, worker: Worker) -> list[NamespaceView]:
        """Returns them, the most bytes first."""
        return worker.prefix_cache.reports.namespaces()


@dataclass(frozen=True)
class Freed:
    """What clearing a namespace dropped."""

    num_tokens: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class ClearCache:
    """Forgets what a namespace holds, but for what running requests use; idle, the system gets the memory back."""

    namespace: str

    def run(self, worker: Worker) -> Freed:
        """Does it, and returns what was freed."""
        worker.close_answered(self.namespace)
        tokens, before = self._held(worker)
        worker.prefix_cache.clear(self.namespace)
        tokens_left, after = self._held(worker)
        if not worker.has_work:
            give_back()
        return Freed(tokens - tokens_left, before.in_memory - after.in_memory, before.disk - after.disk)

    def _held(self, worker: Worker) -> tuple[int, StateBytes]:
        view = worker.prefix_cache.reports.view(self.namespace, max_nodes=0)
        return view.num_tokens, view.state


@dataclass(frozen=True)
class SlotState:
    """One slot, and whether a request runs in it. Nothing of what it holds."""

    index: int
    is_leased: bool


@dataclass(frozen=True)
class DescribeSlots:
    """The slots of all namespaces together."""

    def run(self, worker: Worker) -> tuple[SlotState, ...]:
        """Returns them in order."""
        return tuple(SlotState(slot.index, slot.is_leased) for slot in worker.prefix_cache.slots)


@dataclass(frozen=True)
class PinSession:
    """Keeps the state of a session's last turn, and of those to come, from being evicted."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> int:
        """Returns how many tokens are pinned; 0 for a session of which nothing is held. Raises PinLimit."""
        worker.close_answered(self.namespace)
        return worker.sessions.pin(self.namespace, self.session_id)


@dataclass(frozen=True)
class UnpinSession:
    """Ends a session's pin."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> bool:
        """Returns whether there was one."""
        return worker.sessions.unpin(self.namespace, self.session_id)


@dataclass(frozen=True)
class ForgetSession:
    """Drops what the engine keeps of a session beyond the state of its tokens."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> None:
        """Does it; for an unknown session there is nothing to do."""
        worker.forget_session(self.namespace, self.session_id)


@dataclass(frozen=True, eq=False)
class HoldTurn:
    """Keeps the state of a turn that another request will soon continue, unless memory is wanted for one now."""

    namespace: str
    label: str
    prompt: TokenArray
    reply: Sequence[int]

    def run(self, worker: Worker) -> None:
        """Does it, as far as the turn is known."""
        tokens = np.concatenate([self.prompt, np.array(self.reply, np.int32)])
        name = PinName(self.namespace, self.label, is_soft=True)
        worker.prefix_cache.pin_until(name, tokens, worker.now() + HOLD_SECONDS)


@dataclass(frozen=True)
class ResizeBudget:
    """Gives the state of past tokens another budget."""

    budget_bytes: int

    def run(self, worker: Worker) -> int:
        """Does it; returns the bytes by which running requests exceed it. If there are any, nothing has changed."""
        return worker.prefix_cache.try_resize(self.budget_bytes)
