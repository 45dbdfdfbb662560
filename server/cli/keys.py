"""Ctrl-C and SIGTERM during calls that Python cannot leave by itself, and keys typed during an answer."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import termios
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
    """Handles signals with `handler` in the block, but for those that are ignored; main thread only.

    A shell without job control has what it starts in the background ignore Ctrl-C, which is for the foreground.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in heeded]
    try:
        yield
    finally:
        for number, old in zip(heeded, before, strict=True):
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
