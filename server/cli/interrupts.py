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


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Has a Ctrl-C wait until the block is left; main thread only.

    Threads that start in the block never take one. The C library's `system()` has the whole process ignore Ctrl-C
    while its command runs, and then it is lost, unless every thread holds it back.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
