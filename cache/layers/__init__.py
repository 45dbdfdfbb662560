"""mlx-lm's layer caches taken apart into storable state, and put together again.

Importing this package imports mlx-lm without two side effects: mlx-lm lowers RLIMIT_NOFILE, the hard limit too, and
its generators call `mx.set_wired_limit`, which with several streams and freed buffers can panic macOS. So import this
package, or outside `cache` `models.mlx_lm_import`, before anything from `mlx_lm`.
"""

import importlib
import resource

import mlx.core as mx

set_wired_limit = mx.set_wired_limit
"""MLX's own."""


def guard_mlx_lm() -> None:
    """Loads mlx-lm without its side effects. Idempotent; no other thread may set limits meanwhile."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        importlib.import_module("mlx_lm")
    finally:
        resource.setrlimit = set_limit
    mx.set_wired_limit = lambda limit: 0  # bytes, the limit still in force


guard_mlx_lm()
