"""How likely the model held each token of a prompt: the numbers against the bare model, whatever the cache holds."""

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

TOLERANCE = 1e-3
PROMPT = [40 + (7 * place) % 90 for place in range(300)]
"""Longer than two chunks."""


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "qwen3_5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tiny_models.write(request.param, tmp_path_factory.mktemp("models") / "tiny")
    config = ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 26, slots=2)
    service = open_service(config)
    service.engine.start()
    try:
        with (
            running(create_app(service.engine, service.model, config)) as base,
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client, request.param
    finally:
        service.engine.stop()


def score(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True, **fields}
    extra = {"cache_prompt": True, "session_id": "s", **fields.pop("extra_body", {})}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


def expected(name: str, tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the bare model gives every token behind each of these, in one pass: [num_tokens, vocab_size]."""
    model: Any = tiny_models.build(name)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def assert_right(name: str, prompt: list[int], told: Any, num_answered: int) -> None:
    right = expected(name, prompt)
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
    likeliest = int(expected(name, PROMPT[:20])[-1].argmax())
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
