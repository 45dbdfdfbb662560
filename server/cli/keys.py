"""Ctrl-C and SIGTERM during calls that Python cannot leave by itself, and keys typed during an answer."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models.fast_blas import find_compiler, load_fast_blas
from models.names import resolve

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder, deleted at the end; first deletes those of killed processes. Raises OSError."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError where a living process has the lock, which ends with its process."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


@contextlib.contextmanager
def handling(handler: "Callable[[int, Any], object] | signal.Handlers", *numbers: signal.Signals) -> Iterator[None]:
    """Handles signals with `handler` in the block; main thread only."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def leave(number: int, _: object) -> None:
    """Ends the program in order, with a shell's exit status for the signal."""
    sys.exit(128 + number)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Makes Ctrl-C end the process at once, even in a long call such as reading weights; main thread only."""
    return handling(signal.SIG_DFL, signal.SIGINT)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delays a Ctrl-C; main thread only. Threads that start in the block never take one.

    While a command of the C library's `system()` runs, Ctrl-C is lost unless every thread holds it back.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


LOOK_SECONDS = 0.1
PUT_OFF_SECONDS = signal.SIGTERM - 1


class Sigterm:
    """SIGTERM ends the process even where Python's own handler cannot run, since a thread never gives its lock back.

    The handler is the C library's `alarm`, with the signal's number for its seconds: it may run on any thread, also
    one that is not Python's. A thread of ours finds the alarm set, calls `on_signal`, and postpones the alarm again
    and again. If that thread cannot run for so long, the process exits with SIGALRM's number.
    """

    def __init__(self, on_signal: Callable[[], object]) -> None:
        """Main thread only, once in a process."""
        self.on_signal = on_signal
        libc = ctypes.CDLL(None)
        # Not the default action: it does nothing to the first process of a container.
        libc.signal(int(signal.SIGALRM), libc._exit)
        libc.signal(int(signal.SIGTERM), libc.alarm)
        with held_back():
            threading.Thread(target=self._watch, name="sigterm", daemon=True).start()

    def _watch(self) -> None:
        while not signal.getitimer(signal.ITIMER_REAL)[0]:
            time.sleep(LOOK_SECONDS)
        put_off_to = 0.0
        while True:
            now = time.monotonic()
            remaining, _ = signal.setitimer(signal.ITIMER_REAL, PUT_OFF_SECONDS)
            # Another signal has set the alarm to at least a second later.
            if now + remaining > put_off_to + 0.5:
                self.on_signal()
            put_off_to = time.monotonic() + PUT_OFF_SECONDS
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Hides typed keys, `^C` too, to be read afterwards or one by one. In line mode a Ctrl-D would be forgotten."""
    try:
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
    except (OSError, ValueError, AttributeError, termios.error):
        # Standard input is no terminal.
        yield
        return
    tty.setcbreak(terminal, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


@contextlib.contextmanager
def loading(model: str) -> Iterator[str | None]:
    """Says that MLX is being imported, which Ctrl-C ends; raises ModelError at once.

    MLX and transformers are imported only in this block, once a model is known to be there. Yields the name of the
    fast BLAS that was loaded for MLX, if there is one.
    """
    from rich.console import Console

    resolve(model)
    console = Console()
    with interruptible():
        # Before any other thread exists, which could take a Ctrl-C that is held back.
        with held_back():
            fast_blas = load_fast_blas()
        find_compiler(held_back)
        with console.status(f"Loading {model} …") if console.is_terminal else contextlib.nullcontext():
            # Ctrl-C would leave the terminal without a cursor.
            console.show_cursor(True)
            yield fast_blas
