"""Hangs: how old a step is, what clients of a stuck engine get, and the end of a process whatever hangs in it."""

import contextlib
import http.client
import json
import linecache
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cli.watchdog import MAX_GAP_SECONDS, STUCK, Hangs, StepAge
from tests.support import forked
from tests.support.fake_engine import FakeEngine
from tests.support.server_process import Process
from tests.support.tiny_models import write

WORKING, WAITING = 1, 2
PLANT = """
import ctypes, os, sys, threading, time
import mlx.core as mx, cache.disk.folder as folder, server.app.service as service, server.cli.watchdog as watchdog

go, kind = {go!r}, {kind!r}
watchdog.END_SECONDS = 2
lock = threading.Lock(); lock.acquire()
mutex = ctypes.create_string_buffer(256)

def hang():
    if kind == "returns":
        while os.path.exists(go): time.sleep(0.01)
    if not os.path.exists(go): return
    os.write(1, b"it hangs now\\n")
    if kind == "C with Python's lock for a while":
        os.unlink(go)
        return ctypes.PyDLL(None).usleep(3_000_000)
    if kind == "lock": lock.acquire()
    libc = (ctypes.PyDLL if kind == "C with Python's lock" else ctypes.CDLL)(None)
    for _ in range(2): libc.pthread_mutex_lock(mutex)

def planted(function, is_meant=lambda: True):
    def call(*given, **more):
        if is_meant(): hang()
        return function(*given, **more)
    return call

is_engine = lambda: threading.current_thread().name == "mlx-serve-engine"
first = []
def is_first():
    if is_engine() and not first: first.append(threading.get_ident())
    return first == [threading.get_ident()]
if kind == "disk": folder.write_tensors = planted(folder.write_tensors)
elif kind == "loader": service.load = planted(service.load)
else:
    is_meant = is_first if kind == "first" else is_engine
    mx.eval, mx.async_eval = planted(mx.eval, is_meant), planted(mx.async_eval, is_meant)
"""


@contextlib.contextmanager
def serving(folder: Path, place: Path, kind: str, *arguments: str) -> Iterator[Process]:
    """A server in which something hangs of that kind while the file `go` is there."""
    code = PLANT.format(go=str(place / "go"), kind=kind) + forked.MLX_SERVE
    process = Process(str(folder), "--port", "0", *arguments, code=code)
    try:
        yield process
    finally:
        process.close()


def ask(port: int, method: str, path: str, **fields: Any) -> tuple[int, Any]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method, path, json.dumps(fields) if fields else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        read = response.read().decode()
        return response.status, read if fields.get("stream") else json.loads(read)


def send(port: int, **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    return connection


def test_a_step_is_stuck_once_it_lasts_longer_than_any_step_can() -> None:
    age = StepAge(60)
    for pulse in (WORKING, WORKING + 2, WAITING, WAITING):
        age.look(pulse, 59)
        age.look(pulse, 59)
        assert not age.is_stuck, "each step is new, and one that waits for requests does nothing"
    age.look(WORKING, 1)
    age.look(WORKING, 4 * 59)
    assert not age.is_stuck, "a step of 59 seconds was no hang, and machines differ by so much"
    age.look(WORKING, 1)
    assert age.is_stuck


def test_a_step_may_take_what_the_start_took() -> None:
    hangs, engine, found = Hangs(5, exits=False), FakeEngine(), list[Any]()
    hangs.engines, engine.pulse, engine.start_seconds = lambda: {"slow": engine}, WORKING, 9
    for _ in range(11):
        hangs.look(MAX_GAP_SECONDS)
        found.append(engine.stuck_seconds)
    assert found == [*[None] * 10, 10]


def test_a_step_that_returns_was_no_hang_and_the_next_one_is_told_later() -> None:
    age, found = StepAge(60), list[bool]()
    for pulse, gap_seconds in ((WORKING, 0), (WORKING, 1000), (WAITING, 1)):
        age.look(pulse, gap_seconds)
        found.append(age.is_stuck)
    assert found == [False, True, False] and age.limit_seconds == 120
    assert age.longest_seconds == 0, "a process that is to end waits no longer for it"


@pytest.mark.parametrize("after_seconds", [5, 0])
def test_one_stuck_engine_fails_those_who_wait_for_it_alone(
    after_seconds: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    monkeypatch.setattr(linecache, "checkcache", read.append)
    hangs, stuck, other, told = Hangs(after_seconds, exits=False), FakeEngine(), FakeEngine(), list[Any]()
    hangs.engines, hangs.post = lambda: {"stuck": stuck, "other": other}, told.append
    seconds = list[Any]()
    stuck.pulse = WORKING
    for number in range(9):
        hangs.look(MAX_GAP_SECONDS)
        seconds.append(stuck.stuck_seconds)
        other.pulse += 1
        stuck.pulse += number == 7
    assert other.stuck_seconds is None and other.num_stuck == 0
    if after_seconds:
        assert told == [stuck.fail_waiting] and stuck.num_stuck == 1
        assert seconds == [*[None] * 6, 6, 7, None]
        assert "stuck is stuck" in caplog.text and "thread MainThread: " in caplog.text
        assert not read, "no file is read: a disk may be what hangs"
        assert re.search(r"test_watchdog\.py:\d+ test_one_stuck_engine\w+ > watchdog\.py:\d+ look > ", caplog.text)
        assert "stuck works again" in caplog.text
    else:
        assert not any(seconds) and not told and not caplog.text


def test_a_stuck_engine_is_told_and_all_is_well_once_the_step_returns(folder: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with serving(folder, tmp_path, "returns", "--stuck-after", "2") as server:
        port = server.port
        assert ask(port, "POST", "/v1/completions", prompt="a", max_tokens=1)[0] == 200
        go.touch()
        waiting = [send(port, prompt="b", max_tokens=9), send(port, prompt="b", max_tokens=9, stream=True)]
        vectors = send(port, prompt="c", max_tokens=9, n=2)
        status, body = ask(port, "GET", "/v1/cache")
        assert (status, body["error"]["code"]) == (503, "engine_stuck")
        for path in ("/health", "/ready"):
            status, body = ask(port, "GET", path)
            assert (status, body["status"]) == (503, "stuck") and body["stuck"]["tiny"] >= 2
        plain, stream, several = (one.getresponse() for one in (*waiting, vectors))
        assert (plain.status, stream.status, several.status) == (503, 200, 503)
        assert "engine_stuck" in plain.read().decode() and "engine_stuck" in stream.read().decode()
        status, body = ask(port, "POST", "/v1/completions", prompt="a", max_tokens=1)
        assert (status, body["error"]["code"]) == (503, "engine_stuck")
        server.wait_for("thread mlx-serve-engine: ")
        go.unlink()
        server.wait_for("works again")
        assert ask(port, "GET", "/health")[0] == ask(port, "GET", "/ready")[0] == 200
        assert ask(port, "POST", "/v1/completions", prompt="a", max_tokens=1)[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.output


def test_a_hang_ends_the_process_and_the_disk_gives_the_conversations_back(folder: Path, tmp_path: Path) -> None:
    disk = ("--cache-disk", "30MB", "--cache-dir", str(tmp_path / "disk"))
    prompt = "one two three four five " * 120
    with serving(folder, tmp_path, "C", *disk) as server:
        ask(server.port, "POST", "/v1/completions", prompt=prompt, max_tokens=1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with serving(folder, tmp_path, "C", *disk, "--stuck-after", "2", "--exit-when-stuck") as server:
        port = server.port
        (tmp_path / "go").touch()
        waiting = send(port, prompt="b", max_tokens=9)
        assert waiting.getresponse().status == 503
        assert server.wait() == STUCK
    (tmp_path / "go").unlink()
    with serving(folder, tmp_path, "C", *disk) as server:
        status, body = ask(server.port, "POST", "/v1/completions", prompt=prompt, max_tokens=1)
        assert status == 200 and body["usage"]["prompt_tokens_details"]["cached_tokens"] > 256


@pytest.mark.usual
def test_a_process_that_was_stopped_for_a_while_has_no_hang(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "C", "--stuck-after", "1", "--exit-when-stuck", "--drain", "0") as server:
        stream = send(server.port, prompt="a", max_tokens=100_000, ignore_eos=True, stream=True).getresponse()
        stream.readline()
        server.signal(signal.SIGSTOP)
        time.sleep(3)  # time must pass, and must not count
        server.signal(signal.SIGCONT)
        for _ in range(200):
            assert b"error" not in stream.readline()
        assert ask(server.port, "GET", "/ready")[0] == 200 and "stuck" not in server.output
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.usual("C-*", "disk-*", "loader-*")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("C", signal.SIGINT),
        ("C with Python's lock", signal.SIGINT),
        ("C with Python's lock", signal.SIGTERM),
        ("lock", signal.SIGTERM),
        ("disk", signal.SIGINT),
        pytest.param("loader", signal.SIGTERM, marks=pytest.mark.alone("machines serve one model only")),
    ],
)
def test_a_signal_ends_the_process_whatever_hangs(
    kind: str, number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    """A model that is being loaded keeps nobody; all else ends by the alarm."""
    disk = ("--cache-disk", "30MB", "--cache-dir", str(tmp_path / "disk")) if kind == "disk" else ()
    with serving(folder, tmp_path, kind, "--drain", "1000", *disk) as server:
        port = server.port
        if kind == "disk":
            ask(port, "POST", "/v1/completions", prompt="one two three " * 120, max_tokens=1)
        (tmp_path / "go").touch()
        waiting = send(port, prompt="a", max_tokens=9, **({"model": "demo"} if kind == "loader" else {}))
        if kind == "disk":
            assert waiting.getresponse().status == 200
            server.signal(number)
        server.wait_for("it hangs now")
        if kind != "disk":
            server.signal(number)
        assert server.wait() == (0 if kind == "loader" else signal.SIGALRM), server.output
        if kind != "loader":
            assert "most recent call first" in server.output, "every thread's stack is in the log"


@pytest.mark.parametrize("other", [signal.SIGHUP, signal.SIGINT])
def test_a_sigterm_is_heard_once_right_beside_another_signal(
    other: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'[[keys]]\nname = "own"\nkey = "{"k" * 40}"\n')
    for numbers in ((signal.SIGTERM, other), (other, signal.SIGTERM)):
        with serving(folder, tmp_path, "C", "--api-keys", str(keys)) as server:
            assert server.port
            for number in numbers:
                server.signal(number)
            assert server.wait() == 0, server.output


@pytest.mark.usual
def test_a_call_that_holds_pythons_lock_for_a_while_at_a_ctrl_c_is_no_hang(folder: Path, tmp_path: Path) -> None:
    """A long tokenization does so. A signal that were heard twice would cut the answer off."""
    with serving(folder, tmp_path, "C with Python's lock for a while", "--drain", "1000") as server:
        (tmp_path / "go").touch()
        waiting = send(server.port, prompt="a", max_tokens=9, ignore_eos=True)
        server.wait_for("it hangs now")
        server.signal(signal.SIGINT)
        assert waiting.getresponse().status == 200
        assert server.wait() == 0, server.output


@pytest.mark.usual
def test_one_stuck_model_of_two_is_named_and_the_other_one_answers(folder: Path, tmp_path: Path) -> None:
    other = write("qwen3", tmp_path / "other")
    with serving(folder, tmp_path, "first", str(other), "--stuck-after", "2") as server:
        port = server.port
        for model in ("tiny", "other"):
            assert ask(port, "POST", "/v1/completions", model=model, prompt="a", max_tokens=1)[0] == 200
        (tmp_path / "go").touch()
        assert ask(port, "POST", "/v1/completions", model="tiny", prompt="b", max_tokens=9)[0] == 503
        assert ask(port, "POST", "/v1/completions", model="other", prompt="b", max_tokens=9)[0] == 200
        status, body = ask(port, "GET", "/health")
        assert (status, body["status"], list(body["stuck"])) == (503, "stuck", ["tiny"])


@pytest.mark.alone("machines serve one model only")
def test_an_engine_that_works_keeps_the_time_of_drain_beside_one_that_hangs(folder: Path, tmp_path: Path) -> None:
    """Tokens are progress; an answer is not cut off."""
    with serving(folder, tmp_path, "loader", "--drain", "1000") as server:
        stream = send(server.port, prompt="a", max_tokens=400, ignore_eos=True, stream=True).getresponse()
        stream.readline()
        (tmp_path / "go").touch()
        hung = send(server.port, prompt="a", max_tokens=9, model="demo")
        server.wait_for("it hangs now")
        server.signal(signal.SIGTERM)
        assert stream.read().decode().rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
        hung.close()
