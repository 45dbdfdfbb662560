"""What clients may cost who neither send nor read: on a real uvicorn, with sockets of our own."""

import asyncio
import contextlib
import errno
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from server.api.connections import MAX_HEAD_BYTES, MAX_LINGERING, Connection, HttpConfig, Limits
from server.app.config import ServerConfig
from server.engine.request import FinishReason
from tests.server.api.test_live import until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

WAIT_SECONDS = 120.0
LIMITS = Limits(client_seconds=WAIT_SECONDS, max_connections=6)
"""Clients are waited for, however late a busy machine has them go on."""
HURRIED = Limits(client_seconds=0.8, max_connections=6)
PATIENT = Limits(client_seconds=4.0, max_connections=6)
LONG = Script(texts=("x" * 4000,) * 2000, reason=FinishReason.LENGTH)
"""8 MB, more than any kernel takes for a client that does not read."""
ENDLESS = Script(texts=("x",) * 100_000, step_seconds=0.02)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig()), LIMITS) as address:
        yield address


@pytest.fixture
def hurried(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig()), HURRIED) as address:
        yield address


@pytest.fixture
def patient(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig()), PATIENT) as address:
        yield address


def connect(address: str, sent: bytes = b"", *, receive_bytes: int | None = None) -> socket.socket:
    """Opens a connection and sends something on it."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(WAIT_SECONDS)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


def chat(**fields: Any) -> bytes:
    """Returns a whole request."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def received(connection: socket.socket) -> bytes:
    """Returns all that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def is_reset(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def is_served(address: str) -> bool:
    """False also where this client itself was too late."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(f"{address}/v1/completions", json={"prompt": "x"}, timeout=WAIT_SECONDS).is_success
    return False


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"], ids=["first", "pipelined"])
def test_nothing_is_read_behind_a_request_with_two_lengths(address: str, engine: FakeEngine, before: bytes) -> None:
    body = chat().partition(b"\r\n\r\n")[2]
    lengths = b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (5, len(body), body)
    with connect(address, before + HEAD + lengths + chat()) as connection:
        answers = received(connection)
    assert answers.count(b"HTTP/1.1 200 ") == (2 if before else 1)
    assert answers.count(b"connection: close") == 1 and len(engine.requests) == 1


def test_a_client_that_never_sends_is_closed_without_a_word(hurried: str) -> None:
    with connect(hurried) as connection:
        assert received(connection) == b""


@pytest.mark.parametrize(
    "half",
    [HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"],
    ids=["head", "body", "chunk"],
)
def test_a_half_sent_request_is_told_so_and_closed(
    hurried: str, engine: FakeEngine, half: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(hurried, half) as connection:
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert not engine.requests
    until(lambda: is_served(hurried))
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_half_sent_head_is_closed_in_time_though_others_are_served(hurried: str) -> None:
    with connect(hurried, HEAD) as connection:
        connection.setblocking(False)

        def is_told() -> bool:
            until(lambda: is_served(hurried))
            with contextlib.suppress(BlockingIOError):
                return b" 408 " in connection.recv(1 << 16)
            return False

        until(is_told)


def test_the_half_of_a_second_request_is_closed_too(hurried: str) -> None:
    with connect(hurried, b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" + HEAD) as connection:
        answers = received(connection)
    assert answers.startswith(b"HTTP/1.1 200") and answers.count(b"HTTP/1.1 408 ") == 1


@pytest.mark.parametrize("head", [HEAD, HEAD + b"Content-Length: 100000\r\n\r\n"], ids=["head", "body"])
def test_a_request_that_arrives_byte_by_byte_is_not_waited_for(hurried: str, head: bytes) -> None:
    def drip() -> bool:
        connection.sendall(b"x")
        time.sleep(HURRIED.client_seconds / 20)
        return False

    with connect(hurried, head) as connection, pytest.raises(ConnectionError):
        until(drip)


def test_a_slow_body_that_goes_on_arriving_is_waited_for(patient: str) -> None:
    request = chat(metadata={"padding": "x" * 150_000})
    with connect(patient) as connection:
        for start in range(0, len(request), 8192):
            connection.sendall(request[start : start + 8192])
            time.sleep(PATIENT.client_seconds / 15)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_reader_who_stops_loses_his_stream_and_nobody_else_anything(hurried: str, engine: FakeEngine) -> None:
    engine.script = lambda request: LONG if request.session_id == "stuck" else Script()
    with connect(hurried, chat(stream=True, session_id="stuck")) as connection:
        until(lambda: len(engine.requests) == 1)
        until(lambda: is_served(hurried))
        until(lambda: is_reset(connection))
        until(lambda: is_served(hurried))


def test_a_whole_answer_that_nobody_reads_is_dropped(hurried: str, engine: FakeEngine) -> None:
    engine.script = LONG
    with connect(hurried, chat()) as connection:
        until(lambda: is_reset(connection))


@pytest.mark.parametrize("stream", [True, False])
def test_a_slow_reader_who_goes_on_reading_gets_everything(patient: str, engine: FakeEngine, stream: bool) -> None:
    engine.script = LONG
    answer, began = bytearray(), time.monotonic()
    with connect(patient, chat(stream=stream), receive_bytes=1 << 16) as connection:
        # A part of a stream may end with the braces that end a whole answer.
        while not answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}"):
            answer += (part := connection.recv(1 << 16))
            assert part
            if time.monotonic() - began < 1.25 * PATIENT.client_seconds:
                time.sleep(PATIENT.client_seconds / 40)
    assert answer.count(b"x") >= 8_000_000


def test_a_reader_makes_progress_though_as_much_as_before_is_unsent() -> None:
    """A stream of equal events, of which one waits at each look."""
    connection: Any = Connection.__new__(Connection)
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: 4283)
    connection.conn = SimpleNamespace(num_sent=42_830)
    before = connection._find_awaited()
    connection.conn.num_sent += 4283
    assert before == ("taking an answer", 42_830 - 4283) and connection._find_awaited() != before


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_sending_half_gets_its_answer(address: str, stream: bool) -> None:
    with connect(address, chat(stream=stream)) as connection:
        connection.shutdown(socket.SHUT_WR)
        # The server asks for the body unless it has come by then.
        answer = received(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_a_client_that_waits_with_its_sending_half_closed_gets_its_answer(address: str, engine: FakeEngine) -> None:
    engine.script = Script(texts=("x",) * 40, step_seconds=0.02)
    with connect(address, chat()) as connection:
        until(lambda: len(engine.requests) == 1)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).count(b"x" * 40) == 1
    assert not engine.cancelled


def test_a_client_that_closes_its_sending_half_in_mid_stream_has_left(address: str, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    with connect(address, chat(stream=True)) as connection:
        assert connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        assert engine.cancel_seen.wait(WAIT_SECONDS)
        received(connection)


def test_a_client_of_the_older_protocol_that_closes_its_sending_half_has_left(
    address: str, engine: FakeEngine
) -> None:
    """It might take an interim answer for the answer."""
    engine.script = ENDLESS
    with connect(address, chat().replace(b"HTTP/1.1", b"HTTP/1.0", 1)) as connection:
        until(lambda: len(engine.requests) == 1)
        connection.shutdown(socket.SHUT_WR)
        assert engine.cancel_seen.wait(WAIT_SECONDS)
        assert received(connection) == b""


@pytest.mark.parametrize("has_half_closed", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_has_left(address: str, engine: FakeEngine, stream: bool, has_half_closed: bool) -> None:
    engine.script = ENDLESS
    with connect(address, chat(stream=stream)) as connection:
        if has_half_closed:
            connection.shutdown(socket.SHUT_WR)
        until(lambda: len(engine.requests) == 1)
    assert engine.cancel_seen.wait(WAIT_SECONDS)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
        HEAD + b"X-Long: " + b"x" * 200_000,
        HEAD + b"X-Long: " + b"x" * 66_000 + b"\r\n\r\n",
        HEAD + b"X-Long: " + b" " * 66_000 + b"x\r\n\r\n",
        HEAD + b"X: y\r\n" * 11_000 + b"\r\n",
    ],
    ids=["tls", "length", "chunk", "version", "endless head", "long head", "blanks", "many headers"],
)
def test_what_is_no_http_is_told_so_and_logged_once(
    address: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    for _ in range(3):
        with connect(address, sent) as connection:
            head, _, body = received(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert [record.name for record in caplog.records] == ["server.api.connections"]
    assert not engine.requests and is_served(address)


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1])
@pytest.mark.parametrize("piece", [MAX_HEAD_BYTES + 1, 40_000], ids=["at once", "in pieces"])
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"], ids=["first", "pipelined"])
def test_a_head_is_as_long_as_it_may_be_however_it_arrives(
    address: str, num_bytes: int, piece: int, before: bytes
) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\nX: "
    head = start + b"x" * (num_bytes - len(start) - 4) + b"\r\n\r\n"
    with connect(address, before) as connection, contextlib.suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(head), piece):
            connection.sendall(head[place : place + piece])
            time.sleep(0.01 if len(head) > piece else 0)  # so that the server reads each piece by itself
        answers = received(connection)
    assert (b" 200 " in answers.split(b"\r\n\r\n")[-2]) == (num_bytes <= MAX_HEAD_BYTES)
    assert (b"invalid_http" in answers) == (num_bytes > MAX_HEAD_BYTES)


def test_a_server_ends_beside_a_client_that_reads_an_answer_of_its_connection(engine: FakeEngine) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"
    with contextlib.ExitStack() as stack:
        with running(create_app(engine, fake_model(), ServerConfig()), LIMITS) as address:
            connection = stack.enter_context(connect(address, head))
            assert connection.recv(1) == b"H"
        assert b"invalid_http" in received(connection)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://127.0.0.1:8080/health", b"200"),
        (b"HTTPS://localhost/v1/models?limit=1", b"200"),
        (b"http://[::1]", b"200"),
        (b"http://evil.example/health", b"403"),
        (b"http://me@localhost/health", b"404"),
        (b"ftp://localhost/health", b"404"),
    ],
)
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
def test_a_whole_address_stands_for_host_and_path(address: str, target: bytes, status: bytes, host: bytes) -> None:
    if host == b"evil.example" and status == b"404":
        status = b"403"  # no address that is understood: the header counts
    with connect(address, b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (target, host)) as connection:
        assert received(connection).startswith(b"HTTP/1.1 %s " % status)


def test_no_warning_tells_of_each_write_to_a_client_that_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_left, has_ended = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        has_left.wait(WAIT_SECONDS)  # the event loop learns of it by writing
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"next", "more_body": True})
        has_ended.set()

    with running(app) as address:
        connection = connect(address, HEAD + b"Content-Length: 0\r\n\r\n")
        assert connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        has_left.set()
        assert has_ended.wait(WAIT_SECONDS)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_what_follows_an_early_answer_is_not_answered_again(address: str, caplog: pytest.LogCaptureFixture) -> None:
    head = HEAD.replace(b"/v1/chat/completions", b"/nonsuch") + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"
    with connect(address, head) as connection:
        answer = b""
        while not answer.endswith(b"}}"):
            answer += (part := connection.recv(1 << 16))
            assert part
        assert answer.startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"zz\r\n")
        assert received(connection) == b""
    assert [record.name for record in caplog.records] == ["server.api.connections"]
    assert is_served(address)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/nothing"])
def test_a_refused_client_that_sends_its_whole_body_first_reads_the_answer(engine: FakeEngine, path: str) -> None:
    body = b"x" * (8 << 20)
    head = HEAD.replace(b"/v1/chat/completions", path.encode()) + b"Content-Length: %d\r\n\r\n" % len(body)
    with (
        running(create_app(engine, fake_model(), ServerConfig(max_body_bytes=2000))) as address,
        connect(address, head + body) as connection,
    ):
        assert connection.recv(1 << 16).startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 404 "))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_an_offer_to_change_the_protocol_is_passed_over(address: str, caplog: pytest.LogCaptureFixture) -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with connect(address, b"GET /health HTTP/1.1\r\nHost: here\r\n" + offer) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_a_newcomer_takes_the_place_of_an_idle_connection(address: str) -> None:
    connections = [connect(address, HEAD) for _ in range(3 * LIMITS.max_connections)]
    assert is_served(address)
    for connection in connections:
        connection.close()


def test_where_every_connection_is_at_work_a_newcomer_is_told_to_come_back(address: str, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    connections = [connect(address, chat(stream=True)) for _ in range(LIMITS.max_connections)]
    until(lambda: len(engine.requests) == LIMITS.max_connections)
    answer = httpx.get(f"{address}/health")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_connections"
    assert int(answer.headers["retry-after"]) > 0
    assert not engine.cancelled
    connections.pop().close()
    until(lambda: len(engine.finished) == 1)
    assert httpx.get(f"{address}/health").status_code == 200
    for connection in connections:
        connection.close()


def test_a_newcomer_takes_the_place_of_one_whose_body_does_not_come(address: str) -> None:
    begun = HEAD + b"Content-Length: 100000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(3 * LIMITS.max_connections):
            stack.enter_context(connect(address, begun))
        assert is_served(address)


def test_a_newcomer_that_has_just_come_keeps_its_place_beside_bodies_that_do_not(address: str) -> None:
    begun = HEAD + b"Content-Length: 100000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.max_connections):
            stack.enter_context(connect(address, begun))
        newcomers = [stack.enter_context(connect(address)) for _ in range(3)]
        assert is_served(address)
        newcomers[0].sendall(chat())
        assert newcomers[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_newcomer_that_is_refused_reads_why_though_it_sent_all_first(address: str, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.max_connections):
            stack.enter_context(connect(address, chat(stream=True)))
        until(lambda: len(engine.requests) == LIMITS.max_connections)
        for _ in range(3 * MAX_LINGERING):
            request = chat(metadata={"padding": "x" * 200_000})
            with connect(address, request) as newcomer:
                assert received(newcomer).startswith(b"HTTP/1.1 503 ")


def test_an_idle_connection_is_closed_without_a_word_in_the_time_that_clients_have(hurried: str) -> None:
    with connect(hurried, b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n") as connection:
        answers = received(connection)
    assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1") == 1
    config = HttpConfig(create_app(FakeEngine(), fake_model(), ServerConfig()), Limits(client_seconds=30))
    assert config.timeout_keep_alive > 30


def test_want_of_descriptors_is_logged_once_and_other_failures_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        app = create_app(FakeEngine(), fake_model(), ServerConfig())
        loop.set_exception_handler(HttpConfig(app, Limits()).handle_error)
        for _ in range(100):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_exception_handler({"message": "something else"})

    asyncio.run(run())
    assert [record.name for record in caplog.records] == ["server.api.connections", "asyncio"]
    assert "Too many open files" in caplog.messages[0]
