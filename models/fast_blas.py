"""Prepares what MLX takes from the system on Linux: a fast BLAS, and the C++ compiler.

MLX's CPU backend links the reference BLAS, 30 times slower in float32 than OpenBLAS. A library loaded first with
global symbols replaces it (ELF gABI, "Shared Object Dependencies").
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libmkl_rt.so.3", "libmkl_rt.so.2")
"""Libraries with `cblas_sgemm`, the fastest first."""
ADVICE = "apt install libopenblas0-pthread"


def load_fast_blas(open_library: Callable[[str, int], object] = ctypes.CDLL) -> str | None:
    """Loads the first library found; returns its name, if any."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        for name in LIBRARIES:
            try:
                library = open_library(name, ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            if hasattr(library, "cblas_sgemm"):
                return name
    return None


def find_compiler(held_back: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes MLX run `g++ --version` now, within `held_back`, which delays Ctrl-C.

    Imports MLX alone: other libraries' threads would take the Ctrl-C.
    """
    import mlx.core as mx

    with held_back():
        mx.compile(lambda number: mx.exp(number) + 1)(mx.array(1.0))
