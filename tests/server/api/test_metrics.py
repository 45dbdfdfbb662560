"""`/metrics`: what Prometheus reads, by its own parser, and the rules of its lint."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from server.engine.request import OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
METRIC = re.compile(r"\bmlx_serve_\w+")
LABEL = re.compile(r"by \((\w+)\)")
NON_BASE_UNITS = "milliseconds|minutes|hours|kilobytes|megabytes|percent|bits"


def client_of(engine: FakeEngine, **settings: Any) -> TestClient:
    return TestClient(create_app(engine, fake_model(), ServerConfig(**settings)))


def families(client: TestClient) -> dict[str, Any]:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(client: TestClient, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    samples = [one for family in families(client).values() for one in family.samples if one.name == name]
    return float(sum(one.value for one in samples if labels.items() <= one.labels.items()))


def test_each_answer_is_counted_once_with_its_tokens() -> None:
    client = client_of(FakeEngine(Script(hit_tokens=4)))
    for stream in (False, True):
        assert client.post(CHAT, json={**HI, "stream": stream}).status_code == 200
    assert client.post("/v1/messages", json={**HI, "max_tokens": 9}).status_code == 200
    labels = {"model": "tiny", "endpoint": CHAT}
    assert value(client, "mlx_serve_request_success_total", **labels, finished_reason="stop") == 2
    assert value(client, "mlx_serve_request_success_total", endpoint="/v1/messages") == 1
    assert value(client, "mlx_serve_prompt_tokens_total", **labels) == 2 * len("<user>Hi")
    assert value(client, "mlx_serve_prefix_cache_hits_total", **labels) == 8
    assert value(client, "mlx_serve_generation_tokens_total", **labels) == 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert value(client, f"mlx_serve_{name}_seconds_count", **labels) == 2
    assert value(client, "mlx_serve_request_prompt_tokens_sum", **labels) == 2 * len("<user>Hi")


def test_seconds_are_saved_at_the_pace_of_long_prompts() -> None:
    engine = FakeEngine(Script(hit_tokens=0, prefill_seconds=0.0))
    client = client_of(engine)
    client.post(CHAT, json=HI)
    engine.script = Script(hit_tokens=4)
    client.post(CHAT, json=HI)
    assert value(client, "mlx_serve_saved_seconds_total") == 0
    long = {"messages": [{"role": "user", "content": "long " * 15}]}
    assert client.post(CHAT, json=long).status_code == 200
    client.post(CHAT, json=HI)
    saved = value(client, "mlx_serve_saved_seconds_total")
    assert saved > 0


def test_what_fails_is_counted_by_its_reason() -> None:
    client = client_of(FakeEngine(Script(error=OutOfMemory("no memory"))))
    assert client.post(CHAT, json=HI).status_code >= 400
    assert value(client, "mlx_serve_request_failure_total", reason="OutOfMemory") == 1
    assert value(client, "mlx_serve_request_success_total") == 0


def test_engines_are_read_as_they_are_now() -> None:
    client = client_of(FakeEngine(), slots=3)
    assert value(client, "mlx_serve_num_requests_running", model="tiny") == 0
    assert value(client, "mlx_serve_slots", model="tiny") == 3
    assert {one.labels["tier"] for one in families(client)["mlx_serve_state_bytes"].samples} == {
        "live",
        "memory",
        "disk",
    }


def test_the_lint_of_promtool_finds_nothing() -> None:
    client = client_of(FakeEngine(Script(hit_tokens=4)))
    client.post(CHAT, json=HI)
    for name, family in families(client).items():
        assert family.documentation and name not in family.documentation, name
        assert re.fullmatch(r"[a-z_0-9]+", name) and not re.search(f"metric|{NON_BASE_UNITS}", name), name
        for sample in family.samples:
            assert (
                family.type == "histogram"
                or sample.name.endswith("_total") == (family.type == "counter")
                or (sample.name.endswith("_created"))
            ), sample
            assert not {label for label in sample.labels if label.startswith("__") or label == "job"}


def test_no_label_holds_what_a_client_wrote() -> None:
    client = client_of(FakeEngine())
    told = {**HI, "session_id": "secret-session", "user": "secret-user", "cache_salt": "secret-salt"}
    client.post(CHAT, json=told, headers={"x-session-id": "secret-header"})
    client.post(CHAT, json={**told, "model": "secret-model"})
    assert "secret" not in client.get("/metrics").text


def test_open_metrics_is_written_where_it_is_asked_for() -> None:
    answer = client_of(FakeEngine()).get(
        "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("secret", 200)])
def test_with_keys_on_a_key_is_needed(key: str, status: int) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    assert client_of(FakeEngine(), api_key="secret").get("/metrics", headers=headers).status_code == status


def test_with_several_keys_an_operators_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "a"\nkey = "one"\n[[keys]]\nname = "b"\nkey = "two"\noperator = true\n')
    file.chmod(0o600)
    client = client_of(FakeEngine(), api_keys_file=str(file))
    found = [client.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code for key in ("one", "two")]
    assert found == [403, 200]


def test_the_docs_have_every_metric() -> None:
    client = client_of(FakeEngine(Script(hit_tokens=4)))
    told = {name: family.type for name, family in families(client).items()}
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `mlx_serve_(\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert {f"mlx_serve_{name.removesuffix('_total')}": kind for name, kind in rows} == told


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for one in panel["targets"] for name in METRIC.findall(one["expr"])}
    client = client_of(FakeEngine(Script(hit_tokens=4)))
    known = set(METRIC.findall(client.get("/metrics").text))
    histograms = {f"{name}_bucket" for name, family in families(client).items() if family.type == "histogram"}
    assert len(asked) > 15 and asked <= known | histograms
    labels = {label for panel in board["panels"] for one in panel["targets"] for label in LABEL.findall(one["expr"])}
    assert labels <= {"model", "reason", "finished_reason", "state", "tier", "le"}
    places = [tuple(panel["gridPos"].values())[:2] for panel in board["panels"]]
    assert len(set(places)) == len(places)
