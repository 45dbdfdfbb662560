"""Ctrl-C while something runs that Python cannot leave by itself."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Has Ctrl-C end the process at once, as it ends any program, while the block runs; main thread only.

    Python would wait for the end of the current call, and reading weights is one call that may take a minute; what is
    imported may also turn the interrupt into an error of its own.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
