"""Commands to a running engine: each is called with the worker, on its thread, between two steps."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np

from cache.memory_tier import PinName
from cache.types import TokenArray
from cache.views import CacheView, EdgeDetail, NamespaceView, Traced, trace, view, view_edge, view_namespaces
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


def describe_cache(worker: Worker, namespace: str, max_nodes: int) -> CacheView:
    """What the cache holds for a namespace."""
    return view(worker.prefix_cache, namespace, max_nodes)


def describe_edge(worker: Worker, namespace: str, number: int, max_tokens: int) -> EdgeDetail | None:
    """One edge of a namespace in memory; None if the edge is gone."""
    return view_edge(worker.prefix_cache, namespace, number, max_tokens)


def trace_prompts(worker: Worker, namespace: str, prompts: Sequence[TokenArray]) -> list[tuple[Traced, Traced]]:
    """The edges of each prompt in memory and on disk."""
    return trace(worker.prefix_cache, namespace, prompts)


def list_namespaces(worker: Worker) -> list[NamespaceView]:
    """Each namespace's sums, the most bytes first."""
    return view_namespaces(worker.prefix_cache)


def clear_cache(worker: Worker, namespace: str) -> tuple[int, int, int]:
    """As `EngineState.clear`; an idle engine also gives memory back."""
    worker.close_answered(namespace)
    freed = worker.state.clear(namespace)
    if not worker.has_work:
        give_back()
    return freed


def describe_slots(worker: Worker) -> list[bool]:
    """Whether each slot is in use."""
    return [slot.is_leased for slot in worker.prefix_cache.slots]


def pin_session(worker: Worker, namespace: str, session_id: str) -> int:
    """Pins the state of a session's last turn and of later ones; returns the pinned tokens. Raises PinLimit."""
    worker.close_answered(namespace)
    return worker.state.pin(namespace, session_id)


def unpin_session(worker: Worker, namespace: str, session_id: str) -> bool:
    """Ends a session's pin, if there was one."""
    return bool(worker.prefix_cache.pins.release(PinName(namespace, session_id)))


def forget_session(worker: Worker, namespace: str, session_id: str) -> None:
    """Drops last turn, pins, slot claim and texts for drafts, but no state of tokens."""
    worker.close_answered(namespace)  # else its turn would be recorded after this
    worker.state.forget(namespace, session_id)


def pin_turn(
    worker: Worker, namespace: str, label: str, prompt: TokenArray, reply: Sequence[int], now: float
) -> None:
    """Pins a turn that will soon go on, unless a running request needs the memory; `now` as `Worker.now`."""
    tokens = np.concatenate([prompt, np.array(reply, np.int32)])
    name = PinName(namespace, label, is_soft=True)
    worker.prefix_cache.pins.pin(name, tokens, now + PIN_SECONDS)


def resize(worker: Worker, budget_bytes: int) -> int:
    """Changes the budget for state, unless running requests exceed it: returns by how many bytes."""
    return worker.prefix_cache.try_resize(budget_bytes)


def limit_idle(worker: Worker, max_bytes: int) -> None:
    """Evicts state beyond `max_bytes` that no request holds and nobody has pinned, and gives memory back."""
    if worker.prefix_cache.limit_idle(max_bytes):
        give_back()
