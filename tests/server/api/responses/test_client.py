"""The real `openai` package's Responses API, sync and async, against a real uvicorn; the engine is a fake."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from server.engine.request import FinishReason, OutOfMemory
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits files."},
    {"type": "web_search"},
    {"type": "namespace", "name": "crm", "description": "", "tools": [{"type": "function", "name": "find"}]},
]
THINK = ReasoningFormat("<think>", "</think>", (5,))
THINKING = Script(("<think>\nHm", ", so.\n</think>\n\nHello"), reasoning_tokens=4)


def calling(name: str, arguments: dict[str, Any]) -> Script:
    call = json.dumps({"name": name, "arguments": arguments})
    return Script(("Let me look.<tool_call>" + call[:30], call[30:] + "</tool_call>"))


@pytest.fixture
def address(engine: FakeEngine, renderer: FakeRenderer) -> Iterator[str]:
    config = ServerConfig(heartbeat_seconds=0.05, max_body_bytes=100_000, api_key="secret")
    with running(create_app(engine, fake_model(renderer=renderer, reasoning_format=THINK), config)) as base:
        yield f"{base}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> Any:
    """The whole response, and of a stream what its last event says."""
    fields = {"model": "tiny", "input": "Hi", **fields}
    if not stream:
        return client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response


def asked(renderer: FakeRenderer) -> list[Any]:
    """The messages that were rendered last for an answer, and not for what may follow one."""
    prompts = [call["messages"] for call in renderer.calls]
    return next(list(messages) for messages in reversed(prompts) if texts(messages)[-1] != ("user", "a"))


def texts(messages: Any) -> list[tuple[str, str]]:
    return [(one["role"], "".join(part["text"] for part in one["content"])) for one in messages]


def said(renderer: FakeRenderer) -> list[tuple[str, str]]:
    """Role and text of those."""
    return texts(asked(renderer))


@pytest.mark.parametrize(
    ("script", "reasoning"),
    [
        (Script(), {}),
        (THINKING, {}),
        (THINKING, {"summary": "auto"}),
        (calling("get_weather", {"city": "Bern"}), {}),
        (calling("apply_patch", {"input": "a"}), {}),
        (Script(reason=FinishReason.LENGTH), {}),
        (Script(error=OutOfMemory("full")), {}),
    ],
)
def test_every_event_is_one_of_the_packages_types(
    client: openai.OpenAI, engine: FakeEngine, script: Script, reasoning: Any
) -> None:
    engine.script = script
    asked = {"model": "tiny", "input": "Hi", "tools": TOOLS, "reasoning": reasoning, "stream": True}
    answer = client.with_raw_response.responses.create(**asked)
    lines = [line[6:] for line in answer.http_response.read().decode().splitlines() if line.startswith("data: {")]
    assert lines
    for line in lines:
        kind: Any = pydantic.TypeAdapter(ResponseStreamEvent)
        event = kind.validate_json(line)
        # The package's type of it has come to lack the name, which the interface and other clients have.
        assert event.type != "response.function_call_arguments.done" or event.name == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_over_two_turns(
    client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer, stream: bool
) -> None:
    engine.script = calling("get_weather", {"city": "Paris"})
    response = ask(client, stream, tools=TOOLS)
    message, call = response.output
    assert message.content[0].text == "Let me look."
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Paris"}
    shown = [tool["function"]["name"] for tool in renderer.calls[0]["tools"]]
    assert shown == ["get_weather", "apply_patch", "crm__find"]
    engine.script = Script()
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    history = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in response.output), result]
    ask(client, stream, tools=TOOLS, input=history)
    assert said(renderer) == [("user", "Hi"), ("assistant", "Let me look."), ("tool", "Sunny")]
    _, reply, answer = asked(renderer)
    assert reply["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert reply["tool_calls"][0]["id"] == answer["tool_call_id"] == call.call_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_over_two_turns(
    client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer, stream: bool
) -> None:
    engine.script = calling("apply_patch", {"input": "*** Begin\n+\u201cé\u201d 🙂\n"})
    call = ask(client, stream, tools=TOOLS).output[1]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** Begin\n+\u201cé\u201d 🙂\n")
    result = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "Ok"}],
    }
    ask(client, stream, tools=TOOLS, input=[{"role": "user", "content": "Hi"}, call.to_dict(), result])
    assert said(renderer) == [("user", "Hi"), ("assistant", ""), ("tool", "Ok")]
    function = asked(renderer)[1]["tool_calls"][0]["function"]
    assert function == {"name": "apply_patch", "arguments": {"input": call.input}}


def test_a_tool_of_a_namespace(client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer) -> None:
    engine.script = calling("crm__find", {})
    call = ask(client, False, tools=TOOLS).output[1]
    assert (call.name, call.namespace) == ("find", "crm")
    ask(client, False, input=[{"role": "user", "content": "Hi"}, call.to_dict()])
    assert asked(renderer)[1]["tool_calls"][0]["function"]["name"] == "crm__find"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_thoughts_survive_a_round_trip(
    client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer, stream: bool, summary: str | None
) -> None:
    engine.script = THINKING
    include = ["reasoning.encrypted_content"]
    response = ask(client, stream, include=include, reasoning={"summary": summary, "effort": "low"}, store=False)
    thought, message = response.output
    assert response.usage.output_tokens_details.reasoning_tokens == 4
    assert [part.text for part in (thought.summary if summary else thought.content)] == ["Hm, so."]
    assert renderer.calls[0]["template_kwargs"]["reasoning_effort"] == "low"
    kept = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    question = {"role": "user", "content": "Hi"}
    ask(client, stream, input=[question, kept, message.to_dict(), question], store=False)
    assert asked(renderer)[1]["reasoning_content"] == "Hm, so."
    assert said(renderer)[1] == ("assistant", "Hello")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_another(
    client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer, stream: bool
) -> None:
    engine.script = THINKING
    first = ask(client, stream, instructions="Be terse.")
    second = ask(client, stream, input="And?", previous_response_id=first.id)
    assert said(renderer)[-3:] == [("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]
    assert second.previous_response_id == first.id
    third = ask(client, stream, input="So?", previous_response_id=second.id)
    chained = engine.requests[-1].tokens.tolist()
    history = [{"role": "user", "content": text} for text in ("Hi", "And?", "So?")]
    replies = [[item.to_dict() for item in response.output] for response in (first, second)]
    ask(client, stream, input=[history[0], *replies[0], history[1], *replies[1], history[2]])
    assert engine.requests[-1].tokens.tolist() == chained
    assert [request.session_id for request in engine.requests] == [None, first.id, first.id, None]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="is not stored any more"):
        ask(client, stream, previous_response_id=third.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_and_deleted(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    first = ask(client, stream)
    second = ask(client, stream, input=[{"role": "user", "content": "And?"}], previous_response_id=first.id)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    items: list[Any] = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["Hi", "Hello there.", "And?"]
    pages = [item.id for item in client.responses.input_items.list(second.id, limit=1)]
    assert pages == [item.id for item in reversed(items)]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)


def test_an_item_is_referred_to(client: openai.OpenAI, renderer: FakeRenderer) -> None:
    first = ask(client, False)
    reference = {"type": "item_reference", "id": first.output[0].id}
    question = {"role": "user", "content": "And?"}
    ask(client, False, input=[question, reference, question])
    assert said(renderer)[1] == ("assistant", "Hello there.")
    with pytest.raises(openai.NotFoundError, match=r"input\[0\].id"):
        ask(client, False, input=[{"type": "item_reference", "id": "msg_none_0"}])


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI, engine: FakeEngine) -> None:
    response = ask(client, False, store=False)
    assert engine.requests[0].is_volatile
    for use in (
        lambda: client.responses.retrieve(response.id),
        lambda: ask(client, False, previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            use()


def test_a_conversation_grows_by_its_responses(
    client: openai.OpenAI, engine: FakeEngine, renderer: FakeRenderer
) -> None:
    before: Any = {"role": "user", "content": "My name is Ada."}
    conversation = client.conversations.create(items=[before], metadata={"topic": "a"})
    ask(client, True, conversation=conversation.id)
    response = ask(client, False, conversation={"id": conversation.id}, input="And?")
    assert response.conversation.id == conversation.id
    expected = ["My name is Ada.", "Hi", "Hello there.", "And?"]
    assert [text for _, text in said(renderer)] == expected
    assert [request.session_id for request in engine.requests] == [conversation.id] * 2
    items: list[Any] = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.content[0].text for item in items] == [*expected, "Hello there."]


def test_a_conversation_is_read_changed_and_deleted(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(metadata={"topic": "a"})
    assert client.conversations.retrieve(conversation.id) == conversation
    changed = client.conversations.update(conversation.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"} == client.conversations.retrieve(conversation.id).metadata
    added: Any = [{"type": "message", "role": "user", "content": text} for text in ("one", "two")]
    one, two = client.conversations.items.create(conversation.id, items=added).data
    found = client.conversations.items.retrieve(str(two.id), conversation_id=conversation.id)
    assert found.to_dict() == two.to_dict()
    client.conversations.items.delete(str(one.id), conversation_id=conversation.id)
    assert [item.id for item in client.conversations.items.list(conversation.id)] == [two.id]
    assert client.conversations.delete(conversation.id).deleted
    for use in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            use(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.create(conversation.id, items=added)


def test_nobody_sees_what_another_salt_has_stored(client: openai.OpenAI) -> None:
    response = ask(client, False, extra_body={"cache_salt": "mine"})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert client.responses.retrieve(response.id, extra_query={"cache_salt": "mine"}).id == response.id


class Answer(pydantic.BaseModel):
    size: int


def test_a_format_that_no_model_can_be_bound_to_is_refused_by_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        client.responses.parse(model="tiny", input="Hi", text_format=Answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"conversation": "conv_none"}, "conversation"),
        ({"conversation": "a", "previous_response_id": "b"}, "conversation"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"extra_body": {"never_heard_of": 1}}, "never_heard_of"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, False, **fields)
    assert caught.value.status_code in (400, 404) and caught.value.param == param


def test_each_part_of_a_long_prompt_is_told_by_an_event(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(progress=(2, 4, 7))
    with client.responses.stream(model="tiny", input="Hi") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "Hello there."
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    background = client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    assert [event.type for event in background].count("response.in_progress") == 1
