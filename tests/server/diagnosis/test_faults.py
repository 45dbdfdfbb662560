"""Every fault of the table is named: cause, place and cure; by the answer, by the doctor live, and from a recording.

Without a session on a model of attention, with one on a model with recurrent layers.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.config import ServerConfig
from server.doctor.compare import checkups_of
from server.doctor.findings import Checkup, Finding, findings_of
from server.doctor.recorded import read_requests
from server.doctor.turns import checkup_of
from server.engine.commands import ClearCache
from server.engine.diagnosis import UNBLAMED, Cause
from server.engine.engine import Engine
from server.service import open_service
from tests.support import tiny_models
from tests.support.faults import FAULTS, NEED_A_NAME, NUM_TURNS, Body, Fault, turns_of

CHAT = "/v1/chat/completions"
MAX_TOKENS = 6


@dataclass
class Case:
    """A conversation under a key of its own, and all that was answered."""

    client: TestClient
    key: str
    session_id: str | None = None

    def __post_init__(self) -> None:
        self.answers: list[Body] = []

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def ask(self, body: Body, **fields: Any) -> Body:
        name = {"session_id": self.session_id} if self.session_id else {}
        sent = {"max_tokens": MAX_TOKENS, "temperature": 0, **name, **fields, **body}
        answer = self.client.post(CHAT, json=sent, headers=self.headers)
        assert answer.status_code == 200, answer.text
        self.answers.append(answer.json())
        return dict(answer.json())

    @property
    def misses(self) -> list[Body]:
        return [answer["cache"]["miss"] for answer in self.answers if answer["cache"]["miss"]]

    def checkups(self) -> list[Checkup]:
        listed = self.client.get("/v1/sessions", headers=self.headers).json()["data"]
        one = (self.client.get(f"/v1/sessions/{session['id']}", headers=self.headers).json() for session in listed)
        return [checkup_of(session) for session in one]


@dataclass(frozen=True)
class Served:
    """A running engine behind the whole HTTP side."""

    client: TestClient
    engine: Engine
    is_named: bool
    """Whether its clients name their sessions."""


@pytest.fixture(scope="module", params=["demo", "qwen3_5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = request.param
    folder = "demo" if name == "demo" else str(tiny_models.write(name, tmp_path_factory.mktemp(name) / "tiny"))
    config = ServerConfig(models=(folder,), cache_memory_bytes=1 << 28)
    service = open_service(config)
    service.engine.start()
    with TestClient(create_app(service.engine, service.model, config)) as client:
        yield Served(client, service.engine, is_named=name != "demo")
    service.engine.stop()


def named(findings: list[Finding], fault: Fault) -> Finding | None:
    return next((one for one in findings if one.cause is fault.cause), None)


def check(findings: list[Finding], fault: Fault, where: str) -> None:
    """Asserts that the fault is the first thing told, its place, its cure, and that nothing else is blamed."""
    found = named(findings, fault)
    told = [(one.cause.value, one.example.where, one.tokens) for one in findings]
    assert found is not None, f"{where}: {told}"
    assert found is findings[0], f"{where}: {told}"
    assert found.losses[0].place == fault.role, f"{where}: {told}"
    if fault.index is not None:
        assert found.losses[0].where in ("system message", f"message {fault.index} ({fault.role})")
    assert fault.cure in found.cure, (where, found.cure)
    assert {one.cause for one in findings} <= {fault.cause, fault.also}, f"{where}: {told}"
    assert fault.also is None or any(one.cause is fault.also for one in findings), f"{where}: {told}"


def findings_of_all(checkups: list[Checkup]) -> list[Finding]:
    return findings_of([loss for checkup in checkups for loss in checkup.losses])


def written(folder: Path, lines: list[Body], session_id: str | None) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"session_id": session_id, **line}) for line in lines), "utf-8")
    return path


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(served: Served, fault: Fault, tmp_path: Path) -> None:
    session_id = "s" if served.is_named or fault.name in NEED_A_NAME else None
    case = Case(served.client, f"{fault.name}-{session_id}", session_id)
    lines = turns_of(fault, case.ask)
    check(findings_of_all(checkups_of(read_requests(written(tmp_path, lines, session_id)))), fault, "file")
    lost = [miss for miss in case.misses if miss["cause"] not in UNBLAMED]
    if not lost and fault.may_be_hidden:
        return
    assert fault.cause.value in [miss["cause"] for miss in lost], f"answers: {lost}"
    check(findings_of_all(case.checkups()), fault, "live")


def test_a_good_client_is_blamed_for_nothing(served: Served, tmp_path: Path) -> None:
    session_id = "s" if served.is_named else None
    case = Case(served.client, f"good-{session_id}", session_id)
    lines = turns_of(None, case.ask)
    (checkup,) = case.checkups()
    assert (checkup.num_turns, checkup.losses) == (NUM_TURNS, ())
    (recorded,) = checkups_of(read_requests(written(tmp_path, lines, session_id)))
    assert (recorded.num_turns, recorded.losses) == (NUM_TURNS, ())


def test_what_the_server_lacks_is_no_fault_of_the_client(served: Served) -> None:
    """State that was evicted, that was cleared, and that the client declined to use."""
    case = Case(served.client, "lacking", "s")
    messages: list[Body] = [{"role": "user", "content": "A list of everything that I would like to buy today. " * 12}]
    case.ask({"messages": messages})
    told: list[str] = []
    for number in range(3):
        if number == 0:
            clear_unseen(served, case)
        elif number == 1:
            clear(case)
        is_declined = number == 2
        answer = case.ask({"messages": messages}, cache_prompt=not is_declined)
        told.append(answer["cache"]["miss"]["cause"])
    assert told == [Cause.EVICTED, Cause.CLEARED, Cause.DECLINED]
    findings = findings_of_all(case.checkups())
    assert {one.cause for one in findings} >= {Cause.EVICTED, Cause.CLEARED}


def clear(case: Case) -> None:
    assert case.client.post("/v1/cache/clear", headers=case.headers).status_code == 200


def clear_unseen(served: Served, case: Case) -> None:
    """Drops the state as if memory had been short."""
    namespace = case.client.get("/v1/sessions", headers=case.headers).json()["data"][0]["namespace"]
    portal = served.client.portal
    assert portal is not None
    portal.call(served.engine.execute, ClearCache(namespace))


@pytest.mark.parametrize("change", ["key", "salt"])
def test_another_key_or_salt_is_told_to_who_holds_the_reply(served: Served, change: str) -> None:
    case = Case(served.client, f"before-{change}", f"s-{change}")
    messages: list[Body] = [{"role": "user", "content": f"What is 5 plus 6? This is about the {change}."}]
    reply = case.ask({"messages": messages})["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "And plus one?"}]
    other = Case(served.client, "after-key" if change == "key" else case.key, case.session_id)
    answer = other.ask({"messages": messages}, **({"cache_salt": "x"} if change == "salt" else {}))
    assert answer["cache"]["miss"]["reason"] == "namespace_changed"
    stranger = Case(served.client, f"stranger-{change}", case.session_id)
    answer = stranger.ask({"messages": messages[:1]})
    assert answer["cache"]["miss"] is None or answer["cache"]["miss"]["reason"] == "cold"
