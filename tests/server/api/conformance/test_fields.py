"""No field that a client of any dialect knows is ignored: it is honoured, refused in words, or changes nothing."""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
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

from server.api.anthropic.conversation import IN_MESSAGES, IN_PROMPT, MessagesBody, PromptBody
from server.api.bodies import Rules
from server.api.generation import IGNORED_OPTIONS, IN_TEXT, Options
from server.api.llama_cpp.api import IN_COMPLETION, LlamaCompletionBody
from server.api.ollama.generate import IN_BOTH as IN_OLLAMA
from server.api.ollama.generate import IN_GENERATE, OllamaChatBody, OllamaGenerateBody, OllamaMessage
from server.api.openai.chat import IN_CHAT, ChatBody
from server.api.openai.generate import CompletionBody
from server.api.responses.conversation import IN_INPUT, IN_RESPONSES, KNOWN, WITHOUT_EFFECT, InputBody, ResponsesBody
from tests.support.docs import Page, fields
from tests.support.fake_engine import FakeEngine

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKING = [{"an": "object that no field takes"}]
"""A value that is neutral nowhere."""
REQUEST = ("max_tokens", "sampling", "stop", "session_id", "namespace", "cache_prompt", "priority", "speculates")
"""What no field without effect may change in a request to the engine."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint, the smallest body that it serves, its type, and what is refused and ignored."""

    path: str
    body: Mapping[str, Any]
    kind: type[BaseModel]
    rules: Rules
    ignored: Iterable[str]
    typed: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields without effect whose type is checked."""
    ignores_unknown: bool = True


ASKED_BY = {"user": "me", "safety_identifier": "me"}
RESPONSE_TYPES = {"truncation": "auto", "parallel_tool_calls": False}
STORED = {"previous_response_id", "conversation"}
"""Sessions are found by these."""
OF_COMPLETIONS = Page("api.md").without_effect("Fields of both completion endpoints") - STORED
OF_MESSAGES = Page("anthropic.md").without_effect("Fields of `POST /v1/messages`")
OF_COUNT = OF_MESSAGES | fields(MessagesBody) - fields(PromptBody)
OF_RESPONSE_COUNT = KNOWN - IN_INPUT.keys() - fields(InputBody)
OF_OLLAMA = Page("ollama.md").without_effect("Fields of both endpoints")
PROMPT = {"prompt": "Hi"}
ENDPOINTS = (
    Endpoint("/v1/chat/completions", {"messages": HI}, ChatBody, IN_CHAT, OF_COMPLETIONS, ASKED_BY),
    Endpoint("/v1/completions", PROMPT, CompletionBody, IN_TEXT, OF_COMPLETIONS, ASKED_BY),
    Endpoint("/v1/messages", {"messages": HI, "max_tokens": 9}, MessagesBody, IN_MESSAGES, OF_MESSAGES),
    Endpoint("/v1/messages/count_tokens", {"messages": HI}, PromptBody, IN_PROMPT, OF_COUNT),
    Endpoint(
        *("/v1/responses", {"input": "Hi"}, ResponsesBody, IN_RESPONSES, WITHOUT_EFFECT),
        {**ASKED_BY, **RESPONSE_TYPES, "max_tool_calls": 1},
        ignores_unknown=False,
    ),
    Endpoint(
        *("/v1/responses/input_tokens", {"input": "Hi"}, InputBody, IN_INPUT, OF_RESPONSE_COUNT, RESPONSE_TYPES),
        ignores_unknown=False,
    ),
    Endpoint("/api/chat", {"model": "tiny", "messages": HI, "stream": False}, OllamaChatBody, IN_OLLAMA, OF_OLLAMA),
    Endpoint(
        "/api/generate", {"model": "tiny", **PROMPT, "stream": False}, OllamaGenerateBody, IN_GENERATE, OF_OLLAMA
    ),
    Endpoint("/completion", PROMPT, LlamaCompletionBody, IN_COMPLETION, OF_COMPLETIONS, ASKED_BY),
)
of_every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)


@pytest.fixture
def client(client: TestClient) -> Iterator[TestClient]:
    """One event loop for all requests: a loop for each would take most of the time."""
    with client:
        yield client


def post(client: TestClient, endpoint: Endpoint, **fields: Any) -> Any:
    content = json.dumps({**endpoint.body, **fields})
    return client.post(endpoint.path, content=content, headers={"content-type": "application/json"})


@of_every_endpoint
def test_every_refused_field_is_refused_with_its_reason_and_neutral_values_are_taken(
    client: TestClient, engine: FakeEngine, endpoint: Endpoint
) -> None:
    for name in endpoint.rules:
        answer = post(client, endpoint, **{name: ASKING})
        assert answer.status_code == 400, name
        assert endpoint.rules[name].why in json.dumps(answer.json()["error"], ensure_ascii=False), name
    assert engine.requests == []
    for name in endpoint.rules:
        for value in (*endpoint.rules[name].neutral, None):
            answer = post(client, endpoint, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)


@of_every_endpoint
def test_every_field_without_effect_is_taken_and_has_none(
    client: TestClient, engine: FakeEngine, endpoint: Endpoint
) -> None:
    fields = {**dict.fromkeys(endpoint.ignored, ASKING), **endpoint.typed}
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
    nothing = dict.fromkeys({*endpoint.rules, *endpoint.ignored, *fields(endpoint.kind)} - endpoint.body.keys())
    answers = [post(client, endpoint), post(client, endpoint, **nothing)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    for plain, with_nulls in zip(engine.requests[::2], engine.requests[1::2], strict=True):
        assert [getattr(plain, name) for name in REQUEST] == [getattr(with_nulls, name) for name in REQUEST]


COUNTED = message_count_tokens_params.MessageCountTokensParams.__annotations__


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (
            message_create_params.MessageCreateParamsBase.__annotations__,
            {*IN_MESSAGES, *OF_COUNT, *fields(PromptBody)},
        ),
        (beta_params.MessageCreateParamsBase.__annotations__, {*IN_MESSAGES, *OF_COUNT, *fields(PromptBody)}),
        (COUNTED, {*IN_PROMPT, *OF_COUNT, *fields(PromptBody)}),
        (response_create_params.ResponseCreateParamsBase.__annotations__, KNOWN),
        (input_token_count_params.InputTokenCountParams.__annotations__, KNOWN),
        (_types.ChatRequest.model_fields, {*IN_OLLAMA, *OF_OLLAMA, *fields(OllamaChatBody)}),
        (_types.GenerateRequest.model_fields, {*IN_GENERATE, *OF_OLLAMA, *fields(OllamaGenerateBody)}),
        (ollama.Options.model_fields, {*IGNORED_OPTIONS, *fields(Options)}),
        (ollama.Message.model_fields, fields(OllamaMessage)),
    ],
)
def test_every_field_that_a_package_can_send_is_read_refused_or_documented(
    names: Mapping[str, Any], known: Set[str]
) -> None:
    assert set(names) - known == set()
