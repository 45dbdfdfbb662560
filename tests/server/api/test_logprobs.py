"""What answers tell of their tokens: the numbers against the bare model, on a real tiny one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from server.app.config import ServerConfig
from server.app.service import open_service
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.live_server import running

HI: Any = [{"role": "user", "content": "Hi"}]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tiny_models.write("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    config = ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 26)
    service = open_service(config)
    service.engine.start()
    try:
        with (
            running(create_app(service.engine, service.model, config)) as base,
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client
    finally:
        service.engine.stop()


def expected(prompt: list[int], answer: list[int]) -> np.ndarray[Any, Any]:
    """What the bare model gives each token in the place of each of the answer's: [len(answer), vocab_size]."""
    model: Any = tiny_models.build("qwen3")
    logits = model(mx.array([[*prompt, *answer]]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(logprobs)[len(prompt) - 1 : -1]


def complete(client: openai.OpenAI, prompt: list[int], **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return client.completions.create(model="tiny", prompt=prompt, extra_body={"ignore_eos": True}, **fields)


def answer_ids(prompt: list[int]) -> list[int]:
    """The tokens of an answer, from the text of which they cannot be told for sure."""
    model: Any = tiny_models.build("qwen3")
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(np.argmax(np.array(model(mx.array([tokens]))[0, -1]))))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_tells_of_tokens_without_text_too(streams: bool, client: openai.OpenAI) -> None:
    silent = tiny_models.tokenizer().convert_tokens_to_ids("<|im_start|>")
    asked: Any = {"max_tokens": 6, "logprobs": True, "stream": streams, "logit_bias": {str(silent): 100}}
    answer: Any = client.chat.completions.create(model="tiny", messages=HI, extra_body={"ignore_eos": True}, **asked)
    choices = [chunk.choices[0] for chunk in answer] if streams else answer.choices
    told = [one.token for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert told == ["<|im_start|>"] * 6


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_numbers_are_those_of_the_bare_model(client: openai.OpenAI, num_top: int) -> None:
    prompt = [70, 71, 72, 73, 74]
    told = complete(client, prompt, logprobs=num_top).choices[0].logprobs
    answer = answer_ids(prompt)
    right = expected(prompt, answer)
    theirs = [right[place, token] for place, token in enumerate(answer)]
    assert told.token_logprobs == pytest.approx(theirs, abs=TOLERANCE)
    assert told.text_offset == sorted(told.text_offset) and told.text_offset[0] == 0
    if not num_top:
        assert told.top_logprobs is None
        return
    for place, top in enumerate(told.top_logprobs):
        best = np.sort(right[place])[::-1][:num_top]
        assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=TOLERANCE)


def test_rows_of_a_batch_tell_their_own_and_others_tell_nothing(client: openai.OpenAI) -> None:
    prompts = [list(range(40 + size, 40 + 2 * size)) for size in (3, 9, 17, 30)]

    def ask(index: int) -> Any:
        return complete(client, prompts[index], logprobs=index if index else None).choices[0].logprobs

    with ThreadPoolExecutor(len(prompts)) as pool:
        silent, *telling = pool.map(ask, range(len(prompts)))
    assert silent is None
    for index, told in enumerate(telling, 1):
        answer = answer_ids(prompts[index])
        right = expected(prompts[index], answer)
        assert told.token_logprobs == pytest.approx([right[i, one] for i, one in enumerate(answer)], abs=TOLERANCE)
        assert all(len(top) <= index for top in told.top_logprobs)


def test_they_are_told_before_what_changes_the_choice(client: openai.OpenAI) -> None:
    prompt = [70, 71, 72, 73, 74]
    first = answer_ids(prompt)[0]
    told = complete(client, prompt, logprobs=1, max_tokens=1, logit_bias={str(first): -100}).choices[0].logprobs
    right = expected(prompt, [first])[0]
    assert max(told.top_logprobs[0].values()) == pytest.approx(right[first], abs=TOLERANCE)
    assert told.token_logprobs[0] == pytest.approx(np.sort(right)[-2], abs=TOLERANCE)


def test_chat_tells_bytes_and_a_stream_the_same_as_the_whole(client: openai.OpenAI) -> None:
    told = {"logprobs": True, "top_logprobs": 2}
    asked: Any = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 12, **told}
    whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    said = b"".join(bytes(one.bytes or ()) for one in whole.logprobs.content).decode(errors="replace")
    assert said == whole.message.content
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed += choice.logprobs.content or []
    assert [one.token for one in streamed] == [one.token for one in whole.logprobs.content]
    for one, other in zip(streamed, whole.logprobs.content, strict=True):
        assert len(one.top_logprobs) == 2 and one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob


def test_a_bound_answer_tells_of_forced_tokens_too(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"name": {"const": "ab"}}, "required": ["name"]}
    bound: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    asked: Any = {"response_format": bound, "temperature": 0, "max_tokens": 40, "logprobs": True}
    choice = client.chat.completions.create(
        model="tiny", messages=HI, **asked, extra_body={"max_thinking_tokens": 0}
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    said = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content).decode()
    assert '"ab"' in (choice.message.content or "") and said.endswith(choice.message.content or "")
    assert all(one.logprob < 0 for one in choice.logprobs.content)


def test_what_was_not_asked_for_is_null(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="tiny", messages=HI, max_tokens=2).choices[0].logprobs is None
    assert complete(client, [70, 71]).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_what_makes_no_sense_is_refused(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=HI, **fields)
    assert refusal.value.param == param
