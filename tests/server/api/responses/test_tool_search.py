"""Tools that a client of the Responses API searches for: shown where they are found, called by their own names."""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from models.output.call_formats import HERMES
from models.prompt import tokenize
from server.api.responses.conversation import read_messages, read_tools
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running

SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
ASK = {"type": "message", "role": "user", "content": "Hi"}


def office(*names: str, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "description": f"Does {name}.", **fields} for name in names]
    return {"type": "namespace", "name": "mcp__office", "description": "", "tools": tools}


def searched(*found: dict[str, Any], call: str = "call_1") -> list[dict[str, Any]]:
    return [
        ASK,
        {"type": "tool_search_call", "call_id": call, "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": call, "execution": "client", "tools": list(found)},
    ]


def calling(name: str, **arguments: Any) -> Script:
    return Script((f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",))


class Served:
    def __init__(self, script: Script = Script()) -> None:  # noqa: B008 - frozen
        self.engine, self.renderer = FakeEngine(script), FakeRenderer()
        model = fake_model(renderer=self.renderer, call_format=HERMES, context_tokens=100_000)
        self.client = TestClient(create_app(self.engine, model, ServerConfig()))

    def ask(self, **fields: Any) -> dict[str, Any]:
        seen = len(self.renderer.calls)
        answer = self.client.post("/v1/responses", json={"input": "Hi", "store": False, **fields})
        assert answer.status_code == 200, answer.text
        self.rendered = self.renderer.calls[seen]
        body: dict[str, Any] = answer.json()
        return body

    @property
    def head(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.rendered["tools"] or ()]

    def text(self, index: int) -> str:
        return "".join(part["text"] for part in self.rendered["messages"][index]["content"])


def test_a_search_of_the_client_is_shown_and_called_as_what_it_is() -> None:
    served = Served(calling("tool_search", query="ledger", limit=3))
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    output = served.ask(tools=[{**SEARCH, "parameters": parameters}])["output"]
    (shown,) = served.rendered["tools"]
    assert shown["function"] == {"name": "tool_search", "description": "Finds tools.", "parameters": parameters}
    (call,) = output
    assert (call["type"], call["execution"], call["status"]) == ("tool_search_call", "client", "completed")
    assert call["arguments"] == {"query": "ledger", "limit": 3} and call["call_id"]


def test_what_was_found_is_shown_where_it_was_and_called_with_its_namespace() -> None:
    served = Served(calling("mcp__office__ledger_lookup", id=7))
    found = office("ledger_lookup", defer_loading=True)
    output = served.ask(tools=[SEARCH], input=searched(found))["output"]
    assert served.head == ["tool_search"], "the head stays as it is"
    roles = [message["role"] for message in served.rendered["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert served.rendered["messages"][1]["tool_calls"][0]["function"]["name"] == "tool_search"
    text = served.text(2)
    assert text.startswith("<functions>\n") and text.endswith("\n</functions>")
    assert '"name": "mcp__office__ledger_lookup"' in text and "defer_loading" not in text
    assert [(one["type"], one["namespace"], one["name"]) for one in output] == [
        ("function_call", "mcp__office", "ledger_lookup")
    ]


def test_a_definition_keeps_its_first_wording() -> None:
    served = Served()
    served.ask(tools=[SEARCH], input=searched(office("ledger")))
    first = served.text(2)
    served.ask(tools=[SEARCH], input=searched(office("ledger", parameters={"type": "object"})))
    assert served.text(2) == first


def test_what_later_searches_find_is_shown_there() -> None:
    served = Served(calling("mcp__office__b"))
    items = [*searched(office("a")), *searched(office("a", "b"), call="call_2")[1:]]
    (call,) = served.ask(tools=[SEARCH], input=items)["output"]
    assert "mcp__office__b" not in served.text(2) and "mcp__office__b" in served.text(4)
    assert (call["namespace"], call["name"]) == ("mcp__office", "b")


def test_deferred_tools_wait_for_a_search_of_the_client_only() -> None:
    served = Served()
    served.ask(tools=[SEARCH, office("late", defer_loading=True), office("now") | {"name": "other"}])
    assert served.head == ["tool_search", "other__now"]
    served.ask(tools=[{"type": "tool_search"}, office("late", defer_loading=True)])
    assert served.head == ["mcp__office__late"], "nobody else would find it"


def test_a_search_that_found_nothing_says_so() -> None:
    served = Served()
    served.ask(tools=[SEARCH], input=searched())
    assert served.text(2) == "No tool was found."


def test_many_results_cost_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = list[int]()

    def counted(data: bytes) -> Any:
        digests.append(len(data))
        return sha256(data)

    monkeypatch.setattr("server.api.responses.conversation.hashlib.sha256", counted)
    served = Served()
    items = [one for number in range(200) for one in searched(office(f"t{number % 50}"), call=f"c{number}")[1:]]
    served.ask(tools=[SEARCH], input=[{**ASK, "content": "x" * 5000}, *items])
    assert sum(size > 5000 for size in digests) == 1, "what the user said first is read once"
    monkeypatch.setattr(tokenize, "MAX_REPEATED_BYTES", 300_000)
    big = office("big", description="d" * 50_000)
    refused = served.client.post(
        "/v1/responses", json={"tools": [SEARCH], "input": [ASK, *searched(*[big], call="a")[1:] * 20]}
    )
    assert refused.status_code == 400 and "more than 300000 bytes" in refused.json()["error"]["message"]


def test_found_tools_are_joined_in_order_and_the_first_wording_stays() -> None:
    found = [
        read_tools([office(name, description=name * number)]) for number, name in enumerate(["ab", "b", "ab"], 1)
    ]
    given = read_tools([office("own")])
    joined = given.with_found(found)
    assert [tool["function"]["name"] for tool in joined.callable_tools] == [
        f"mcp__office__{name}" for name in ("own", "ab", "b")
    ]
    assert joined.found[0]["function"]["description"] == "ab" and set(joined.by_name) == {
        f"mcp__office__{name}" for name in ("own", "ab", "b")
    }


class Text(str):
    """Counts how many characters are copied behind it."""

    copied = 0

    def __add__(self, other: str) -> "Text":
        Text.copied += len(self) + len(other)
        return Text(str.__add__(self, other))


def test_thoughts_in_a_row_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.responses.conversation.reasoning_of", lambda *texts: Text("x" * 100))
    (message,) = read_messages([{"type": "reasoning"}] * 500)
    assert len(message["reasoning_content"]) == 50_000 and Text.copied < 200_000


def test_searches_of_another_server_are_left_out() -> None:
    served = Served()
    items = [ASK, {"type": "tool_search_call", "arguments": {}}, {"type": "tool_search_output", "tools": []}]
    served.ask(tools=[SEARCH], input=items)
    assert [message["role"] for message in served.rendered["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "tool_search_output", "call_id": "c", "tools": "x"}, "input[0].tools"),
        ({"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function"}]}, "input.tools[0].name"),
        ({"type": "tool_search_call", "call_id": "c", "arguments": "x"}, "input[0].arguments"),
    ],
)
def test_a_wrong_item_is_refused_by_name(item: dict[str, Any], param: str) -> None:
    answer = Served().client.post("/v1/responses", json={"input": [item], "tools": [SEARCH]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    engine = FakeEngine(calling("tool_search", query="ledger"))
    model = fake_model(context_tokens=100_000)
    with running(create_app(engine, model, ServerConfig())) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_the_package_of_openai_reads_a_search_from_a_stream(client: openai.OpenAI) -> None:
    tools: Any = [SEARCH]
    with client.responses.stream(model="tiny", input="Hi", tools=tools) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_response().output
    assert call.type == "tool_search_call" and call.arguments == {"query": "ledger"}
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1
    assert not any("arguments" in kind for kind in kinds)


def test_a_stored_search_goes_on(client: openai.OpenAI) -> None:
    tools: Any = [SEARCH]
    first = client.responses.create(model="tiny", input="Hi", tools=tools)
    (call,) = first.output
    assert call.type == "tool_search_call"
    found: Any = {
        "type": "tool_search_output",
        "call_id": call.call_id,
        "execution": "client",
        "tools": [office("a")],
    }
    second = client.responses.create(model="tiny", input=[found], tools=tools, previous_response_id=first.id)
    assert second.status == "completed"
