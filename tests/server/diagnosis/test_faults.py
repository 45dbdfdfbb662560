"""Every fault of the table is named: cause, place and cure; by the answer, by the doctor live, and from a recording.

Usually each row without a session on a model of attention, and every fifth row with one on a model with recurrent
layers; with the option `--all-faults` each row both ways on the built-in model and on that one.
"""

import asyncio
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from starlette.testclient import TestClient

from models.prompt.chat_template import ChatRenderer
from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import open_renderer, open_service
from server.diagnosis.causes import UNTOLD, Cause
from server.doctor.findings import Checkup, Finding, checkup_of, findings_of, place_name
from server.doctor.model_reader import ModelReader
from server.doctor.recorded import checkups_of, read_requests
from server.engine.commands import clear_cache
from server.engine.engine import Engine
from server.pool.pool import ModelPool
from tests.support import tiny_models
from tests.support.apps import create_app, member
from tests.support.fake_engine import FakeEngine, fake_model
from tests.support.faults import FAULTS, NEED_A_NAME, NUM_TURNS, TOOLS, Body, Fault, on_messages, turns_of

CHAT = "/v1/chat/completions"
MAX_TOKENS = 4
LETTERS = [80, 85, 87, 89]
"""What is answered, q, v, x and z: no two of them are one token, so an answer sent back has its tokens again."""


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
        sent = {"max_tokens": MAX_TOKENS, "temperature": 0, "allowed_token_ids": LETTERS, **name, **fields, **body}
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
    restores_anywhere: bool
    renderer: ChatRenderer
    """As `--model` opens it."""


MODELS = ("demo", "lfm2")
ALL_CASES = tuple(product(MODELS, (False, True), FAULTS))
USUAL_CASES = (
    *product(["llama"], [False], FAULTS),
    *product(["demo"], [False], FAULTS[::11]),
    *product(["lfm2"], [True], FAULTS[::5]),
)
"""A model, whether its clients name their sessions, and a row of the table."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Has each test run on its models, one after the other."""
    names: tuple[str, ...] = ("served",)
    cases: Sequence[tuple[Any, ...]] = [(model,) for model in MODELS]
    if "served" not in metafunc.fixturenames:
        return
    if "fault" in metafunc.fixturenames:
        names = ("served", "is_named", "fault")
        cases = ALL_CASES if metafunc.config.getoption("all_faults") else USUAL_CASES
    elif "is_named" in metafunc.fixturenames:
        names, cases = ("served", "is_named"), list(product(MODELS, (False, True)))
    values = [pytest.param(*case, id=", ".join(map(_spoken, case))) for case in cases]
    metafunc.parametrize(names, values, indirect=["served"], scope="module")


def _spoken(value: str | bool | Fault) -> str:
    if isinstance(value, bool):
        return "named" if value else "unnamed"
    return value.name if isinstance(value, Fault) else value


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Serves each model once, however its tests are ordered."""
    with ExitStack() as stack:

        @functools.cache
        def serve(name: str) -> Served:
            folder = (
                "demo" if name == "demo" else str(tiny_models.write(name, tmp_path_factory.mktemp(name) / "tiny"))
            )
            # Else the order of a tool's keys would be mended before it costs anything.
            config = ServerConfig(models=(folder,), cache_memory_bytes=1 << 28, prompt_hygiene=False)
            service = open_service(config)
            service.engine.start()
            stack.callback(service.engine.stop)
            client = stack.enter_context(TestClient(create_app(service.engine, service.model, config)))
            # The table's conversations begin with what was said elsewhere, as after a restart.
            client.app.state.api.conversations.is_whole = False  # type: ignore[attr-defined]
            return Served(client, service.engine, name != "lfm2", open_renderer(folder)[0])

        yield serve


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, opened: Callable[[str], Served]) -> Served:
    return opened(request.param)


def check(checkups: list[Checkup], fault: Fault, where: str) -> None:
    """Asserts that the fault is the first thing told, its place, its cure, and that nothing else is blamed."""
    findings = findings_of_all(checkups)
    told = [(one.cause.value, one.where, one.tokens) for one in findings]
    losses = [loss for checkup in checkups for loss in checkup.losses if loss.miss.cause is fault.cause]
    assert losses, f"{where}: {told}"
    found, place = findings[0], place_name(losses[0].miss)
    role = "system" if place == "system message" else place.rpartition("(")[2].rstrip(")")
    assert (found.cause, role) == (fault.cause, fault.role or ""), f"{where}: {told}"
    if fault.index is not None:
        assert place in ("system message", f"message {fault.index} ({fault.role})")
    assert fault.cure in found.cure, (where, found.cure)
    assert {one.cause for one in findings} <= {fault.cause, fault.also}, f"{where}: {told}"
    assert fault.also is None or any(one.cause is fault.also for one in findings), f"{where}: {told}"


def told(findings: list[Finding]) -> list[tuple[str, str, str, str, str]]:
    """What a person reads of findings, besides the costs, of which live ones depend on what was kept where."""
    shown = ((one.cause.value, one.where, one.before, one.after, one.cure) for one in findings)
    return sorted(shown)


def findings_of_all(checkups: list[Checkup]) -> list[Finding]:
    return findings_of([loss for checkup in checkups for loss in checkup.losses])


def written(folder: Path, lines: list[Body], session_id: str | None = None) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"session_id": session_id, **line}) for line in lines), "utf-8")
    return path


def test_a_fault_is_named(served: Served, is_named: bool, fault: Fault, tmp_path: Path) -> None:
    session_id = "s" if is_named else None
    case = Case(served.client, f"{fault.name}-{session_id}", session_id)
    lines = turns_of(fault, case.ask)
    recorded = checkups_of(read_requests(written(tmp_path, lines, session_id)))
    if fault.name in NEED_A_NAME and not is_named:
        assert not findings_of_all(recorded)
        assert not findings_of_all(case.checkups())
        return
    check(recorded, fault, "file")
    reader = ModelReader(served.renderer, config=ServerConfig(prompt_hygiene=False))
    by_model = findings_of_all(checkups_of(read_requests(tmp_path / "requests.jsonl"), reader=reader))
    assert told(by_model) == told(findings_of_all(case.checkups())), "file with --model, and live"
    lost = [miss for miss in case.misses if miss["cause"] not in UNTOLD]
    if not lost and fault.may_be_hidden:
        return
    assert fault.cause.value in [miss["cause"] for miss in lost], f"answers: {lost}"
    check(case.checkups(), fault, "live")


def test_the_docs_hold_the_whole_table() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", docs, re.MULTILINE)
    assert rows[1:] == [*dict.fromkeys(rows[1:])]
    assert set(rows[1:]) == {cause.value for cause in Cause}


def test_a_good_client_is_blamed_for_nothing(served: Served, is_named: bool, tmp_path: Path) -> None:
    session_id = "s" if is_named else None
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


@pytest.mark.parametrize("session_id", ["s", None])
def test_questions_about_one_long_text_are_told_how_to_resume_behind_it(
    served: Served, session_id: str | None
) -> None:
    """A model with recurrent layers keeps no state within a message, unless it is asked to."""
    case = Case(served.client, f"document-{session_id}", session_id)
    for number, question in enumerate(("What comes first?", "How many are there?", "Is there any soap?")):
        cut = {"cache_control": {"type": "ephemeral"}} if number else {}
        parts = [{"type": "text", "text": "A list of what I would like to buy. " * 12, **cut}, text(question)]
        answer = case.ask({"messages": [{"role": "user", "content": parts}]})
    first, second = (one["cache"]["miss"] for one in case.answers[:2])
    assert first["reason"] == "cold"
    if served.restores_anywhere:
        assert second is None or not second["lost_tokens"] or second["cause"] == Cause.SIDE_REQUEST
    else:
        assert (second["reason"], second["role"]) == ("no_restore_point", "user")
        assert second["lost_tokens"] > 100 and "cache_control" in second["cure"]
    assert answer["cache"]["hit_tokens"] > 100


def test_a_conversation_from_before_the_start_is_told_to_need_the_disk(served: Served) -> None:
    case = Case(served.client, "before the start")
    conversations = case.client.app.state.api.conversations  # type: ignore[attr-defined]
    conversations.is_whole = True
    said = "Here is all that I would like to buy this week. "
    messages = [{"role": role, "content": said * (70 * (role == "assistant") or 1)} for role in ("user", "assistant")]
    messages.append(messages[0])
    examples = [{**one, "content": f"For example: {said * 2}"} for one in messages]
    first = case.ask({"messages": examples})["cache"]["miss"]
    assert first["cause"] == Cause.COLD, "examples were said by nobody"
    miss = case.ask({"messages": messages})["cache"]["miss"]
    conversations.is_whole = False
    assert (miss["reason"], miss["cause"], "--cache-disk" in miss["cure"]) == ("restarted", Cause.RESTARTED, True)
    (finding,) = findings_of_all(case.checkups())
    assert finding.cause is Cause.RESTARTED and finding.tokens == miss["lost_tokens"] > 128


def test_a_sub_agent_under_the_name_of_its_session_begins_anew(served: Served) -> None:
    agent = [
        {"role": "system", "content": "You search files and tell where things stand in them. " * 9},
        {"role": "user", "content": "Look for the price of pears in all files, please. " * 9},
    ]
    case = Case(served.client, "sub-agent", "s")

    def apply(turn: int, body: Body) -> list[Body]:
        own = {**body, "tools": TOOLS}
        return [{"messages": agent, "tools": TOOLS[:1]}, own] if turn == 1 else [own]

    turns_of(Fault("", apply, Cause.COLD, None, ""), case.ask)
    assert {one.cause for one in findings_of_all(case.checkups())} <= {Cause.NOT_RESTORABLE}
    assert {miss["cause"] for miss in case.misses} <= {Cause.COLD, Cause.TEMPLATE, Cause.NOT_RESTORABLE}


def test_a_recording_counts_what_older_branches_left_as_the_server_does(served: Served, tmp_path: Path) -> None:
    """A group chat: each turn another of two characters speaks, over the same history."""
    case = Case(served.client, "branches", "s")

    def apply(turn: int, messages: list[Body]) -> None:
        messages[0]["content"] = f"You are {('Zelda', 'Otto')[turn % 2]} of the shop. {SHOP_RULES}"

    lines = turns_of(Fault("", on_messages(apply), Cause.EDITED, "system", ""), case.ask, num_turns=6)
    reader = ModelReader(served.renderer, config=ServerConfig(prompt_hygiene=False))
    recorded = checkups_of(read_requests(written(tmp_path, lines, "s")), reader=reader)
    live, told = ([loss.tokens for loss in one[0].losses] for one in (case.checkups(), recorded))
    assert told[-2:] == pytest.approx(live[-2:], abs=4) and max(told[-2:]) < 128


SHOP_RULES = "Answer briefly and politely, never speak of prices, and count each item twice. " * 12


@pytest.mark.parametrize("system", ["You serve store {0}. {1}", "You help {2}. {1}"], ids=["number", "name"])
def test_conversations_that_differ_early_are_told_to_put_it_last(
    served: Served, system: str, is_named: bool, tmp_path: Path
) -> None:
    lines, cases = list[Body](), list[Case]()
    for store, person, question in ((12, "Ada", "How far is the sea?"), (47, "Bob", "Do you sell soap?")):
        case = Case(served.client, f"early {system} {is_named}", f"s{store}" if is_named else None)
        messages = [{"role": "system", "content": system.format(store, SHOP_RULES, person)}]
        for words in (question, "And what else?"):
            messages.append({"role": "user", "content": words})
            body = {"messages": list(messages), **({"session_id": case.session_id} if is_named else {})}
            answer = case.ask(body)
            lines.append({"body": body, "response": answer})
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        cases.append(case)
    for found in (
        findings_of_all(cases[0].checkups()),
        findings_of_all(checkups_of(read_requests(written(tmp_path, lines)))),
    ):
        (finding,) = found
        assert (finding.cause, finding.where, finding.turns) == (Cause.EARLY, "system message", 1)
        assert finding.tokens > 128 and "after all that they share" in finding.cure


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def clear(case: Case) -> None:
    wait_for_idle_work(case)
    assert case.client.post("/v1/cache/clear", headers=case.headers).status_code == 200


def clear_unseen(served: Served, case: Case) -> None:
    """Drops the state as if memory had been short."""
    namespace = case.client.get("/v1/sessions", headers=case.headers).json()["data"][0]["namespace"]
    wait_for_idle_work(case)
    portal_of(case).call(served.engine.execute, clear_cache, namespace)


def wait_for_idle_work(case: Case) -> None:
    """Waits until nothing more is evaluated ahead of the next turn."""

    async def wait() -> None:
        await asyncio.gather(*case.client.app.state.api.background)  # type: ignore[attr-defined]

    portal_of(case).call(wait)


def portal_of(case: Case) -> BlockingPortal:
    assert case.client.portal is not None
    return case.client.portal


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model": "other"}, Cause.MODEL),
        ({"headers": {"Authorization": "Bearer other"}}, Cause.NAMESPACE),
        ({"cache_salt": "other"}, Cause.NAMESPACE),
    ],
    ids=["model", "key", "salt"],
)
@pytest.mark.parametrize("session_id", ["s", None])
@pytest.mark.parametrize("has_answers", [True, False])
def test_another_model_key_or_salt_is_told_from_a_recording(
    change: Body, cause: Cause, session_id: str | None, has_answers: bool, tmp_path: Path
) -> None:
    lines = turns_of(None, lambda body: {"choices": [{"message": {"role": "assistant", "content": "It is so."}}]})
    lines = lines if has_answers else [{"body": line["body"]} for line in lines]
    headers = change.get("headers", {})
    lines[1:] = [{**line, "headers": headers, "body": {**line["body"], **change}} for line in lines[1:]]
    (finding,) = findings_of_all(checkups_of(read_requests(written(tmp_path, lines, session_id))))
    assert (finding.cause, finding.turns) == (cause, 1)


def test_another_model_is_told_at_once() -> None:
    models = [fake_model(id=name, context_tokens=2000) for name in ("one", "other")]
    app = create_pool_app(ModelPool.of(*(member(model, FakeEngine()) for model in models)), ServerConfig())
    case = Case(TestClient(app), "key", "s")
    messages = [{"role": "user", "content": "What is 5 plus 6?"}]
    reply = case.ask({"messages": messages}, model="one")["choices"][0]["message"]
    miss = case.ask({"messages": [*messages, reply, *messages]}, model="other")["cache"]["miss"]
    assert (miss["reason"], miss["before"], miss["after"]) == ("model_changed", "one", "other")
    assert miss["lost_tokens"] > 0 and "one model" in miss["cure"]


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
