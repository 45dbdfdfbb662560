"""A server as a process of its own, with its output."""

import os
import re
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from tests.support import forked

DEADLINE_SECONDS = 300.0


class Process:
    """A server process, its output so far, and the address that it reported."""

    def __init__(
        self,
        *arguments: str,
        limits: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        fresh: bool = False,
        code: str = forked.MLX_SERVE,
    ) -> None:
        self._runtime = tempfile.TemporaryDirectory()
        self._process = forked.start(
            "serve",
            *arguments,
            fresh=fresh,
            code=code,
            # What other servers on this machine have claimed is not for a test to see.
            env={**os.environ, "XDG_RUNTIME_DIR": self._runtime.name, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(_limit, dict(limits)),
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def port(self) -> int:
        self.wait_for("Try it:")
        match = re.search(r"http://[^:]*:(\d+)/v1", self.output)
        assert match is not None
        return int(match[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            assert self._reader.is_alive(), self.output
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        status = self._process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return status

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(DEADLINE_SECONDS)
        self._runtime.cleanup()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line


def _limit(limits: Mapping[int, tuple[int, int]]) -> None:
    for name, soft_and_hard in limits.items():
        resource.setrlimit(name, soft_and_hard)
