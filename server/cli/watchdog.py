"""Hangs: steps that do not return, and a process that is to end and does not.

A thread of its own looks at what engines count up (`Engine.pulse`), and waits for no lock, device or event loop. Only
time between its looks counts, and a long pause counts little: a machine that slept makes no step old.

Where a C call never gives Python's lock back, that thread cannot run either. What then ends it needs no lock:

- Python's own handler writes a signal's number to a pipe, on any thread. The pipe sends `PIPE_SIGNAL`, whose
  handler is the C library's `alarm`, with the signal's number for its seconds. A timer of C that the thread puts off
  writes to the same pipe.
- SIGALRM's handler writes every thread's stack, and is `_exit`, with 14 for its status.

While the thread runs, it takes each such alarm back, and sets its own for a process that is to end.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from cache.disk.files import FileSystem
from server.cli.keys import held_back
from server.engine.engine import Engine

logger = logging.getLogger(__name__)

STUCK = 75
"""Exit status: EX_TEMPFAIL of <sysexits.h>, to try again."""
LOOK_SECONDS = 0.1
MAX_GAP_SECONDS = 1.0
"""Counted between two looks at most."""
TIMES_LONGEST = 4
"""Times the longest so far that a step may take."""
FAREWELL_SECONDS = 2.0
"""For the clients' errors to be sent."""
END_SECONDS = signal.SIGTERM - 1
"""Without progress, from a signal to the end; where a step took longer, one and a half times the longest."""
TIMER_SECONDS = 2.0
PIPE_SIGNAL = signal.SIGIO
if sys.platform == "linux":
    PIPE_SIGNAL = signal.SIGSTKFLT  # of no use else, and one above SIGTERM


class StepAge:
    """How long an engine's step lasts, as its looks find. Pure."""

    def __init__(self, least_seconds: float) -> None:
        """A step of fewer seconds is no hang."""
        self._least_seconds, self._pulse = least_seconds, 0
        self.seconds = self.longest_seconds = 0.0
        self.is_stuck = False

    def look(self, pulse: int, gap_seconds: float) -> None:
        """Looks again, after `gap_seconds`."""
        if pulse != self._pulse:
            if self.is_stuck:  # it was no hang, so the next one is to be told later
                self._least_seconds = 2 * self.limit_seconds
            else:
                self.longest_seconds = max(self.longest_seconds, self.seconds)
            self._pulse, self.seconds = pulse, 0.0
        elif pulse % 2:
            self.seconds += gap_seconds
        self.is_stuck = self.seconds > self.limit_seconds

    @property
    def limit_seconds(self) -> float:
        return max(self._least_seconds, TIMES_LONGEST * self.longest_seconds)


class Hangs:
    """Tells steps that do not return. One thread only."""

    def __init__(self, after_seconds: float, *, exits: bool) -> None:
        """0 seconds: never. `exits`: a hang ends the process."""
        self._after_seconds, self._exits = after_seconds or math.inf, exits and after_seconds > 0
        self.engines: Callable[[], Mapping[str, Engine]] = dict
        """By model. For any thread."""
        self.post: Callable[[Callable[[], object]], object] = lambda act: None
        """Calls a function on the event loop, if that runs."""
        self._ages = WeakKeyDictionary[Engine, StepAge]()
        self._is_lost = False
        """Another machine is lost, and the process ends in a moment."""

    def look(self, gap_seconds: float) -> None:
        """Looks at every engine."""
        for name, engine in self.engines().items():
            if engine.lost is not None and not self._is_lost:
                self._is_lost = True
                self.post(engine.fail_waiting)
                end_soon(engine.lost)
            age = self._ages.setdefault(engine, StepAge(max(self._after_seconds, engine.start_seconds)))
            seconds, was_stuck = age.seconds, age.is_stuck
            age.look(engine.pulse, gap_seconds)
            engine.stuck_seconds = age.seconds if age.is_stuck else None
            if age.is_stuck and not was_stuck:
                engine.num_stuck += 1
                # First of all: writing a log may be what hangs.
                self.post(engine.fail_waiting)
                logger.critical("%s is stuck: a step of its engine has not returned for %.0f s", name, age.seconds)
                log_stacks()
            elif was_stuck and not age.is_stuck:
                logger.warning("%s works again: the step returned after %.0f s", name, seconds)
            exits = self._exits or engine.is_divided
            if exits and age.seconds > age.limit_seconds + FAREWELL_SECONDS:
                logger.critical("the process ends with status %d, to be started again", STUCK)
                os._exit(STUCK)

    @property
    def progress(self) -> tuple[int, list[int]]:
        """Changes as anything is evaluated or written."""
        return FileSystem.num_writes, [engine.pulse for engine in self.engines().values()]

    @property
    def patience_seconds(self) -> float:
        """How long a process that is to end waits for progress."""
        return max([END_SECONDS, *(1.5 * age.longest_seconds for age in self._ages.values())])

    @property
    def exit_seconds(self) -> float:
        """The longest of a step before the process ends; 0: it does not."""
        return max((age.limit_seconds for age in self._ages.values()), default=0.0) if self._exits else 0.0


def end_soon(why: str | None) -> None:
    """Ends a process that waits for what will not come, once it has told so; with status 0 if no fault is named.

    For any thread.
    """
    if why is not None:
        logger.critical("%s: the process ends with status %d, to be started again", why, STUCK)
    timer = threading.Timer(FAREWELL_SECONDS, os._exit, (0 if why is None else STUCK,))
    timer.daemon = True
    timer.start()


def log_stacks() -> None:
    """Logs what each thread of Python does, in a line each. Reads no file: a disk may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        inmost_first = [(line, call.f_code) for call, line in traceback.walk_stack(frame)]
        calls = (f"{Path(code.co_filename).name}:{line} {code.co_name}" for line, code in reversed(inmost_first))
        logger.critical("thread %s: %s", names.get(ident, ident), " > ".join(calls))


class Watchdog:
    """The thread, and what ends the process where the thread cannot run."""

    def __init__(self, hangs: Hangs, on_signal: Callable[[], object]) -> None:
        """Main thread only, once in a process. `on_signal` is called at SIGTERM and Ctrl-C, on the thread."""
        self.hangs, self.on_signal = hangs, on_signal
        self._num_ends, self._progress = 0, object()
        self._acts = dict[int, Callable[[], object]]()
        self._alarm_at = self._timer_at = 0.0
        libc = ctypes.CDLL(None)
        # Not the default action: it does nothing to the first process of a container.
        libc.signal(int(signal.SIGALRM), libc._exit)
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, chain=True)
        libc.signal(int(PIPE_SIGNAL), libc.alarm)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        fcntl.fcntl(self._read_end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._read_end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if sys.platform == "linux":
            fcntl.fcntl(self._read_end, fcntl.F_SETSIG, PIPE_SIGNAL)
        self.take(signal.SIGTERM)
        with held_back():
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        # A stack is many writes, hence many signals: no other thread is to be interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, {PIPE_SIGNAL})

    def take(self, number: signal.Signals, act: Callable[[], object] | None = None) -> None:
        """From now on a signal has `act` called on the thread; without one it ends the process. Main thread only."""
        self._acts[number] = act or self._heed
        # Else asyncio would set handlers that need Python's lock.
        signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def end(self) -> None:
        """The process is to end; each call is a sign of progress. For any thread."""
        self._num_ends += 1

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self.hangs.look(min(now - looked, MAX_GAP_SECONDS))
            self._set_alarm(now)
            self._set_timer(now)
            looked = now

    def _set_alarm(self, now: float) -> None:
        """Heeds signals, and sets the thread's own alarm in place of theirs."""
        events = b""
        with contextlib.suppress(BlockingIOError):
            events = os.read(self._read_end, 1 << 20)
        progress = self._num_ends, self.hangs.progress
        if progress != self._progress:
            self._progress, self._alarm_at = progress, now + self.hangs.patience_seconds
        # Writing the stacks may hang: the second alarm ends the process at once.
        own = (max(self._alarm_at - now, 0.01), 1.0) if self._num_ends else (0.0, 0.0)
        signal.setitimer(signal.ITIMER_REAL, *own)
        # A timer's events are words. SIGTERM and a Ctrl-C at once are one wish.
        for act in dict.fromkeys(act for number, act in list(self._acts.items()) if number in events):
            act()

    def _heed(self) -> None:
        self.end()
        self._set_alarm(time.monotonic())
        self.on_signal()

    def _set_timer(self, now: float) -> None:
        """With `--exit-when-stuck`, has C write to the pipe unless this is called again in time."""
        if now < self._timer_at:
            return
        self._timer_at = now + TIMER_SECONDS
        faulthandler.cancel_dump_traceback_later()
        if (seconds := self.hangs.exit_seconds) and not self._num_ends:
            after_seconds = max(seconds - PIPE_SIGNAL, 2 * TIMER_SECONDS)
            faulthandler.dump_traceback_later(after_seconds, file=self._write_end)
