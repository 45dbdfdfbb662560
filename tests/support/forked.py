"""`mlx-serve` as a process of its own, most often without the seconds that its imports take.

A fork server is a process with one thread that has imported what programs need and evaluated nothing. It forks for
each process that a test wants, and the copy becomes that process: code, arguments, environment, working directory,
limits, open files, session, signals and streams are its own. The copy is a child of the tests' process, as one that
is started anew would be, so that `Popen` waits for it, signals it and reads it. A fork server starts at its first use
in each worker of the tests.

What a copy has behind it is the start: imports, and what they read of the environment. Tests of that say
`fresh=True`. With a GPU every start is a true one: neither Metal nor CUDA lasts through a fork.
"""

import atexit
import ctypes
import gc
import inspect
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from models.fast_blas import load_fast_blas

MLX_SERVE = "from mlx_serve import main; main()"
COMMANDS = ("mlx_serve", "server.cli.top", "httpx2", "pydantic", "rich.progress", "tqdm", "yaml")
"""What commands import that load no model, but for `huggingface_hub`, which reads the environment once."""
MODELS = ("mlx_serve", "server.cli.serve", "server.cli.chat")

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
_READ_BY_PYTHON = ("LANG", "LC_", "PYTHON")
_READ_BY_IMPORTS = {COMMANDS: _READ_BY_PYTHON, MODELS: (*_READ_BY_PYTHON, "HF_", "TRANSFORMERS_OFFLINE")}
"""How variables begin that are read once: a copy must have those of the fork server."""
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_MAX_MESSAGE_BYTES = 100_000
_FORK_SECONDS = 300.0
_forking = threading.Lock()
"""Adopting orphans is said of the whole process, for all fork servers."""


class _Start(NamedTuple):
    """What a copy is to become."""

    code: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    is_session: bool
    preexec: Callable[[], object] | None


def can_fork() -> bool:
    """Says whether a process that has imported MLX may go on in a copy of it."""
    import mlx.core as mx  # not by a fork server, before its fast BLAS

    return sys.platform == "linux" and not mx.is_available(mx.gpu)


def start(
    *arguments: str, code: str = MLX_SERVE, imported: tuple[str, ...] = MODELS, fresh: bool = False, **options: Any
) -> "subprocess.Popen[Any]":
    """Starts `python -c CODE ARGUMENTS`; the options are those of `Popen`, and a `preexec_fn` must be picklable."""
    command = [sys.executable, "-c", code, *arguments]
    if fresh or not can_fork():
        return subprocess.Popen(command, **options)
    return _Forked(command, imported, **options)


def run(*arguments: str, sent: str | bytes | None = None, timeout: float = 120.0, **options: Any) -> Any:
    """Starts and ends; returns a `CompletedProcess`, with output and errors."""
    pipe = subprocess.PIPE
    with start(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            output, errors = process.communicate(sent, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class _Forked(subprocess.Popen[Any]):
    """A copy of a fork server. Of `Popen`, only how a process comes to be is replaced."""

    def __init__(self, command: list[str], imported: tuple[str, ...], **options: Any) -> None:
        self._imported = imported
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        environment = os.environ if given["env"] is None else given["env"]
        for name in {*environment, *_ENVIRONMENT}:
            if name.startswith(_READ_BY_IMPORTS[self._imported]):
                assert environment.get(name) == _ENVIRONMENT.get(name), f"{name} is read at the start: say fresh=True"
        _, _, code, *words = given["args"]
        folder = Path(given["cwd"] or ".").resolve()
        wanted = _Start(code, words, dict(environment), folder, given["start_new_session"], given["preexec_fn"])
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        try:
            self.pid = _fork_server(self._imported).fork(pickle.dumps(wanted), files)
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


class _ForkServer:
    """The tests' end of a fork server; any thread may call it."""

    def __init__(self, imported: Sequence[str]) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from tests.support.forked import serve; serve()"
        with other:
            command = [sys.executable, "-c", code, str(other.fileno()), *imported]
            # The streams of pipes never seek, whatever a copy has behind them.
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            self._process = subprocess.Popen(command, cwd=_ROOT, env=_ENVIRONMENT, pass_fds=[other.fileno()], **pipes)
        self._connection.settimeout(_FORK_SECONDS)
        atexit.register(self._close)

    def fork(self, wanted: bytes, files: Sequence[int]) -> int:
        """Returns the id of a new child of this process, which has `files` as its standard streams."""
        assert len(wanted) < _MAX_MESSAGE_BYTES
        prctl = ctypes.CDLL(None).prctl
        with _forking:
            # An orphan goes to its nearest ancestor that says so, else to the system's first process.
            prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [wanted], files)
                pid = self._connection.recv(_MAX_MESSAGE_BYTES)
                assert pid and self._connection.recv(_MAX_MESSAGE_BYTES), "the fork server has ended"
            finally:
                prctl(_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(pid)

    def _close(self) -> None:
        self._connection.close()
        self._process.wait(_FORK_SECONDS)


_fork_server = cache(_ForkServer)


def serve() -> None:
    """Forks for each message of the tests until they end; in a copy, is the program that was asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and their end this process
    load_fast_blas()
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        import_module(name)
    gc.freeze()
    while True:
        wanted, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
        if not wanted:
            return
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        assert num_threads == 1, "an import has started a thread, which a copy would not have"
        parent = os.fork()
        if parent == 0:
            child = os.fork()
            if child == 0:
                connection.close()
                _become(pickle.loads(wanted), files)
                return
            connection.send(str(child).encode())
            os._exit(0)  # makes an orphan of its child
        os.waitpid(parent, 0)
        connection.send(b"orphaned")
        for file in files:
            os.close(file)


def _become(wanted: _Start, files: Sequence[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdin, sys.stdout):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=stream.isatty() and not stream.write_through)
    if wanted.is_session:
        os.setsid()
    os.chdir(wanted.folder)
    os.environ.clear()
    os.environ.update(wanted.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if wanted.preexec is not None:
        wanted.preexec()
    gc.unfreeze()
    sys.argv = ["-c", *wanted.arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(wanted.code, "<string>", "exec"), vars(main))
