"""What answers tell of their tokens and of the prompt's: the numbers against the bare model, on a real tiny one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from tests.server.api.test_live import Live, serving
from tests.support import tiny_models

HI: Any = [{"role": "user", "content": "Hi"}]
TOLERANCE = 1e-3


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return live.client


def all_logprobs(name: str, tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the bare model gives every token behind each of these, in one pass: [num_tokens, vocab_size]."""
    model: Any = tiny_models.build(name)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def expected(prompt: list[int], answer: list[int]) -> np.ndarray[Any, Any]:
    """What the bare model gives each token in the place of each of the answer's: [len(answer), vocab_size]."""
    return all_logprobs("qwen3", [*prompt, *answer])[len(prompt) - 1 : -1]


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


# --------------------------------------------------------------- of a prompt, whatever the cache holds of it

PROMPT = [40 + (7 * place) % 90 for place in range(300)]
"""Longer than two chunks."""


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "qwen3_5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tiny_models.write(request.param, tmp_path_factory.mktemp("models") / "tiny")
    with serving(folder, slots=2) as live:
        yield live.client, request.param


def score(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True, **fields}
    extra = {"cache_prompt": True, "session_id": "s", **fields.pop("extra_body", {})}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


def assert_right(name: str, prompt: list[int], told: Any, num_answered: int) -> None:
    right = all_logprobs(name, prompt)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(prompt) + num_answered
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    theirs = [right[place, token] for place, token in enumerate(prompt[1:])]
    assert told.token_logprobs[1 : len(prompt)] == pytest.approx(theirs, abs=TOLERANCE)
    for place, top in enumerate(told.top_logprobs[1:]):
        best = np.sort(right[place])[::-1][:2]
        assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_numbers_are_those_of_one_pass_with_and_without_state_in_the_cache(served: Any, max_tokens: int) -> None:
    client, name = served
    for _ in range(2):
        answer = score(client, PROMPT, max_tokens=max_tokens)
        assert_right(name, PROMPT, answer.choices[0].logprobs, max_tokens)
        # What others leave of the same prompt is restored for others only.
        score(client, PROMPT, echo=False)
    assert score(client, PROMPT, echo=False).usage.prompt_tokens_details.cached_tokens > 200
    again = score(client, PROMPT, max_tokens=max_tokens)
    assert_right(name, PROMPT, again.choices[0].logprobs, max_tokens)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    miss = again.to_dict()["cache"]["miss"]
    assert (miss["reason"], miss["cause"]) == ("disabled", "log-probabilities of the prompt")


def test_a_list_of_prompts_beside_each_other_and_a_stream(served: Any) -> None:
    client, name = served
    prompts = [PROMPT[:150], PROMPT[20:60], PROMPT[:2], PROMPT[9:10]]
    with ThreadPoolExecutor() as threads:
        other = threads.submit(
            score, client, PROMPT[5:90], echo=False, max_tokens=40, extra_body={"ignore_eos": True}
        )
        choices = score(client, prompts).choices
        alone = score(client, PROMPT[5:90], echo=False, max_tokens=40, extra_body={"ignore_eos": True})
    for prompt, choice in zip(prompts, choices, strict=True):
        assert_right(name, prompt, choice.logprobs, 1)
    assert other.result().choices[0].text == alone.choices[0].text


def test_a_token_that_ends_the_answer_is_told(served: Any) -> None:
    client, name = served
    likeliest = int(all_logprobs(name, PROMPT[:20])[-1].argmax())
    choice = score(client, PROMPT[:20], extra_body={"stop_token_ids": [likeliest]}).choices[0]
    assert choice.finish_reason == "stop"
    assert_right(name, PROMPT[:20], choice.logprobs, 1)


def test_offsets_are_places_in_the_text(served: Any) -> None:
    client, _ = served
    choice = score(client, "Hello there, how are you?", max_tokens=0).choices[0]
    told = choice.logprobs
    assert choice.text == "Hello there, how are you?" == "".join(told.tokens)
    assert all(
        choice.text[offset:].startswith(token) for token, offset in zip(told.tokens, told.text_offset, strict=True)
    )
