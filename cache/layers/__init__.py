"""mlx-lm's layer caches taken apart into storable state, and put together again.

Importing this package imports mlx-lm without two side effects: mlx-lm lowers RLIMIT_NOFILE, the hard limit too, and
its generators call `mx.set_wired_limit`, which with several streams and freed buffers can panic macOS. So import this
package, or outside `cache` `models.mlx_lm_import`, before anything from `mlx_lm`.
"""

import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    original = resource.setrlimit

    def ignore(*_: Any) -> None: ...

    resource.setrlimit = ignore
    try:
        yield
    finally:
        resource.setrlimit = original


set_wired_limit = mx.set_wired_limit
"""MLX's own."""


def _ignore_wired_limit(limit: int) -> int:
    """Replaces `mx.set_wired_limit`: returns 0 bytes, the limit still in force."""
    return 0


def guard_mlx_lm() -> None:
    """Loads mlx-lm without its side effects. Idempotent; no other thread may set limits meanwhile."""
    with _file_limit_kept():
        importlib.import_module("mlx_lm")
    mx.set_wired_limit = _ignore_wired_limit


guard_mlx_lm()
