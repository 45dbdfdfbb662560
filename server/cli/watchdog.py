"""Hangs: steps that do not return, and a process that is to end and does not.

A thread of its own looks at what engines count up (`Engine.pulse`), and waits for no lock, no device and no event
loop. Only time between its looks counts, and a long pause counts little: a machine that slept makes no step old.

Where a C call never gives Python's lock back that thread cannot run either. What then ends the process needs no lock:
the handlers of SIGTERM, SIGINT and SIGIO are the C library's `alarm`, with the signal's number for its seconds, and
that of SIGALRM writes every thread's stack and is `_exit`, with 14 for its status. While the thread runs, it takes
each alarm back, and sets its own for a process that is to end, again and again as long as anything makes progress.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

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
"""Without progress, from a signal to the end."""
SLACK_SECONDS = 0.5
TIMER_SECONDS = 2.0


class StepAge:
    """How long an engine's step lasts, as its looks find. Pure."""

    def __init__(self, least_seconds: float) -> None:
        """A step of fewer seconds is no hang."""
        self._least_seconds, self._longest_seconds = least_seconds, 0.0
        self._pulse = 0
        self.seconds = 0.0
        self.is_stuck = False

    def look(self, pulse: int, gap_seconds: float) -> None:
        """Looks again, after `gap_seconds`."""
        if pulse != self._pulse:
            if self.is_stuck:  # it was no hang, so the next one is to be told later
                self._least_seconds = 2 * self.limit_seconds
            else:
                self._longest_seconds = max(self._longest_seconds, self.seconds)
            self._pulse, self.seconds = pulse, 0.0
        elif pulse % 2:
            self.seconds += gap_seconds
        self.is_stuck = self.seconds > self.limit_seconds

    @property
    def limit_seconds(self) -> float:
        return max(self._least_seconds, TIMES_LONGEST * self._longest_seconds)

    @property
    def patience_seconds(self) -> float:
        """How long a process that is to end waits for a step."""
        return max(END_SECONDS, 1.5 * self._longest_seconds)


class Hangs:
    """Tells steps that do not return. One thread only."""

    def __init__(self, after_seconds: float, *, exits: bool) -> None:
        """0 seconds: never. `exits`: a hang ends the process."""
        self._after_seconds, self._exits = after_seconds, exits
        self.engines: Callable[[], Mapping[str, Engine]] = dict
        """By model. For any thread."""
        self.post: Callable[[Callable[[], object]], object] = lambda act: None
        """Calls a function on the event loop."""
        self._ages = WeakKeyDictionary[Engine, StepAge]()

    def look(self, gap_seconds: float) -> None:
        """Looks at every engine."""
        for name, engine in self.engines().items():
            age = self._ages.setdefault(engine, StepAge(max(self._after_seconds, engine.start_seconds)))
            seconds, was_stuck = age.seconds, age.is_stuck
            age.look(engine.pulse, gap_seconds)
            if not self._after_seconds:
                continue
            engine.stuck_seconds = age.seconds if age.is_stuck else None
            if age.is_stuck and not was_stuck:
                engine.num_stuck += 1
                # First of all: writing a log may be what hangs.
                self.post(engine.fail_waiting)
                logger.critical("%s is stuck: a step of its engine has not returned for %.0f s", name, age.seconds)
                log_stacks()
            elif was_stuck and not age.is_stuck:
                logger.warning("%s works again: the step returned after %.0f s", name, seconds)
            if self._exits and age.seconds > age.limit_seconds + FAREWELL_SECONDS:
                logger.critical("the process ends with status %d: it is to be started again", STUCK)
                os._exit(STUCK)

    @property
    def progress(self) -> list[tuple[int, int]]:
        return [engine.progress for engine in self.engines().values()]

    @property
    def patience_seconds(self) -> float:
        return max((age.patience_seconds for age in self._ages.values()), default=END_SECONDS)

    @property
    def exit_seconds(self) -> float:
        """The longest of a step before the process ends; 0: it does not."""
        longest = max((age.limit_seconds for age in self._ages.values()), default=0.0)
        return longest if self._exits and self._after_seconds else 0.0


def log_stacks() -> None:
    """Logs what each thread of Python does, in a line each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        calls = (f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in traceback.extract_stack(frame))
        logger.critical("thread %s: %s", names.get(ident, ident), " > ".join(calls))


class Watchdog:
    """The thread, and what ends the process where the thread cannot run."""

    def __init__(self, hangs: Hangs, on_signal: Callable[[], object]) -> None:
        """Main thread only, once in a process. `on_signal` is called at SIGTERM, on the thread."""
        self.hangs, self.on_signal = hangs, on_signal
        self._due: float | None = None
        """When the alarm is due that the thread has set."""
        self._timer = 0.0, 0.0
        """For how long, and when, it was set last."""
        self._num_steps = 0
        self._progress: object = None
        self._is_ending = False
        self._libc = libc = ctypes.CDLL(None)
        # Not the default action: it does nothing to the first process of a container.
        libc.signal(int(signal.SIGALRM), libc._exit)
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or 2, chain=True)
        libc.signal(int(signal.SIGTERM), libc.alarm)
        libc.signal(int(signal.SIGIO), libc.alarm)
        self._read_end, self._write_end = os.pipe()
        fcntl.fcntl(self._read_end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._read_end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.set_blocking(self._write_end, False)
        with held_back():
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        # The stacks are many writes, hence many signals: no other thread is to be interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})

    def take_ctrl_c(self) -> None:
        """From now on Ctrl-C is as SIGTERM. Main thread only."""
        # Else asyncio would set a handler that needs Python's lock.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._libc.signal(int(signal.SIGINT), self._libc.alarm)

    def end(self) -> None:
        """The process is to end; each call is a sign of progress. For any thread."""
        self._num_steps += 1
        self._is_ending = True

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self.hangs.look(min(now - looked, MAX_GAP_SECONDS))
            self._look_at_alarm(now)
            self._set_timer(now)
            looked = now

    def _look_at_alarm(self, now: float) -> None:
        progress = self._num_steps, self.hangs.progress
        if self._is_ending and progress != self._progress:
            self._progress = progress
            self._set_alarm(now + self.hangs.patience_seconds)
        else:
            self._set_alarm(self._due)

    def _set_alarm(self, due: float | None) -> None:
        """Sets the thread's own alarm, and heeds one that a signal has set."""
        before, was_due = time.monotonic(), self._due
        # Writing the stacks may hang: the second alarm ends the process at once.
        seconds = (0.0, 0.0) if due is None else (max(due - before, 0.01), 1.0)
        left, _ = signal.setitimer(signal.ITIMER_REAL, *seconds)
        after, self._due = time.monotonic(), due
        is_own = was_due is not None and before + left - SLACK_SECONDS < was_due < after + left + SLACK_SECONDS
        if not left or is_own:
            return
        if left > signal.SIGTERM:  # of SIGIO: the timer went off, and the thread has run all the same
            with contextlib.suppress(BlockingIOError):
                os.read(self._read_end, 1 << 20)
            return
        self.end()
        self._set_alarm(after + self.hangs.patience_seconds)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.on_signal()

    def _set_timer(self, now: float) -> None:
        """Has the C library send SIGIO unless this is called again in time: the stacks are written to a pipe."""
        seconds, (was_seconds, set_at) = 0.0 if self._is_ending else self.hangs.exit_seconds, self._timer
        if seconds == was_seconds and now - set_at < TIMER_SECONDS:
            return
        self._timer = seconds, now
        if seconds:
            after_seconds = max(seconds - signal.SIGIO, 2 * TIMER_SECONDS)
            faulthandler.dump_traceback_later(after_seconds, file=self._write_end)
        else:
            faulthandler.cancel_dump_traceback_later()
