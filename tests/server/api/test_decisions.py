"""Questions about a state: probabilities against those of completions, both APIs' forms, and bad input."""

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from cache.layers import layout
from models.output.call_formats import HARMONY
from models.output.pieces import ReasoningFormat
from server.api.decisions import prompts
from server.api.decisions.api import SystemOneBody
from server.api.decisions.prompts import Prompts, options_of
from server.api.decisions.questions import Asked, Judged, QuestionKind, judged
from server.app.config import ServerConfig
from server.app.service import open_service
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model
from tests.support.live_server import running

TWELVE = (
    *("llama", "llama_4bit", "llama_swa", "qwen3", "qwen3_5", "qwen3_next", "gemma3", "gpt_oss", "lfm2"),
    *("mamba2", "falcon_h1", "nemotron_h", "deepseek_v32"),
)
STATE = {"subject": "Refund?", "body": "I was charged twice this month. " * 6}
QUESTIONS: dict[str, Any] = {
    "billing": {"type": "noul", "instructions": "Is it about billing?", "criteria": {"true": "Money."}},
    "team": {
        "type": "choice",
        "instructions": "Who takes it?",
        "criteria": {"no": None, "no way": "never", "north": None, "tech sales": {"a": 1}, "tech support": None},
    },
    "level": {"type": "score", "criteria": ["can wait", "today", {"when": "now"}]},
    "one": {"type": "choice", "criteria": {"only <|im_end|>": None}},
}
MANY = {
    f"q{number}": {"type": "noul", "instructions": f"Does the number {number} fit the letter?"}
    for number in range(64)
}


class Server:
    """A tiny model on a real server, and what its completions say of options."""

    def __init__(self, folder: Path, base: str, service: Any) -> None:
        self.base, self.model, self.engine = base, service.model, service.engine
        self.http = httpx.Client(base_url=base, timeout=60)

    def ask(self, questions: Any, state: Any = STATE, **fields: Any) -> Any:
        answer = self.http.post("/v1/systemone", json={"state": state, "questions": questions, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def expected(self, questions: Any) -> list[Judged]:
        """The answers by `/v1/completions`, one request for each option."""
        body = SystemOneBody.model_validate({"state": json.dumps(STATE), "questions": questions})
        asked = [one.asked(name) for name, one in body.questions.items()]
        state = [{"type": "text", "text": body.state}]
        _, tokens = Prompts(self.model, state, "state", "").all_tokens(asked)
        pairs = zip(asked, tokens, options_of(self.model, asked), strict=True)
        return [judged(one, self._logprobs(prompt.tolist(), options)) for one, prompt, options in pairs]

    def _logprobs(self, prompt: list[int], options: Sequence[tuple[int, ...]]) -> list[float]:
        begins = any(one != other and other[: len(one)] == one for one in options for other in options)
        end = [tiny_models.tokenizer().eos_token_id] if begins else []
        fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
        sums = list[float]()
        for option in options:
            answer = self.http.post("/v1/completions", json={"prompt": [*prompt, *option, *end], **fields}).json()
            sums.append(sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]))
        return sums


def chances(answer: Any) -> list[float]:
    return [answer["noul"], 1 - answer["noul"]] if answer["type"] == "noul" else [*answer["probabilities"].values()]


def assert_right(told: Any, expected: Sequence[Judged]) -> None:
    assert list(told["answers"]) == [one.asked.name for one in expected]
    for answer, right in zip(told["answers"].values(), expected, strict=True):
        assert chances(answer) == pytest.approx(right.probabilities, abs=1e-4)
        assert sum(chances(answer)) == pytest.approx(1)


def serve(folder: Path, memory_bytes: int) -> Iterator[Server]:
    config = ServerConfig(models=(str(folder),), cache_memory_bytes=memory_bytes, slots=4, speculate="off")
    service = open_service(config)
    service.engine.start()
    try:
        with running(create_app(service.engine, service.model, config)) as base:
            server = Server(folder, base, service)
            with server.http:
                yield server
    finally:
        service.engine.stop()


@pytest.fixture(scope="module", params=TWELVE)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(tiny_models.write(request.param, tmp_path_factory.mktemp("models") / "tiny"), 1 << 27)


@pytest.mark.usual("llama")
def test_what_a_decision_leaves_is_named_and_its_refusal_has_the_status_it_had(server: Server) -> None:
    server.ask(QUESTIONS, "The violet door is locked.")
    nodes = server.http.get("/v1/cache").json()["nodes"]
    assert any(node["name"] and node["name"]["sessions"] == [""] for node in nodes), "no session, but known"
    assert server.http.post("/v1/systemone", json={"state": "Hi", "questions": {}}).status_code == 422
    refused = server.http.get("/v1/sessions").json()["refused"]
    assert [one["status"] for one in refused if one["path"] == "/v1/systemone"] == [422]


@pytest.mark.usual("llama")
def test_probabilities_are_those_of_completions_cold_cached_and_beside_others(server: Server) -> None:
    expected = server.expected(QUESTIONS)
    cold = server.ask(QUESTIONS)
    assert_right(cold, expected)
    cached = server.ask(QUESTIONS)
    assert_right(cached, expected)
    assert cached["usage"]["cached_tokens"] > cold["usage"]["cached_tokens"]
    assert cached["usage"]["input_tokens"] == cold["usage"]["input_tokens"]
    with ThreadPoolExecutor() as threads:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "ignore_eos": True}
        other = threads.submit(server.http.post, "/v1/chat/completions", json=chat)
        beside = [threads.submit(server.ask, QUESTIONS, cache_salt=str(number)) for number in range(2)]
        for one in beside:
            assert_right(one.result(), expected)
    assert other.result().status_code == 200


@pytest.mark.usual("llama")
def test_one_to_sixty_four_questions_have_the_answers_of_each_alone(server: Server) -> None:
    whole = server.ask(MANY)
    some = ["q0", "q63"]
    expected = server.expected({name: MANY[name] for name in some})
    assert_right({"answers": {name: whole["answers"][name] for name in some}}, expected)
    for name in some:
        assert chances(server.ask({name: MANY[name]})["answers"][name]) == pytest.approx(
            chances(whole["answers"][name]), abs=1e-4
        )


@pytest.mark.usual("llama")
def test_the_state_is_held_once_for_all_rows(server: Server) -> None:
    server.http.post("/v1/cache/clear").raise_for_status()
    told = server.ask({name: MANY[name] for name in ("q0", "q1", "q2", "q3")}, state="A long letter. " * 220)
    cache = server.engine.stats().cache
    # Each slot's own buffer holds a step of growth.
    most = told["usage"]["input_tokens"] + 4 * layout.GROWTH_TOKENS
    assert cache.stored_bytes + cache.live_bytes <= 1.15 * most * cache.bytes_per_token


@pytest.mark.parametrize("name", TWELVE)
@pytest.mark.usual("llama")
@pytest.mark.alone("part of a model has less state, and nothing is evicted")
def test_little_memory_changes_no_probability(name: str, tmp_path: Path) -> None:
    for server in serve(tiny_models.write(name, tmp_path / "tiny"), 1 << 20):
        expected = server.expected(QUESTIONS)
        assert_right(server.ask(QUESTIONS), expected)
        for number in range(6):
            server.ask({"x": MANY[f"q{number}"]}, state="Another letter. " * 60 + str(number))
        assert_right(server.ask(QUESTIONS), expected)
        assert server.engine.stats().cache.num_evictions > 0


# ------------------------------------------------------------------------------------------------- answers and forms


def client_of(engine: FakeEngine | None = None, **model: Any) -> TestClient:
    served = fake_model(**{"context_tokens": 4000, **model})
    return TestClient(create_app(engine or FakeEngine(), served, ServerConfig()))


def test_a_question_is_shown_after_the_state_with_options_and_how_to_answer() -> None:
    engine = FakeEngine()
    client_of(engine).post("/v1/systemone", json={"state": "S", "instructions": "Be fair.", "questions": QUESTIONS})
    (request,) = engine.requests
    texts = ["".join(map(chr, one.tokens)) for one in request.questions]
    assert texts[0] == (
        "<system>Be fair.<user>S\n\n"
        "Question: Is it about billing?\n- yes: Money.\n- no\nAnswer with one word, yes or no."
    )
    assert texts[2].endswith(
        "Question: Which option fits?\n- 0: can wait\n- 1: today\n"
        '- 2: {"when": "now"}\nAnswer with the number of the level that fits, and nothing else.'
    )
    assert "".join(map(chr, request.tokens)) == "<system>Be fair.<user>S\n\n"
    assert request.questions[0].options == (tuple(map(ord, "yes")), tuple(map(ord, "no")))
    assert request.max_tokens == 0 and request.cache_prompt


def test_thinking_is_off_and_fields_of_other_apis_count() -> None:
    engine = FakeEngine()
    renderer = FakeRenderer()
    body = {"state": "S", "questions": MANY, "cache_salt": "x", "priority": "background", "store": False}
    assert client_of(engine, renderer=renderer).post("/v1/systemone", json=body).status_code == 200
    assert renderer.calls[0]["template_kwargs"] == {"enable_thinking": False}
    assert len(renderer.calls) == 1
    (request,) = engine.requests
    assert request.namespace.endswith("/x") and request.priority == 1 and request.is_volatile


def test_a_template_that_changes_the_question_is_rendered_for_each() -> None:
    class Trimming(FakeRenderer):
        def render(self, messages: Any, *args: Any, **options: Any) -> Any:
            shouted = [{**one, "content": [{"text": self._text(one["content"]).upper()}]} for one in messages]
            return super().render(shouted, *args, **options)

    engine, renderer = FakeEngine(), Trimming()
    questions = {name: MANY[name] for name in ("q1", "q2")}
    client = client_of(engine, renderer=renderer)
    assert client.post("/v1/systemone", json={"state": "s", "questions": questions}).status_code == 200
    (request,) = engine.requests
    texts = ["".join(map(chr, one.tokens)) for one in request.questions]
    assert texts[1].startswith("<user>S\n\nQUESTION: DOES THE NUMBER 2")
    assert "".join(map(chr, request.tokens)) == "<user>S\n\nQUESTION: "


@pytest.mark.parametrize(
    ("logprobs", "chances"),
    [
        ([-1.0, -1.0], [0.5, 0.5]),
        ([-1000.0, -1001.0], [0.7311, 0.2689]),
        ([-np.inf, -3.0], [0.0, 1.0]),
        ([-np.inf, -np.inf], [0.5, 0.5]),
    ],
)
def test_probabilities_are_the_softmax(logprobs: list[float], chances: list[float]) -> None:
    assert judged(asked("a", "b"), logprobs).probabilities == pytest.approx(chances, abs=1e-4)


def asked(*options: str) -> Asked:
    return Asked("q", QuestionKind.CHOICE, "?", dict.fromkeys(options, ""))


def test_confidence_and_the_expected_level() -> None:
    told = judged(asked("0", "1", "2"), np.log([0.2, 0.2, 0.6]).tolist())
    assert told.expected == pytest.approx(1.4) and told.confidence == pytest.approx(0.4)
    assert judged(asked("a"), [-5.0]).confidence == 1.0
    assert judged(asked("a", "b"), [-1.0, -1.0]).confidence == 0.0


def test_the_form_of_type_safe() -> None:
    answer = client_of().post("/v1/systemone", json={"state": {"a": 1}, "questions": QUESTIONS})
    assert answer.headers["x-typesafe-request-id"].startswith("req_")
    body = answer.json()
    assert body["model"] == "tiny" and list(body["answers"]) == list(QUESTIONS)
    assert body["answers"]["billing"].keys() == {"type", "noul"}
    team, level = body["answers"]["team"], body["answers"]["level"]
    assert team["choice"] == "no" and team.keys() == {"type", "choice", "probabilities", "confidence"}
    assert level["legend"] == {"0": "can wait", "1": "today", "2": {"when": "now"}}
    assert list(level["probabilities"]) == ["0", "1", "2"] and 0 <= level["score"] <= 2
    assert body["usage"].keys() == {"input_tokens", "output_tokens", "cached_tokens"}


def test_the_form_of_openai_by_its_own_package() -> None:
    http: Any = client_of()
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "input_json", "data": {"a": 1}}]
    items: Any = [{"role": "developer", "content": "Be fair."}, {"role": "user", "content": parts}]
    choices = [{"value": True}, {"value": "no"}]
    levels = [{"label": "low", "description": "not much"}, {"label": "high"}]
    questions: Any = [
        {"type": "predicate", "instructions": "Is it?"},
        {"type": "choice", "name": "c", "instructions": "Which?", "choices": choices},
        {"type": "score", "instructions": [{"type": "input_text", "text": "How?"}], "levels": levels},
    ]
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)
    told = client.decisions.create(model="tiny", input=items, questions=questions)
    predicate, chosen, scored = told.answers
    assert predicate.type == "predicate" and predicate.name is None and 0 <= predicate.probability <= 1
    assert chosen.type == "choice" and chosen.name == "c" and chosen.choice in (True, "no")
    assert [one.value for one in chosen.probabilities] == [True, "no"]
    assert scored.type == "score" and [(one.value, one.label) for one in scored.probabilities] == [
        (0, "low"),
        (1, "high"),
    ]
    assert told.usage.total_tokens == told.usage.input_tokens and told.usage.output_tokens == 0


def test_several_items_of_an_input_are_one_text() -> None:
    engine = FakeEngine()
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    body = {"input": items, "questions": [{"type": "predicate", "instructions": "Is it?"}]}
    assert client_of(engine).post("/v1/decisions", json=body).status_code == 200
    text = "".join(map(chr, engine.requests[0].tokens))
    call = json.dumps(items[1])
    assert text == f"<user>user:Hifunction_call:{call}function_call_output:done\n\n"


# --------------------------------------------------------------------------------------------------------- bad input


def of(**question: Any) -> dict[str, Any]:
    return {"state": "S", "questions": {"q": {"type": "choice", "criteria": {"a": None}, **question}}}


PIXEL = base64.b64encode(b"no image").decode()
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "state"),
    ({"state": "S"}, "questions"),
    ({"state": " ", "questions": QUESTIONS}, "empty"),
    ({"state": "S", "questions": {}}, "from 1 to 64"),
    ({"state": "S", "questions": {f"q{n}": QUESTIONS["billing"] for n in range(65)}}, "from 1 to 64"),
    (of(type="maybe"), "type"),
    (of(criteria={}), "0 options; from 1 to 255"),
    (of(criteria={str(n): None for n in range(256)}), "from 1 to 255"),
    (of(criteria={"": None, "a": None}), "empty text"),
    (of(criteria={"a" * 129: None}), "128 tokens"),
    (of(type="score", criteria=["a"] * 11, instructions="?"), "from 1 to 10"),
    (of(type="noul", criteria=None), "neither instructions nor criteria"),
    (of(instructions="x" * 5000), "context"),
    (of() | {"stream": True}, "stream"),
    (of() | {"cache_prompt": False}, "cache_prompt"),
    (of() | {"assets": {"pic": {"data_base64": PIXEL}}}, "does not name it"),
    (of() | {"state": "see pic", "assets": {"pic": {"data_base64": PIXEL}}}, "takes no images"),
    (of() | {"state": "see pic", "assets": {"pic": {"part": "x"}}}, "data_base64"),
    (of() | {"state": "x" * 4001}, "context"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_a_problem_of_its_field(body: dict[str, Any], said: str) -> None:
    engine = FakeEngine()
    answer = client_of(engine).post("/v1/systemone", json=body)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["detail"]
    assert problem["loc"][0] == "body" and problem["type"]
    assert said in problem["msg"] or said in ".".join(problem["loc"])
    assert not engine.requests


WRONG_PLACES: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"state": 5, "questions": {}}, ["state"], "valid string or a valid dictionary or a valid list"),
    (of(type="maybe"), ["questions", "q", "type"], "one of 'noul', 'choice', 'score'"),
    ({"state": "S", "questions": {"q": {}}}, ["questions", "q", "type"], "Field required"),
    ({"state": "S", "questions": {"q": 5}}, ["questions", "q"], "valid dictionary"),
    (of(criteria={"a.b": 5}), ["questions", "q", "criteria", "a.b"], "valid string or"),
    (of(type="noul", criteria={"yes": "a"}), ["questions", "q", "criteria", "yes"], "'true' or 'false'"),
    (of(type="noul", criteria=5), ["questions", "q", "criteria"], "valid dictionary or a valid string"),
    (of(type="score", criteria=[5]), ["questions", "q", "criteria", 0], "valid string or"),
    ({"state": "S", "questions": {'a."b[0]': {"type": "noul"}}}, ["questions", 'a."b[0]'], "neither instructions"),
    (of() | {"assets": {"x": 5}}, ["assets", "x"], "valid dictionary"),
    (
        of() | {"state": "see a.b", "assets": {"a.b": {"data_base64": "a"}}},
        ["assets", "a.b", "data_base64"],
        "images",
    ),
    (of() | {"state": "x" * 4001}, ["state"], "context"),
]


@pytest.mark.parametrize(("body", "place", "said"), WRONG_PLACES)
def test_a_problem_names_its_place_and_no_class_of_ours(body: dict[str, Any], place: list[Any], said: str) -> None:
    client = client_of()
    (problem,) = client.post("/v1/systemone", json=body).json()["detail"]
    assert problem["loc"] == ["body", *place] and said in problem["msg"]
    assert not any(word in problem["msg"] for word in ("instance", "extract", "tag", "Body"))
    (refusal,) = client.get("/v1/sessions").json()["refused"]
    assert refusal["status"] == 422, "as it was sent"


def decision(**question: Any) -> dict[str, Any]:
    return {
        "input": "S",
        "questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}], **question}],
    }


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (decision(choices=["a"]), "questions[0].choices[0]", "valid dictionary"),
        (decision(choices=[{}]), "questions[0].choices[0].value", "Field required"),
        (decision(choices=[{"value": 5}]), "questions[0].choices[0].value", "valid string or a valid boolean"),
        (decision(choices=[{"value": "a"}] * 2), "questions[0].choices", "the same text"),
        (decision(type="score", levels=["a"]), "questions[0].levels[0]", "valid dictionary"),
        (decision(type="x"), "questions[0].type", "one of 'predicate', 'choice', 'score'"),
        (decision(instructions=[5]), "questions[0].instructions", "a text or a list of texts and JSON"),
        (decision() | {"input": 5}, "input", "valid string or a valid list"),
        (decision() | {"input": [5]}, "input[0]", "valid dictionary"),
        (decision() | {"input": [{"role": "user", "content": 5}]}, "input[0].content", "no text, JSON or image"),
        (decision() | {"input": [{"output": [{"type": "x"}]}]}, "input[0].output[0]", "no text, JSON or image"),
        (decision() | {"input": "x" * 4001}, "input", "context"),
    ],
)
def test_a_wrong_decision_names_its_path(body: dict[str, Any], param: str, said: str) -> None:
    error = client_of().post("/v1/decisions", json=body).json()["error"]
    assert error["param"] == param and said in error["message"]


def test_all_options_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_ALL_TOKENS", 6)
    assert client_of().post("/v1/systemone", json=of(criteria={"abc": None, "def": None})).status_code == 200
    answer = client_of().post("/v1/systemone", json=of(criteria={"abc": None, "defg": None}))
    assert "have 7" in answer.json()["detail"][0]["msg"]


def test_options_that_are_the_same_tokens_are_refused() -> None:
    same = {"a": None, chr(ord("a") + 1024): None}
    assert "the same text" in client_of().post("/v1/systemone", json=of(criteria=same)).json()["detail"][0]["msg"]
    choices = [{"value": True}, {"value": "true"}]
    body = {"input": "S", "questions": [{"type": "choice", "instructions": "?", "choices": choices}]}
    told = client_of().post("/v1/decisions", json=body)
    assert told.status_code == 400 and "the same text" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    "model",
    [
        {"call_format": HARMONY},
        {"reasoning_format": ReasoningFormat("<think>", "</think>"), "renderer": FakeRenderer(opening="<think>")},
    ],
)
def test_a_model_whose_thought_stays_open_is_refused(model: Any) -> None:
    answer = client_of(**model).post("/v1/systemone", json=of())
    assert answer.status_code == 422 and "thinks before each answer" in answer.json()["detail"][0]["msg"]


def test_errors_that_are_no_fault_of_the_body_are_a_text() -> None:
    answer = client_of(FakeEngine(is_running=False)).post("/v1/systemone", json=of())
    assert answer.status_code == 503 and answer.json() == {"detail": "the server is stopping"}
    full = client_of(FakeEngine(max_waiting=0)).post("/v1/systemone", json=of())
    assert full.status_code == 429 and full.headers["retry-after"] == "7"
