"""Commands to a running engine: each is called once with the worker, on its thread, between two steps."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from cache.memory_tier import PinName
from cache.types import TokenArray
from cache.views import CacheView, EdgeDetail, NamespaceView
from server.engine.worker import Worker


def give_back() -> None:
    """Gives the system what MLX and the C library freed, in some milliseconds. Worker thread only."""
    trims, trim = _trim()
    # glibc gives the end of a thread's heap back when it is freed, or never.
    trims(0)
    mx.clear_cache()
    trims(_TRIM_BYTES)
    trim()


_M_TRIM_THRESHOLD = -1  # <malloc.h>
_TRIM_BYTES = 64 << 20
"""The most that glibc itself sets, once large blocks were freed."""


@cache
def _trim() -> tuple[Callable[[int], object], Callable[[], object]]:
    """What sets how much must be free at the end of a heap to go back, and what gives the rest back."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        return lambda num_bytes: library.mallopt(_M_TRIM_THRESHOLD, num_bytes), lambda: library.malloc_trim(0)
    if hasattr(library, "malloc_zone_pressure_relief"):
        library.malloc_zone_pressure_relief.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.malloc_zone_pressure_relief.restype = ctypes.c_size_t
        return lambda _: None, lambda: library.malloc_zone_pressure_relief(None, 0)
    return lambda _: None, lambda: None


PIN_SECONDS = 120.0
"""How long the state of a turn that ended in tool calls is kept for their results."""


@dataclass(frozen=True)
class DescribeCache:
    """Returns what the cache holds for a namespace."""

    namespace: str
    max_nodes: int

    def __call__(self, worker: Worker) -> CacheView:
        return worker.prefix_cache.reports.view(self.namespace, self.max_nodes)


@dataclass(frozen=True)
class DescribeEdge:
    """Returns one edge of a namespace in memory; None if the edge is gone."""

    namespace: str
    number: int
    max_tokens: int

    def __call__(self, worker: Worker) -> EdgeDetail | None:
        return worker.prefix_cache.reports.edge(self.namespace, self.number, self.max_tokens)


@dataclass(frozen=True)
class ListNamespaces:
    """Each namespace's sums, the most bytes first."""

    def __call__(self, worker: Worker) -> list[NamespaceView]:
        return worker.prefix_cache.reports.namespaces()


@dataclass(frozen=True)
class Freed:
    """What clearing a namespace dropped."""

    num_tokens: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class ClearCache:
    """Drops state, except what running requests use. An idle engine also gives memory back."""

    namespace: str

    def __call__(self, worker: Worker) -> Freed:
        worker.close_answered(self.namespace)
        before = worker.prefix_cache.reports.view(self.namespace, max_nodes=0)
        worker.prefix_cache.clear(self.namespace)
        after = worker.prefix_cache.reports.view(self.namespace, max_nodes=0)
        if not worker.has_work:
            give_back()
        return Freed(
            before.num_tokens - after.num_tokens,
            before.state.in_memory - after.state.in_memory,
            before.state.disk - after.state.disk,
        )


@dataclass(frozen=True)
class SlotState:
    """One slot, never its content."""

    index: int
    is_leased: bool


@dataclass(frozen=True)
class DescribeSlots:
    """Returns the slots of all namespaces."""

    def __call__(self, worker: Worker) -> tuple[SlotState, ...]:
        return tuple(SlotState(slot.index, slot.is_leased) for slot in worker.prefix_cache.slots)


@dataclass(frozen=True)
class PinSession:
    """Pins the state of a session's last turn and of later ones; returns the pinned tokens. Raises PinLimit."""

    namespace: str
    session_id: str

    def __call__(self, worker: Worker) -> int:
        worker.close_answered(self.namespace)
        return worker.sessions.pin(self.namespace, self.session_id)


@dataclass(frozen=True)
class UnpinSession:
    """Ends a session's pin, if there was one."""

    namespace: str
    session_id: str

    def __call__(self, worker: Worker) -> bool:
        return worker.sessions.unpin(self.namespace, self.session_id)


@dataclass(frozen=True)
class ForgetSession:
    """Drops last turn, pins, slot claim and texts for drafts, but no state of tokens."""

    namespace: str
    session_id: str

    def __call__(self, worker: Worker) -> None:
        worker.close_answered(self.namespace)  # else its turn would be recorded after this
        worker.sessions.forget(self.namespace, self.session_id)


@dataclass(frozen=True, eq=False)
class PinTurn:
    """Pins a turn that will soon go on, unless a running request needs the memory."""

    namespace: str
    label: str
    prompt: TokenArray
    reply: Sequence[int]

    def __call__(self, worker: Worker) -> None:
        tokens = np.concatenate([self.prompt, np.array(self.reply, np.int32)])
        name = PinName(self.namespace, self.label, is_soft=True)
        worker.prefix_cache.pin_until(name, tokens, worker.now() + PIN_SECONDS)


@dataclass(frozen=True)
class ResizeBudget:
    """Changes the budget for state, unless running requests exceed it: returns by how many bytes."""

    budget_bytes: int

    def __call__(self, worker: Worker) -> int:
        return worker.prefix_cache.try_resize(self.budget_bytes)


@dataclass(frozen=True)
class LimitIdle:
    """Evicts state beyond `max_bytes` that no request holds and nobody has pinned, and gives memory back."""

    max_bytes: int

    def __call__(self, worker: Worker) -> None:
        if worker.prefix_cache.limit_idle(self.max_bytes):
            give_back()
