"""Prepares what MLX takes from the system on Linux, before a model is loaded: a fast BLAS, and the C++ compiler.

On Linux, MLX's CPU backend links the reference BLAS, which is about 30 times slower in float32 than OpenBLAS. A
library loaded before MLX with global symbols replaces it: the dynamic linker resolves each name in the order of
loading (ELF gABI, "Shared Object Dependencies"). So `load_fast_blas` must run before MLX is imported. No Python
package brings such a library: numpy's and scipy's copies use other names for the functions.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libmkl_rt.so.3", "libmkl_rt.so.2")
"""Names under which the dynamic linker finds libraries with `cblas_sgemm`, the fastest first."""
ADVICE = "apt install libopenblas0-pthread"


def load_fast_blas(open_library: Callable[[str, int], object] = ctypes.CDLL) -> str | None:
    """Loads the first library found and returns its name; None if there is none, or MLX needs none."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    for name in LIBRARIES:
        try:
            library = open_library(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm"):
            return name
    return None


def find_compiler(held_back: Callable[[], AbstractContextManager[None]]) -> None:
    """Makes MLX look for the C++ compiler that fuses operations now, instead of at the first fused operation.

    On a CPU it runs `g++ --version` by the C library's `system()`, once in a process and within `held_back`, which
    delays Ctrl-C; on a GPU it runs nothing. It imports MLX alone: other libraries start threads, which would take the
    Ctrl-C.
    """
    import mlx.core as mx

    with held_back():
        mx.compile(lambda number: mx.exp(number) + 1)(mx.array(1.0))
