"""`return_token_ids` and `return_tokens_as_token_ids`, in the shapes of vLLM, on a real tiny model."""

import asyncio
import json
from typing import Any

import pytest

from models.output.pieces import TokenLogprob
from server.engine.messages import MAX_PENDING, Generation, Mailbox
from server.engine.request import Delta, Failed
from tests.server.api.test_live import Live
from tests.support import tiny_models

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": False}},
    TEXT: {"prompt": [70, 71, 72, 73, 74]},
}
TOKENIZER: Any = tiny_models.tokenizer()
CALL = {"type": "function", "function": {"name": "now"}}


def ask(live: Live, path: str, **fields: Any) -> Any:
    """The whole answer, with `n` choices in order."""
    body = {**PROMPTS[path], "max_tokens": 12, "seed": 1, "return_token_ids": True, **fields}
    answer = live.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(live: Live, path: str, **fields: Any) -> list[Any]:
    body = {**PROMPTS[path], "max_tokens": 12, "seed": 1, "return_token_ids": True, "stream": True, **fields}
    lines = live.post(path, **body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def streamed_ids(told: list[Any], index: int) -> list[int]:
    of_choice = [choice for chunk in told for choice in chunk["choices"] if choice["index"] == index]
    assert all(isinstance(choice["token_ids"], list) for choice in of_choice)
    return [token for choice in of_choice for token in choice["token_ids"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"n": 3}, {"temperature": 0, "logprobs": 2}])
def test_a_stream_and_a_whole_answer_tell_all_tokens(live: Live, path: str, fields: dict[str, Any]) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {**fields, "logprobs": True, "top_logprobs": 2}
    whole = ask(live, path, **fields)
    told = chunks(live, path, **fields)
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        assert choice["token_ids"] == streamed_ids(told, choice["index"])
        assert TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True) == text_of(choice)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_and_an_end_of_turn_are_among_the_tokens(live: Live, path: str) -> None:
    free = ask(live, path, ignore_eos=True)["choices"][0]
    stop = TOKENIZER.decode(free["token_ids"][3:5])
    assert stop.strip()
    for fields in ({"stop": [stop]}, {"stop_token_ids": [free["token_ids"][4]]}):
        whole = ask(live, path, ignore_eos=True, **fields)
        ids = whole["choices"][0]["token_ids"]
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert ids == free["token_ids"][: len(ids)] and len(ids) == whole["usage"]["completion_tokens"]
        assert ids == streamed_ids(chunks(live, path, ignore_eos=True, **fields), 0)


def test_logprobs_have_an_entry_for_each_id(live: Live) -> None:
    free = ask(live, CHAT, ignore_eos=True)["choices"][0]["token_ids"]
    asked = {"ignore_eos": True, "stop_token_ids": [free[4]], "logprobs": True}
    choice = ask(live, CHAT, **asked, return_tokens_as_token_ids=True)["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{one}" for one in choice["token_ids"]
    ]
    without = ask(live, CHAT, **asked, return_token_ids=False)["choices"][0]
    assert len(without["logprobs"]["content"]) == len(choice["token_ids"]) - 1 and "token_ids" not in without


def test_tokens_in_logprobs_are_called_by_their_ids(live: Live) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": True, "temperature": 0}
    text = ask(live, TEXT, **asked, logprobs=2)["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{one}" for one in text["token_ids"]]
    likely = text["logprobs"]["top_logprobs"]
    assert all(name in top for name, top in zip(text["logprobs"]["tokens"], likely, strict=True))
    chat = ask(live, CHAT, **asked, logprobs=True, top_logprobs=2)["choices"][0]
    for one, token in zip(chat["logprobs"]["content"], chat["token_ids"], strict=True):
        assert one["token"] == one["top_logprobs"][0]["token"] == f"token_id:{token}"
        assert bytes(one["bytes"]).decode(errors="replace") == TOKENIZER.decode([token])


def test_the_tokens_of_the_prompt_stand_where_vllm_has_them(live: Live) -> None:
    chat, text = ask(live, CHAT, n=2), ask(live, TEXT, prompt=[[70, 71], [72]])
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[70, 71], [72]]
    told = [chunk.get("prompt_token_ids") for chunk in chunks(live, CHAT, n=2)]
    assert told == [chat["prompt_token_ids"]] * 2 + [None] * (len(told) - 2)
    for index, prompt in enumerate([[70, 71], [72]]):
        streamed = chunks(live, TEXT, prompt=[[70, 71], [72]], ignore_eos=True)
        own = [choice for chunk in streamed for choice in chunk["choices"] if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [prompt, *[None] * (len(own) - 1)]


def test_a_call_and_an_echo_tell_their_tokens_too(live: Live) -> None:
    # The seed gives a call that ends; others give arguments beyond any limit.
    forced = {"tools": [CALL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60, "seed": 6}
    whole, told = ask(live, CHAT, **forced), chunks(live, CHAT, **forced)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["token_ids"] == streamed_ids(told, 0)
    assert TOKENIZER.decode(streamed_ids(told, 0)).startswith("<tool_call>")
    echoed = chunks(live, TEXT, echo=True)
    assert echoed[0]["choices"][0]["token_ids"] == [] and echoed[0]["choices"][0]["prompt_token_ids"]
    assert streamed_ids(echoed, 0) == streamed_ids(chunks(live, TEXT), 0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nothing_is_told_unasked(live: Live, path: str) -> None:
    for value in (False, None):
        whole, told = ask(live, path, return_token_ids=value), chunks(live, path, return_token_ids=value)
        assert "token_ids" not in str(whole) and "token_ids" not in str(told)


def test_text_that_was_joined_for_a_slow_reader_keeps_what_is_told_of_its_tokens() -> None:
    async def read() -> list[int]:
        generation = Generation(lambda: None, Mailbox(asyncio.get_running_loop()))
        count = MAX_PENDING + 3
        generation.post([Delta("a", (token,), (TokenLogprob(token, -1.0, ()),)) for token in range(count)])
        generation.post([Failed(ValueError("the end"))])
        return [one.token_id async for event in generation if isinstance(event, Delta) for one in event.logprobs]

    assert asyncio.run(read()) == list(range(MAX_PENDING + 3))
