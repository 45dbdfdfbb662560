"""A tool whose keys come in another order is shown as it was first sent, in its namespace only; over HTTP."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.prompt.shapes import MAX_TOOL_BYTES, MAX_TOOLS, ToolOrders
from server.app.config import ServerConfig
from tests.server.api.test_live import Live, serving
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

DEMO = Path(__file__).parents[3] / "models" / "demo"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
SHUFFLED = {"properties": {"depth": {"type": "integer"}, "path": {"type": "string"}}, "type": "object"}
HI = [{"role": "user", "content": "Hi"}]


def function(schema: Any) -> dict[str, Any]:
    return {"name": "list", "description": "Lists a folder.", "parameters": schema}


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": function(schema)}


DIALECTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": lambda schema: {"messages": HI, "tools": [tool(schema)]},
    "/v1/responses": lambda schema: {"input": "Hi", "tools": [{"type": "function", **function(schema)}]},
    "/v1/messages": lambda schema: {
        "messages": HI,
        "max_tokens": 4,
        "tools": [{"name": "list", "description": "Lists a folder.", "input_schema": schema}],
    },
    "/api/chat": lambda schema: {"messages": HI, "tools": [tool(schema)], "stream": False},
}


def shown(path: str, schemas: list[tuple[Any, str]], **settings: Any) -> list[str]:
    """The tools that the template gets, for a schema and the key it comes with at a time."""
    model = fake_model()
    client = TestClient(create_app(FakeEngine(), model, ServerConfig(**settings)))
    for schema, key in schemas:
        body = {"model": "tiny", **DIALECTS[path](schema)}
        answer = client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
    calls: list[Any] = model.renderer.calls  # type: ignore[attr-defined]
    # Prompts of a next turn are rendered too.
    return [json.dumps(call["tools"]) for call in calls if len(call["messages"]) == 1]


@pytest.mark.parametrize("path", DIALECTS)
def test_a_tool_keeps_the_order_in_which_its_namespace_sent_it_first(path: str) -> None:
    first, second, other = shown(path, [(SCHEMA, "ours"), (SHUFFLED, "ours"), (SHUFFLED, "theirs")])
    assert first == second != other


def test_the_order_is_that_of_the_client_where_hygiene_is_off() -> None:
    first, second = shown("/v1/chat/completions", [(SCHEMA, "ours"), (SHUFFLED, "ours")], prompt_hygiene=False)
    assert first != second


def test_another_order_of_values_or_another_value_is_another_tool() -> None:
    orders = ToolOrders()
    for schema in ({"enum": [1, 2], "type": "integer"}, {"type": "integer", "enum": [2, 1]}, {"enum": [1, 2.0]}):
        assert json.dumps(orders.settle("", [tool(schema)])) == json.dumps([tool(schema)])


def test_what_is_remembered_is_bounded() -> None:
    orders = ToolOrders()
    long = "x" * MAX_TOOL_BYTES
    for schema in ({"a": 1, "b": long}, {"b": long, "a": 1}):
        assert json.dumps(orders.settle("", [tool(schema)])) == json.dumps([tool(schema)])
    orders.settle("", [tool(SCHEMA)])
    orders.settle("", [tool({"number": number}) for number in range(MAX_TOOLS)])
    assert json.dumps(orders.settle("", [tool(SHUFFLED)])) == json.dumps([tool(SHUFFLED)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("demo") / "tiny"
    shutil.copytree(DEMO, folder)
    with serving(folder, slots=2) as live:
        yield live


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_process_that_shuffles_its_tools_reuses_the_prompt_of_another(server: Live, choice: str) -> None:
    """A forced call is bound to the tools as they are shown, so both processes get the same answer."""

    def ask(schema: Any) -> Any:
        body = {"messages": HI, "tools": [tool(schema)], "tool_choice": choice, "temperature": 0, "max_tokens": 40}
        return server.post("/v1/chat/completions", **body, cache_salt=choice).json()

    first, second = ask(SCHEMA), ask(SHUFFLED)
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    told = [
        [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
        for answer in (first, second)
    ]
    assert told[0] == told[1] and bool(told[0]) == (choice == "required")
