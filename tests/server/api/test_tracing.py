"""Traces, as a collector on this machine gets them."""

import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.api.observe import Tracing, check_otlp
from server.app.config import ServerConfig, StartError
from server.engine.request import StepFailed
from tests.server.api.test_live import until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes traces, and refuses them while it `is_away`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.is_away = False
        self.num_refused = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(400 if collector.is_away else 200)
                self.end_headers()
                collector.paths.add(self.path)
                collector.num_refused += collector.is_away
                if not collector.is_away:
                    collector.bodies.append(body)

            def log_message(self, *arguments: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span for one in requests for resource in one.resource_spans for scope in resource.scope_spans
            for span in scope.spans
        ]  # fmt: skip


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@contextmanager
def serving(collector: Collector, script: Script | None = None) -> Iterator[httpx.Client]:
    """A client; at the end all spans are sent."""
    config = ServerConfig(otlp=collector.url, name="mac-1")
    app = create_app(FakeEngine(script or Script(hit_tokens=3)), fake_model(), config)
    with running(app) as address, httpx.Client(base_url=address, timeout=120) as client:
        yield client
        until(lambda: not client.get("/v1/stats").json()["requests"])
        app.state.api.tracing.close()


def value_of(span: Any, name: str) -> Any:
    found = next((one.value for one in span.attributes if one.key == name), None)
    if found is None:
        return None
    kind = found.WhichOneof("value")
    return [one.string_value for one in found.array_value.values] if kind == "array_value" else getattr(found, kind)


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "A secret question"}], "temperature": 0.5, "seed": 7, **fields}
    return client.post("/v1/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})


def test_a_request_is_a_span_with_its_phases_in_the_clients_trace(collector: Collector) -> None:
    with serving(collector) as client:
        answer = ask(client, session_id="s1", stream=True)
        assert answer.status_code == 200
    assert collector.paths == {"/v1/traces"}
    (root,) = [span for span in collector.spans if span.name == "chat tiny"]
    phases = [span for span in collector.spans if span is not root and span.name != "chat tiny"]
    assert [span.name for span in phases] == ["queue", "restore", "prefill", "decode"]
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in phases} == {root.span_id}
    times = [
        root.start_time_unix_nano,
        *(span.start_time_unix_nano for span in phases),
        phases[-1].end_time_unix_nano,
    ]
    assert times == sorted(times) and phases[-1].end_time_unix_nano <= root.end_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 1000
    assert value_of(root, "gen_ai.operation.name") == "chat" and value_of(root, "gen_ai.provider.name") == "mlx_serve"
    assert value_of(root, "gen_ai.conversation.id") == "s1" and value_of(root, "gen_ai.request.model") == "tiny"
    assert value_of(root, "gen_ai.usage.output_tokens") > 0 and value_of(root, "mlx_serve.cached_tokens") == 3
    assert value_of(root, "gen_ai.response.finish_reasons") == ["stop"]
    assert value_of(root, "gen_ai.request.temperature") == 0.5 and value_of(root, "gen_ai.request.seed") == 7
    assert value_of(root, "error.type") is None


def test_no_span_holds_what_was_said(collector: Collector) -> None:
    with serving(collector, Script(texts=("A secret answer",))) as client:
        ask(client)
    assert collector.bodies and not any(b"secret" in body for body in collector.bodies)


def test_a_failure_has_its_kind(collector: Collector) -> None:
    with serving(collector, Script(error=StepFailed("x"))) as client:
        assert ask(client).status_code == 500
    (root,) = [span for span in collector.spans if span.name == "chat tiny"]
    assert value_of(root, "error.type") == "StepFailed" and root.status.message == "StepFailed"


def test_a_trace_header_that_is_none_begins_a_trace(collector: Collector) -> None:
    with serving(collector) as client:
        for header in ("", "00-zz-zz-01", "x" * 5000):
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            sent = client.post("/v1/chat/completions", json=body, headers={"traceparent": header})
            assert sent.status_code == 200
    roots = [span for span in collector.spans if span.name == "chat tiny"]
    assert len(roots) == 3 and not any(span.parent_span_id for span in roots)


def test_a_collector_that_is_away_is_told_of_once(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    collector.is_away = True
    with serving(collector) as client:
        for _ in range(3):
            assert ask(client).status_code == 200
    assert collector.num_refused >= 1
    told = [line for line in caplog.messages if "takes no traces" in line]
    assert len(told) == 1 and collector.url in told[0]


def test_without_its_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match="pip install opentelemetry-sdk"):
        check_otlp()


def test_an_address_may_name_its_path(collector: Collector) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig(otlp=f"{collector.url}/my/traces"))
    with running(app) as address:
        httpx.post(f"{address}/v1/completions", json={"prompt": "Hi"})
        tracing = app.state.api.tracing
        assert isinstance(tracing, Tracing)
        until(lambda: not app.state.api.activity.open_requests(None))
        tracing.close()
    assert collector.paths == {"/my/traces"}
    assert "text_completion tiny" in {span.name for span in collector.spans}
