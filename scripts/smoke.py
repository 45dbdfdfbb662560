"""Starts the server as a person does, asks it once, stops it, and checks that it ended well.

Usage: .venv/bin/python scripts/smoke.py make run
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_SECONDS = 120
STOP_SECONDS = 30


def main(command: list[str]) -> None:
    """Runs the whole round; raises SystemExit with one sentence if anything is not as it should be."""
    port = free_port()
    started = subprocess.Popen([*command, f"PORT={port}"], stdin=subprocess.DEVNULL)
    try:
        wait_until_healthy(port, started)
        answer = ask(port)
        print(f"smoke: the server answered {answer!r}")
        if "Ada" not in answer:
            sys.exit("smoke: the answer does not hold the name that the question was about")
        os.kill(server_process(started.pid), signal.SIGTERM)
        status = started.wait(STOP_SECONDS)
        if status != 0:
            sys.exit(f"smoke: the server ended with status {status} after SIGTERM")
        print("smoke: the server stopped with status 0")
    finally:
        if started.poll() is None:
            os.kill(server_process(started.pid), signal.SIGKILL)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_healthy(port: int, started: "subprocess.Popen[bytes]") -> None:
    """Returns once `/health` answers 200; raises SystemExit if the process ends or time runs out first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if started.poll() is not None:
            sys.exit(f"smoke: the server ended with status {started.returncode} before it was healthy")
        if health_status(port) == 200:
            return
        time.sleep(0.1)
    sys.exit(f"smoke: no healthy server after {START_SECONDS} s")


def health_status(port: int) -> int | None:
    """Returns the status of `/health`, None if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def ask(port: int) -> str:
    """Returns the reply to a question that only the conversation before it answers."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    completion = client.chat.completions.create(
        model="demo",
        temperature=0,
        max_tokens=60,
        messages=[
            {"role": "user", "content": "My name is Ada and I live in Paris."},
            {"role": "assistant", "content": "Nice to meet you, Ada!"},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    return completion.choices[0].message.content or ""


def server_process(pid: int) -> int:
    """Returns the server's process id, given that of the command: its only descendant, or itself.

    A signal to `make` itself would end `make`, and its exit status would hide the server's.
    """
    child = next((process for process, parent in process_parents().items() if parent == pid), None)
    return pid if child is None else server_process(child)


def process_parents() -> dict[int, int]:
    """Returns the parent of every process, from /proc or, where there is none, from `ps`."""
    if Path("/proc/self/stat").exists():
        return {int(path.name): parent_of(path) for path in Path("/proc").glob("[0-9]*")}
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    return {int(pid): int(parent) for pid, parent in map(str.split, listing.stdout.splitlines())}


def parent_of(process: Path) -> int:
    """Returns the parent's id from /proc/<pid>, 0 if the process is gone."""
    try:
        # The name in parentheses may hold anything, so count from after the last one.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main(sys.argv[1:])
