"""The server as a process of its own, on loopback, and what it costs: memory and processor time."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 300.0
STOP_SECONDS = 30.0
PROBE_SECONDS = 30.0
_ON_LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--name", "load")
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")

_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT")


class ServerFailed(Exception):
    """The server did not start, or ended by itself."""


class Served:
    """A running server process."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, probe: Path | None) -> None:
        self._process = process
        self._log = log
        self._probe = probe
        self.port = self._wait_for_port()

    @property
    def url(self) -> str:
        """The base address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def log(self) -> str:
        """Returns all that the server has written."""
        return self._log.read_text(errors="replace")

    def faults(self) -> list[str]:
        """Returns what the log tells of faults of the server's own, tracebacks included."""
        faults: list[str] = []
        for line in self.log().splitlines():
            if " ERROR " in line or line.startswith("Traceback"):
                faults.append(line)
            elif faults and not _LOG_LINE.match(line):
                faults[-1] += f"\n{line}"
        return faults

    def rss_bytes(self) -> int:
        """Returns the memory that the process holds."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            return int(re.findall(r"VmRSS:\s+(\d+) kB", status.read_text())[0]) * 1024
        return int(_ps("rss=", self._process.pid)) * 1024

    def used_bytes(self) -> int:
        """Returns what a probed server has in use, as `memory_probe` says; 0 where the C library does not tell."""
        assert self._probe is not None, "the server was started without a probe"
        self._probe.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + PROBE_SECONDS
        while not self._probe.exists():
            if time.monotonic() > deadline or not self.is_alive:
                raise ServerFailed(f"the server did not say what it has in use within {PROBE_SECONDS:g} s")
            time.sleep(0.05)
        return int(self._probe.read_text())

    def cpu_seconds(self) -> float:
        """Returns the processor time that the process has used, in itself and for it in the kernel."""
        return cpu_seconds(self._process.pid)

    def stop(self) -> int:
        """Ends the process as Ctrl-C does; returns its exit status."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(STOP_SECONDS)

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_alive:
            match = _ADDRESS.search(self.log())
            if match is not None and "Try it:" in self.log():
                return int(match[1])
            time.sleep(0.05)
        raise ServerFailed(f"the server did not start; it said:\n{self.log()[-2000:]}")


@contextmanager
def serving(*arguments: str, num_files: int | None = None, leak_bytes: int | None = None) -> Iterator[Served]:
    """Serves the built-in model while the block runs; it may open `num_files`.

    With `leak_bytes` it says what it has in use, and loses so much with each request.
    Raises ServerFailed where it does not start or does not end well.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        log, probe = Path(folder) / "log", Path(folder) / "used"
        program = ["mlx_serve"] if leak_bytes is None else ["scripts.load.memory_probe", str(probe), str(leak_bytes)]
        process = _start([*program, "serve", "demo", *arguments], Path(folder), log, num_files)
        try:
            served = Served(process, log, None if leak_bytes is None else probe)
            yield served
            status = served.stop()
            if status != 0:
                raise ServerFailed(f"the server ended with status {status}:\n{served.log()[-2000:]}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(arguments: Sequence[str], folder: Path, log: Path, num_files: int | None) -> "subprocess.Popen[bytes]":
    def limit() -> None:
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    cache = ["--cache-dir", str(folder / "cache")]
    command = [sys.executable, "-m", *arguments, *cache, *_ON_LOOPBACK]
    # What other servers on this machine have claimed is not for a measurement to see.
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "XDG_DATA_HOME": str(folder)}
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, preexec_fn=limit
        )


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that a process has used, in itself and for it in the kernel."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        # The name in parentheses may hold anything, so count from after it.
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    minutes, _, seconds = _ps("time=", pid).rpartition(":")
    return int(minutes.replace(":", "")) * 60 + float(seconds)


def _ps(column: str, pid: int) -> str:
    return subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=True).stdout
