"""The server with a probe: it says what it has in use, apart from what its allocators keep for the next requests.

    python -m scripts.load.memory_probe FILE LEAK serve demo …

On SIGUSR2 it writes the bytes in use to FILE. What the process holds in all goes up and down by tens of megabytes
with what the C library and MLX keep of freed blocks, in which a small leak is not seen. LEAK is how many bytes are
lost with each request, on purpose: 0, or so many as to see that the proof finds them.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

SMALL_BLOCK_BYTES = 96
"""What Python's own small blocks are taken for; those over 512 bytes are the C library's."""


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def used_bytes() -> int:
    """Returns the bytes in use; 0 where the C library does not say."""
    import mlx.core as mx

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    gc.collect()
    mx.clear_cache()
    library.mallinfo2.restype = _MallocInfo
    info: Any = library.mallinfo2()
    return int(info.uordblks + info.hblkhd) + SMALL_BLOCK_BYTES * sys.getallocatedblocks()


def _answer_signals(file: Path) -> None:
    def write(_signal: int, _frame: object) -> None:
        draft = file.with_suffix(".draft")
        draft.write_text(str(used_bytes()))
        draft.replace(file)

    signal.signal(signal.SIGUSR2, write)


def _lose_with_each_request(num_bytes: int) -> None:
    from server.api.guard import ErrorBoundary

    call, lost = ErrorBoundary.__call__, list[bytes]()

    async def call_and_lose(self: ErrorBoundary, scope: Any, receive: Any, send: Any) -> None:
        lost.append(os.urandom(num_bytes))
        await call(self, scope, receive, send)

    ErrorBoundary.__call__ = call_and_lose  # type: ignore[method-assign]


def main() -> None:
    """Runs the server."""
    _answer_signals(Path(sys.argv[1]))
    if int(sys.argv[2]):
        _lose_with_each_request(int(sys.argv[2]))
    sys.argv[1:] = sys.argv[3:]
    from server.cli.main import main as serve

    sys.exit(serve())


if __name__ == "__main__":
    main()
