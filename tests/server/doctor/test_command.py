"""`mlx-serve doctor` as a person meets it: what it prints, and one sentence for what is in its way."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from threading import Thread
from typing import Any

import httpx
import pytest

from server.app.config import ServerConfig
from server.cli import ask as ask_module
from server.cli import doctor as doctor_module
from server.cli.main import execute
from server.diagnosis.causes import Cause, Miss, MissReason
from server.doctor.findings import NEGLIGIBLE_TOKENS
from server.pool.memory import Pressure
from tests.support import tiny_vision
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

DOCS = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
CLOCK = Miss(
    MissReason.SYSTEM_CHANGED,
    0,
    "system",
    9,
    "It is 09:16. Be [kind].\n",
    "It is 09:17. Be [kind].\x1b[31m\n",
    5,
    cause=Cause.CLOCK,
)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Returns exit status, the lines of standard output, of which none is padded, and standard error."""
    status = execute(["doctor", *arguments])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    return status, lines, captured.err


def served(api_key: str | None = None) -> Any:
    return running(create_app(FakeEngine(), fake_model(), ServerConfig(api_key=api_key)))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig())) as url:
        yield url


def ask(address: str, session_id: str, **headers: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": session_id}
    assert httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers).status_code == 200


def test_of_several_servers_the_one_that_was_asked_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (ask_module, doctor_module):
        monkeypatch.setattr(module, "known_urls", lambda: [address, "http://127.0.0.1:8080"])
    assert doctor(capsys)[2] == f"Asked {address}; `mlx-serve ps` lists the other servers.\n"
    assert doctor(capsys, address)[2] == "", "an address that was given is no news"


def test_a_running_server_is_examined(engine: FakeEngine, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(address, "steady")
    ask(address, "a/b [c]")
    engine.script = Script(hit_tokens=2, miss=CLOCK)
    ask(address, "a/b [c]")
    ask(address, "a/b [c]")
    status, lines, errors = doctor(capsys, address)
    assert (status, errors) == (0, "")
    assert lines == [
        "a/b [c]: 3 turns, 50 % of the previous prompt reused on average",
        "  date or time in the system message, in 2 turns",
        "    before  It is 09:16. Be [kind].⏎",
        "    after   It is 09:17. Be [kind].\\x1b[31m⏎",
        "    cost    10 tokens evaluated again: 5 and 0.02 s per turn",
        "    mend    Put the date or time into a message of its own just before the",
        "            newest one and leave it there, or round it to the day.",
        "",
        "steady: 1 turn; nothing to mend",
        "",
        "2 sessions, 1 with something to mend: 10 tokens (0.03 s) evaluated again.",
        "Mended, that saves 0.01 s per turn.",
    ]


def test_what_was_refused_is_told(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [image]}], "session_id": "photos"}
    for _ in range(2):
        httpx.post(f"{address}/v1/chat/completions", json=body)
    status, lines, errors = doctor(capsys, address)
    assert (status, errors) == (0, "")
    assert lines[0] == "2 requests refused"
    assert lines[1].startswith("  2 ×  /v1/chat/completions (photos): 400 messages.0.content.0.image")
    assert "this model takes no images" in re.sub(r"\s+", " ", " ".join(lines))
    _, lines, _ = doctor(capsys, address, "--json")
    (one,) = json.loads("\n".join(lines))["refused"]
    assert (one["session_id"], one["status"], one["count"]) == ("photos", 400, 2)


def test_a_server_without_sessions_is_no_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, errors = doctor(capsys, address)
    assert (status, errors) == (0, "")
    assert "No conversations yet" in " ".join(lines)
    _, lines, _ = doctor(capsys, address, "--api-key", "other")
    assert "--api-key" in " ".join(lines)


def test_who_owns_the_server_sees_what_every_key_asked_and_a_key_its_own(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("other", "none"):
        ask(address, f"of-{key}", Authorization=f"Bearer {key}")
    _, lines, _ = doctor(capsys, address)
    assert sorted(line.split(":")[0] for line in lines[:2]) == ["of-none", "of-other"]
    _, lines, _ = doctor(capsys, address, "--api-key", "other")
    assert lines[0].startswith("of-other: 1 turn") and "of-none" not in " ".join(lines)


@pytest.mark.parametrize(
    "change", [lambda url: f"{url}/", lambda url: f"{url}/v1", lambda url: url[len("http://") :]]
)
def test_an_address_may_be_written_in_several_ways(
    address: str, capsys: pytest.CaptureFixture[str], change: Callable[[str], str]
) -> None:
    status, _, errors = doctor(capsys, change(address))
    assert (status, errors) == (0, "")


def test_recorded_requests_are_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, history, lines = tmp_path / "requests.jsonl", list[dict[str, Any]](), []
    for minute in range(3):
        history.append({"role": "user", "content": f"Question {minute}?"})
        system = {"role": "system", "content": f"It is 09:1{minute}. Be kind. " + "And so on. " * 40}
        lines.append(json.dumps({"session_id": "s", "messages": [system, *history]}))
        history.append({"role": "assistant", "content": "So it is. " * 40})
    path.write_text("\n".join(lines))
    status, shown, errors = doctor(capsys, "--file", str(path))
    assert (status, errors) == (0, "")
    assert shown[0] == "s: 3 turns, 3 % of the previous prompt reused on average"
    assert shown[4] == "    cost    341 tokens evaluated again: 170 per turn"
    assert shown[-1] == "Tokens are estimated as characters / 4; --model counts them as the model does."
    assert all(len(line) <= 80 for line in shown)
    _, shown, _ = doctor(capsys, "--file", str(path), "--json")
    told = json.loads("\n".join(shown))
    (finding,) = told["conversations"][0]["findings"]
    assert (finding["cause"], finding["tokens"], finding["turns"]) == ("date or time", 341, 2)
    assert (told["savings"]["tokens"], told["savings"]["seconds_per_turn"]) == (341, None)


def test_with_a_model_a_recording_is_read_by_its_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template decides what a thought that is turned off costs; the model takes no images."""
    path, messages = tmp_path / "requests.jsonl", [{"role": "user", "content": "How far is the sea? " * 30}]
    lines: list[dict[str, Any]] = [{"messages": messages, "session_id": "s", "enable_thinking": True}]
    messages = [*messages, {"role": "assistant", "content": "Far."}, {"role": "user", "content": "Why?"}]
    lines.append({"messages": messages, "session_id": "s", "enable_thinking": False})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    lines.append({"messages": [{"role": "user", "content": [image]}], "session_id": "photos"})
    path.write_text("\n".join(map(json.dumps, lines)))
    status, shown, errors = doctor(capsys, "--file", str(path))
    assert (status, errors) == (0, "")
    assert "other template arguments" in " ".join(shown)
    assert "Only the model's template decides whether other template arguments cost" in " ".join(shown)
    status, shown, _ = doctor(capsys, "--file", str(path), "--model", "demo")
    assert status == 0 and shown[0] == "s: 2 turns, 100 % of the previous prompt reused on average; nothing to mend"
    assert "1 request refused" in shown and "takes no images" in " ".join(shown)
    assert doctor(capsys, "--model", "demo")[0] == doctor(capsys, "--file", str(path), "--heal", "*=git")[0] == 2
    status, _, errors = doctor(capsys, "--file", str(path), "--model", "demo", "--heal", "*=luck")
    assert status == 2 and "'*=luck' heals nothing" in errors
    status, _, errors = doctor(capsys, "--file", str(path), "--model", str(tmp_path))
    assert status == 1 and str(tmp_path) in errors


def test_a_recording_of_a_model_that_sees_has_its_images_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tiny_vision.write("qwen3_vl", tmp_path / "tiny"), tmp_path / "requests.jsonl"

    def line(data: bytes, session: str, *more: Any) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        return {"messages": [asked, *more], "session_id": session}

    more = {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And now?"}
    small, other = tiny_vision.image(1), tiny_vision.image(2)
    lines = [line(small, "same"), line(small, "same", *more), line(small, "other"), line(other, "other", *more)]
    path.write_text("\n".join(map(json.dumps, [*lines, line(small[:-20], "damaged")])))
    status, shown, _ = doctor(capsys, "--file", str(path), "--model", str(folder), "--json")
    told = json.loads("\n".join(shown))
    assert status == 0 and [one["session_id"] for one in told["refused"]] == ["damaged"]
    kept = {one["id"]: one["kept"] for one in told["conversations"]}
    assert kept["same"] > 0.9 > kept["other"]


def test_a_repeated_call_is_named_for_a_server_and_for_a_recording(
    engine: FakeEngine, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Edits and tests in turns are no circle, two calls in turns are one; the answer's own call counts."""
    path, lines = tmp_path / "requests.jsonl", list[str]()
    engine.script = Script(texts=('<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>',))
    work = [one for number in range(5) for one in (look("b"), look(str(number)))]
    for session_id, calls in (("circle", [look("a"), look("b")] * 3 + [look("a")]), ("work", work)):
        asked = {"messages": [{"role": "user", "content": "Hi"}, *calls], "session_id": session_id, "tools": [TOOL]}
        answer = httpx.post(f"{address}/v1/chat/completions", json=asked).json()
        lines.append(json.dumps({"body": asked, "response": answer}))
    path.write_text("\n".join(lines))
    for source in ([address], ["--file", str(path)]):
        status, shown, errors = doctor(capsys, *source)
        assert (status, errors) == (0, "")
        assert shown[:3] == [
            "circle: 1 turn",
            "  repeated call, 4 times with no other call between",
            '    call  ["look", {"at": "b"}]',
        ]
        assert "--loop-guard" in " ".join(shown) and "2 sessions, 1 with something to mend" in " ".join(shown)
        told = json.loads("\n".join(doctor(capsys, *source, "--json")[1]))["conversations"]
        assert {one["id"]: one["repeated_call"] for one in told} == {
            "circle": {"call": '["look", {"at": "b"}]', "times": 4},
            "work": None,
        }


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def look(at: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps({"at": at})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


# ------------------------------------------------------------------------------------- what is in its way


def one_line(errors: str) -> str:
    assert errors.startswith("mlx-serve: ")
    assert errors.count("\n") == 1
    return errors


def test_where_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket() as unused:
        # Taken, so that no other program answers there.
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        status, lines, errors = doctor(capsys, f"127.0.0.1:{port}")
    assert (status, lines) == (1, [])
    told = f"no server answers at http://127.0.0.1:{port}: Connection refused; mlx-serve serve starts one"
    assert told in one_line(errors)


def test_where_the_key_is_missing_or_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(api_key="secret") as address:
        for key in ([], ["--api-key", "wrong"]):
            status, _, errors = doctor(capsys, address, *key)
            assert status == 1
            assert "asks for a key; give it with --api-key" in one_line(errors)
        assert doctor(capsys, address, "--api-key", "secret")[0] == 0
        monkeypatch.setenv("MLX_SERVE_API_KEY", "secret")
        assert doctor(capsys, address)[0] == 0


@pytest.mark.parametrize(
    ("status_code", "body", "words"),
    [
        (200, b"<html>hello</html>", "is not mlx-serve"),
        (200, b"[]", "this version cannot read the sessions"),
        (200, b'{"data": 5}', "this version cannot read the sessions"),
        (200, b'{"data": [{"id": "s"}]}', "this version cannot read the sessions"),
        (200, b"\xff", "is not mlx-serve"),
        (404, b"nothing", "is not mlx-serve"),
        (500, b"oops", "is not mlx-serve: status 500"),
    ],
)
def test_another_program_is_told_from_mlx_serve(
    capsys: pytest.CaptureFixture[str], status_code: int, body: bytes, words: str
) -> None:
    with another_program(status_code, body) as address:
        status, lines, errors = doctor(capsys, address)
    assert (status, lines) == (1, [])
    assert words in one_line(errors)
    assert address in errors


class another_program:  # noqa: N801 - used as a block
    """A web server that answers every request alike."""

    def __init__(self, status: int, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - likewise
                """Says nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://a:b:c", "127.0.0.1:port"])
def test_what_is_no_address(capsys: pytest.CaptureFixture[str], url: str) -> None:
    status, _, errors = doctor(capsys, url)
    assert status == 1
    assert "is no address of a server" in one_line(errors)


def test_a_missing_value_or_file_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, told in (
        (["--file"], "requires an argument; see mlx-serve doctor --help"),
        (["--file", str(tmp_path)], "--file needs a file with a recorded request on each line"),
        (["--file", str(tmp_path / "gone")], "--file needs a file with a recorded request on each line"),
    ):
        _, _, errors = doctor(capsys, *arguments)
        assert told in one_line(errors)


@pytest.mark.parametrize("arguments", [["http://a", "--file", "b"], ["--model", "demo"], ["a", "b"]])
def test_wrong_arguments_get_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, _, errors = doctor(capsys, *arguments)
    assert status == 2
    one_line(errors)


def test_every_flag_is_documented() -> None:
    section = DOCS.split("## `mlx-serve doctor")[1].split("\n## ")[0]
    assert "diagnosis.md" in section
    assert all(f"`{flag}" in section for flag in ("--file", "--model", "--api-key", "--cache-salt", "--json"))
    assert f"up to {NEGLIGIBLE_TOKENS} tokens" in section


def test_a_machine_that_is_short_of_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    app.state.api.pool.budgets.relieve(Pressure.CRITICAL)
    with running(app) as url:
        assert httpx.get(f"{url}/v1/stats").json()["memory"] == {"pressure": "critical", "idle_limit_bytes": 0}
        status, lines, _ = doctor(capsys, url)
    assert status == 0
    assert " ".join(lines).endswith(
        "Memory of the machine: critical. Idle state is cut to 0 bytes until the machine has enough memory."
    )


def test_another_program_that_stands_first_on_the_path_is_told(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = tmp_path / "own" / "mlx-serve", tmp_path / "homebrew" / "mlx-serve"
    for program in (own, other):
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(own)])
    monkeypatch.setenv("PATH", f"{own.parent}:{other.parent}")
    assert doctor(capsys, address)[2] == ""
    monkeypatch.setenv("PATH", f"{other.parent}:{own.parent}")
    assert doctor(capsys, address)[2] == f"Another mlx-serve stands first on PATH: {other}; this is {own}.\n"
