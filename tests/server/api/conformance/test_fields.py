"""No field that a client of any dialect knows is ignored: it is honoured, refused in words, or changes nothing."""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import ollama
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from ollama import _types
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel
from starlette.testclient import TestClient

from server.api.anthropic.conversation import IN_COUNT as IN_MESSAGE_COUNT
from server.api.anthropic.conversation import IN_MESSAGES, IN_PROMPT, MessagesBody, PromptBody
from server.api.app import create_app
from server.api.bodies import Rules, Treatment
from server.api.llama_cpp.api import IN_COMPLETION, LlamaCompletionBody
from server.api.ollama.generate import IN_BOTH as IN_OLLAMA
from server.api.ollama.generate import IN_CHAT as IN_OLLAMA_CHAT
from server.api.ollama.generate import IN_GENERATE, OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaMessage
from server.api.ollama.generate import IN_MESSAGE as IN_OLLAMA_MESSAGE
from server.api.openai.fields import IN_BOTH, IN_CHAT, IN_MESSAGE, IN_TEXT
from server.api.openai.generate import CompletionBody
from server.api.openai.types import ChatBody, ChatMessage, GenerationBody
from server.api.params import IN_OPTIONS, Options
from server.api.responses.types import IN_COUNT as IN_RESPONSE_COUNT
from server.api.responses.types import IN_INPUT, IN_RESPONSES, InputBody, ResponsesBody
from server.app.config import ServerConfig
from tests.support.fake_engine import FakeEngine, fake_model

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
REQUEST = ("max_tokens", "sampling", "stop", "session_id", "namespace", "cache_prompt", "priority", "speculates")
"""What no field without effect may change in a request to the engine."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint, the smallest body that it serves, and the table of its fields."""

    path: str
    body: Mapping[str, Any]
    rules: Rules
    asking: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields without effect whose type is checked."""
    skipped: Set[str] = frozenset()
    """Fields without effect whose type is checked, or which name something stored."""
    ignores_unknown: bool = True


RESPONSE_TYPES = {
    **dict.fromkeys(name for name, rule in IN_RESPONSES.items() if rule.is_read),
    "truncation": "auto",
    "parallel_tool_calls": False,
    "user": "me",
    "safety_identifier": "me",
    "max_tool_calls": 1,
}
STORED = frozenset({"previous_response_id", "conversation"})
ENDPOINTS = (
    Endpoint("/v1/chat/completions", {"messages": HI}, IN_CHAT, skipped=STORED | set(ChatBody.model_fields)),
    Endpoint("/v1/completions", {"prompt": "Hi"}, IN_TEXT, skipped=STORED | set(CompletionBody.model_fields)),
    Endpoint("/v1/messages", {"messages": HI, "max_tokens": 9}, IN_MESSAGES),
    Endpoint("/v1/messages/count_tokens", {"messages": HI}, IN_MESSAGE_COUNT),
    Endpoint("/v1/responses", {"input": "Hi"}, IN_RESPONSES, RESPONSE_TYPES, ignores_unknown=False),
    Endpoint("/v1/responses/input_tokens", {"input": "Hi"}, IN_RESPONSE_COUNT, RESPONSE_TYPES, ignores_unknown=False),
    Endpoint("/api/chat", {"model": "tiny", "messages": HI, "stream": False}, IN_OLLAMA_CHAT),
    Endpoint("/api/generate", {"model": "tiny", "prompt": "Hi", "stream": False}, IN_GENERATE),
    Endpoint("/completion", {"prompt": "Hi"}, IN_COMPLETION, skipped=STORED | set(LlamaCompletionBody.model_fields)),
)
of_every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, fake_model(), ServerConfig()))


def post(client: TestClient, endpoint: Endpoint, **fields: Any) -> Any:
    content = json.dumps({**endpoint.body, **fields})
    return client.post(endpoint.path, content=content, headers={"content-type": "application/json"})


def treated(rules: Rules, treatment: Treatment) -> list[str]:
    return [name for name, rule in rules.items() if rule.treatment is treatment]


@of_every_endpoint
def test_every_refused_field_is_refused_with_its_reason_and_neutral_values_are_taken(
    client: TestClient, engine: FakeEngine, endpoint: Endpoint
) -> None:
    names = treated(endpoint.rules, Treatment.REFUSED)
    for name in names:
        answer = post(client, endpoint, **{name: ASKING})
        assert answer.status_code == 400, name
        assert endpoint.rules[name].why in json.dumps(answer.json()["error"], ensure_ascii=False), name
    assert engine.requests == []
    for name in names:
        for value in (*endpoint.rules[name].neutral, None):
            answer = post(client, endpoint, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)


@of_every_endpoint
def test_every_field_without_effect_is_taken_and_has_none(
    client: TestClient, engine: FakeEngine, endpoint: Endpoint
) -> None:
    names = set(treated(endpoint.rules, Treatment.NO_EFFECT)) - endpoint.skipped
    fields = {name: endpoint.asking.get(name, ASKING) for name in names}
    if endpoint.ignores_unknown:
        fields["a_field_of_the_next_version"] = {"enabled": True}
    answers = [post(client, endpoint), post(client, endpoint, **fields)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    if engine.requests:
        plain, with_all = engine.requests
        assert [getattr(plain, name) for name in REQUEST] == [getattr(with_all, name) for name in REQUEST]
        assert plain.tokens.tolist() == with_all.tokens.tolist()
    else:
        assert answers[0].json() == answers[1].json()


@of_every_endpoint
def test_null_is_the_same_as_absent(client: TestClient, engine: FakeEngine, endpoint: Endpoint) -> None:
    nothing = dict.fromkeys(endpoint.rules.keys() - endpoint.body.keys())
    answers = [post(client, endpoint), post(client, endpoint, **nothing)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    for plain, with_nulls in zip(engine.requests[::2], engine.requests[1::2], strict=True):
        assert [getattr(plain, name) for name in REQUEST] == [getattr(with_nulls, name) for name in REQUEST]


@pytest.mark.parametrize(
    ("rules", "body"),
    [
        (IN_BOTH, GenerationBody),
        (IN_CHAT, ChatBody),
        (IN_TEXT, CompletionBody),
        (IN_MESSAGE, ChatMessage),
        (IN_MESSAGES, MessagesBody),
        (IN_PROMPT, PromptBody),
        (IN_MESSAGE_COUNT, PromptBody),
        (IN_RESPONSES, ResponsesBody),
        (IN_INPUT, InputBody),
        (IN_RESPONSE_COUNT, InputBody),
        (IN_OLLAMA, OllamaBody),
        (IN_OLLAMA_CHAT, OllamaChatBody),
        (IN_GENERATE, OllamaGenerateBody),
        (IN_OLLAMA_MESSAGE, OllamaMessage),
        (IN_OPTIONS, Options),
        (IN_COMPLETION, LlamaCompletionBody),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_honoured_is_what_the_bodies_read(rules: Rules, body: type[BaseModel]) -> None:
    read = {name for name, rule in rules.items() if rule.is_read and rule.treatment is not Treatment.REFUSED}
    # What a body of llama.cpp has from another's and refuses.
    unread = {"n", "return_token_ids"} if body is LlamaCompletionBody else set()
    assert read == {field.alias or name for name, field in body.model_fields.items()} - unread
    assert {name for name, rule in rules.items() if rule.treatment is Treatment.HONOURED} <= read


@pytest.mark.parametrize(
    ("names", "rules"),
    [
        (message_create_params.MessageCreateParamsBase.__annotations__, IN_MESSAGES),
        (beta_params.MessageCreateParamsBase.__annotations__, IN_MESSAGES),
        (message_count_tokens_params.MessageCountTokensParams.__annotations__, IN_MESSAGE_COUNT),
        (response_create_params.ResponseCreateParamsBase.__annotations__, IN_RESPONSES),
        (input_token_count_params.InputTokenCountParams.__annotations__, IN_RESPONSE_COUNT),
        (_types.ChatRequest.model_fields, IN_OLLAMA_CHAT),
        (_types.GenerateRequest.model_fields, IN_GENERATE),
        (ollama.Options.model_fields, IN_OPTIONS),
        (ollama.Message.model_fields, IN_OLLAMA_MESSAGE),
    ],
)
def test_every_field_that_a_package_can_send_is_in_the_table(names: Mapping[str, Any], rules: Rules) -> None:
    assert set(names) - rules.keys() == set()
