"""A conversation with the small model of recurrent and attention layers: what is restored is what was said."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api.test_live import Live, assistant, serving, user

NEW_TOKENS = 40
"""More than a question with its frame, and less than the system prompt."""
SYSTEM = {"role": "system", "content": "You answer questions on the server. " * 12}


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Live]:
    with serving("demo-hybrid") as server:
        yield server


def ask(hybrid: Live, *messages: Any, **extra: Any) -> Any:
    return hybrid.ask(*messages, max_tokens=60, extra_body=extra)


def test_it_recalls_what_was_said_from_restored_state(hybrid: Live) -> None:
    first = user("My name is Ada and I live in Paris.")
    reply = assistant(ask(hybrid, SYSTEM, first, session_id="s").choices[0].message.content)
    second = [SYSTEM, first, reply, user("What is my name?")]
    answer = ask(hybrid, *second, session_id="s")
    assert answer.choices[0].message.content == "Your name is Ada."
    assert answer.model_extra["timings"]["prompt_n"] <= NEW_TOKENS
    cold = ask(hybrid, *second, cache_salt="nobody else's")
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == answer.choices[0].message.content


def test_two_conversations_share_the_system_prompt(hybrid: Live) -> None:
    ask(hybrid, SYSTEM, user("hello"), session_id="a")
    other = ask(hybrid, SYSTEM, user("What is a prefix cache?"), session_id="b")
    assert "prefix cache" in other.choices[0].message.content
    assert other.model_extra["timings"]["prompt_n"] <= NEW_TOKENS
