"""`/v1/messages` and `/v1/messages/count_tokens` over a fake engine: what goes to the model and what comes back."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.output.call_formats import HERMES
from models.output.pieces import ReasoningFormat
from server.api.anthropic.conversation import MAX_CACHE_POINTS, MessagesBody, read_conversation, read_params
from server.api.binding import answer_grammar
from server.app.config import ServerConfig
from server.diagnosis.causes import Cause, Miss, MissReason
from server.engine.request import FinishReason
from tests.server.api.test_live import until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.fake_grammar import FakeCompiler

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
THINK = ReasoningFormat("<think>", "</think>", (5,))
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}
CALLING = Script(
    ("Let me look.\n<tool_", 'call>{"name": "get_weather", "arguments": {"city": ', '"Zür', 'ich"}}</tool_call>')
)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


class Served:
    """A server over a fake engine, and what its renderer was given."""

    def __init__(self, script: Script = Script(), **model: Any) -> None:  # noqa: B008 - frozen
        self.engine = FakeEngine(script)
        self.renderer = model.pop("renderer", None) or FakeRenderer()
        settings = {"prompt_hygiene": model.pop("prompt_hygiene", True), "api_key": model.pop("api_key", None)}
        served = fake_model(renderer=self.renderer, **model)
        self.client = TestClient(create_app(self.engine, served, ServerConfig(**settings)))

        self._num_rendered = 0

    def post(self, path: str = PATH, **fields: Any) -> Any:
        self._num_rendered = len(self.renderer.calls)
        body = {"messages": [HI], **({"max_tokens": 100} if path == PATH else {}), **fields}
        return self.client.post(path, json={name: value for name, value in body.items() if value is not ...})

    def ask(self, **fields: Any) -> dict[str, Any]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream; each has its type as its name."""
        answer = self.post(**fields, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = []
        for text in answer.text.strip().split("\n\n"):
            name, data = text.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    def refused(self, path: str = PATH, **fields: Any) -> str:
        answer = self.post(path, **fields)
        assert answer.status_code == 400, answer.text
        assert self.engine.requests == []
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        return str(body["error"]["message"])

    @property
    def messages(self) -> Any:
        """What the last prompt was rendered from; what is rendered behind an answer comes after it."""
        return self.rendered["messages"]

    @property
    def rendered(self) -> Any:
        return self.renderer.calls[self._num_rendered]


def shown(*messages: dict[str, Any], **fields: Any) -> Any:
    """What the template is given of messages."""
    served = Served()
    served.ask(messages=list(messages), **fields)
    return served.messages


# ------------------------------------------------------------------------------------------------------ answers


def usage_of(*counts: int) -> dict[str, Any]:
    """The usage with these tokens new, written and read, and of the answer."""
    told = {"server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0}, "service_tier": "standard"}
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    created = {"ephemeral_5m_input_tokens": counts[1], "ephemeral_1h_input_tokens": 0}
    counted = dict(zip(names, counts, strict=True))
    return {**counted, "cache_creation": created, "output_tokens_details": None, "inference_geo": None, **told}


def test_an_answer_of_nothing_has_no_blocks() -> None:
    assert Served(Script(())).ask()["content"] == []
    types = [event["type"] for event in Served(Script(())).stream()]
    assert types == ["message_start", "ping", "message_delta", "message_stop"]


def test_an_answer_that_fills_the_context_says_so() -> None:
    for fields in ({"max_tokens": 2}, {"max_tokens": 32000}):
        reason = "max_tokens" if fields["max_tokens"] == 2 else "model_context_window_exceeded"
        served = Served(Script(("a", "b"), FinishReason.LENGTH))
        assert served.ask(**fields)["stop_reason"] == served.stream(**fields)[-2]["delta"]["stop_reason"] == reason


def test_a_turn_is_evaluated_ahead_as_it_comes_back() -> None:
    served = Served(CALLING)
    with served.client:
        content = served.ask(tools=[TOOL])["content"]
        until(lambda: bool(served.engine.idle_requests))
    [ahead] = [call["messages"] for call in served.renderer.calls if len(call["messages"]) == 3]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "sunny"}
    served.ask(messages=[HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}])
    assert served.messages[1] == ahead[1]


def test_state_that_went_is_said_in_anthropics_words() -> None:
    miss = Miss(MissReason.EVICTED, 0, "system", 17, "It is 09:16", "It is 09:17", 12, cause=Cause.CLOCK)
    assert Served(Script(miss=miss)).ask()["diagnostics"]["cache_miss_reason"] == {"type": "unavailable"}


def test_no_edits_are_said_to_be_applied() -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert Served().ask(context_management=edits)["context_management"] == {"applied_edits": []}
    events = Served().stream(context_management=edits)
    assert events[0]["message"]["context_management"] == events[-2]["context_management"] == {"applied_edits": []}
    assert "context_management" not in Served().ask()


# ----------------------------------------------------------------------------------------------------- messages


def test_the_system_prompt_stands_first() -> None:
    blocks = [{"type": "text", "text": "Be terse."}, {"type": "text", "text": "Be kind.", **EPHEMERAL}]
    assert shown(HI, system="Be terse.")[0] == {"role": "system", "content": [{"text": "Be terse."}]}
    system = shown(HI, system=blocks)[0]
    assert [part["text"] for part in system["content"]] == ["Be terse.", "Be kind."]
    assert "cache_control" in system["content"][1] and "cache_control" not in system["content"][0]
    for none in ([], "", [{"type": "text", "text": ""}]):
        assert shown(HI, system=none)[0]["role"] == "user"


def test_a_system_message_may_stand_anywhere() -> None:
    roles = [message["role"] for message in shown(HI, {"role": "system", "content": "New tools."}, HI)]
    assert roles == ["user", "system", "user"]
    assert len(shown(HI, {"role": "system", "content": "Now."})) == 2


def test_results_of_tools_are_messages_of_their_own() -> None:
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "f", "input": {"n": n}} for n in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "two", **EPHEMERAL}]},
        {"type": "text", "text": "Go on."},
    ]
    _, answer, first, second, text = shown(
        HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Look: "}, *calls]},
        {"role": "user", "content": results},
    )
    function = {"name": "f", "arguments": {"n": 1}}
    assert answer["tool_calls"][0] == {"id": "toolu_1", "type": "function", "function": function}
    assert (answer["content"], len(answer["tool_calls"])) == ([{"text": "Look: "}], 2)
    assert first == {"role": "tool", "content": [{"text": "one"}], "tool_call_id": "toolu_1"}
    assert (second["tool_call_id"], second["content"][0]["text"]) == ("toolu_2", "two")
    assert second["content"][0]["cache_control"] is not None
    assert text == {"role": "user", "content": [{"text": "Go on."}]}


def test_texts_around_a_result_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    text = {"type": "text", "text": "a"}
    messages = shown(HI, {"role": "user", "content": [text, text, result, text]})[1:]
    assert [(message["role"], len(message["content"])) for message in messages] == [
        ("user", 2),
        ("tool", 0),
        ("user", 1),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("no such file", "Error: no such file"), ("error: none", "error: none"), (None, "Error: "), ("", "Error: ")],
)
def test_a_result_that_is_an_error_says_so(content: str | None, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": content}
    [_, message] = shown(HI, {"role": "user", "content": [result]})
    assert message["content"] == [{"text": expected}]


def test_thoughts_of_the_history_are_handed_to_the_template() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm", "signature": "from elsewhere"},
        {"type": "redacted_thinking", "data": "EmwKAhgB"},
        {"type": "text", "text": "Hel"},
        {"type": "text", "text": "lo"},
    ]
    answer = shown(HI, {"role": "assistant", "content": blocks}, HI)[1]
    assert answer == {"role": "assistant", "content": [{"text": "Hello"}], "reasoning_content": "Hm"}


def test_tools_have_the_form_that_templates_read() -> None:
    served = Served()
    served.ask(tools=[{**TOOL, "type": "custom", "strict": True, **EPHEMERAL}, {"name": "g", "input_schema": {}}])
    assert served.rendered["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather.",
                "parameters": {"type": "object"},
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]
    served.ask(tools=[TOOL], tool_choice={"type": "none"})
    assert served.rendered["tools"] is None


# ------------------------------------------------------------------------------------------------------- fields


def test_the_fields_reach_the_engine() -> None:
    served = Served()
    user_id = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})
    served.ask(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END", "\n\n"],
        metadata={"user_id": user_id},
    )
    [request] = served.engine.requests
    assert (request.max_tokens, request.stop, request.session_id) == (7, ("END", "\n\n"), "s-1")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 40)
    assert request.request_id.startswith("msg_")


def test_no_tokens_only_evaluate_the_prompt() -> None:
    served = Served(Script((), FinishReason.LENGTH))
    with served.client:
        body = served.ask(max_tokens=0)
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
    assert served.engine.requests[0].is_prefix_only
    assert served.engine.idle_requests == []


@pytest.mark.parametrize(
    ("thinking", "effort", "arguments", "limit"),
    [
        (None, None, {}, None),
        ({"type": "enabled", "budget_tokens": 1024}, None, {"enable_thinking": True}, 1024),
        ({"type": "enabled", "budget_tokens": 1024, "display": "summarized"}, None, {"enable_thinking": True}, 1024),
        ({"type": "disabled", "budget_tokens": 1024}, None, {"enable_thinking": False}, None),
        ({"type": "adaptive"}, None, {}, None),
        ({"type": "adaptive"}, "low", {"reasoning_effort": "low"}, None),
        ({"type": "between_tools"}, "max", {"reasoning_effort": "high"}, None),
        (None, "xhigh", {"reasoning_effort": "high"}, None),
    ],
)
def test_thinking_is_told_to_the_template(
    thinking: Any, effort: str | None, arguments: dict[str, Any], limit: int | None
) -> None:
    served = Served(reasoning_format=THINK)
    served.ask(thinking=thinking, output_config={"effort": effort})
    assert served.renderer.calls[0]["template_kwargs"] == arguments
    request = served.engine.requests[0]
    assert request.thinking is not None and request.thinking.max_tokens == limit


@pytest.mark.parametrize(
    ("choice", "may_call_again", "names"),
    [
        ({"type": "any"}, True, ("f", "g")),
        ({"type": "any", "disable_parallel_tool_use": True}, False, ("f", "g")),
        ({"type": "tool", "name": "g"}, False, ("g",)),
    ],
)
def test_forced_calls_bind_the_answer(choice: dict[str, Any], may_call_again: bool, names: tuple[str, ...]) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
    body = MessagesBody.model_validate({"messages": [HI], "max_tokens": 9, "tools": tools, "tool_choice": choice})
    syntax = HERMES
    model = fake_model(grammars=FakeCompiler(), call_format=syntax)
    conversation = read_conversation(body, model, "")
    wanted = answer_grammar(model, conversation, read_params(body, model).grammar)
    assert wanted is not None and wanted.param == "tool_choice"
    rules = wanted.grammar.text.splitlines()
    assert rules[1].startswith("calls: ") and rules[1].rstrip().endswith("function)*") == may_call_again
    assert [
        name for name in ("f", "g") if any(rule.split(": ", 1)[1].startswith(f'"{name}\\"') for rule in rules)
    ] == [*names]


@pytest.mark.parametrize(
    ("choice", "is_single"),
    [
        (None, False),
        ({"type": "auto"}, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ({"type": "none", "disable_parallel_tool_use": True}, False),
    ],
)
def test_an_answer_may_be_one_call_at_most(choice: dict[str, Any] | None, is_single: bool) -> None:
    served = Served()
    served.ask(tools=[TOOL], tool_choice=choice)
    assert (served.engine.requests[0].single_call is not None) == is_single


def test_anthropics_own_names_stand_for_the_only_model() -> None:
    assert Served().ask(model="claude-sonnet-4-5-20250929")["model"] == "tiny"
    assert Served().ask(model="tiny")["model"] == "tiny"
    assert Served().ask()["model"] == "tiny"
    missing = Served().post(model="gpt-5")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def points(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "a", **EPHEMERAL} for _ in range(count)]


def test_four_restore_points_may_be_asked_for() -> None:
    tools = [{**TOOL, **EPHEMERAL}]
    assert shown({"role": "user", "content": points(2)}, system=points(1), tools=tools)
    message = Served().refused(messages=[{"role": "user", "content": points(3)}], system=points(1), tools=tools)
    assert f"at most {MAX_CACHE_POINTS} blocks may hold cache_control, and 5 do" in message
    result = {"type": "tool_result", "tool_use_id": "a", "content": points(3), **EPHEMERAL}
    fields: dict[str, Any] = {"messages": [HI, {"role": "user", "content": [result]}], **EPHEMERAL}
    assert "and 5 do" in Served().refused(**fields)


def test_what_is_marked_counts_as_written_to_the_cache() -> None:
    ttl = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    usage = Served(Script(hit_tokens=3)).ask(**ttl)["usage"]
    assert usage == usage_of(0, 5, 3, 3)


def answered(block: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [block]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": ...}, "max_tokens: Field required"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [HI, {"role": "assistant", "content": "The "}]}, "its text ends with white space"),
        ({"messages": [HI, {"role": "assistant", "content": ""}]}, "it holds no text"),
        (
            {"messages": [HI, answered({"type": "tool_use", "id": "a", "name": "f", "input": {}})]},
            "tool_result is to",
        ),
        (
            {
                "messages": [HI, {"role": "assistant", "content": "The"}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
            "tool_choice has the answer begin with a call",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: Field required",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "role user"),
        ({"messages": [HI, answered({"type": "tool_result", "tool_use_id": "a"}), HI]}, "role assistant"),
        ({"messages": [HI, answered({"type": "server_tool_use"}), HI]}, "Anthropic's servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "there is no tool 'g'"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "much"}}, "capability_rejected: thinking_type:much"),
        ({"output_format": {"type": "json_object"}}, "output_format"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "prompt is too long: 306 tokens > 199 maximum"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in Served().refused(**fields)


def test_a_model_without_a_place_for_tools_says_so() -> None:
    served = Served(renderer=FakeRenderer(reads_tools=False))
    assert "does not support tools" in served.refused(tools=[TOOL])


# ------------------------------------------------------------------------------------------------ other endpoints


def test_the_count_is_that_of_the_prompt() -> None:
    served = Served()
    fields: dict[str, Any] = {"system": "Be terse.", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    counted = served.post(COUNT, **fields).json()
    assert served.engine.requests == []
    usage = served.ask(**fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize("fields", [{"messages": [{"role": "assistant", "content": "x"}]}, {"mcp_servers": [{}]}])
def test_what_no_prompt_can_be_made_of_is_not_counted(fields: dict[str, Any]) -> None:
    Served().refused(COUNT, **fields)


def test_the_models_are_listed_in_the_dialect_of_the_header() -> None:
    client, version = Served().client, {"anthropic-version": "2023-06-01"}
    page = client.get("/v1/models?limit=20", headers=version).json()
    [model] = page.pop("data")
    assert page == {"has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert model == {
        "type": "model", "id": "tiny", "display_name": "tiny", "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active", "max_input_tokens": 199, "max_tokens": 199,
    }  # fmt: skip
    assert client.get("/v1/models/tiny", headers=version).json() == model
    assert client.get("/v1/models/other", headers=version).json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("headers", [{"x-api-key": "secret"}, {"authorization": "Bearer secret"}])
def test_the_key_is_taken_from_either_header(headers: dict[str, str]) -> None:
    served = Served(api_key="secret")
    body = {"messages": [HI], "max_tokens": 5}
    refused = served.client.post(PATH, json=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert served.client.post(PATH, json=body, headers=headers).status_code == 200


def test_every_answer_has_a_request_id() -> None:
    client = Served().client
    for path in (PATH, COUNT):
        for body in ({"messages": [HI], "max_tokens": 5}, {}):
            answer = client.post(path, json=body)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_message_without_blocks_stays_in_its_place() -> None:
    served = Served()
    served.ask(messages=[HI, {"role": "assistant", "content": []}, HI])
    assert [one["role"] for one in served.messages] == ["user", "assistant", "user"]
