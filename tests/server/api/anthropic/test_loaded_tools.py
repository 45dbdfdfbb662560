"""Tools that are loaded when they are needed: what the model is shown of them, where, and what it may call."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from starlette.testclient import TestClient

from models.names import DEMO
from models.output.call_formats import HERMES
from models.prompt import tokenize
from server.api.anthropic import api as messages_module
from server.api.anthropic.tool_search import BM25, MAX_SECONDS, REGEX, SearchFailed, find_tools
from server.app.config import ServerConfig
from tests.server.api.anthropic.test_messages import COUNT, HI, Served
from tests.server.api.test_live import serving
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, Script, fake_model
from tests.support.live_server import running


def roomy(script: Script = Script(), **model: Any) -> Served:  # noqa: B008 - frozen
    return Served(script, context_tokens=100_000, **model)


SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}


def tool(name: str, description: str = "", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": description or f"Does {name}.", "input_schema": {"type": "object"}, **fields}


def deferred(name: str, description: str = "", **fields: Any) -> dict[str, Any]:
    return tool(name, description, defer_loading=True, **fields)


def loading(*names: str, call: str = "toolu_1", then: Any = ()) -> list[dict[str, Any]]:
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": call, "content": [*references, *then]}
    use = {"type": "tool_use", "id": call, "name": "ToolSearch", "input": {"query": "x"}}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def definition(name: str) -> str:
    function = {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}
    return json.dumps({"type": "function", "function": function})


def named(tools: Any) -> list[str]:
    return [one["function"]["name"] for one in tools or ()]


def texts(message: Any) -> list[str]:
    return [part["text"] for part in message["content"]]


# ---------------------------------------------------------------------------------------------------- references


def test_deferred_tools_stay_out_of_the_head_and_out_of_the_count() -> None:
    served = roomy()
    tools = [SEARCH, tool("Read"), deferred("Placeholder"), deferred("ledger")]
    served.ask(tools=tools)
    assert named(served.rendered["tools"]) == ["ToolSearch", "Read"]
    assert served.post(COUNT, tools=tools).status_code == 200
    assert named(served.rendered["tools"]) == ["ToolSearch", "Read"]


def test_references_become_one_block_of_definitions_where_they_stand() -> None:
    served = roomy()
    note = {"type": "text", "text": "That is all."}
    served.ask(
        messages=[HI, *loading("ledger", "mail", then=[note])],
        tools=[SEARCH, deferred("mail"), deferred("ledger"), deferred("other")],
    )
    assert named(served.rendered["tools"]) == ["ToolSearch"]
    result = served.messages[-1]
    block = f"<functions>\n{definition('ledger')}\n{definition('mail')}\n</functions>"
    assert (result["role"], texts(result)) == ("tool", [block, "That is all."])


def test_a_reference_without_its_tool_is_no_error() -> None:
    served = roomy()
    served.ask(messages=[HI, *loading("gone")], tools=[SEARCH])
    assert texts(served.messages[-1]) == ["gone is no longer available."]


def test_a_definition_keeps_its_first_wording_in_its_conversation_only() -> None:
    served = roomy()
    messages = [HI, *loading("ledger")]
    served.ask(messages=messages, tools=[SEARCH, deferred("ledger")])
    first = texts(served.messages[-1])
    for tools in ([SEARCH, deferred("ledger", "Reworded.")], [SEARCH]):
        served.ask(messages=messages, tools=tools)
        assert texts(served.messages[-1]) == first
    others: dict[str, Any] = {"messages": [{"role": "user", "content": "Other"}, *loading("ledger")]}
    for fields in (others, {"messages": messages, "cache_salt": "elsewhere"}):
        served.ask(**fields, tools=[SEARCH, deferred("ledger", "Reworded.")])
        assert "Reworded." in texts(served.messages[-1])[0]


def test_a_mark_on_a_reference_is_a_restore_point_and_no_other_conversation() -> None:
    served = roomy()
    marked = loading("ledger")
    served.ask(messages=[HI, *marked], tools=[SEARCH, deferred("ledger")])
    marked[1]["content"][0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    hi = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    served.ask(messages=[hi, *marked], tools=[SEARCH, deferred("ledger", "Reworded.")])
    (part,) = served.messages[-1]["content"]
    assert part["cache_control"]["type"] == "ephemeral" and "Does ledger." in part["text"]


CALL_LEDGER = Script(('<tool_call>{"name": "ledger", "arguments": {}}</tool_call>',))


@pytest.mark.parametrize("tools", [[SEARCH, deferred("ledger")], [deferred("ledger")]])
def test_a_loaded_tool_is_called(tools: list[dict[str, Any]]) -> None:
    body = roomy(CALL_LEDGER).ask(messages=[HI, *loading("ledger")], tools=tools)
    assert [(one["type"], one["name"]) for one in body["content"]] == [("tool_use", "ledger")]


def callable_after(*messages: dict[str, Any], tools: list[dict[str, Any]]) -> set[str]:
    """The tools that a call can be forced of."""
    allowed = set()
    for name in {one["name"] for one in tools} | {"inline"}:
        answer = roomy().post(messages=[HI, *messages], tools=tools, tool_choice={"type": "tool", "name": name})
        assert (
            answer.status_code == 400
        )  # the fake cannot force calls; what it says of tools that are not there differs
        if "there is no tool" not in answer.text:
            allowed.add(name)
    return allowed


def changed(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def test_what_may_be_called_follows_the_conversation() -> None:
    tools = [SEARCH, deferred("ledger"), deferred("late"), deferred("other")]
    removal = changed("tool_removal", type="tool_reference", name="ledger")
    addition = changed("tool_addition", type="tool_reference", name="late")
    inline = changed("tool_addition", type="tool_definition", definition=tool("inline"))
    assert callable_after(tools=tools) == {"ToolSearch"}
    assert callable_after(*loading("ledger"), tools=tools) == {"ToolSearch", "ledger"}
    assert callable_after(*loading("ledger"), removal, tools=tools) == {"ToolSearch"}
    assert callable_after(addition, tools=tools) == {"ToolSearch", "late"}
    assert callable_after(inline, tools=tools) == {"ToolSearch", "inline"}
    assert callable_after(removal, *loading("ledger"), tools=tools) == {"ToolSearch", "ledger"}


def test_changes_are_told_where_they_stand() -> None:
    served = roomy()
    served.ask(
        messages=[
            HI,
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
            changed("tool_addition", type="tool_definition", definition=tool("inline")),
            changed("tool_removal", type="tool_reference", name="Read"),
        ],
        tools=[tool("Read")],
    )
    assert named(served.rendered["tools"]) == ["Read"], "the head stays as it is"
    added, removed = served.messages[-2:]
    assert added["role"] == removed["role"] == "system"
    assert texts(added) == [f"<functions>\n{definition('inline')}\n</functions>"]
    assert texts(removed) == ["Read is no longer available."]


def test_what_a_conversation_defines_itself_is_worded_as_it_says() -> None:
    served = roomy()
    for description in ("One.", "Other."):
        inline = changed("tool_addition", type="tool_definition", definition=tool("inline", description))
        served.ask(messages=[HI, inline])
        assert description in texts(served.messages[-1])[0]


def test_no_tool_is_called_where_none_may_be_though_it_was_added() -> None:
    inline = changed("tool_addition", type="tool_definition", definition=tool("ledger"))
    body = roomy(CALL_LEDGER).ask(messages=[HI, inline], tool_choice={"type": "none"})
    assert [one["type"] for one in body["content"]] == ["text"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "tool_reference", "name": "x"}], "tool_name"),
        ([{"type": "puzzle", "pieces": 7}], "puzzle is not a known type of block"),
    ],
)
def test_what_a_result_cannot_hold_is_refused_by_name(content: Any, message: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    assert message in roomy().refused(messages=[HI, loading()[0], {"role": "user", "content": [result]}])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "note", "text": "one\ntwo"},
        {"type": "compaction", "content": "one\ntwo"},
        {"type": "search_result", "title": "t", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
    ],
)
def test_an_unknown_block_of_text_is_text(block: dict[str, Any]) -> None:
    served = roomy()
    served.ask(messages=[{"role": "user", "content": [block]}])
    assert texts(served.messages[-1]) == ["one\ntwo"]


@pytest.mark.parametrize(
    "change",
    [
        {"type": "tool_reference"},
        {"type": "tool_definition"},
        {"type": "mcp_tool_reference", "server_name": "s", "name": "x"},
    ],
)
def test_a_change_says_of_which_tool(change: dict[str, Any]) -> None:
    assert "messages[1].content[0]" in roomy().refused(messages=[HI, changed("tool_addition", **change)])


# ------------------------------------------------------------------------------------------------------ searches

MANY = [
    deferred("get_weather", "The weather of a city."),
    deferred("sendMail", "Sends a message to somebody."),
    deferred("list_mails", "Lists the messages of a folder.", input_schema={"properties": {"mailbox": {}}}),
    deferred("add", "Adds two numbers."),
]
FUNCTIONS = [
    {"function": {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}} for t in MANY
]


@pytest.mark.parametrize(
    ("search", "query", "found"),
    [
        (REGEX, "mail", ["sendMail", "list_mails"]),
        (REGEX, "^(ADD|get_.*)$", ["get_weather", "add"]),
        (REGEX, "mailbox", ["list_mails"]),
        (REGEX, "nothing like it", []),
        (BM25, "how is the weather in a city", ["get_weather", "list_mails"]),
        (BM25, "send a mail", ["sendMail", "get_weather", "list_mails"]),
        (BM25, "mailbox", ["list_mails"]),
        (BM25, "?!", []),
    ],
)
def test_a_search_finds_names_descriptions_and_arguments(search: str, query: str, found: list[str]) -> None:
    assert find_tools(search, {"query": query}, FUNCTIONS)[: len(found)] == found
    assert found or not find_tools(search, {"query": query}, FUNCTIONS)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("(", "invalid_tool_input"),
        ("", "invalid_tool_input"),
        ("x" * 201, "invalid_tool_input"),
        (7, "invalid_tool_input"),
        ("(a{999}){999}", "invalid_tool_input"),
        ("(?:" * 30 + "a" + "+)" * 30 + "+b", "invalid_tool_input"),
        ("(?:" * 20 + "a" + "){1,}" * 20, "invalid_tool_input"),
        ("(?x)(?:a { 9 9 9 9 9 9 9 9 })", "invalid_tool_input"),
        ("(a+)+b", "execution_time_exceeded"),
    ],
)
def test_a_search_that_cannot_run_says_why(query: Any, code: str) -> None:
    functions = [{"function": {"name": "a" * 60, "description": "a" * 9000}}]
    with pytest.raises(SearchFailed, match=code):
        find_tools(REGEX, {"query": query}, functions)


@pytest.mark.parametrize("search", [REGEX, BM25])
def test_a_search_as_a_whole_takes_a_second_at_most(search: str) -> None:
    many = [{"function": {"name": "other"}}] * 100 + [{"function": {"name": "weather"}}]
    assert find_tools(search, {"query": "weather"}, many, now=lambda: 7.0) == ["weather"]
    readings = itertools.count(7.0, 0.01)
    with pytest.raises(SearchFailed, match="execution_time_exceeded"):
        find_tools(search, {"query": "weather"}, many, now=lambda: next(readings))
    assert next(readings) == pytest.approx(7.0 + MAX_SECONDS, abs=0.03)


def searching(search: str, query: str) -> Script:
    call = json.dumps({"name": search, "arguments": {"query": query}})
    return Script(("I look.", f"<tool_call>{call}</tool_call>"))


class TakingTurns(FakeEngine):
    """Answers each request with the next script."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(scripts[0])
        self._scripts = scripts

    def submit(self, request: Any) -> Any:
        self.script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        return super().submit(request)


@pytest.fixture
def answers() -> Iterator[Any]:
    """Asks a live server whose engine follows scripts, with Anthropic's package."""
    stack: list[Any] = []

    def ask(*scripts: Script, tools: list[Any], **fields: Any) -> tuple[Any, Any, TakingTurns, FakeRenderer]:
        engine, renderer = TakingTurns(*scripts), FakeRenderer()
        model = fake_model(context_tokens=100_000, renderer=renderer, call_format=HERMES)
        server = running(create_app(engine, model, ServerConfig()))
        stack.append(server)
        client = anthropic.Anthropic(base_url=server.__enter__(), api_key="none", max_retries=0)
        asked = {"model": "tiny", "max_tokens": 100, "messages": [HI], "tools": tools, **fields}
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            return stream.get_final_message(), kinds, engine, renderer

    yield ask
    for server in stack:
        server.__exit__(None, None, None)


REGEX_TOOL = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
CALL_WEATHER = Script(('<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>',))


def test_a_search_runs_here_and_the_answer_goes_on(answers: Any) -> None:
    message, kinds, engine, renderer = answers(searching(REGEX, "weather"), CALL_WEATHER, tools=[REGEX_TOOL, *MANY])
    kinds_of_blocks = [block.type for block in message.content]
    assert kinds_of_blocks == ["text", "server_tool_use", "tool_search_tool_result", "tool_use"]
    search, result, call = message.content[1:]
    assert (search.name, search.input) == (REGEX, {"query": "weather"}) and search.id.startswith("srvtoolu_")
    assert result.tool_use_id == search.id
    assert [reference.tool_name for reference in result.content.tool_references] == ["get_weather"]
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Bonn"}, "tool_use")
    assert kinds.count("message_start") == kinds.count("message_stop") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert message.usage.output_tokens == 3, "both parts count"
    first, second = engine.requests[:2]
    assert named(renderer.calls[0]["tools"]) == ["tool_search_tool_regex"]
    assert second.max_tokens == first.max_tokens - 2
    shown = next(call for call in renderer.calls if call["messages"][-1]["role"] == "tool")["messages"]
    assert [one["role"] for one in shown] == ["user", "assistant", "tool"]
    assert "The weather of a city." in texts(shown[-1])[0]


def test_what_was_searched_comes_back_as_it_was(answers: Any) -> None:
    tools = [REGEX_TOOL, *MANY]
    message, _, _, renderer = answers(searching(REGEX, "weather"), Script(("Sunny.",)), tools=tools)
    assert (message.stop_reason, message.content[-1].text) == ("end_turn", "Sunny.")
    shown = next(call for call in renderer.calls if call["messages"][-1]["role"] == "tool")["messages"]
    again = roomy(CALL_WEATHER)
    history = [HI, {"role": "assistant", "content": [block.to_dict() for block in message.content]}]
    body = again.ask(messages=[*history, {"role": "user", "content": "And now?"}], tools=tools)
    assert again.messages[:3] == shown
    assert body["content"][0]["name"] == "get_weather", "what was found may be called"


def test_calls_of_the_client_end_the_answer_with_the_search_run(answers: Any) -> None:
    both = Script((*searching(BM25, "weather").texts, '<tool_call>{"name": "Read", "arguments": {}}</tool_call>'))
    message, _, engine, _ = answers(
        both, tools=[{"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"}, tool("Read"), *MANY]
    )
    kinds_of_blocks = [block.type for block in message.content]
    assert kinds_of_blocks == ["text", "server_tool_use", "tool_use", "tool_search_tool_result"]
    assert message.stop_reason == "tool_use" and len([one for one in engine.requests if not one.is_idle_work]) == 1


def test_a_search_that_fails_is_told_to_the_model_and_the_client(answers: Any) -> None:
    message, _, _, renderer = answers(searching(REGEX, "("), Script(("No luck.",)), tools=[REGEX_TOOL, *MANY])
    assert message.content[2].content.error_code == "invalid_tool_input"
    shown = next(call for call in renderer.calls if call["messages"][-1]["role"] == "tool")["messages"]
    assert texts(shown[-1]) == ["Error: invalid_tool_input"]


def test_a_search_keeps_no_other_request_waiting(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def find(*given: Any) -> list[str]:
        names.append(threading.current_thread().name)
        return find_tools(*given)

    monkeypatch.setattr(messages_module, "find_tools", find)
    answers(searching(REGEX, "weather"), Script(("Sunny.",)), tools=[REGEX_TOOL, *MANY])
    assert [name.partition("_")[0] for name in names] == ["search"], "no planning thread either"


def test_parts_have_as_many_tokens_as_the_request_allows_together(answers: Any) -> None:
    tools = [REGEX_TOOL, *MANY]
    message, _, engine, _ = answers(searching(REGEX, "weather"), CALL_WEATHER, tools=tools, max_tokens=2)
    assert message.usage.output_tokens == 2 and len(engine.requests) == 1
    assert message.stop_reason == "pause_turn"


def test_an_answer_that_only_searches_is_paused(answers: Any) -> None:
    message, _, engine, _ = answers(searching(REGEX, "weather"), tools=[REGEX_TOOL, *MANY])
    assert message.stop_reason == "pause_turn"
    assert len([one for one in engine.requests if not one.is_idle_work]) == 8


def asked_whole(engine: FakeEngine) -> tuple[TestClient, dict[str, Any]]:
    """The answer of a search, which is not streamed, and the client that got it."""
    app = create_app(engine, fake_model(context_tokens=100_000, call_format=HERMES), ServerConfig())
    engine.pool = app.state.api.pool  # type: ignore[attr-defined]
    client = TestClient(app)
    body = {"messages": [HI], "max_tokens": 100, "tools": [REGEX_TOOL, *MANY]}
    answer = client.post("/v1/messages", json=body, headers={"x-session-id": "s"})
    assert answer.status_code == 200, answer.text
    return client, answer.json()


def test_each_part_is_a_turn_that_goes_on_from_the_part_before() -> None:
    client, answer = asked_whole(TakingTurns(searching(REGEX, "weather"), CALL_WEATHER))
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["text", "server_tool_use", "tool_search_tool_result", "tool_use"]
    assert (answer["usage"]["output_tokens"], answer["stop_reason"]) == (3, "tool_use")
    turns = [(turn["id"], turn["previous"]) for turn in client.get("/v1/sessions/s").json()["turns"]]
    assert turns == [(answer["id"], None), (f"{answer['id']}-2", answer["id"])]


def test_an_answer_ends_with_what_it_has_where_the_queue_is_full() -> None:
    class Full(FakeEngine):
        def submit(self, request: Any) -> Any:
            self.max_waiting = 0 if self.requests else None
            return super().submit(request)

    _, answer = asked_whole(Full(searching(REGEX, "weather")))
    assert (answer["content"][-1]["type"], answer["stop_reason"]) == ("tool_search_tool_result", "pause_turn")


def test_an_answer_goes_on_although_another_model_waits_for_the_memory_of_its_own() -> None:
    class Wanted(TakingTurns):
        pool: Any = None

        def submit(self, request: Any) -> Any:
            for member in self.pool.members:
                member.is_leaving = True
            return super().submit(request)

    _, answer = asked_whole(Wanted(searching(REGEX, "weather"), CALL_WEATHER))
    assert answer["stop_reason"] == "tool_use"


# ----------------------------------------------------------------------------------- a real model and the package


def test_a_load_costs_its_definition_and_the_next_turn_its_message() -> None:
    tools: Any = [SEARCH, *(deferred(f"tool_{number}", "Some work in the office. " * 8) for number in range(40))]
    with serving(DEMO) as live, anthropic.Anthropic(base_url=live.address, api_key="none", max_retries=0) as client:

        def evaluated(messages: list[Any], tools: Any) -> tuple[int, int]:
            usage = client.messages.create(model=live.model, max_tokens=1, messages=messages, tools=tools).usage
            live.wait_until_idle()
            read = usage.cache_read_input_tokens or 0
            return usage.input_tokens + (usage.cache_creation_input_tokens or 0), read

        def count(messages: list[Any]) -> int:
            return client.messages.count_tokens(model=live.model, messages=messages, tools=tools).input_tokens

        short, loaded = [HI], [HI, *loading("tool_7")]
        assert count(short) < 400, "forty deferred tools are not counted"
        evaluated(short, tools)
        new, read = evaluated(loaded, tools)
        assert read >= count(short) - 8 and new + read == count(loaded)
        later = [*loaded, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
        gone = [one for one in tools if one["name"] != "tool_7"]
        _, read = evaluated(later, gone)
        assert read >= count(loaded) - 8, "its server has gone, and nothing is evaluated again"


def test_a_definition_that_is_shown_again_and_again_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_REPEATED_BYTES", 300_000)
    served = roomy()
    tools = [SEARCH, deferred("ledger", "d" * 50_000)]
    turns = [loading("ledger", call=f"toolu_{number}") for number in range(40)]
    assert served.post(COUNT, messages=[HI, *turns[0], *turns[1]], tools=tools).status_code == 200
    drawn = len(served.renderer.calls)
    refused = served.post(COUNT, messages=[HI, *(one for turn in turns for one in turn)], tools=tools)
    assert refused.status_code == 400 and "more than 300000 bytes" in refused.json()["error"]["message"]
    assert len(served.renderer.calls) - drawn < 20, "the work ends there"


def test_a_search_reads_the_beginning_of_a_long_description() -> None:
    tools = [{"function": {"name": "a", "description": "x " * 40_000 + "needle"}}]
    for search in (REGEX, BM25):
        assert find_tools(search, {"query": "needle"}, tools) == []
        assert find_tools(search, {"query": "x"}, tools) == ["a"]
