"""Imports mlx-lm without two of its side effects on the process.

Importing mlx-lm sets RLIMIT_NOFILE to (2048, 4096), including the hard limit, which a server with many sockets and
cache files cannot undo; and its generators call `mx.set_wired_limit`, which together with several streams and freed
buffers can panic macOS. Import this module before any other import from `mlx_lm`: afterwards `mlx_lm` is loaded,
RLIMIT_NOFILE is unchanged, and `mx.set_wired_limit` does nothing for the rest of the process.

Modules of `cache` import this one; modules outside it import `models.mlx_lm_import`, which imports this one.
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


def _ignore_wired_limit(limit: int) -> int:
    """Replaces `mx.set_wired_limit`: returns 0 bytes, the limit that stays in force."""
    return 0


def guard_mlx_lm() -> None:
    """Loads mlx-lm without its side effects. Idempotent; must not run while other threads set limits."""
    with _file_limit_kept():
        importlib.import_module("mlx_lm")
    mx.set_wired_limit = _ignore_wired_limit


guard_mlx_lm()
