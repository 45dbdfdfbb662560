"""OpenAI's protocol in its details: each row is one thing that a client, or the tests of another server, rely on.

What every answer has is in the transcripts of `conformance/golden`; this is what fields change of it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from server.engine.request import FinishReason
from tests.support.apps import create_app
from tests.support.fake_engine import VOCAB_SIZE, FakeEngine, Script, fake_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLING = Script(texts=('<tool_call>{"name": "f", "arguments": {}}</tool_call>',))
ENDED = Script(stop_token=2)
STOPPED = Script(stop_text="END")
CUT = Script(reason=FinishReason.LENGTH)
CACHED = Script(hit_tokens=3)


@dataclass(frozen=True)
class Reply:
    """What came back: `body` is the JSON of an answer that is no stream, `chunks` are those of one that is."""

    status: int
    body: Any
    chunks: list[Any]
    ends_with_done: bool
    engine: FakeEngine

    @property
    def choice(self) -> Any:
        return self.body["choices"][0]

    @property
    def usage(self) -> Any:
        return self.body["usage"]

    @property
    def deltas(self) -> list[Any]:
        return [chunk["choices"][0] for chunk in self.chunks if chunk["choices"]]


def ask(path: str, script: Script = Script(), **fields: Any) -> Reply:  # noqa: B008 - frozen
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {"messages": [HI]}
    engine = FakeEngine(script)
    client = TestClient(create_app(engine, fake_model(), ServerConfig()))
    answer = client.post(path, json=prompt | fields)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return Reply(answer.status_code, answer.json(), [], False, engine)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    done = lines[-1] == "[DONE]"
    return Reply(answer.status_code, None, [json.loads(line) for line in lines if line != "[DONE]"], done, engine)


def get(path: str) -> Reply:
    engine = FakeEngine()
    answer = TestClient(create_app(engine, fake_model(), ServerConfig())).get(path)
    return Reply(answer.status_code, answer.json(), [], False, engine)


def told(messages: list[Any]) -> list[int]:
    return list(ask(CHAT, messages=messages).engine.requests[0].tokens.tolist())


def adds_up(usage: Any) -> bool:
    return bool(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"])


def rises(counts: list[int]) -> bool:
    return counts == sorted(counts) and counts[0] < counts[-1]


WHOLE: dict[str, Callable[[], Any]] = {
    "a message of calls has null for a text": lambda: (
        ask(CHAT, CALLING, tools=[TOOL]).choice["message"]["content"] is None
    ),
    "an end of turn was asked for by nobody": lambda: ask(CHAT, ENDED).choice["stop_reason"] is None,
    "an end of turn matched its token": lambda: ask(CHAT, ENDED).choice["matched_stop"] == 2,
    "a stop token is named": lambda: ask(TEXT, ENDED, stop_token_ids=[2]).choice["stop_reason"] == 2,
    "a stop string is named": lambda: ask(CHAT, STOPPED, stop="END").choice["stop_reason"] == "END",
    "a stop string matched": lambda: ask(TEXT, STOPPED, stop="END").choice["matched_stop"] == "END",
    "a limit matched nothing": lambda: ask(CHAT, CUT).choice["matched_stop"] is None,
    "each choice says what stopped it": lambda: (
        [choice["stop_reason"] for choice in ask(CHAT, STOPPED, n=2, stop="END").body["choices"]] == ["END"] * 2
    ),
    "a tier of any name is the default": lambda: ask(CHAT, service_tier="auto").body["service_tier"] == "default",
    "a flexible tier is said to be one": lambda: ask(TEXT, service_tier="flex").body["service_tier"] == "flex",
}

STREAMED: dict[str, Callable[[], Any]] = {
    "chunks have one id": lambda: len({chunk["id"] for chunk in ask(CHAT, stream=True, n=2).chunks}) == 1,
    "chunks have one time": lambda: len({chunk["created"] for chunk in ask(CHAT, stream=True, n=2).chunks}) == 1,
    "chunks say the tier": lambda: (
        {chunk["service_tier"] for chunk in ask(CHAT, stream=True, service_tier="flex").chunks} == {"flex"}
    ),
    "each choice begins with the role": lambda: (
        [each["index"] for each in ask(CHAT, stream=True, n=2).deltas if "role" in each["delta"]] == [0, 1]
    ),
    "the end says what stopped it": lambda: (
        ask(CHAT, STOPPED, stream=True, stop="END").deltas[-1]["stop_reason"] == "END"
    ),
    "only the end says what stopped it": lambda: (
        ["matched_stop" in each for each in ask(TEXT, ENDED, stream=True).deltas] == [False] * 3 + [True]
    ),
    "the end of each choice says what stopped it": lambda: (
        [each["matched_stop"] for each in ask(CHAT, ENDED, stream=True, n=2).deltas if "matched_stop" in each]
        == [2, 2]
    ),
    "no usage for options that ask for none": lambda: (
        not any(
            chunk.get("usage") for chunk in ask(CHAT, stream=True, stream_options={"include_usage": False}).chunks
        )
    ),
    "no usage in every chunk where none is included": lambda: (
        not any(
            chunk.get("usage")
            for chunk in ask(TEXT, stream=True, stream_options={**ALWAYS, "include_usage": False}).chunks
        )
    ),
    "usage stands in every chunk on demand": lambda: all(
        adds_up(chunk["usage"]) for chunk in ask(CHAT, stream=True, stream_options=ALWAYS).chunks
    ),
    "usage so far rises": lambda: (
        [chunk["usage"]["completion_tokens"] for chunk in ask(CHAT, stream=True, stream_options=ALWAYS).chunks]
        == [0, 1, 2, 3, 3, 3]
    ),
    "usage so far says what was cached": lambda: (
        ask(TEXT, CACHED, stream=True, stream_options=ALWAYS).chunks[0]["usage"]["prompt_tokens_details"]
        == {"cached_tokens": 3}
    ),
    "usage so far is of the choice": lambda: all(
        rises(
            [
                c["usage"]["completion_tokens"]
                for c in ask(TEXT, stream=True, n=2, stream_options=ALWAYS).chunks
                if c["choices"] and c["choices"][0]["index"] == index
            ]
        )
        for index in (0, 1)
    ),
}

TAKEN: dict[str, Callable[[], Any]] = {
    "a developer is the system": lambda: (
        told([{"role": "developer", "content": "x"}, HI]) == told([{"role": "system", "content": "x"}, HI])
    ),
    "no choice of no tools": lambda: ask(CHAT, tools=[], tool_choice="none").status == 200,
    "stop is more texts": lambda: len(ask(TEXT, stop=list("abcdefgh")).engine.requests[0].stop) == 8,
    "the prompt may be repeated": lambda: ask(TEXT, prompt="Once", echo=True).choice["text"] == "OnceHello there.",
    "a prompt of tokens may be repeated": lambda: (
        ask(TEXT, prompt=[79, 110], echo=True).choice["text"] == "OnHello there."
    ),
    "each prompt is repeated in its own answers": lambda: (
        [choice["text"][0] for choice in ask(TEXT, prompt=["a", "b"], n=2, echo=True).body["choices"]] == list("aabb")
    ),
    "a stream repeats the prompt first": lambda: (
        ask(TEXT, prompt="Once", echo=True, stream=True).deltas[0]["text"] == "Once"
    ),
    "a stream repeats the prompt once": lambda: (
        "".join(each["text"] for each in ask(TEXT, prompt="Once", echo=True, stream=True).deltas)
        == "OnceHello there."
    ),
    "a model says how long its context is": lambda: get("/v1/models").body["data"][0]["max_model_len"] == 200,
    "a model is its own root": lambda: get("/v1/models/tiny").body["root"] == "tiny",
}


@pytest.mark.parametrize("name", [*WHOLE, *STREAMED, *TAKEN])
def test_it_holds(name: str) -> None:
    assert {**WHOLE, **STREAMED, **TAKEN}[name]()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": [VOCAB_SIZE]}, "prompt[0]"),
    (CHAT, {"messages": [HI, {}]}, "messages[1].role"),
    (CHAT, {"messages": [HI] * 100, "stream": True}, "messages"),
    (TEXT, {"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (TEXT, {"echo": True, "logprobs": 1, "stream": True}, "stream"),
    (TEXT, {"echo": True, "logprobs": 1, "n": 2}, "n"),
    (TEXT, {"echo": True, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"response_format": {"type": "sound"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
    (CHAT, {"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex"),
]
"""Fields that do not fit each other, and the exact places of others."""


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_it_is_refused_in_openais_shape(path: str, fields: dict[str, Any], param: str) -> None:
    reply = ask(path, **fields)
    assert reply.status == 400, reply.body
    error = reply.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"] and isinstance(error["code"], str)
    assert reply.engine.requests == []
