"""Commands to a running engine. Each reports on, or changes, one namespace's part of the prefix cache.

Also gives memory back to the system that nothing uses any more (`give_back`).
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
    """Returns freed buffers of MLX and freed blocks of the C library to the system. Worker thread only.

    MLX keeps freed buffers for later use. The C library keeps freed blocks, between others or in the arenas of
    threads that have ended. After many requests together that is more than all memory in use. The call takes some
    milliseconds, in which other threads may wait.
    """
    mx.clear_cache()
    _trim()()


@cache
def _trim() -> Callable[[], object]:
    """Returns the function that trims the heap: glibc's, macOS's, or one that does nothing."""
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
    """What the cache holds for a namespace, with at most `max_nodes` edges."""

    namespace: str
    max_nodes: int

    def run(self, worker: Worker) -> CacheView:
        """Returns a copied description."""
        return worker.prefix_cache.reports.view(self.namespace, self.max_nodes)


@dataclass(frozen=True)
class DescribeEdge:
    """One edge of a namespace in memory, with at most `max_tokens` of its tokens."""

    namespace: str
    number: int
    max_tokens: int

    def run(self, worker: Worker) -> EdgeDetail | None:
        """Returns a copied description; None if the edge is gone."""
        return worker.prefix_cache.reports.edge(self.namespace, self.number, self.max_tokens)


@dataclass(frozen=True)
class ListNamespaces:
    """Sums of what each namespace holds."""

    def run(self, worker: Worker) -> list[NamespaceView]:
        """Returns the namespaces, the largest in bytes first."""
        return worker.prefix_cache.reports.namespaces()


@dataclass(frozen=True)
class Freed:
    """Tokens and bytes dropped by clearing a namespace."""

    num_tokens: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class ClearCache:
    """Clears a namespace, except state that running requests use. An idle engine also gives memory back to the
    system.
    """

    namespace: str

    def run(self, worker: Worker) -> Freed:
        """Clears the namespace and returns what was freed."""
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
    """One slot, and whether a request runs in it; never the slot's content."""

    index: int
    is_leased: bool


@dataclass(frozen=True)
class DescribeSlots:
    """The slots of all namespaces together."""

    def run(self, worker: Worker) -> tuple[SlotState, ...]:
        """Returns the slots in order."""
        return tuple(SlotState(slot.index, slot.is_leased) for slot in worker.prefix_cache.slots)


@dataclass(frozen=True)
class PinSession:
    """Keeps the state of a session's last turn, and of its later turns, from being evicted."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> int:
        """Returns the number of pinned tokens, 0 where nothing of the session is held. Raises PinLimit."""
        worker.close_answered(self.namespace)
        return worker.sessions.pin(self.namespace, self.session_id)


@dataclass(frozen=True)
class UnpinSession:
    """Ends a session's pin."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> bool:
        """Returns whether the session was pinned."""
        return worker.sessions.unpin(self.namespace, self.session_id)


@dataclass(frozen=True)
class ForgetSession:
    """Drops what the engine keeps of a session beyond the state of its tokens."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> None:
        """Forgets the session; an unknown session is no error."""
        worker.forget_session(self.namespace, self.session_id)


@dataclass(frozen=True, eq=False)
class HoldTurn:
    """Keeps the state of a turn that a request will soon continue, unless a running request needs the memory."""

    namespace: str
    label: str
    prompt: TokenArray
    reply: Sequence[int]

    def run(self, worker: Worker) -> None:
        """Holds the turn, as far as it is known."""
        tokens = np.concatenate([self.prompt, np.array(self.reply, np.int32)])
        name = PinName(self.namespace, self.label, is_soft=True)
        worker.prefix_cache.pin_until(name, tokens, worker.now() + HOLD_SECONDS)


@dataclass(frozen=True)
class ResizeBudget:
    """Changes the memory budget for the state of past tokens."""

    budget_bytes: int

    def run(self, worker: Worker) -> int:
        """Returns the bytes by which running requests exceed the new budget; if any, nothing has changed."""
        return worker.prefix_cache.try_resize(self.budget_bytes)
