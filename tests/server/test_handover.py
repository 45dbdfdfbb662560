"""`--handover`: a server that stops gives its conversations to another one, behind HAProxy too."""

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.test_gateway import HAPROXY, Conversation, configured, held_port, needs_haproxy, wait_until
from tests.support.server_process import Process

NUM_CONVERSATIONS = 4
FORMS = ("in the header", "in the body", "absent")


def conversations(name: str, form: str = "in the header") -> list[Conversation]:
    made = [Conversation(f"{name} {number}", form) for number in range(NUM_CONVERSATIONS)]
    for one in made:
        one.messages = [{"role": "system", "content": f"Answer {one.name} in few words. " * 12}]
    return made


def turns(port: int, asked: list[Conversation]) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: one.turn(port), asked))


def newest_turn_tokens(port: int, one: Conversation) -> int:
    """How many tokens the next turn evaluates; asks it."""
    before = one.num_tokens, one.num_cached
    one.turn(port)
    return (one.num_tokens - before[0]) - (one.num_cached - before[1])


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[dict[str, Process]]:
    with contextlib.ExitStack() as stack:
        second = Process("demo", "--port", "0", "--name", "second")
        stack.callback(second.close)
        heir = f"http://127.0.0.1:{second.port}"
        first = Process("demo", "--port", "0", "--name", "first", "--handover", heir)
        stack.callback(first.close)
        first.wait_for("Try it:")
        yield {"first": first, "second": second}


@needs_haproxy
def test_a_drained_replica_costs_no_conversation_more_than_its_newest_turn(
    replicas: dict[str, Process], tmp_path: Path
) -> None:
    file = tmp_path / "haproxy.cfg"
    addresses = [f"127.0.0.1:{process.port}" for process in replicas.values()]
    with held_port() as port:
        file.write_text(configured(addresses, f"127.0.0.1:{port}", str(tmp_path / "admin.sock")))
        proxy = subprocess.Popen([str(HAPROXY), "-db", "-f", str(file)], stderr=subprocess.DEVNULL)
        try:
            asked = [one for form in FORMS for one in conversations(form, form)]
            wait_until(lambda: _answers(port))
            turns(port, asked)
            turns(port, asked)
            moving = [one for one in asked if one.served_by == ["first"] * 2]
            assert 0 < len(moving) < len(asked)
            replicas["first"].signal(15)
            turns(port, asked)  # while they move
            assert replicas["first"].wait() == 0
            evaluated = [newest_turn_tokens(port, one) for one in asked]
        finally:
            proxy.kill()
            proxy.wait()
    assert {one.served_by[-1] for one in asked} == {"second"}
    assert max(evaluated) < 60, evaluated
    share = sum(one.num_cached for one in asked) / sum(one.num_tokens for one in asked)
    assert share > 0.6
    assert "handed over to" in replicas["first"].output and "not handed over" not in replicas["first"].output


def _answers(port: int) -> bool:
    try:
        Conversation("probe", "in the header").turn(port)
    except (OSError, AssertionError):
        return False
    return True
