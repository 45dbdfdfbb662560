"""What clients say of drafts, and are told of them."""

import logging
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from models.errors import PromptTooLong
from models.prompt.chat_template import RenderedPrompt
from server.api.conversation import next_turn_request
from server.app.config import ServerConfig
from server.app.log_events import RequestEnded
from server.app.service import _engine_config
from server.engine.request import GenerationRequest
from tests.support.apps import create_app
from tests.support.fake_engine import DRAFTS, FakeEngine, FakeRenderer, Script, fake_model

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}


def predict(client: TestClient, content: Any, **fields: Any) -> Any:
    prediction = {"type": "content", "content": content}
    return client.post(CHAT, json={"messages": HI, "prediction": prediction, **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("wish", "speculates"), [({}, True), ({"speculate": None}, True), ({"speculate": False}, False)]
)
def test_a_request_does_without_drafts_on_wish(
    client: TestClient, engine: FakeEngine, path: str, wish: dict[str, Any], speculates: bool
) -> None:
    assert client.post(path, json={**BODIES[path], **wish}).status_code == 200
    assert [request.speculates for request in engine.requests] == [speculates]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion"])
@pytest.mark.parametrize(("most", "speculates"), [(0, False), (16, True), (-1, True), (None, True)])
def test_a_request_of_llama_cpps_clients_does_without_drafts_too(
    client: TestClient, engine: FakeEngine, path: str, most: int | None, speculates: bool
) -> None:
    assert client.post(path, json={**BODIES[path], "speculative.n_max": most}).status_code == 200
    assert [request.speculates for request in engine.requests] == [speculates]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a = 1\n", "a = 1\n"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ("", None),
        ([], None),
    ],
)
def test_a_prediction_reaches_the_engine_as_tokens(
    client: TestClient, engine: FakeEngine, content: Any, text: str | None
) -> None:
    assert predict(client, content).status_code == 200
    found = engine.requests[0].prediction
    assert (None if found is None else found.tolist()) == (None if text is None else list(map(ord, text)))


class LimitedRenderer(FakeRenderer):
    """Counts as the real one does, and knows one special token."""

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens:
            raise PromptTooLong(len(text), max_tokens)
        return super().tokenize(text.replace("<end>", "E") if parse_special else text)


def test_a_prediction_is_text_and_no_longer_than_the_context() -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(renderer=LimitedRenderer()), ServerConfig()))
    assert predict(client, "<end>" + 195 * "a").status_code == 200
    found = engine.requests[0].prediction
    assert found is not None and len(found) == 200
    error = predict(client, 201 * "a").json()["error"]
    assert (error["param"], error["message"]) == (
        "prediction.content",
        "prediction.content: it has 201 tokens or more, and the context only 200",
    )


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_usage_says_what_became_of_a_prediction(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.script = Script(reasoning_tokens=1, drafted_tokens=5, accepted_tokens=2)
    answer, count = predict(client, "a", **fields), fields.get("n", 1)
    assert f'"accepted_prediction_tokens":{2 * count},"rejected_prediction_tokens":{3 * count}' in answer.text
    assert f'"draft_n":{5 * count},"draft_n_accepted":{2 * count}' in answer.text


def test_without_prediction_and_drafts_nothing_is_said_of_them(client: TestClient, engine: FakeEngine) -> None:
    engine.script = Script(reasoning_tokens=1)
    answer = client.post(CHAT, json={"messages": HI}).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert "draft_n" not in answer["timings"]


def test_the_log_counts_the_drafts_of_all_choices(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server")
    engine.script = Script(drafted_tokens=5, accepted_tokens=2)
    assert client.post(CHAT, json={"messages": HI, "n": 2}).status_code == 200
    (entry,) = [record.msg for record in caplog.records if isinstance(record.msg, RequestEnded)]
    assert (entry.drafted_tokens, entry.accepted_tokens) == (10, 4)


def test_a_turn_evaluated_ahead_predicts_nothing() -> None:
    request = GenerationRequest("a", np.arange(4, dtype=np.int32), 9, prediction=np.arange(3, dtype=np.int32))
    ahead = next_turn_request(request, [7], RenderedPrompt(np.arange(40, dtype=np.int32)))
    assert ahead is not None and ahead.prediction is None


@pytest.mark.parametrize(("wish", "speculates"), [("auto", True), ("history", True), ("off", False)])
def test_the_setting_reaches_the_engine(wish: str, speculates: bool) -> None:
    assert _engine_config(ServerConfig(speculate=wish), 1 << 30, fake_model()).speculates == speculates


def test_the_stats_tell_what_became_of_drafts(client: TestClient, engine: FakeEngine) -> None:
    engine.drafts = DRAFTS
    assert client.get("/v1/stats").json()["models"][0]["drafts"] == {
        "drafted": {"history": 90, "prediction": 10},
        "accepted": {"history": 62, "prediction": 0},
        "steps": 20,
        "tokens": 85,
    }


def test_an_engine_without_drafts_has_no_figures_of_them(client: TestClient) -> None:
    assert client.get("/v1/stats").json()["models"][0]["drafts"] is None
    assert "spec_decode_num_draft_tokens_total{" not in client.get("/metrics").text


def test_metrics_count_drafted_tokens_by_source(client: TestClient, engine: FakeEngine) -> None:
    engine.drafts = DRAFTS
    found = {
        (sample.name, sample.labels["source"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("mlx_serve_spec_decode_num_draft_tokens_total", "history"): 90,
        ("mlx_serve_spec_decode_num_draft_tokens_total", "prediction"): 10,
        ("mlx_serve_spec_decode_num_accepted_tokens_total", "history"): 62,
        ("mlx_serve_spec_decode_num_accepted_tokens_total", "prediction"): 0,
    }
