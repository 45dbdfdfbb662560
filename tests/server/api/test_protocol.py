"""OpenAI's protocol in its details: each row is one thing that a client, or the tests of another server, rely on.

What other servers do in another way, and why it is not done here, is listed too: see `DIFFERENT`.
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
USAGE = {"include_usage": True}
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
    "the id of a chat names its kind": lambda: ask(CHAT).body["id"].startswith("chatcmpl-"),
    "the id of a completion names its kind": lambda: ask(TEXT).body["id"].startswith("cmpl-"),
    "a chat is called one": lambda: ask(CHAT).body["object"] == "chat.completion",
    "a completion is called one": lambda: ask(TEXT).body["object"] == "text_completion",
    "an answer has a time": lambda: type(ask(CHAT).body["created"]) is int,
    "an answer has a fingerprint": lambda: isinstance(ask(CHAT).body["system_fingerprint"], str),
    "an answer names the model": lambda: ask(CHAT).body["model"] == "tiny",
    "there is one choice": lambda: len(ask(CHAT).body["choices"]) == 1,
    "there are n choices": lambda: [c["index"] for c in ask(CHAT, n=3).body["choices"]] == [0, 1, 2],
    "two prompts with two answers are four choices": lambda: (
        [c["index"] for c in ask(TEXT, prompt=["a", "b"], n=2).body["choices"]] == [0, 1, 2, 3]
    ),
    "a message is the assistant's": lambda: ask(CHAT).choice["message"]["role"] == "assistant",
    "a message refuses nothing": lambda: ask(CHAT).choice["message"]["refusal"] is None,
    "an end of turn is stop": lambda: ask(CHAT).choice["finish_reason"] == "stop",
    "a limit is length": lambda: ask(TEXT, CUT).choice["finish_reason"] == "length",
    "calls are tool_calls": lambda: ask(CHAT, CALLING, tools=[TOOL]).choice["finish_reason"] == "tool_calls",
    "a message of calls has null for a text": lambda: (
        ask(CHAT, CALLING, tools=[TOOL]).choice["message"]["content"] is None
    ),
    "logprobs are null unless asked for": lambda: ask(CHAT, logprobs=False).choice["logprobs"] is None,
    "a completion's logprobs are null unless asked for": lambda: ask(TEXT, logprobs=None).choice["logprobs"] is None,
    "an end of turn was asked for by nobody": lambda: ask(CHAT, ENDED).choice["stop_reason"] is None,
    "an end of turn matched its token": lambda: ask(CHAT, ENDED).choice["matched_stop"] == 2,
    "a stop token is named": lambda: ask(TEXT, ENDED, stop_token_ids=[2]).choice["stop_reason"] == 2,
    "a stop string is named": lambda: ask(CHAT, STOPPED, stop="END").choice["stop_reason"] == "END",
    "a stop string matched": lambda: ask(TEXT, STOPPED, stop="END").choice["matched_stop"] == "END",
    "a limit matched nothing": lambda: ask(CHAT, CUT).choice["matched_stop"] is None,
    "each choice says what stopped it": lambda: (
        [choice["stop_reason"] for choice in ask(CHAT, STOPPED, n=2, stop="END").body["choices"]] == ["END"] * 2
    ),
    "usage adds up": lambda: adds_up(ask(CHAT).usage),
    "a completion's usage adds up": lambda: adds_up(ask(TEXT, prompt=[5, 6, 7]).usage),
    "usage counts the prompt's tokens": lambda: ask(TEXT, prompt=[5, 6, 7]).usage["prompt_tokens"] == 3,
    "usage counts all prompts": lambda: ask(TEXT, prompt=["ab", "cde"]).usage["prompt_tokens"] == 5,
    "usage counts a prompt once": lambda: ask(TEXT, prompt="ab", n=3).usage["prompt_tokens"] == 2,
    "usage counts all answers": lambda: ask(TEXT, n=3).usage["completion_tokens"] == 9,
    "usage says what was cached": lambda: ask(CHAT, CACHED).usage["prompt_tokens_details"]["cached_tokens"] == 3,
    "usage says that nothing was cached": lambda: ask(CHAT).usage["prompt_tokens_details"]["cached_tokens"] == 0,
    "an answer says no tier unless asked": lambda: "service_tier" not in ask(CHAT).body,
    "a tier of any name is the default": lambda: ask(CHAT, service_tier="auto").body["service_tier"] == "default",
    "a flexible tier is said to be one": lambda: ask(TEXT, service_tier="flex").body["service_tier"] == "flex",
}

STREAMED: dict[str, Callable[[], Any]] = {
    "a stream ends with [DONE]": lambda: ask(CHAT, stream=True).ends_with_done,
    "chunks are called so": lambda: (
        {chunk["object"] for chunk in ask(CHAT, stream=True).chunks} == {"chat.completion.chunk"}
    ),
    "chunks have one id": lambda: len({chunk["id"] for chunk in ask(CHAT, stream=True, n=2).chunks}) == 1,
    "chunks have one time": lambda: len({chunk["created"] for chunk in ask(CHAT, stream=True, n=2).chunks}) == 1,
    "chunks have a fingerprint": lambda: all(chunk["system_fingerprint"] for chunk in ask(TEXT, stream=True).chunks),
    "chunks say the tier": lambda: (
        {chunk["service_tier"] for chunk in ask(CHAT, stream=True, service_tier="flex").chunks} == {"flex"}
    ),
    "the role comes first": lambda: ask(CHAT, stream=True).deltas[0]["delta"]["role"] == "assistant",
    "the first delta is empty": lambda: ask(CHAT, stream=True).deltas[0]["delta"]["content"] == "",
    "the role comes once": lambda: not any("role" in each["delta"] for each in ask(CHAT, stream=True).deltas[1:]),
    "each choice begins with the role": lambda: (
        [each["index"] for each in ask(CHAT, stream=True, n=2).deltas if "role" in each["delta"]] == [0, 1]
    ),
    "the end has an empty delta": lambda: ask(CHAT, stream=True).deltas[-1]["delta"] == {},
    "the end of a completion has no text": lambda: ask(TEXT, stream=True).deltas[-1]["text"] == "",
    "only the end has a reason": lambda: (
        [each["finish_reason"] for each in ask(CHAT, stream=True).deltas] == [None] * 4 + ["stop"]
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
    "each choice ends once": lambda: (
        sorted(each["index"] for each in ask(CHAT, stream=True, n=3).deltas if each["finish_reason"]) == [0, 1, 2]
    ),
    "the end says that a limit was reached": lambda: (
        ask(TEXT, CUT, stream=True).deltas[-1]["finish_reason"] == "length"
    ),
    "the pieces are the whole text": lambda: (
        "".join(each["text"] for each in ask(TEXT, stream=True).deltas) == ask(TEXT).choice["text"]
    ),
    "a call has id, type and name first": lambda: (
        ask(CHAT, CALLING, tools=[TOOL], stream=True).deltas[1]["delta"]["tool_calls"][0].keys()
        == {"index", "id", "type", "function"}
    ),
    "no usage unless asked for": lambda: not any("usage" in chunk for chunk in ask(CHAT, stream=True).chunks),
    "no usage for no options": lambda: (
        not any(chunk.get("usage") for chunk in ask(TEXT, stream=True, stream_options={}).chunks)
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
    "usage has a chunk without choices": lambda: (
        ask(CHAT, stream=True, stream_options=USAGE).chunks[-1]["choices"] == []
    ),
    "usage has a chunk of its own": lambda: (
        [bool(chunk["usage"]) for chunk in ask(CHAT, stream=True, stream_options=USAGE).chunks]
        == [False] * 5 + [True]
    ),
    "the costs stand in the last chunk": lambda: (
        [("timings" in chunk) for chunk in ask(CHAT, stream=True, stream_options=USAGE).chunks]
        == [False] * 5 + [True]
    ),
    "the costs say how fast it was": lambda: (
        {"prompt_per_second", "predicted_per_second", "predicted_n"}
        <= ask(TEXT, stream=True).chunks[-1]["timings"].keys()
    ),
    "usage of a stream adds up": lambda: adds_up(ask(TEXT, stream=True, stream_options=USAGE).chunks[-1]["usage"]),
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
    "usage at the end is of all choices": lambda: (
        ask(TEXT, stream=True, n=2, stream_options=ALWAYS).chunks[-1]["usage"]["completion_tokens"] == 6
    ),
}

PARTS = [{"type": "text", "text": "Hi"}]
TAKEN: dict[str, Callable[[], Any]] = {
    "a developer is the system": lambda: (
        told([{"role": "developer", "content": "x"}, HI]) == told([{"role": "system", "content": "x"}, HI])
    ),
    "parts of a text are the text": lambda: told([{"role": "user", "content": PARTS}]) == told([HI]),
    "unknown fields of a message are ignored": lambda: told([HI | {"extra_field": "0"}]) == told([HI]),
    "no tools are none": lambda: ask(CHAT, tools=[]).status == 200,
    "no choice of no tools": lambda: ask(CHAT, tools=[], tool_choice="none").status == 200,
    "a text is bound by nothing": lambda: ask(CHAT, response_format={"type": "text"}).status == 200,
    "stop is one text": lambda: ask(CHAT, stop="x").engine.requests[0].stop == ("x",),
    "stop is four texts": lambda: len(ask(CHAT, stop=["a", "b", "c", "d"]).engine.requests[0].stop) == 4,
    "stop is more texts": lambda: len(ask(TEXT, stop=list("abcdefgh")).engine.requests[0].stop) == 8,
    "token ids are a prompt": lambda: ask(TEXT, prompt=[0, 0, 0]).engine.requests[0].tokens.tolist() == [0, 0, 0],
    "texts and token ids are prompts": lambda: len(ask(TEXT, prompt=["a", [5, 6]]).body["choices"]) == 2,
    "the newer limit is one": lambda: ask(CHAT, max_completion_tokens=5).engine.requests[0].max_tokens == 5,
    "the prompt may be repeated": lambda: ask(TEXT, prompt="Once", echo=True).choice["text"] == "OnceHello there.",
    "a prompt of tokens may be repeated": lambda: (
        ask(TEXT, prompt=[79, 110], echo=True).choice["text"] == "OnHello there."
    ),
    "each prompt is repeated in its own answers": lambda: (
        [choice["text"][0] for choice in ask(TEXT, prompt=["a", "b"], n=2, echo=True).body["choices"]] == list("aabb")
    ),
    "a prompt is not counted as an answer": lambda: ask(TEXT, echo=True).usage["completion_tokens"] == 3,
    "a stream repeats the prompt first": lambda: (
        ask(TEXT, prompt="Once", echo=True, stream=True).deltas[0]["text"] == "Once"
    ),
    "a stream repeats the prompt once": lambda: (
        "".join(each["text"] for each in ask(TEXT, prompt="Once", echo=True, stream=True).deltas)
        == "OnceHello there."
    ),
    "the model's end can be ignored": lambda: ask(CHAT, ignore_eos=True).engine.requests[0].ignore_eos,
    "a user is taken": lambda: ask(CHAT, user="ada").status == 200,
    "metadata is taken": lambda: ask(CHAT, metadata={"a": "b"}).status == 200,
    "store is taken": lambda: ask(CHAT, store=True).status == 200,
    "the only model may be left out": lambda: ask(CHAT).body["model"] == "tiny",
    "models are a list": lambda: get("/v1/models").body["object"] == "list",
    "a model says how long its context is": lambda: get("/v1/models").body["data"][0]["max_model_len"] == 200,
    "a model is found by its id": lambda: get("/v1/models/tiny").body["id"] == "tiny",
    "a model is its own root": lambda: get("/v1/models/tiny").body["root"] == "tiny",
    "health is a path": lambda: get("/health").status == 200,
}


@pytest.mark.parametrize("name", [*WHOLE, *STREAMED, *TAKEN])
def test_it_holds(name: str) -> None:
    assert {**WHOLE, **STREAMED, **TAKEN}[name]()


REFUSED: dict[str, tuple[Callable[[], Reply], int, str | None]] = {
    "an unknown model": (lambda: ask(CHAT, model="gpt-0"), 404, "model"),
    "an unknown model of a completion": (lambda: ask(TEXT, model="gpt-0"), 404, "model"),
    "an unknown model by its path": (lambda: get("/v1/models/gpt-0"), 404, "model"),
    "an unknown path": (lambda: get("/v1/nothing"), 404, None),
    "no messages": (lambda: ask(CHAT, messages=[]), 400, "messages"),
    "messages that are null": (lambda: ask(CHAT, messages=None), 400, "messages"),
    "messages that are a text": (lambda: ask(CHAT, messages="string"), 400, "messages"),
    "a message that is a number": (lambda: ask(CHAT, messages=[123]), 400, "messages[0]"),
    "a message without a role": (lambda: ask(CHAT, messages=[{}]), 400, "messages[0].role"),
    "a role that is a number": (lambda: ask(CHAT, messages=[{"role": 123}]), 400, "messages[0].role"),
    "a content that is a number": (
        lambda: ask(CHAT, messages=[{"role": "system", "content": 123}]),
        400,
        "messages[0].content",
    ),
    "a second message that is empty": (lambda: ask(CHAT, messages=[HI, {}]), 400, "messages[1].role"),
    "no prompt": (lambda: ask(TEXT, prompt=None), 400, "prompt"),
    "an empty list of prompts": (lambda: ask(TEXT, prompt=[]), 400, "prompt"),
    "an empty prompt": (lambda: ask(TEXT, prompt=""), 400, "prompt"),
    "a token that is none": (lambda: ask(TEXT, prompt=[VOCAB_SIZE]), 400, "prompt[0]"),
    "a prompt beyond the context": (lambda: ask(TEXT, prompt="x" * 300), 400, "prompt"),
    "messages beyond the context": (lambda: ask(CHAT, messages=[HI] * 100), 400, "messages"),
    "the same in a stream": (lambda: ask(CHAT, messages=[HI] * 100, stream=True), 400, "messages"),
    "options of no stream": (lambda: ask(CHAT, stream_options=USAGE), 400, "stream_options"),
    "options of a stream that is none": (
        lambda: ask(TEXT, stream=False, stream_options={"include_usage": None}),
        400,
        "stream_options",
    ),
    "counts in every chunk of no stream": (
        lambda: ask(TEXT, stream_options={"continuous_usage_stats": True}),
        400,
        "stream_options",
    ),
    "more than 20 logprobs": (lambda: ask(CHAT, logprobs=True, top_logprobs=21, stream=True), 400, "top_logprobs"),
    "more than 20 logprobs of a completion": (lambda: ask(TEXT, logprobs=30), 400, "logprobs"),
    "top_logprobs without logprobs": (lambda: ask(CHAT, top_logprobs=2), 400, "top_logprobs"),
    "a seed of more than 63 bits": (lambda: ask(CHAT, seed=2**63), 400, "seed"),
    "a seed of fewer": (lambda: ask(CHAT, seed=-(2**63) - 1), 400, "seed"),
    "logprobs of a streamed prompt": (lambda: ask(TEXT, echo=True, logprobs=1, stream=True), 400, "stream"),
    "logprobs of a prompt for several answers": (lambda: ask(TEXT, echo=True, logprobs=1, n=2), 400, "n"),
    "no answer": (lambda: ask(TEXT, echo=True, max_tokens=0), 400, "max_tokens"),
    "no tokens": (lambda: ask(CHAT, max_tokens=0), 400, "max_tokens"),
    "too hot": (lambda: ask(CHAT, temperature=2.5), 400, "temperature"),
    "n of none": (lambda: ask(CHAT, n=0), 400, "n"),
    "a bias of no token": (lambda: ask(CHAT, logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias"),
    "a bias that is too large": (lambda: ask(CHAT, logit_bias={"5": 101}), 400, "logit_bias.5"),
    "a format of no kind": (lambda: ask(CHAT, response_format={"type": "sound"}), 400, "response_format.type"),
    "a schema that is a number": (
        lambda: ask(CHAT, response_format={"type": "json_object", "schema": 123}),
        400,
        "response_format.schema",
    ),
    "a pattern that is an object": (
        lambda: ask(CHAT, structured_outputs={"regex": {"1": "a"}}),
        400,
        "structured_outputs.regex",
    ),
    "a function that no tool is": (
        lambda: ask(CHAT, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice",
    ),
    "calls of no tools": (lambda: ask(CHAT, tool_choice="required"), 400, "tool_choice"),
    "an image": (
        lambda: ask(CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_openais_shape(name: str) -> None:
    attempt, status, param = REFUSED[name]
    reply = attempt()
    assert reply.status == status, reply.body
    error = reply.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert isinstance(error["code"], str)
    assert reply.engine.requests == []


DIFFERENT: dict[str, Callable[[], Any]] = {
    # Others put the last text into the chunk with the reason, or null beside the role; OpenAI does neither.
    "the end of a stream is a chunk of its own": lambda: "content" not in ask(CHAT, stream=True).deltas[-1]["delta"],
    "the text beside the role is empty": lambda: ask(CHAT, stream=True).deltas[0]["delta"]["content"] is not None,
    # Others have a type of their own for it, and the two numbers as fields; here the message has them.
    "a context that is too short is a request that is wrong": lambda: (
        "300" in ask(TEXT, prompt="x" * 300).body["error"]["message"]
        and ask(TEXT, prompt="x" * 300).body["error"]["code"] == "context_length_exceeded"
    ),
    # Others refuse it; a client that asks for the most there is gets that.
    "a limit beyond the context is cut to it": lambda: (
        ask(CHAT, max_tokens=5000).engine.requests[0].max_tokens == 200 - len("<user>Hi")
    ),
    # Others show a template any role; most templates leave such a message out, or fail.
    "a role of no kind is refused": lambda: ask(CHAT, messages=[{"role": "my-role", "content": "x"}]).status == 400,
    # Others take it as a salt of its own; forms send it for none.
    "an empty salt is none": lambda: ask(CHAT, cache_salt="").status == 200,
    # OpenAI refuses it; libraries send it where a list of theirs is empty.
    "an empty list of tools is none": lambda: ask(CHAT, tools=[]).status == 200,
    # Others search with beams in place of sampling.
    "beams are refused": lambda: ask(TEXT, n=2, use_beam_search=True).status == 400,
    "logprobs of the prompt are refused": lambda: ask(CHAT, prompt_logprobs=1).status == 400,
    "a prompt of text and tokens mixed is refused": lambda: ask(TEXT, prompt=[5, "text", 7]).status == 400,
    "a prompt is never cut": lambda: ask(TEXT, truncate_prompt_tokens=4).status == 400,
    # Others have it end at a pattern; the texts of stop are found without searching all of the answer again.
    "a pattern that ends the answer is refused": lambda: ask(CHAT, stop_regex="a|b").status == 400,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_it_is_done_in_another_way_here(name: str) -> None:
    assert DIFFERENT[name]()
