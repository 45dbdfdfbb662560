"""The two servers under test: started as their users start them, watched, and ended whatever happens."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from scripts.bench.common import ROOT, fast_blas_environment

OURS = "mlx-serve"
PEER = "mlx_lm.server"
LLAMA_CPP = "llama-server"
START_SECONDS = 120.0
STOP_SECONDS = 15.0
_LOG_TAIL = 2000


class ServerDied(Exception):
    """A server ended, or never became ready; the message holds the end of its log."""


@dataclass
class Server:
    """One running server process on the loopback address."""

    name: str
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raises ServerDied unless the process runs."""
        if self.process.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
            raise ServerDied(f"{self.name} ended with status {self.process.returncode}:\n{tail}")

    def wait_until_ready(self) -> None:
        """Returns once `/health` answers with 200."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as response:
                    if response.status == 200:
                        return
            except (URLError, OSError):
                time.sleep(0.1)
        raise ServerDied(f"{self.name} was not ready after {START_SECONDS:.0f} s")

    def stop(self) -> None:
        """Ends the process: gently, then for good."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def command(name: str, model: Path, port: int, options: Sequence[str] = ()) -> list[str]:
    """Returns the command line that starts a server, the one its users type."""
    if name == LLAMA_CPP:
        return [LLAMA_CPP, "--model", str(model), "--port", str(port), *options]
    binaries = Path(sys.executable).parent
    if name == OURS:
        return [str(binaries / "mlx-serve"), "serve", str(model), "--port", str(port), *options]
    return [str(binaries / "mlx_lm.server"), "--model", str(model), "--port", str(port), *options]


@contextmanager
def running(name: str, model: Path, folder: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Runs one server while the block does; its log goes into `folder`."""
    port = _free_port()
    log = folder / f"{name}-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(name, model, port, options),
            cwd=ROOT,
            env=fast_blas_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(name, port, process, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@contextmanager
def both(model: Path, folder: Path) -> Iterator[list[Server]]:
    """Runs both servers side by side, ours first in the list; only one is ever asked at a time."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(name, model, folder)) for name in (OURS, PEER)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
