"""A conversation by `previous_response_id` or by items sent again reuses as much as a chat, on a real model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from models.names import DEMO
from tests.server.api.test_live import Live, serving

QUESTIONS = (
    "My name is Ada and I live in Paris.",
    "What is my name?",
    "Where do I live?",
    "Count from 1 to 5.",
    "What is the capital of Italy?",
    "Thank you.",
)
SYSTEM = "You help with a small garden and answer briefly. " * 10
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Returns the weather of a city.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", **WEATHER}]
MAX_TOKENS = 24
Turn = tuple[int, int, str]
"""Prompt tokens, restored ones, and the answer."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(DEMO) as server:
        yield server


def talk_as_chat(live: Live, tools: bool) -> list[Turn]:
    client = live.client.with_options(api_key=f"chat-{tools}")
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    offered: Any = {"tools": [{"type": "function", "function": WEATHER}]} if tools else {}
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=live.model, messages=messages, max_tokens=MAX_TOKENS, temperature=0, **offered
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        messages.append(answer.choices[0].message.to_dict())
        text = str(answer.choices[0].message.content)
        turns.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, text))
        live.wait_until_idle()
    return turns


def talk(live: Live, key: str, asked: Callable[[str, Any], dict[str, Any]], tools: bool, stream: bool) -> list[Turn]:
    """Has the conversation; `asked` says what a request holds, from its question and the response before."""
    client = live.client.with_options(api_key=f"{key}-{tools}-{stream}")
    response: Any = None
    turns: list[Turn] = []
    for question in QUESTIONS:
        fields: dict[str, Any] = {
            "model": live.model,
            "instructions": SYSTEM,
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0,
            "tools": TOOLS if tools else [],
            **asked(question, response),
        }
        if stream:
            events: list[Any] = list(client.responses.create(**fields, stream=True))
            response = events[-1].response
        else:
            response = client.responses.create(**fields)
        usage = response.usage
        turns.append((usage.input_tokens, usage.input_tokens_details.cached_tokens, response.output_text))
        live.wait_until_idle()
    return turns


def chained(question: str, before: Any) -> dict[str, Any]:
    return {"input": question, "previous_response_id": before.id if before is not None else None}


def sent_again() -> Callable[[str, Any], dict[str, Any]]:
    history: list[Any] = []

    def asked(question: str, before: Any) -> dict[str, Any]:
        history.extend(item.to_dict() for item in (before.output if before is not None else ()))
        history.append({"role": "user", "content": question})
        return {"input": list(history), "store": False}

    return asked


@pytest.mark.usual("False-True")
@pytest.mark.parametrize(("tools", "stream"), [(False, True), (True, False)])
def test_six_turns_reuse_as_much_as_a_chat_either_way(live: Live, tools: bool, stream: bool) -> None:
    chat = talk_as_chat(live, tools)
    by_id = talk(live, "by-id", chained, tools, stream)
    by_items = talk(live, "by-items", sent_again(), tools, stream)
    assert chat == by_id == by_items
    later = by_id[1:]
    assert sum(restored for _, restored, _ in later) > 0.9 * sum(prompt for prompt, _, _ in later)


def test_an_answer_is_bound_to_a_schema(live: Live) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
    wanted: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    response = live.client.responses.create(model=live.model, input="How large?", text=wanted, max_output_tokens=40)
    assert response.output_text.startswith('{"size":')


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_call_of_a_custom_tool_is_forced(live: Live, syntax: str) -> None:
    definition = "[0-9]{3}-[a-c]" if syntax == "regex" else "start: /[0-9]/"
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools: Any = [{"type": "custom", "name": "apply_patch", "format": grammar}]
    choice: Any = {"type": "custom", "name": "apply_patch"}
    response = live.client.responses.create(
        model=live.model, input="Edit it.", tools=tools, tool_choice=choice, max_output_tokens=60, temperature=0
    )
    assert [item.type for item in response.output] == ["custom_tool_call"] or response.status == "incomplete"
    if syntax == "regex":
        (call,) = response.output
        assert call.type == "custom_tool_call" and len(call.input) == 5 and call.input[3] == "-"
