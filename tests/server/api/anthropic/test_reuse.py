"""A conversation through the `anthropic` package reuses as much as the same one through OpenAI's, on a real model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
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
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(DEMO) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.address, api_key="as-messages", max_retries=0) as client:
        yield client


def functions() -> list[dict[str, Any]]:
    """The tools as OpenAI's clients send them."""
    renamed = [{"parameters" if name == "input_schema" else name: tool[name] for name in tool} for tool in TOOLS]
    return [{"type": "function", "function": function} for function in renamed]


def talk_as_chat(live: Live, **fields: Any) -> list[tuple[int, int, str]]:
    """Prompt tokens, restored ones, and the answer of each turn. The key makes a namespace of its own."""
    client = live.client.with_options(api_key="as-chat")
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=live.model, messages=messages, max_tokens=MAX_TOKENS, temperature=0, **fields
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        messages.append(answer.choices[0].message.to_dict())
        text = str(answer.choices[0].message.content)
        turns.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, text))
        live.wait_until_idle()
    return turns


def talk_as_messages(live: Live, client: anthropic.Anthropic, **fields: Any) -> list[tuple[int, int, str]]:
    messages: list[Any] = []
    turns = []
    # As Claude Code does, the newest message is marked, and the mark moves with each turn.
    mark = {"cache_control": {"type": "ephemeral"}}
    for question in QUESTIONS:
        newest = {"role": "user", "content": [{"type": "text", "text": question, **mark}]}
        with client.messages.stream(
            model=live.model,
            system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            messages=[*messages, newest],  # type: ignore[list-item]
            max_tokens=MAX_TOKENS,
            extra_body={"temperature": 0},
            **fields,
        ) as stream:
            answer = stream.get_final_message()
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.content}]
        usage, read = answer.usage, answer.usage.cache_read_input_tokens or 0
        text = "".join(block.text for block in answer.content if block.type == "text")
        turns.append((usage.input_tokens + (usage.cache_creation_input_tokens or 0) + read, read, text))
        live.wait_until_idle()
    return turns


def test_six_turns_reuse_as_much_as_a_chat(live: Live, client: anthropic.Anthropic) -> None:
    chat, messages = talk_as_chat(live), talk_as_messages(live, client)
    assert messages == chat
    later = messages[1:]
    assert sum(restored for _, restored, _ in later) > 0.9 * sum(prompt for prompt, _, _ in later)


def test_with_tools_and_thoughts_too(live: Live, client: anthropic.Anthropic) -> None:
    chat = talk_as_chat(live, tools=functions(), reasoning_effort="low", extra_body={"enable_thinking": True})
    fields: dict[str, Any] = {"tools": TOOLS, "output_config": {"effort": "low"}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 4096}}
    assert talk_as_messages(live, client, **fields, **thinking) == chat


def session(name: str) -> Any:
    """As Claude Code names its session."""
    return {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": name})}


def asked(live: Live, client: anthropic.Anthropic, system: Any, *questions: str, **fields: Any) -> Any:
    messages: list[Any] = []
    for question in questions:
        messages += [{"role": "assistant", "content": "Yes."}] if messages else []
        messages.append({"role": "user", "content": question})
    answer = client.messages.create(model=live.model, max_tokens=8, system=system, messages=messages, **fields)
    live.wait_until_idle()
    return answer


def test_a_clock_in_the_system_prompt_is_told_with_what_it_cost(live: Live, client: anthropic.Anthropic) -> None:
    fields = {"metadata": session("clocked")}
    asked(live, client, "It is 09:16. " + SYSTEM, "Hi", **fields)
    second = asked(live, client, "It is 09:17. " + SYSTEM, "Hi", "Well?", **fields)
    told = second.diagnostics.to_dict()
    lost = told["cache_miss_reason"]["cache_missed_input_tokens"]
    assert told["cache_miss_reason"]["type"] == "system_changed"
    assert lost > 0.8 * (second.usage.input_tokens - len("Well?"))
    assert (told["cache"]["miss"]["cause"], told["cache"]["miss"]["lost_tokens"]) == ("date or time", lost)
    assert told["cache"]["session_id"] == "clocked"


def test_a_header_that_changes_with_each_request_costs_nothing(live: Live, client: anthropic.Anthropic) -> None:
    def system(build: str, cch: str) -> list[dict[str, str]]:
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=cli; cch={cch};"
        return [{"type": "text", "text": header}, {"type": "text", "text": "You are an agent. " * 40}]

    asked(live, client, system("3a0", "eb6c6"), "Hi")
    usage = asked(live, client, system("7b4", "00af1"), "Hi", "Well?").usage
    assert usage.cache_read_input_tokens > 0.9 * (usage.input_tokens + usage.cache_read_input_tokens)


def test_what_stands_before_the_last_mark_counts_as_written_to_the_cache(
    live: Live, client: anthropic.Anthropic
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "A system prompt that is marked. " * 20, **mark}]
    counted = client.messages.count_tokens(
        model=live.model,
        system=system,  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "Hi"}],
    )
    usage = asked(live, client, system, "Hi").usage
    written = usage.cache_creation_input_tokens
    assert usage.input_tokens + written + usage.cache_read_input_tokens == counted.input_tokens
    assert 0 < usage.input_tokens < 20 < written


def test_a_prompt_is_counted_as_it_is_evaluated(live: Live, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "system": SYSTEM, "tools": TOOLS}
    counted = client.messages.count_tokens(model=live.model, **fields).input_tokens
    usage = client.messages.create(model=live.model, max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_prompt_that_is_too_long_is_told_from_others(live: Live, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": live.model, "messages": [{"role": "user", "content": "word " * 60_000}]}
    words = r"prompt is too long: \d+ tokens > \d+ maximum"
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.count_tokens(**fields)
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(max_tokens=1, **fields)


def test_an_answer_may_be_bound_to_a_schema(live: Live, client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    messages: Any = [{"role": "user", "content": "Where do I live?"}]
    answer = client.messages.create(model=live.model, max_tokens=30, messages=messages, output_config=config)
    assert answer.content[0].to_dict()["text"] in ('{"city": "Paris"}', '{"city": "Rome"}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_may_be_forced(live: Live, client: anthropic.Anthropic, choice: Any, stream: bool) -> None:
    fields: Any = {"model": live.model, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    if stream:
        with client.messages.stream(messages=messages, **fields) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(messages=messages, **fields)
    assert answer.stop_reason == "tool_use"
    assert {block.name for block in answer.content if block.type == "tool_use"} == {"get_weather"}


def test_a_prompt_is_evaluated_ahead_by_asking_for_no_tokens(live: Live, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": live.model, "messages": [{"role": "user", "content": "Where is the bank?"}]}
    warm = client.messages.create(max_tokens=0, system="A bank. " * 30, **fields)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    usage = client.messages.create(max_tokens=1, system="A bank. " * 30, **fields).usage
    assert usage.cache_read_input_tokens is not None and usage.input_tokens <= 2
