"""Gives memory that nothing uses any more back to the system.

MLX keeps freed buffers for the next ones, and the C library keeps freed blocks, between others or in the arenas of
threads that have ended: after many requests together that is more than all that is in use. Worker thread only.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import mlx.core as mx


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
