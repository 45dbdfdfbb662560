"""What a server does every few seconds. Event loop only.

* An engine that has ended by itself ends the process, for launchd or systemd to start it again.
* A machine that is short of memory gets back what idle conversations hold.
* Servers on one machine share its memory by what each needs.
* A Mac does not fall asleep while requests run.
"""

import asyncio
import contextlib
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from models.errors import brief
from models.texts import size_text
from server.pool.memory import Pressure
from server.pool.pool import ModelPool

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""Between two rounds."""


Child: TypeAlias = "subprocess.Popen[bytes]"


def start_program(command: Sequence[str]) -> Child:
    """Starts a program by its path; it inherits no files, and without closing them Python need not fork."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False)


class Awake:
    """Keeps a Mac from falling asleep, by caffeinate(8), which ends with this process at the latest."""

    def __init__(self, start: Callable[[Sequence[str]], Child] = start_program) -> None:
        self._start = start
        self._child: Child | None = None

    def keep(self, is_busy: bool) -> None:
        """Lets the Mac sleep again once nothing is busy. Blocks for no program."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        if is_busy and self._child is None:
            with contextlib.suppress(OSError):
                self._child = self._start(("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())))
        elif self._child is not None and not is_busy:
            self._child.terminate()


def exclude_from_backups(folder: Path) -> None:
    """Keeps Time Machine from copying gigabytes each day."""
    if platform.system() == "Darwin":
        try:
            command = ("/usr/bin/tmutil", "addexclusion", str(folder))
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "Time Machine may copy %s: %s", folder, brief(getattr(error, "stderr", None) or error, 200)
            )


@dataclass
class Upkeep:
    """The rounds of one server."""

    pool: ModelPool
    on_lost: Callable[[], object]
    """Called in each round without a running engine."""
    read_pressure: Callable[[], Pressure] | None = None
    """None where state is in memory that nothing else wants."""
    find_share: Callable[[], int] | None = None
    """Blocks; None where a person has set the memory."""
    awake: Awake | None = field(default_factory=lambda: Awake() if platform.system() == "Darwin" else None)

    async def run(self) -> None:
        """Goes on until cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            try:
                await self.tick()
            except Exception:  # a round that fails must not end the watch over engines
                logger.exception("a round of the upkeep failed; the next round tries again")

    async def tick(self) -> None:
        """One round."""
        if any(not engine.is_running for engine in self.pool.engines.values()):
            self.on_lost()
        if self.read_pressure is not None and self.pool.budgets.relieve(self.read_pressure()):
            self._tell_pressure()
        if self.find_share is not None:
            self.pool.budgets.on_change()
            self.pool.resize(await asyncio.to_thread(self.find_share))
        if self.awake is not None:
            self.awake.keep(any(member.is_busy for member in self.pool.members))

    def _tell_pressure(self) -> None:
        limit = self.pool.budgets.idle_limit
        if limit.level is Pressure.NORMAL:
            logger.info("the machine has memory again: the limit on idle state rises step by step")
        else:
            kept = size_text(limit.max_bytes or 0)
            logger.warning(
                "the machine is short of memory (%s): idle state is cut to %s", limit.level.name.lower(), kept
            )
