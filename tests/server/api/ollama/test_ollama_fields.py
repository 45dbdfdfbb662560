"""Every field and option of Ollama's is honoured, refused in words, or changes nothing; unknown ones are ignored."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.inference.sampling_params import SamplingParams
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model
from tests.support.fake_grammar import FakeCompiler

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "Hi"}]
TEXT_ARGUMENTS = {"name": "f", "arguments": "{}"}


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, fake_model(grammars=FakeCompiler()), ServerConfig()))


def post(client: TestClient, path: str, **fields: Any) -> Any:
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == GENERATE else {"messages": HI}
    return client.post(path, json={"model": "tiny", "stream": False, **prompt, **fields})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams(temperature=0.7, top_k=5)),
        ({"temperature": 0, "seed": 42.0}, SamplingParams(temperature=0, top_k=5, seed=42)),
        ({"top_k": 0, "top_p": 0.5, "min_p": 0.1}, SamplingParams(0.7, 0.5, 0, 0.1)),
        ({"top_k": -1, "seed": -1}, SamplingParams(0.7)),
        ({"top_p": 0}, SamplingParams(0.7, top_k=1)),
        ({"typical_p": 0.4}, SamplingParams(0.7, top_k=5, typical_p=0.4)),
        ({"typical_p": 0}, SamplingParams(0.7, top_k=5)),
        (
            {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 1, "repeat_last_n": -1},
            SamplingParams(
                *(0.7, 1.0, 5), repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=1, repeat_last_n=-1
            ),
        ),
        ({"repeat_last_n": 0}, SamplingParams(0.7, top_k=5, repeat_last_n=0)),
        ({"repeat_last_n": 64.0}, SamplingParams(0.7, top_k=5, repeat_last_n=64)),
        ({"temperature": None, "stop": None}, SamplingParams(0.7, top_k=5)),
    ],
)
def test_options_set_the_sampling(options: Any, expected: SamplingParams) -> None:
    engine, model = FakeEngine(), fake_model(sampling=SamplingParams(temperature=0.7, top_k=5))
    assert post(TestClient(create_app(engine, model, ServerConfig())), CHAT, options=options).status_code == 200
    assert engine.requests[0].sampling == expected


@pytest.mark.parametrize(("num_predict", "limit"), [(7, 7), (7.0, 7), (0, None), (-1, None), (-2, None)])
def test_num_predict_limits_the_answer(
    client: TestClient, engine: FakeEngine, num_predict: Any, limit: int | None
) -> None:
    assert post(client, CHAT, options={"num_predict": num_predict, "stop": ["\n", ""]}).status_code == 200
    [request] = engine.requests
    assert request.max_tokens == limit or (limit is None and request.max_tokens == 200 - len("<user>Hi"))
    assert request.stop == ("\n",)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model": None}, "model is required"),
        ({"model": ""}, "model is required"),
        ({"stream": "yes"}, "stream:"),
        ({"format": "xml"}, "format: Input should be a JSON schema"),
        ({"think": "hard"}, "think: Input should be true, false"),
        ({"think": True}, "does not support thinking"),
        ({"options": {"temperature": "hot"}}, "options.temperature:"),
        ({"options": {"seed": 2**70}}, "options.seed:"),
        ({"options": {"stop": "x"}}, "options.stop:"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop:"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_what_is_wrong_is_said_in_one_text(client: TestClient, path: str, fields: Any, word: str) -> None:
    content = json.dumps({"model": "tiny", "prompt": "Hi", "messages": HI, **fields})
    answer = client.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"} and word in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, "chat template refuses"),
        (
            CHAT,
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "tool_calls": [{"function": TEXT_ARGUMENTS}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "context"),
        (GENERATE, {"raw": True, "system": "x"}, "raw mode does not support template, system, or context"),
        (GENERATE, {"raw": True, "context": [1]}, "raw mode does not support template, system, or context"),
        (GENERATE, {"context": [1, 1024]}, "context[1]"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said(client: TestClient, path: str, fields: Any, word: str) -> None:
    answer = post(client, path, **fields)
    assert (answer.status_code, word in answer.json()["error"]) == (400, True), answer.text


def test_an_answer_is_bound_to_a_format(client: TestClient, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False}
    for value in ("json", schema, ""):
        assert post(client, CHAT, format=value).status_code == 200
        assert post(client, GENERATE, format=value).status_code == 200
    bound: list[Any] = [request.grammar.compiled if request.grammar else None for request in engine.requests]
    assert bound == [*(json.dumps({"type": "object"}),) * 2, *(json.dumps(schema),) * 2, None, None]


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("POST", "/api/push", 404, "the rest of Ollama's API"),
        ("HEAD", "/api/blobs/sha256:00", 404, ""),
        ("POST", "/api/web_search", 404, "the rest of Ollama's API"),
        ("GET", "/api/v0/models", 404, "LM Studio's own API"),
        ("GET", "/api/chat", 405, "does not take the method GET"),
        ("GET", "/api/unheard_of", 404, "there is no GET /api/unheard_of here"),
    ],
)
def test_what_is_missing_of_ollama_says_so_in_its_shape(
    client: TestClient, method: str, path: str, status: int, word: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    if method != "HEAD":
        assert set(answer.json()) == {"error"} and word in answer.json()["error"]
