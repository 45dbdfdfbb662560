"""The `ollama` package on tiny real models: as much is reused as through OpenAI's API, and answers are the same."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from models.names import DEMO_FOLDER
from tests.server.api.test_live import Live, assistant, serving, until, user
from tests.support import tiny_models

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 12}
QUESTIONS = [f"Question {number}: what comes after {number}?" for number in range(6)]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module", params=["llama", "lfm2", "gemma3"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_models.write(request.param, tmp_path_factory.mktemp(request.param) / "tiny")
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> Iterator[Live]:
    with serving(DEMO_FOLDER) as server:
        yield server


def through_ollama(live: Live, system: dict[str, str], num_ahead: list[None], **fields: Any) -> list[str]:
    """Six turns of a chat, each begun when the one before is evaluated ahead; returns what was answered."""
    client, answers = ollama.Client(live.address, headers={"x-session-id": "of ollama"}), list[str]()
    messages: list[Any] = [system]
    for question in QUESTIONS:
        messages.append(user(question))
        message = client.chat(live.model, messages, options=GREEDY, **fields).message
        messages.append(message)
        answers.append(message.content or "")
        wait_for_turn(len(answers), num_ahead)
    return answers


def through_openai(live: Live, system: dict[str, str], num_ahead: list[None], **fields: Any) -> list[str]:
    messages, answers = list[Any]([system]), list[str]()
    for question in QUESTIONS:
        messages.append(user(question))
        message = live.ask(*messages, extra_body={"session_id": "of openai", **fields}).choices[0].message
        thought = getattr(message, "reasoning_content", None)
        messages.append({**assistant(message.content), **({"reasoning_content": thought} if thought else {})})
        answers.append(message.content)
        wait_for_turn(len(answers), num_ahead)
    return answers


def wait_for_turn(count: int, num_ahead: list[None]) -> None:
    until(lambda: len(num_ahead) == count)
    if count == len(QUESTIONS):
        num_ahead.clear()


def turns(live: Live, session: str, key: str | None) -> list[tuple[int, int]]:
    """Prompt tokens and cached tokens of each turn."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    found = httpx.get(f"{live.address}/v1/sessions/{session}", headers=headers).json()["turns"]
    return [(turn["prompt_tokens"], turn["cached_tokens"]) for turn in found]


def test_six_turns_are_reused_as_through_openai(live: Live, num_ahead: list[None]) -> None:
    assert through_ollama(live, SYSTEM, num_ahead) == through_openai(live, SYSTEM, num_ahead)
    of_ollama, of_openai = turns(live, "of%20ollama", None), turns(live, "of%20openai", "none")
    assert of_ollama == of_openai
    assert len(of_ollama) == 6 and all(cached > 0.7 * prompt for prompt, cached in of_ollama[1:])


def test_six_turns_with_thoughts_are_reused_as_through_openai(demo: Live, num_ahead: list[None]) -> None:
    system = {"role": "system", "content": "Answer in a few words."}
    of_ollama = through_ollama(demo, system, num_ahead, think=True)
    assert of_ollama == through_openai(demo, system, num_ahead, enable_thinking=True)
    assert turns(demo, "of%20ollama", None) == turns(demo, "of%20openai", "none")


def test_streamed_and_whole_answers_are_the_same(live: Live) -> None:
    client = ollama.Client(live.address)
    whole = client.generate(live.model, "Hello there", options=GREEDY)
    parts = list(client.generate(live.model, "Hello there", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert parts[-1].context == whole.context
    assert whole.eval_count == 12 and whole.eval_duration and whole.prompt_eval_duration


def test_a_context_goes_on_in_place(live: Live) -> None:
    client = ollama.Client(live.address, headers={"x-session-id": "a context"})
    first = client.generate(live.model, "Once upon a time", system="Tell stories.", options=GREEDY)
    assert first.context is not None
    body = {
        "model": live.model,
        "prompt": "Go on",
        "context": list(first.context),
        "options": GREEDY,
        "stream": False,
    }
    named = {"x-session-id": "a context"}
    second = httpx.post(f"{live.address}/api/generate", json=body, headers=named, timeout=120).json()
    # The last token of an answer that was cut off is not evaluated.
    assert second["cache"]["hit_tokens"] >= len(first.context) - 1
    assert (second["cache"]["kept"], second["cache"]["miss"]) == (1, None)
    assert second["context"][: len(first.context)] == list(first.context)
    # What is behind the reply is what the template puts there, and the next question.
    asked = second["context"][len(first.context) : second["prompt_eval_count"]]
    tokenizer = tiny_models.tokenizer()
    shown = tokenizer.apply_chat_template(
        [user("a"), assistant("b"), user("Go on")], tokenize=False, add_generation_prompt=True
    )
    assert str(shown).endswith("b" + str(tokenizer.decode(asked)))


def test_a_format_binds_the_answer(live: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}, "is_there": {"type": "boolean"}},
        "required": ["age", "is_there"],
        "additionalProperties": False,
    }
    client = ollama.Client(live.address)
    said = client.chat(live.model, [user("Who?")], format=schema, options={"num_predict": 400, "seed": 1}, think=None)
    assert set(json.loads(said.message.content or "")) == {"age", "is_there"}


def test_the_model_is_described(live: Live) -> None:
    client = ollama.Client(live.address)
    [listed] = client.list().models
    shown = client.show(str(listed.model))
    assert listed.size and listed.details and listed.details.family
    assert shown.modelinfo and shown.modelinfo[f"{listed.details.family}.context_length"] == tiny_models.CONTEXT
    assert shown.template == tiny_models.CHAT_TEMPLATE
    assert "completion" in (shown.capabilities or [])
