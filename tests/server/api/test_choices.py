"""Several answers to one request: each is one of its own, and together they are one request to whoever asks."""

import http.client
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.app.config import ServerConfig
from server.app.log_events import RequestEnded
from server.engine.request import GenerationRequest, OutOfMemory
from tests.server.api.test_live import Live, until
from tests.server.api.test_openai_client import SLOW
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "chat", "text"


def say_index(request: GenerationRequest) -> Script:
    """Each choice says its own index, in two pieces."""
    index = index_of(request)
    return Script(texts=(f"answer {index}", "."), hit_tokens=1, reasoning_tokens=index, step_seconds=0.001 * index)


def index_of(request: GenerationRequest) -> int:
    parts = request.request_id.split("-")
    return int(parts[2]) if len(parts) > 2 else 0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(say_index)


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig(slots=4, max_waiting=4))) as base:
        yield base


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, kind: str = CHAT, **fields: Any) -> Any:
    if kind == CHAT:
        return client.chat.completions.create(model="tiny", **{"messages": HI, **fields})
    return client.completions.create(model="tiny", **{"prompt": "Hi", **fields})


def texts_of(answer: Any) -> list[str]:
    return [c.text if hasattr(c, "text") else c.message.content for c in answer.choices]


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_each_choice_is_an_answer_of_its_own(client: openai.OpenAI, engine: FakeEngine, kind: str) -> None:
    answer = ask(client, kind, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts_of(answer) == ["answer 0.", "answer 1.", "answer 2."]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({request.request_id for request in engine.requests}) == 3
    assert answer.id == engine.requests[0].request_id


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_the_prompt_counts_once_and_the_answers_together(
    client: openai.OpenAI, engine: FakeEngine, kind: str
) -> None:
    answer = ask(client, kind, n=3)
    num_prompt = len(engine.requests[0].tokens)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 6)
    assert answer.usage.total_tokens == num_prompt + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0 + 1 + 2
    timings = answer.model_extra["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (1, num_prompt - 1, 6)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (20.0, 40.0), "the choices run side by side"


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_a_stream_names_the_choice_of_each_chunk(client: openai.OpenAI, kind: str) -> None:
    chunks = list(ask(client, kind, n=3, stream=True, stream_options={"include_usage": True}))
    texts, ends = ["", "", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or "" if kind == CHAT else choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == ["answer 0.", "answer 1.", "answer 2."]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert "timings" in chunks[-1].model_extra
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_interleaved_as_the_answers_come(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(texts=("x",) * 5, step_seconds=0.02)
    indices = [c.choices[0].index for c in ask(client, TEXT, n=2, stream=True)]
    assert indices != sorted(indices)


def test_seeds_differ_and_the_first_is_the_one_given(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask(client, n=3, seed=7)
    assert [r.sampling.seed for r in engine.requests] == [7, 8, 9]
    ask(client, n=2)
    assert [r.sampling.seed for r in engine.requests[3:]] == [None, None]
    ask(client, n=2, seed=2**63 - 1)
    assert [r.sampling.seed for r in engine.requests[5:]] == [2**63 - 1, 0]


PROMPTS: list[tuple[Any, list[list[int]]]] = [
    (["Hi", "Ho!"], [[72, 105], [72, 111, 33]]),
    ([[1, 2], [3]], [[1, 2], [3]]),
    (["Hi", [3]], [[72, 105], [3]]),
    (["Hi"], [[72, 105]]),
]


@pytest.mark.parametrize(("prompt", "tokens"), PROMPTS)
def test_a_list_of_prompts_has_an_answer_to_each(
    client: openai.OpenAI, engine: FakeEngine, prompt: Any, tokens: list[list[int]]
) -> None:
    answer = ask(client, TEXT, prompt=prompt)
    assert [request.tokens.tolist() for request in engine.requests] == tokens
    assert texts_of(answer) == [f"answer {index}." for index in range(len(tokens))]
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert answer.usage.prompt_tokens_details.cached_tokens == len(tokens)


def test_each_of_several_prompts_has_n_answers(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = ask(client, TEXT, prompt=["Hi", "Ho!"], n=2, seed=5)
    assert [len(request.tokens) for request in engine.requests] == [2, 2, 3, 3]
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 5, 6]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["Hi", ""]}, "prompt[1]"),
        ({"prompt": [[1], [2, 99999]]}, "prompt[1][1]"),
        ({"prompt": ["Hi", [1] * 200]}, "prompt[1]"),
        ({"prompt": ["Hi", 5]}, "prompt"),
        ({"prompt": [[1], [[2]]]}, "prompt"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 3}, "n"),
        ({"n": 9}, "n"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    client: openai.OpenAI, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, TEXT, **{"extra_body": {k: fields.pop(k) for k in list(fields) if k == "best_of"}, **fields})
    assert refused.value.param == param
    assert engine.requests == []


def test_a_full_queue_takes_all_choices_or_none(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script, engine.max_waiting = SLOW, 2
    with pytest.raises(openai.RateLimitError):
        ask(client, n=3)
    assert engine.cancelled == {request.request_id for request in engine.requests}
    assert len(engine.requests) == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_choice_that_fails_does_not_lose_the_others(
    client: openai.OpenAI, engine: FakeEngine, failing: int
) -> None:
    def script(request: GenerationRequest) -> Script:
        error = OutOfMemory("too long") if index_of(request) == failing else None
        return Script(texts=("so far",), error=error)

    engine.script = script
    answer = ask(client, n=2)
    assert texts_of(answer) == ["so far", "so far"]
    assert [choice.finish_reason == "error" for choice in answer.choices] == [failing == 0, failing == 1]
    assert "too long" in answer.choices[failing].error["message"]
    ends = [c.choices[0] for c in ask(client, n=2, stream=True) if c.choices[0].finish_reason]
    assert {end.index: end.finish_reason for end in ends} == {failing: "error", 1 - failing: "stop"}
    assert "too long" in next(end for end in ends if end.index == failing).error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_choices(address: str, engine: FakeEngine, stream: bool) -> None:
    engine.script = SLOW
    body = {"messages": HI, "n": 3, "stream": stream}
    client = http.client.HTTPConnection(address.removeprefix("http://"))
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: len(engine.requests) == 3)
    client.close()
    until(lambda: len(engine.cancelled) == 3)


def test_several_choices_are_one_request_to_a_person(
    client: openai.OpenAI, engine: FakeEngine, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ask(client, n=3, extra_body={"session_id": "s"})
    entries = [record.msg for record in caplog.records if isinstance(record.msg, RequestEnded)]
    assert [(entry.session_id, entry.predicted_tokens) for entry in entries] == [("s", 6)]
    assert entries[0].prompt_tokens == len(engine.requests[0].tokens)
    assert [request.session_id for request in engine.requests] == ["s", None, None]
    sessions = httpx.get(f"{address}/v1/sessions").json()["data"]
    assert [(session["id"], session["num_turns"]) for session in sessions] == [("s", 1)]


# ---------------------------------------------------------------------------------------------- with a real model


LONG = [5 + number % 200 for number in range(300)]


def test_the_answers_share_one_prefill(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(live.client, TEXT, prompt=LONG, n=4, max_tokens=4, seed=1)
    (entry,) = [record.msg for record in caplog.records if isinstance(record.msg, RequestEnded)]
    # Each but the first evaluates the token behind which it begins to differ.
    assert len(LONG) <= entry.evaluated_tokens <= len(LONG) + 3
    assert entry.prompt_tokens == len(LONG)


def test_prompts_of_a_list_are_answered_as_alone(live: Live) -> None:
    prompts = [LONG[:40], LONG[50:70], LONG[:90]]
    several = ask(live.client, TEXT, prompt=prompts, max_tokens=6, temperature=0)
    alone = [ask(live.client, TEXT, prompt=prompt, max_tokens=6, temperature=0).choices[0].text for prompt in prompts]
    assert texts_of(several) == alone
