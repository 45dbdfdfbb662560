"""On a real model each dialect reuses as much of a conversation as chat does, and binds and goes on with answers."""

import json
from typing import Any

import httpx
import pytest

from tests.server.api.conformance.surfaces import Messages, OllamaChat, Responses, Surface, Told
from tests.server.api.test_live import Live, assistant, until, user

CHAT, RESPONSES, MESSAGES, OLLAMA = CHATS = (Surface(), Responses(), Messages(), OllamaChat())
of_every_chat = pytest.mark.parametrize("surface", CHATS, ids=lambda surface: surface.path)
QUESTIONS = (
    *("My name is Ada and I live in Paris.", "What is my name?", "Where do I live?", "Count from 1 to 5."),
    *("What is the capital of Italy?", "Thank you."),
)
SYSTEM = "You help with a small garden and answer briefly. " * 10
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Returns the weather of a city."}
FUNCTION = {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}}
TOOLS: dict[Surface, Any] = {
    CHAT: FUNCTION,
    OLLAMA: FUNCTION,
    RESPONSES: {"type": "function", **WEATHER, "parameters": PARAMETERS},
    MESSAGES: {**WEATHER, "input_schema": PARAMETERS},
}
SCHEMA = {"type": "object", "properties": {"who": {"enum": ["me", "you"]}}, "required": ["who"]}
FORMATS: dict[Surface, dict[str, Any]] = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    OLLAMA: {"format": SCHEMA},
}
GOING_ON: dict[Surface, dict[str, Any]] = {CHAT: {"continue_final_message": True}, MESSAGES: {}, OLLAMA: {}}
COUNT, BEGUN, OPEN = user("Count from 1 to 9."), assistant("1, 2, 3,"), assistant('{"who": "')


def post(demo: Live, surface: Surface, prompt: Any, limit: int = 40, key: str = "", **fields: Any) -> httpx.Response:
    """The greedy answer; a key makes a namespace of its own."""
    limits = surface.limited(limit)
    greedy = {"options": {**limits["options"], "temperature": 0}} if "options" in limits else {"temperature": 0}
    body = {**surface.body, "model": demo.model, **limits, **greedy, surface.prompt: prompt, **fields}
    return demo.http.post(surface.path, json=body, headers={"authorization": f"Bearer {key or surface.path}"})


def ask(demo: Live, surface: Surface, prompt: Any, *options: Any, **fields: Any) -> Told:
    answer = post(demo, surface, prompt, *options, **fields)
    assert answer.status_code == 200, answer.text
    return surface.told(answer.json())


def talk(demo: Live, surface: Surface, num_ahead: list[None], tools: bool) -> list[Told]:
    """Six turns, each begun once the one before is evaluated ahead."""
    messages, turns = [{"role": "system", "content": SYSTEM}], list[Told]()
    offered = {"tools": [TOOLS[surface]]} if tools else {}
    num_before = len(num_ahead)
    for question in QUESTIONS:
        messages.append(user(question))
        turns.append(ask(demo, surface, messages, 24, f"{surface.path} {tools}", **offered))
        messages.append(assistant(turns[-1].text))
        until(lambda: len(num_ahead) == num_before + len(turns))
    return turns


@pytest.mark.parametrize("tools", [False, True])
def test_six_turns_reuse_as_much_as_a_chat(demo: Live, num_ahead: list[None], tools: bool) -> None:
    chat, *others = ([told._replace(finish="") for told in talk(demo, each, num_ahead, tools)] for each in CHATS)
    assert others == [chat] * 3
    assert sum(told.cached_tokens for told in chat[1:]) > 0.9 * sum(told.prompt_tokens for told in chat[1:])


def test_a_chain_of_responses_reuses_as_much_as_its_items(demo: Live, num_ahead: list[None]) -> None:
    messages: list[Any] = []
    before = None
    for number, question in enumerate(QUESTIONS[:3]):
        messages.append(user(question))
        chained = {"instructions": SYSTEM, "previous_response_id": before}
        answer = post(demo, RESPONSES, question, 24, "by id", **chained).json()
        until(lambda: len(num_ahead) == 1)
        again = ask(demo, RESPONSES, messages, 24, "by items", instructions=SYSTEM, store=False)
        until(lambda: len(num_ahead) == 2)
        num_ahead.clear()
        assert RESPONSES.told(answer) == again and (number == 0 or again.cached_tokens > 0.7 * again.prompt_tokens)
        messages += answer["output"]
        before = answer["id"]


@of_every_chat
def test_an_answer_is_bound_to_a_schema(demo: Live, surface: Surface) -> None:
    assert json.loads(ask(demo, surface, [user("Who?")], **FORMATS[surface]).text)["who"] in ("me", "you")


@pytest.mark.parametrize("surface", GOING_ON, ids=lambda surface: surface.path)
def test_an_answer_goes_on_with_what_was_begun_and_the_whole_is_reused(demo: Live, surface: Surface) -> None:
    first = ask(demo, surface, [COUNT, BEGUN], 100, **GOING_ON[surface])
    assert (first.text, first.finish) == (" 4, 5, 6, 7, 8, 9.", surface.reasons[0])
    whole = assistant(BEGUN["content"] + first.text)
    following = ask(demo, surface, [COUNT, whole, user("hello")], 2)
    assert following.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1
    bound = ask(demo, surface, [COUNT, OPEN], **FORMATS[surface], **GOING_ON[surface])
    assert json.loads(OPEN["content"] + bound.text)["who"] in ("me", "you")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_of_messages_is_forced(demo: Live, choice: Any) -> None:
    asked = [user("What is the weather in Rome?")]
    answer = post(demo, MESSAGES, asked, 100, tools=[TOOLS[MESSAGES]], tool_choice=choice).json()
    assert answer["stop_reason"] == "tool_use"
    assert {block["name"] for block in answer["content"] if block["type"] == "tool_use"} == {"get_weather"}


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_call_of_a_custom_tool_is_forced(demo: Live, syntax: str) -> None:
    grammar = {"type": "grammar", "syntax": syntax, "definition": "[0-9]{3}-[a-c]"}
    grammar["definition"] = grammar["definition"] if syntax == "regex" else "start: /[0-9]/"
    tool = {"type": "custom", "name": "apply_patch"}
    answer = post(demo, RESPONSES, "Edit it.", 60, tools=[{**tool, "format": grammar}], tool_choice=tool).json()
    assert answer["status"] == "incomplete" or [item["type"] for item in answer["output"]] == ["custom_tool_call"]
    if syntax == "regex":
        [call] = answer["output"]
        assert len(call["input"]) == 5 and call["input"][3] == "-"


@pytest.mark.parametrize(("surface", "count"), [(MESSAGES, "/count_tokens"), (RESPONSES, "/input_tokens")])
def test_a_prompt_is_counted_as_it_is_evaluated(demo: Live, surface: Surface, count: str) -> None:
    asked = {"model": demo.model, surface.prompt: [user("Hi"), BEGUN, COUNT], "tools": [TOOLS[surface]]}
    counted = demo.post(surface.path + count, **asked).json()["input_tokens"]
    assert counted == ask(demo, surface, asked.pop(surface.prompt), 1, **asked).prompt_tokens


def test_a_prompt_is_evaluated_ahead_by_asking_messages_for_no_tokens(demo: Live) -> None:
    system = "A bank. " * 30
    warm = ask(demo, MESSAGES, [user("Where is the bank?")], 0, system=system)
    assert (warm.text, warm.finish, warm.completion_tokens) == ("", "max_tokens", 0)
    again = ask(demo, MESSAGES, [user("Where is the bank?")], 1, system=system)
    assert again.cached_tokens >= again.prompt_tokens - 2


def test_a_context_of_ollamas_generate_goes_on_in_place(demo: Live) -> None:
    body = {"model": demo.model, "options": {"temperature": 0, "num_predict": 12}, "stream": False}
    first = demo.post("/api/generate", prompt="Once upon a time", system="Tell stories.", **body).json()
    second = demo.post("/api/generate", prompt="Go on", context=first["context"], **body).json()
    # The last token of an answer that was cut off is not evaluated.
    assert second["cache"]["hit_tokens"] >= len(first["context"]) - 1 and second["cache"]["miss"] is None
    assert second["context"][: len(first["context"])] == first["context"]
