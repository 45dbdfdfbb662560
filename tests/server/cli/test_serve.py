"""`mlx-serve serve` as a process: start-up report, addresses, signals, exit status. On a real tiny model."""

import asyncio
import contextlib
import http.client
import ipaddress
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import mlx.core as mx
import pytest

from models.inference.sampling_params import SamplingParams
from models.names import model_id
from models.ranks import Ranks
from server.api.responses.store import FILE_NAME, ResponseStore
from server.app.config import ServerConfig, StartError
from server.app.memory_budget import Claim, Machine, choose_pool_bytes, running, take
from server.app.service import ServiceOpener, _bound_pool, open_service, read_sampling, source_of
from server.cli import serve
from server.cli.main import execute
from server.cli.serve import (
    Surroundings,
    bind,
    example_call,
    is_for_this_machine,
    raise_file_limit,
    urls,
)
from server.engine.messages import on_thread
from server.pool.members import Around
from server.pool.memory import PoolMemory, Pressure
from tests.support import loopback
from tests.support.forked import MLX_SERVE
from tests.support.server_process import Process
from tests.support.tiny_models import write

JSON = {"Content-Type": "application/json"}
GB = 10**9
DEADLINE_SECONDS = 300.0


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, **options: Any) -> Iterator[Process]:
    process = Process(str(folder), "--port", "0", *arguments, **options)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Runs `serve`, which has to end before a model is loaded; returns its exit status and standard error."""

    def load(*_: object) -> NoReturn:
        pytest.fail("the model is loaded")

    def run(*arguments: str | Path) -> tuple[int, str]:
        status = execute(["serve", *map(str, arguments)])
        captured = capsys.readouterr()
        assert captured.out == ""
        return status, captured.err

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(serve, "_start", load)
    # What is for the whole process stays as it is in that of the tests.
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(serve, "Watchdog", lambda hangs, action: None)
    return run


class Stream:
    """One streaming request; `start` returns when its first token has come."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
        body = {
            "stream": True,
            "ignore_eos": True,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": "hi"}],
        }
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self._response.readline()

    def rest(self) -> str:
        return self._response.read().decode()


def ask(port: int, method: str, path: str, **fields: Any) -> tuple[http.client.HTTPResponse, Any]:
    """Returns the answer on a connection of its own, and its body."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)) as connection:
        connection.request(method, path, json.dumps(fields) if fields else None, JSON)
        response = connection.getresponse()
        return response, json.loads(response.read())


def get(port: int, path: str) -> tuple[int, Any]:
    response, body = ask(port, "GET", path)
    return response.status, body


@pytest.mark.alone("machines serve one model only")
def test_start_up_reports_imports_nothing_large_and_sigterm_lets_answers_finish(folder: Path, tmp_path: Path) -> None:
    """Large for a line: `np.median` wants `numpy.ma`, text with a colon of rich its table of emoji; some 8 MB."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Told:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('numpy.ma', 'rich._emoji_codes'): print('imported', name, flush=True)\n"
        "sys.meta_path.insert(0, Told())\n"
    )
    sizes = ("--slots", "3", "--context", "900", "--cache-memory", "64MB", "--max-waiting", "5", "--drain", "120")
    with serving(folder, *sizes, environment={"PYTHONPATH": str(tmp_path)}, fresh=True) as server:
        port = server.port
        assert ask(port, "POST", "/v1/completions", prompt="a", max_tokens=1)[0].status == 200
        report = server.output
        for fact in ("tiny, 115072 parameters", "900 tokens", "64.0 MB", "3 conversations at once, 5 more", "curl"):
            assert fact in report
        assert get(port, "/health")[0] == 200
        listed = get(port, "/v1/models")[1]["data"]
        assert [(model["id"], model["loaded"]) for model in listed][:2] == [("tiny", True), ("demo", False)]
        idle = socket.create_connection(("127.0.0.1", port))

        stream = Stream(port, max_tokens=600)
        server.signal(signal.SIGTERM)
        server.wait_for("stopping: 1 running")
        refused, body = ask(port, "POST", "/v1/completions", prompt="me too?", max_tokens=1)
        assert refused.status == 503 and body["error"]["code"] == "server_stopping"
        assert int(refused.headers["retry-after"]) > 0
        assert get(port, "/health")[1]["status"] == "draining"
        rest = stream.rest()
        assert '"finish_reason":"length"' in rest
        assert rest.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
        assert "terminate" not in server.output and "imported" not in server.output
        idle.close()


def test_half_open_connections_beyond_the_descriptors_keep_nobody_out_and_the_log_short(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        # The soft limit alone would end the start.
        server = stack.enter_context(serving(folder, limits={resource.RLIMIT_NOFILE: (64, 128)}))
        port = server.port
        for _ in range(200):
            half = stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port))))
            half.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        for _ in range(20):
            assert ask(port, "POST", "/v1/completions", prompt="x", max_tokens=1)[0].status == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "too many" in server.output
        assert server.output.count("\n") < 60, server.output
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_too_few_descriptors_are_told_at_the_start(
    folder: Path, refused: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    status, told = refused(folder, "--port", "0")
    assert (status, told.count("\n")) == (1, 1)
    assert "ulimit -n" in told


def test_what_does_not_finish_in_time_is_told_so(folder: Path) -> None:
    with serving(folder, "--drain", "0.2") as server:
        stream = Stream(server.port, max_tokens=100_000)
        server.signal(signal.SIGINT)
        assert "the server is stopping" in stream.rest()
        assert server.wait() == 0
        assert "Traceback" not in server.output


def test_what_is_made_in_the_background_at_the_end_is_stored_with_what_there_is(folder: Path, tmp_path: Path) -> None:
    with serving(folder, "--drain", "0.2", "--cache-disk", "8MB", "--cache-dir", str(tmp_path)) as server:
        # Without chance, what this model says to it does not end by itself.
        endless = {"input": "one two", "background": True, "temperature": 0}
        name = ask(server.port, "POST", "/v1/responses", **endless)[1]["id"]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while get(server.port, f"/v1/responses/{name}")[1]["status"] == "queued":
            assert time.monotonic() < deadline, server.output
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.output and server.output.count(name) == 1
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(("-wal", "-shm"))]
    kept = ResponseStore(tmp_path / FILE_NAME).find("", name)
    assert kept is not None and kept[0] == "failed"
    assert json.loads(kept[1])["error"]["message"] == "the server is stopping"


def test_a_cache_folder_that_cannot_be_used_ends_the_start_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    told = f"mlx-serve: the cache folder {file} cannot be used: file exists\n"
    assert refused(folder, "--port", "0", "--cache-disk", "8MB", "--cache-dir", file) == (1, told)


def test_the_cache_folder_has_the_models_name_and_one_server_at_a_time(
    folder: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    arguments = ("--cache-disk", "8MB", "--cache-dir", str(tmp_path / "new"))
    with serving(folder, *arguments) as server:
        server.wait_for("Try it:")
        assert f"disk      8.0 MB in {tmp_path / 'new'}, at most 100.0 GB written a day\n" in server.output
        assert [path.name[:-16] for path in (tmp_path / "new").iterdir()] == ["tiny-"]
        status, told = refused(folder, "--port", "0", *arguments)
        assert (status, told.count("\n")) == (1, 1)
        assert "is in use by another process" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(number: int, folder: Path) -> None:
    with serving(folder) as server:
        stream = Stream(server.port, max_tokens=100_000)
        server.signal(number)
        server.wait_for("stopping: 1 running")
        server.signal(number)
        assert server.wait() == 130
        with pytest.raises(http.client.IncompleteRead):
            stream.rest()
        assert "Traceback" not in server.output


def test_a_slow_get_of_a_server_that_stops_gets_its_apis_error_and_leaves_no_traceback(folder: Path) -> None:
    code = (
        "import os, time, server.cli.serve as serve, server.pool.pool as pool\n"
        "def listed(self):\n"
        "    os.write(1, b'it is asked\\n'); time.sleep(2); return []\n"
        "pool.ModelPool.listed, serve.CLOSE_SECONDS = listed, 0\n"
    )
    with serving(folder, code=code + MLX_SERVE) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_SECONDS)
        connection.request("GET", "/v1/models")
        server.wait_for("it is asked")
        server.signal(signal.SIGTERM)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "server_stopping")
        assert server.wait() == 0
        assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_minded_on_a_thread_that_is_not_pythons(number: int, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes, os, signal, threading, time\n"
        "libc, foreign = ctypes.CDLL(None), ctypes.c_ulong()\n"
        "def hand_over():\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "    libc.pthread_create(ctypes.byref(foreign), None, libc.pause, None)\n"
        f"    signal.pthread_kill(foreign.value, {int(number)})\n"
        "threading.Thread(target=hand_over, daemon=True).start()\n"
    )
    with serving(folder, environment={"PYTHONPATH": str(tmp_path)}, fresh=True) as server:
        assert get(server.port, "/health")[0] == 200
        (tmp_path / "go").touch()
        assert server.wait() == 0


def test_a_hangup_ends_no_server_whose_threads_wait_for_long(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[[keys]]\nname = 'a'\nkey = 'b'\n")
    file.chmod(0o600)
    code = (
        "import os, signal, time, server.cli.watchdog as watchdog\n"
        "set_timer, looks = signal.setitimer, []\n"
        "def set_and_wait(*given):\n"
        "    last = set_timer(*given)\n"
        f"    if os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        looks.append(last)\n"
        "        if len(looks) == 1: os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.5)\n"
        "        if len(looks) == 6: os.write(1, b'looked for long\\n')\n"
        "    return last\n"
        "signal.setitimer, watchdog.LOOK_SECONDS = set_and_wait, 1.5\n"
    )
    with serving(folder, "--api-keys", str(file), code=code + MLX_SERVE) as server:
        assert status_with(server.port, "b") == 200
        (tmp_path / "go").touch()
        server.wait_for("was read again")
        server.wait_for("looked for long")
        assert status_with(server.port, "b") == 200


@pytest.mark.usual
def test_a_gpu_that_refuses_all_work_ends_the_process_with_an_error(folder: Path, tmp_path: Path) -> None:
    """So that launchd or systemd starts another, which macOS lets work again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "def plant():\n"
        "    while not hasattr(sys.modules.get('models.inference.runner'), 'Runner'): time.sleep(0.01)\n"
        "    runner = sys.modules['models.inference.runner'].Runner\n"
        "    real = runner.prefill\n"
        "    def prefill(self, caches, tokens, *more):\n"
        "        if len(tokens) > 60: raise RuntimeError('kIOGPUCommandBufferCallbackErrorSubmissionsIgnored')\n"
        "        real(self, caches, tokens, *more)\n"
        "    runner.prefill = prefill\n"
        "threading.Thread(target=plant, daemon=True).start()\n"
    )
    with serving(folder, environment={"PYTHONPATH": str(tmp_path)}, fresh=True) as server:
        assert ask(server.port, "POST", "/v1/completions", prompt="a", max_tokens=1)[0].status == 200
        assert ask(server.port, "POST", "/v1/completions", prompt="a " * 200, max_tokens=1)[0].status >= 500
        assert get(server.port, "/health")[0] == 503
        assert server.wait() == 1
        assert "the GPU refuses all work of this process" in server.output
        assert "Traceback" not in server.output


def test_an_address_that_others_reach_needs_a_key(folder: Path, refused: Callable[..., tuple[int, str]]) -> None:
    status, told = refused(folder, "--port", "0", "--host", "0.0.0.0")
    assert status == 2 and "--insecure-no-key" in told
    with serving(folder, "--host", "0.0.0.0", "--insecure-no-key") as server:
        assert get(server.port, "/health")[0] == 200
        assert "key       none: anyone" in server.output
        others = re.findall(r"^ {10}(http://\S+)/v1 from other machines$", server.output, re.MULTILINE)
        assert not any(ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback for url in others)
        assert all(urlsplit(url).port == server.port for url in others)


@pytest.mark.parametrize(
    ("address", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
    ],
)
def test_only_the_loopback_is_for_this_machine_alone(address: str, is_ours: bool) -> None:
    assert is_for_this_machine(address) == is_ours
    host = f"[{address}]" if ":" in address else address
    first = urls(address, 80)[0]
    assert first == ("http://127.0.0.1:80" if address in ("0.0.0.0", "::") else f"http://{host}:80")


@pytest.mark.alone("the report of several machines is another")
def test_two_servers_see_what_the_other_has_claimed(folder: Path, tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with serving(folder, "--cache-memory", "3GB", environment=environment) as first:
        url = f"http://127.0.0.1:{first.port}"
        claim = running(tmp_path / "mlx-serve")[0]
        assert (claim.model, claim.url) == ("tiny", url) and 3 * 10**9 < claim.memory_bytes < 3.1 * 10**9
        assert "beside" not in first.output
        with serving(folder, environment=environment) as second:
            second.wait_for("Try it:")
            assert f"beside    3.0 GB are claimed by tiny, process {claim.pid}" in second.output
        first.signal(signal.SIGKILL)
        first.wait()
    assert running(tmp_path / "mlx-serve") == []


@pytest.mark.parametrize(
    ("moment", "number", "statuses"),
    [
        ("weights", signal.SIGINT, (130, -signal.SIGINT)),
        ("trying", signal.SIGINT, (130, -signal.SIGINT)),
        ("weights", signal.SIGTERM, (0,)),
    ],
)
def test_a_signal_while_it_starts_ends_it_without_a_word(
    moment: str, number: int, statuses: tuple[int, ...], folder: Path
) -> None:
    with serving(folder, "--log-level", "debug") as server:
        server.wait_for(moment)
        server.signal(number)
        assert server.wait() in statuses
        assert "Traceback" not in server.output


def test_ctrl_c_is_not_for_a_server_in_the_background_of_a_shell_without_job_control(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text("[[keys]]\nname = 'one'\nkey = 'geheim'\n")
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with serving(folder, "--api-keys", str(file), "--log-level", "debug", code=ignored + MLX_SERVE) as server:
        server.wait_for("weights")
        server.signal(signal.SIGINT)
        server.wait_for("Try it:")
        server.signal(signal.SIGINT)
        server.signal(signal.SIGHUP)
        server.wait_for("was read again")  # by now a Ctrl-C would have been heeded
        assert get(server.port, "/health")[0] == 200


@pytest.mark.parametrize("module", ["server.cli.main", "server.cli.start"])
def test_ctrl_c_while_it_imports_is_not_lost_where_python_drops_exceptions(
    module: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: Finder()\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    with serving(folder, environment={"PYTHONPATH": str(tmp_path)}, fresh=True) as server:
        assert server.wait() == -signal.SIGINT
        assert not server.output


@pytest.mark.skipif(sys.platform != "linux", reason="MLX asks for a compiler on Linux only")
def test_ctrl_c_while_mlx_looks_for_a_compiler_is_not_lost(folder: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    compiler = tmp_path / "g++"
    may_end = tmp_path / "may_end"
    compiler.write_text(f"#!/bin/sh\ntouch {asked}\nwhile [ -e {tmp_path} -a ! -e {may_end} ]; do sleep 0.01; done\n")
    compiler.chmod(0o755)
    with serving(folder, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, fresh=True) as server:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not asked.exists():
            assert time.monotonic() < deadline, server.output
            time.sleep(0.02)
        server.signal(signal.SIGINT)
        may_end.touch()
        assert server.wait() == -signal.SIGINT
        assert not server.output


def test_a_taken_port_is_told_before_the_model_is_loaded(
    folder: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(folder, "--port", port) == (
            1,
            f"mlx-serve: port {port} of 127.0.0.1 is in use; choose another with --port, or 0 for any free one\n",
        )


def test_a_bound_socket_does_not_listen_yet() -> None:
    (listener,) = bind("127.0.0.1", 0)
    with contextlib.closing(listener), pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_port_of_which_another_program_has_all_addresses_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where such an address can be bound: clients of the other program would come here."""
    monkeypatch.setattr("socket.socket.bind", lambda *given: None)
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(StartError, match=f"port {port} of {host} is in use"):
                bind(host, port)


def test_localhost_is_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*others: str) -> list[tuple[object, ...]]:
        kind = socket.SOCK_STREAM
        six = [(socket.AF_INET6, kind, 6, "", (address, 0, 0, 0)) for address in others]
        return [*six, *[(socket.AF_INET, kind, 6, "", ("127.0.0.1", 0))] * 2]

    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **more: listed("::1"))
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(one) for one in bind("localhost", 0)]
        # A system without IPv6 has only the first.
        assert [one.getsockname()[0] for one in bound] == ["127.0.0.1", "::1"][: len(bound)]
        assert len({one.getsockname()[1] for one in bound}) == 1 and len(bound) == 1 + socket.has_dualstack_ipv6()
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **more: listed("2001:db8::1"))
    with pytest.raises(StartError, match="cannot listen on name"):
        bind("name.example", 0)


def test_backups_leave_the_folder_of_state_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Path] = []
    monkeypatch.setattr(serve, "exclude_from_backups", told.append)
    serve._check_cache_dir(ServerConfig(models=(str(folder),), cache_dir=str(tmp_path / "state")))
    assert not told, "nothing is written there"
    serve._check_cache_dir(
        ServerConfig(models=(str(folder),), cache_dir=str(tmp_path / "state"), cache_disk_bytes=1 << 30)
    )
    assert told == [tmp_path / "state"]


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [(256, -1, 8192), (256, 1024, 1024), (20_000, 1 << 20, None), (-1, -1, None)],
)
def test_the_soft_limit_of_files_is_raised(
    soft: int, hard: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append(limits))
    raise_file_limit()
    assert told == ([] if wanted is None else [(wanted, hard)])


@pytest.mark.parametrize(
    ("host", "words"),
    [("nowhere.invalid", "no address"), ("x" * 80, "no address"), ("203.0.113.7", "cannot listen on 203.0.113.7")],
)
def test_an_address_that_is_not_ours(host: str, words: str) -> None:
    with pytest.raises(StartError, match=words):
        bind(host, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on any port")
def test_a_port_that_needs_more_rights() -> None:
    with pytest.raises(StartError, match="needs more rights"):
        bind("127.0.0.1", 1)


def test_the_example_is_a_call_that_a_shell_understands() -> None:
    call = example_call("http://127.0.0.1:1", "org/it's", needs_key=True)
    words = subprocess.run(["sh", "-c", call.replace("curl", "printf '%s\\n'", 1)], capture_output=True, check=True)
    body = words.stdout.decode().splitlines()[-1]
    assert json.loads(body)["model"] == "org/it's"


@pytest.mark.alone("each machine holds a part of the weights")
def test_weights_that_the_machine_cannot_hold_are_refused_with_a_smaller_model_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app.service.weights.total_bytes", lambda path: 200 * GB)
    monkeypatch.setattr("server.app.service.read_machine", lambda info: Machine(8 * GB))
    monkeypatch.setattr("server.app.service.resolve", lambda name: folder)
    with pytest.raises(StartError, match=r"take 200.0 GB, .* memory for 6.9 GB of weights; qwen3:8b would fit"):
        open_service(ServerConfig(models=("qwen3:30b",)))
    two = Ranks(loopback.Group(0, loopback.Team(2)))
    with pytest.raises(StartError, match=r"take 100.0 GB on each of 2 machines, .* 6.9 GB of weights"):
        open_service(ServerConfig(models=("qwen3:30b",)), ranks=two)


def test_a_budget_beyond_the_machine_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.app.service.read_machine", lambda info: Machine(8 * GB))
    with pytest.raises(
        StartError, match=r"8.0 GB of cache memory and .* than the 8.0 GB of this machine; the default is 2.0 GB"
    ):
        open_service(ServerConfig(models=(str(folder),), cache_memory_bytes=8 * GB))


def test_the_budget_leaves_what_others_have_claimed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.app.service.read_machine", lambda info: Machine(8 * GB))
    monkeypatch.setattr("server.app.service._useful_bytes", lambda loaded, config: 100 * GB)
    config = ServerConfig(models=(str(folder),))
    alone = open_service(config).memory
    beside = open_service(config, [Claim(1, "a", 4 * GB, ""), Claim(2, "b", GB, "")]).memory
    assert alone.budget_bytes == 2 * GB
    assert beside.budget_bytes + beside.weights_bytes == GB
    assert beside.rest_bytes == 2 * GB


@pytest.mark.alone("part of a model has less state than the smallest budget")
def test_a_budget_is_no_more_than_a_full_context_in_each_slot() -> None:
    few = open_service(ServerConfig(models=("demo",), slots=4))
    more = open_service(ServerConfig(models=("demo",), slots=8))
    context_tokens = few.model.context_tokens
    per_token = more.memory.budget_bytes / 8 / context_tokens
    assert few.memory.budget_bytes == 4 * context_tokens * per_token == few.opened.useful_bytes
    assert open_service(ServerConfig(models=("demo",), cache_memory_bytes=4 * GB)).memory.budget_bytes == 4 * GB
    more.engine.start()
    try:
        assert more.engine.stats().cache.bytes_per_token == per_token, "the shapes told another size"
    finally:
        more.engine.stop()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("demo", "demo"),
        ("org/name@v1", "org/name@v1"),
        ("qwen3:4b", "qwen3:4b"),
        ("mymodels/x", "x"),
        ("mymodels/x/", "x"),
        ("./mymodels/x", "x"),
        ("mymodels", "mymodels"),
        ("mymodels/link", "link"),
        ("mymodels/x/.", "x"),
        ("..", "home"),
        ("absent/x", "absent/x"),
    ],
)
def test_clients_ask_by_the_name_given_and_for_a_folder_by_its_own(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "home" / "here"
    (here / "mymodels" / "x").mkdir(parents=True)
    (here / "mymodels" / "link").symlink_to(here / "mymodels" / "x")
    (here / "demo").mkdir()
    monkeypatch.chdir(here)
    assert model_id(name) == shown


def test_a_folder_in_other_letters_is_the_one_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Tiny-4bit").mkdir()
    # As a Mac's disk says, which ignores case.
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert model_id(f"{tmp_path}/tiny-4BIT") == model_id(f"{tmp_path}/Tiny-4bit/") == "Tiny-4bit"


def test_recommended_sampling_is_used(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}')
    assert read_sampling(file, 1000) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    file.write_text('{"do_sample": false, "temperature": 0.6}')
    assert read_sampling(file, 1000).is_greedy


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": "hot"}', '{"temperature": 1e9}', '{"top_k": -3}'])
def test_an_unusable_recommendation_is_ignored(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert read_sampling(file, 1000) == SamplingParams()
    file.write_text(text)
    assert read_sampling(file, 1000) == SamplingParams()


def test_a_template_decides_by_itself_whether_the_model_thinks(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "thinker")
    template = "{% if enable_thinking is defined %}asked{% endif %}<think>{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    model = open_service(ServerConfig(models=(str(folder),))).model
    prompt = model.renderer.render([{"role": "user", "content": "hi"}])
    assert prompt.tokens.tolist() == model.renderer.encode("<think>hi").tokens.tolist()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ tools }}{{ messages[0].content }}", "text"),
        ("{{ messages[0].content }}", "none"),
        ("{{ tools }}{% for tool_call in [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}", "parsed"),
    ],
)
def test_what_becomes_of_calls_is_said_when_a_model_is_loaded(
    template: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write("qwen3", tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(template)
    assert open_service(ServerConfig(models=(str(folder),))).model.tool_calls == says
    assert ("calls come as text" in caplog.text) == (says == "text")


def test_the_pool_of_freed_buffers_is_bounded_and_never_made_larger() -> None:
    limit = mx.set_cache_limit(1000)
    try:
        _bound_pool(700)
        assert mx.set_cache_limit(500) == 700
        _bound_pool(700)
    finally:
        assert mx.set_cache_limit(limit) == 500


def test_a_service_bounds_the_pool_by_its_budget_which_others_may_change() -> None:
    budget_bytes = 1 << 28
    config = ServerConfig(models=("demo",), cache_memory_bytes=budget_bytes)
    limit = mx.set_cache_limit(1 << 40)
    try:
        service = open_service(config)
        assert mx.set_cache_limit(1 << 40) == choose_pool_bytes(budget_bytes)
        pool = serve._make_pool(service, config, Surroundings((), None, ["http://127.0.0.1:1"]))
        pool.members[0].budget_bytes = 8 << 30
        pool.budgets.on_change()
        assert mx.set_cache_limit(1 << 40) == choose_pool_bytes(8 << 30)
        service.engine.stop()
    finally:
        mx.set_cache_limit(limit)


@pytest.mark.alone("machines keep the memory that they begin with")
def test_a_server_grows_to_a_quarter_of_the_machine_once_another_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("server.app.service", "server.cli.serve"):
        monkeypatch.setattr(f"{module}.read_machine", lambda info: Machine(8 * GB))
    monkeypatch.setattr("server.app.service._useful_bytes", lambda loaded, config: 100 * GB)
    config, limit = ServerConfig(models=("demo",)), mx.set_cache_limit(1 << 40)
    other, _ = take(tmp_path / "run", Claim(1, "m", 5 * GB, "", 5 * GB))
    own, others = take(tmp_path / "run", Claim(os.getpid(), "", 0, ""))
    service = open_service(config, others)
    service.start()
    try:
        pool = serve._make_pool(service, config, Surroundings(others, None, ["http://127.0.0.1:1"], own))
        stopper = cast(Any, SimpleNamespace(pool=pool, fail=pytest.fail))
        upkeep, member = serve._make_upkeep(stopper, config, own), pool.members[0]

        async def grow() -> None:
            other.close()
            await upkeep.tick()
            await asyncio.gather(*pool._background)

        assert member.budget_bytes == GB - member.weights_bytes
        asyncio.run(grow())
        assert member.budget_bytes == 2 * GB
        assert upkeep.read_pressure is not None and upkeep.read_pressure() in Pressure
        fixed = replace(config, cache_memory_bytes=GB)
        assert serve._make_upkeep(stopper, fixed, own).find_share is None
    finally:
        service.engine.stop()
        own.close()
        mx.set_cache_limit(limit)


def test_a_model_is_loaded_again_in_the_same_precision_when_another_server_has_taken_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Path(shutil.copytree(folder, tmp_path / "halves"))
    weights = cast(dict[str, mx.array], mx.load(str(halves / "model.safetensors")))
    stored = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(halves / "model.safetensors"), stored, {"format": "mlx"})
    monkeypatch.setattr("server.pool.memory.SMALLEST_PART_BYTES", 0)
    memory = PoolMemory(1 << 40)
    opener = ServiceOpener(ServerConfig(models=(str(halves),)), memory, 1 << 39)
    sizes = []
    for _ in range(2):
        opening = partial(opener.open, source_of(str(halves)), Around([], 1 << 28), lambda step: None)
        opened = asyncio.run(on_thread("loader", opening))
        opened.unload()
        sizes.append(opened.weights_bytes)
        memory.total_bytes = int(1.5 * opened.weights_bytes)
    assert sizes[0] == sizes[1]


def test_keys_of_a_file_are_read_again_on_sighup(
    folder: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]
) -> None:
    file = tmp_path / "keys.toml"

    def write_key(name: str) -> None:
        file.write_text(f"[[keys]]\nname = '{name}'\nkey = 'geheim-{name}'\n")

    write_key("first")
    file.chmod(0o644)
    status, told = refused(folder, "--port", "0", "--api-keys", file)
    assert status == 2 and f"chmod 600 {file}" in told
    file.chmod(0o600)
    with serving(folder, "--api-keys", str(file), "--host", "0.0.0.0") as server:
        assert status_with(server.port, "geheim-first") == 200
        write_key("second")
        server.signal(signal.SIGHUP)
        server.wait_for("the file of keys was read again; it has 1")
        assert [status_with(server.port, f"geheim-{name}") for name in ("first", "second")] == [401, 200]
        file.write_text("nonsense")
        server.signal(signal.SIGHUP)
        server.wait_for("the keys stay as they were: --api-keys")
        assert status_with(server.port, "geheim-second") == 200
        assert "geheim" not in server.output


def status_with(port: int, key: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
