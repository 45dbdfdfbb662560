"""The whole server on tiny real models: HTTP, renderer, engine and cache together, asked by the `openai` package."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scripts.bench.serving_client import Messages
from scripts.bench.serving_prompts import PerfectCache, TextMaker, with_answer
from server.app.config import ServerConfig
from server.app.service import open_service
from server.engine.engine import Engine
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.live_server import running

JSON = {"Content-Type": "application/json"}

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 12}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
WAIT_SECONDS = 120.0


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Live:
    """A running server and how to ask it."""

    address: str
    client: openai.OpenAI
    http: httpx.Client
    engine: Engine
    model: str = "tiny"

    def ask(self, *messages: Any, **fields: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, messages=list(messages), **{**GREEDY, **fields})

    def text(self, *messages: Any, **fields: Any) -> str:
        return str(self.ask(*messages, **fields).choices[0].message.content)

    def streamed(self, *messages: Any, **fields: Any) -> str:
        chunks = self.ask(*messages, stream=True, **fields)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps(fields), headers=JSON)

    def wait_until_idle(self) -> None:
        until(lambda: self.engine.stats().num_open == 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_models.write(request.param, tmp_path_factory.mktemp(request.param) / "tiny")
    with serving(folder) as server:
        yield server


class serving:  # noqa: N801 - a context manager reads as a verb
    """Serves a model folder while the block runs."""

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        config = ServerConfig(models=(str(folder),), **{"cache_memory_bytes": 1 << 28, **settings})
        service = open_service(config)
        self._engine, self._model = service.engine, service.model.id
        self._server = running(create_app(service.engine, service.model, config))

    def __enter__(self) -> Live:
        self._engine.start()
        address = self._server.__enter__()
        self._client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        self._http = httpx.Client(base_url=address, timeout=WAIT_SECONDS)
        return Live(address, self._client, self._http, self._engine, self._model)

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._http.close()
        self._server.__exit__(None, None, None)
        self._engine.stop()


def test_streamed_and_whole_answers_are_the_same(live: Live) -> None:
    whole = live.text(user("Hello there"))
    assert whole
    assert live.streamed(user("Hello there")) == whole


def test_counts_agree_and_a_repeat_is_cached(live: Live) -> None:
    question = user("How many tokens does this take?")
    first, second = live.ask(SYSTEM, question), live.ask(SYSTEM, question)
    for answer in (first, second):
        timings = answer.model_extra["timings"]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert timings["cache_n"] == cached
        assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens
        assert timings["predicted_n"] == answer.usage.completion_tokens == 12
        assert timings["prompt_n"] >= 1
    assert second.usage.prompt_tokens_details.cached_tokens > 0.8 * second.usage.prompt_tokens
    assert second.choices[0].message.content == first.choices[0].message.content


def test_the_second_turn_and_a_second_conversation_are_cached(live: Live) -> None:
    system = {"role": "system", "content": "Second turns are cheap. " * 12}
    first = live.ask(system, user("one"), extra_body={"session_id": "a", "ignore_eos": True})
    reply = assistant(first.choices[0].message.content)
    second = live.ask(system, user("one"), reply, user("two"), extra_body={"session_id": "a", "ignore_eos": True})
    other = live.ask(system, user("Something else"), extra_body={"session_id": "b", "ignore_eos": True})
    num_system = first.usage.prompt_tokens - 12
    assert first.usage.prompt_tokens_details.cached_tokens < num_system
    assert second.usage.prompt_tokens_details.cached_tokens > num_system
    assert other.usage.prompt_tokens_details.cached_tokens > num_system - 16


@pytest.mark.parametrize(
    ("live", "most"), [("llama", 0), ("gemma3", 8), ("qwen3_5", 8), ("mamba2", 8)], indirect=["live"]
)
def test_nine_steps_of_a_chats_life_lose_no_more_than_the_tokens_that_ask_for_the_answer(
    live: Live, most: int
) -> None:
    """Attention loses nothing. Otherwise a prompt's end is kept once, before the tokens that ask."""
    maker, perfect, lost = TextMaker(2), PerfectCache(), list[int]()

    def say(history: Messages, message: dict[str, str]) -> Messages:
        asked = [*history, message]
        answer = live.ask(*asked, max_tokens=24)
        lost.append(perfect.cached_tokens(asked) - answer.usage.prompt_tokens_details.cached_tokens)
        text = answer.choices[0].message.content
        # An answer that ends within a character comes back as other tokens.
        perfect.remember(asked, text if "\ufffd" not in text else "")
        return with_answer(asked, text)

    start, edit = [maker.message(160, "system")], maker.message(40)
    first = say(start, maker.message(40))
    third = say(say(first, maker.message(40)), maker.message(40))
    say(say(start, maker.message(40)), maker.message(40))
    for history, message in ((third, maker.message(40)), (third, maker.message(40)), (first, edit), (first, edit)):
        say(history, message)
    assert len(lost) == 9 and max(lost) <= most, lost


def test_what_goes_on_after_the_first_of_two_system_messages_is_cached_so_far(live: Live) -> None:
    """As an agent goes on that has compacted, and has moved its second one."""
    first = {"role": "system", "content": "The first of two is kept. " * 12}
    second = {"role": "system", "content": "The second one moves. " * 12}
    num_first = live.ask(first, user("one"), extra_body={"cache_prompt": False}).usage.prompt_tokens
    live.ask(first, second, user("one"), extra_body={"session_id": "compacted"})
    moved = live.ask(first, user("kept"), second, user("two"), extra_body={"session_id": "compacted"})
    assert moved.usage.prompt_tokens_details.cached_tokens > num_first - 24


def test_a_clock_that_moves_with_each_turn_costs_only_what_follows_it(live: Live) -> None:
    system = {"role": "system", "content": "A clock precedes each newest message. " * 8}
    history = [system, user("one"), assistant("first")]
    live.ask(*history, user("It is 9:16."), user("two"))
    later = [*history, user("two"), assistant("second"), user("It is 9:17."), user("three")]
    num_cached = live.ask(*later).usage.prompt_tokens_details.cached_tokens
    # Asked last: a prompt that ends there would leave a restore point of its own.
    num_history = live.ask(*history).usage.prompt_tokens
    assert num_cached > num_history - 16


def test_another_key_neither_reuses_state_nor_sees_the_session(live: Live) -> None:
    body = {"messages": [SYSTEM, user("Is this mine?")], "session_id": "mine", "max_tokens": 2}
    for key, is_known in (("one", False), ("two", False), ("one", True)):
        headers = {"Authorization": f"Bearer {key}"}
        answer = live.http.post("/v1/chat/completions", json=body, headers=headers).json()
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == is_known
    assert live.http.delete("/v1/sessions/mine", headers={"Authorization": "Bearer three"}).status_code == 404
    for key, num_turns in (("one", 2), ("two", 1)):
        listed = live.http.get("/v1/sessions", headers={"Authorization": f"Bearer {key}"}).json()["data"]
        assert [(session["id"], session["num_turns"]) for session in listed] == [("mine", num_turns)]


def test_declining_the_cache_neither_reuses_nor_keeps(live: Live) -> None:
    question = user("Nothing of this is kept. " * 5)
    decline = {"extra_body": {"cache_prompt": False, "ignore_eos": True}}
    for fields in (decline, decline, {}):
        answer = live.ask(question, **fields)
        assert answer.usage.prompt_tokens_details.cached_tokens < 16


def test_answers_given_together_are_those_given_alone(live: Live) -> None:
    questions = [[SYSTEM, user(f"Question {number} " * (number + 1))] for number in range(8)]
    alone = [live.text(*messages) for messages in questions]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.address}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(stream(client, messages) for messages in questions)))

    async def stream(client: openai.AsyncOpenAI, messages: Any) -> str:
        chunks = await client.chat.completions.create(model="tiny", messages=messages, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(together()) == alone


def test_the_same_seed_gives_the_same_text(live: Live) -> None:
    def draw(seed: int) -> str:
        return live.text(user("Roll"), temperature=1, seed=seed)

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(5)}) > 1


def test_a_bias_and_a_stop_string_reach_the_sampler(live: Live) -> None:
    forced = {"logit_bias": {str(ord("!") - 33): 100}, "max_tokens": 5}
    text = live.text(user("Hello"), **forced)
    assert text == text[0] * 5
    stopped = live.ask(user("Hello"), stop=text[:2], **forced)
    assert stopped.choices[0].message.content == ""
    assert stopped.choices[0].finish_reason == "stop"


def raw_request(live: Live, **fields: Any) -> socket.socket:
    fields = {"messages": [user("Tell me a long story")], "ignore_eos": True, **fields}
    return raw_post(live.address, "/v1/chat/completions", fields)


def raw_post(address: str, path: str, fields: dict[str, Any]) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_the_engine(live: Live, stream: bool) -> None:
    connection = raw_request(live, stream=stream, max_tokens=3900)
    until(lambda: live.engine.stats().num_open == 1)
    connection.close()
    live.wait_until_idle()
    assert live.text(user("Hello there"))


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 10**9, "temperature": 1},
    {"xtc_probability": 1, "xtc_threshold": 0.9},
    {"stop": "", "repeat_penalty": 1.3, "seed": 5.0},
    {"seed": 2**63 - 1},
    {"temperature": 1e-320},
    {"min_p": 1, "temperature": 2},
    {"top_p": 0, "n": 3},
    {"response_format": {"type": "json_object"}},
    {"chat_template_kwargs": {"enable_thinking": True}},
]
"""What is served although a sampler might fail by it."""


def test_no_request_stops_the_server_for_the_others(live: Live) -> None:
    before = live.text(user("Are you there?"))
    for fields in EXTREMES:
        answer = live.post("/v1/chat/completions", messages=[user("x")], max_tokens=4, **fields)
        assert answer.status_code == 200 or "response_format" in fields, (fields, answer.text)
    assert live.post("/v1/completions", prompt="x" * 100_000).status_code == 400
    assert live.text(user("Are you there?")) == before
    assert live.post("/v1/nowhere").status_code == 404
    assert live.http.get("/health").json()["status"] == "ok"
    live.wait_until_idle()


def test_tools_are_shown_and_random_text_is_no_call(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    plain, with_tools = live.ask(user("x")), live.ask(user("x"), tools=tools)
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + 20
    assert with_tools.choices[0].finish_reason == "length"
