"""A model divided among processes over MLX's ring: it answers, and ends as a whole once one of them is lost."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest

from models.errors import ModelBroken
from server.app.config import ConfigError, ServerConfig, StartError
from server.cli.ranks import _accept, _compare, _key, joined
from server.cli.watchdog import STUCK
from tests.support import tiny_models
from tests.support.server_process import Process

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "temperature": 0, "ignore_eos": True}

QUESTIONS = {"level": {"type": "score", "criteria": ["can wait", "today", "now"]}}


@pytest.fixture
def divided(tmp_path: Path) -> Iterator[Process]:
    folder = tiny_models.write("qwen3", tmp_path / "tiny")
    process = Process(str(folder), "--ranks", "2", "--port", "0", fresh=True)
    try:
        yield process
    finally:
        process.close()


def other_pid(divided: Process) -> int:
    divided.wait_for("Try it:")
    (pid,) = re.findall(r"machine 1 is process (\d+)", divided.output)
    return int(pid)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, perhaps without a parent that reads its status."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not state.strip() or state.startswith("Z")


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.1)


def test_it_answers_and_ends_as_asked(divided: Process) -> None:
    pid, url = other_pid(divided), f"http://127.0.0.1:{divided.port}/v1"
    assert divided.output.count("machine   ") == 2
    asked = f"{url}/chat/completions"
    answers = [httpx.post(asked, json={**BODY, "max_tokens": 8}, timeout=300).json() for _ in range(2)]
    assert len({one["choices"][0]["message"]["content"] for one in answers}) == 1
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    divided.signal(signal.SIGTERM)
    assert divided.wait() == 0
    assert has_ended(pid)


@pytest.mark.usual("SIGKILL-1")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_process_that_is_lost_in_a_stream_ends_all(divided: Process, number: signal.Signals, rank: int) -> None:
    """A stopped one too, as soon as it goes on."""
    pids = [divided.pid, other_pid(divided)]
    url, last = f"http://127.0.0.1:{divided.port}/v1/chat/completions", ""
    with (
        suppress(httpx.TransportError),
        httpx.stream("POST", url, json={**BODY, "max_tokens": 4000, "stream": True}, timeout=300) as answer,
    ):
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        os.kill(pids[rank], number)
        if number == signal.SIGSTOP:
            wait_for_end(pids[1 - rank])
            os.kill(pids[rank], signal.SIGCONT)
        last = deque(lines, 1)[0]
    for pid in pids:
        wait_for_end(pid)
    if rank == 0 and number == signal.SIGTERM:  # as of any server
        assert divided.wait() == 0
        return
    assert divided.wait() == (-signal.SIGKILL if rank == 0 and number == signal.SIGKILL else STUCK)
    assert rank == 0 or json.loads(last)["error"]["code"] == "machine_lost"


@pytest.mark.usual("SIGINT")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_who_ends_the_start_ends_it_for_all(number: signal.Signals, tmp_path: Path) -> None:
    """Nothing is said of it: it is no fault."""
    folder = tiny_models.write("qwen3", tmp_path / "tiny")
    process = Process(str(folder), "--ranks", "2", "--port", "0", "--log-level", "debug", fresh=True)
    try:
        process.wait_for("reading weights")
        (pid,) = re.findall(r"machine 1 is process (\d+)", process.output)
        process.signal(number)
        assert process.wait() == -number
        wait_for_end(int(pid))
        assert "CRITICAL" not in process.output
    finally:
        process.close()


@pytest.mark.usual
@pytest.mark.parametrize("name", ["llama", "llama_4bit", "qwen3", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_two_processes_answer_as_one(name: str, tmp_path: Path) -> None:
    """Greedily, and by a seed; a second time from the cache."""
    folder, told = tiny_models.write(name, tmp_path / "tiny"), list[list[str]]()
    bodies = [{**BODY, "max_tokens": 40}, {**BODY, "max_tokens": 40, "temperature": 1, "seed": 7}]
    for arguments in (("--ranks", "2"), ()):
        process = Process(str(folder), "--port", "0", *arguments, fresh=True)
        try:
            asked = f"http://127.0.0.1:{process.port}/v1/chat/completions"
            answers = [httpx.post(asked, json=body, timeout=300).json() for body in (*bodies, *bodies)]
            told.append([answer["choices"][0]["message"]["content"] for answer in answers])
        finally:
            process.close()
    divided, whole = told
    assert divided == whole and len({*whole}) == 2 and all(whole)


@pytest.mark.usual
def test_three_processes_answer_as_one(tmp_path: Path) -> None:
    """Chats, vectors and decisions."""
    bodies = {
        "chat/completions": {**BODY, "model": "demo", "max_tokens": 24},
        "embeddings": {"model": "demo", "input": ["Hello.", "My name is Ada."]},
        "systemone": {"model": "demo", "state": {"body": "I was charged twice."}, "questions": QUESTIONS},
    }
    told = list[dict[str, Any]]()
    for arguments in (("--ranks", "3"), ()):
        process = Process("demo", "--port", "0", *arguments, fresh=True)
        try:
            url = f"http://127.0.0.1:{process.port}/v1"
            ask = partial(httpx.post, timeout=300)
            told.append({path: ask(f"{url}/{path}", json=body).json() for path, body in bodies.items()})
        finally:
            process.close()
    message = [answers["chat/completions"]["choices"][0]["message"]["content"] for answers in told]
    assert message[0] == message[1]
    vectors = [[data["embedding"] for data in answers["embeddings"]["data"]] for answers in told]
    assert np.allclose(vectors[0], vectors[1], atol=1e-4)
    chances = [[*answers["systemone"]["answers"]["level"]["probabilities"].values()] for answers in told]
    assert np.allclose(chances[0], chances[1], atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"models": ("demo", "other")}, "several models"),
        ({"adapters": ("folder",)}, "--adapter"),
        ({"speculate": "draft=demo"}, "--speculate draft=MODEL"),
        ({"cache_disk_bytes": 10**9}, "--cache-disk"),
        ({"cache_bits": ("8",)}, "--cache-bits"),
        ({"handover": "http://127.0.0.1:1"}, "--handover"),
    ],
)
def test_what_several_machines_cannot_have_is_refused(settings: dict[str, object], named: str) -> None:
    config = ServerConfig(**{"models": ("demo",), "ranks": 2, **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(named)), joined(config, {}):
        pass


def test_machines_know_one_another_by_a_key_of_their_owner(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key\n")
    config = ServerConfig(models=("demo",), rank_key_file=str(file))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        _key(config)
    file.chmod(0o600)
    assert _key(config) == b"a key"
    with pytest.raises(ConfigError, match="needs --rank-key-file"):
        _key(ServerConfig(models=("demo",)))


def test_machines_that_differ_are_refused() -> None:
    class Differing:
        """Two ranks, the second with another release of MLX."""

        def gather(self, value: dict[str, str]) -> list[dict[str, str]]:
            return [value, {**value, "mlx": "0.0.1"}]

    with pytest.raises(StartError, match=r"mlx: machine 1 has 0\.0\.1, machine 0 "):
        _compare(ServerConfig(models=("demo",)), Differing())  # type: ignore[arg-type]


def test_who_has_not_the_key_keeps_no_machine_from_joining() -> None:
    arrived = SimpleQueue[tuple[int, Connection]]()
    with Listener(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, b"key", arrived.put), daemon=True).start()
        silent = Client(listener.address)
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"another")
        machine = Client(listener.address, authkey=b"key")
        machine.send_bytes(b"1")
        assert arrived.get(timeout=60)[0] == 1
        silent.close()


@pytest.mark.parametrize("config", [{"ranks": 1}, {"ranks": 3}])
def test_a_key_without_other_machines_is_refused(config: dict[str, int]) -> None:
    given = ServerConfig(models=("demo",), rank_key_file="key", **config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is for machines that mlx\.launch starts"), joined(given, {}):
        pass


def test_heads_that_do_not_divide_are_refused_before_anything_starts() -> None:
    with (
        pytest.raises(ModelBroken, match="2 machines cannot share its 3 num_key_value_heads; 3 can"),
        joined(ServerConfig(models=("demo",), ranks=2), {}),
    ):
        pass
