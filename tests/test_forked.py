"""What a fork server makes is like a process that was started anew, to the program in it and to who started it."""

import json
import os
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

pytestmark = pytest.mark.skipif(not forked.can_fork(), reason="with a GPU, each process is started anew")

PROBE = """
import json, os, pickle, resource, signal, sys, threading
class Own: pass
streams = [sys.stdin, sys.stdout, sys.stderr]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "environment": dict(os.environ), "HOME": os.path.expanduser("~"),
    "folder": os.getcwd(), "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "limits": [resource.getrlimit(kind) for kind in range(16)],
    "signals": {n: repr(signal.getsignal(n)).partition(" at ")[0] for n in range(1, signal.NSIG)},
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
    "files": len(os.listdir("/proc/self/fd")),
    "threads": [len(os.listdir("/proc/self/task")), threading.active_count()],
    "main": [__name__, isinstance(pickle.loads(pickle.dumps(Own())), Own), threading.current_thread().name],
    "streams": [[one.fileno(), one.mode, one.encoding, one.errors, one.line_buffering] for one in streams],
    "originals": [one is other for one, other in zip(streams, [sys.__stdin__, sys.__stdout__, sys.__stderr__])],
    "sent": sys.stdin.read(),
}))
print("ünïcödé", file=sys.stderr)
"""


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.parametrize("imported", [forked.COMMANDS, forked.MODELS], ids=["commands", "models"])
@pytest.mark.parametrize("is_session", [False, True])
def test_a_copy_sees_what_a_fresh_process_sees(imported: tuple[str, ...], is_session: bool, tmp_path: Path) -> None:
    # The interpreter fixes some of these when it starts.
    started = {
        name: value for name, value in forked._ENVIRONMENT.items() if name.startswith(("LANG", "LC_", "PYTHON"))
    }
    kept = {name: value for name, value in forked._ENVIRONMENT.items() if name.startswith(("HF_", "TRANSFORMERS_"))}
    options: dict[str, Any] = {
        "env": {**started, **kept, "HOME": str(tmp_path / "home"), "OWN": "1"},
        "cwd": tmp_path,
        "text": True,
        "start_new_session": is_session,
        "preexec_fn": limit,
    }
    run = partial(forked.run, "a", "--b", code=PROBE, sent="was sent", **options)
    fresh, copy = run(fresh=True), run(imported=imported)
    assert copy.stderr == fresh.stderr == "ünïcödé\n"
    assert json.loads(copy.stdout) == json.loads(fresh.stdout)
    assert copy.returncode == fresh.returncode == 0


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import os; os._exit(4)", 4, ""),
        ("raise SystemExit('a sentence')", 1, "a sentence\n"),
        ("import atexit; atexit.register(print, 'at the end', file=__import__('sys').stderr)", 0, "at the end\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_copy_ends_as_a_fresh_process_ends(code: str, status: int, error: str) -> None:
    ended = forked.run(code=code, imported=forked.COMMANDS, text=True)
    assert ended.returncode == status
    assert ended.stderr.endswith(error) and bool(ended.stderr) == bool(error)


def test_a_copy_is_ones_own_to_signal_and_wait_for() -> None:
    code = "import time; print('here', flush=True); time.sleep(1000)"
    with forked.start(code=code, imported=forked.COMMANDS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait(120) == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_what_is_read_once_needs_a_fresh_process() -> None:
    with pytest.raises(AssertionError, match="HF_HOME is read at the start: say fresh=True"):
        forked.start("serve", env={**os.environ, "HF_HOME": "/elsewhere"})
    with pytest.raises(AssertionError, match="PYTHONPATH is read at the start"):
        forked.start("pull", imported=forked.COMMANDS, env={**os.environ, "PYTHONPATH": "/elsewhere"})
