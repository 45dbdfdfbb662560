"""Makes MLX multiply matrices with a fast BLAS of the system, where MLX brings a slow one. Knows no MLX.

On Linux, MLX's CPU backend links the reference BLAS, which is about 30 times slower in float32 than OpenBLAS. A
library loaded before MLX with global symbols replaces it: the dynamic linker resolves each name in the order of
loading (ELF gABI, "Shared Object Dependencies"). So `load_fast_blas` must run before MLX is imported. No Python
package brings such a library: numpy's and scipy's copies use other names for the functions.
"""

import ctypes
import sys
from collections.abc import Callable

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
