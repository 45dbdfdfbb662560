"""What the proofs with coding agents rest on: scripted words over real state."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai import OpenAI

from models.names import DEMO_FOLDER
from models.output.call_formats import find_call_format
from scripts.clients.__main__ import CALL_FORMATS
from scripts.clients.agents import AGENTS
from scripts.clients.interleaved import Spelling
from scripts.clients.packages import BENCHMARKS, PACKAGES, PROGRAMS
from scripts.clients.scripted_model import call_template
from scripts.clients.scripted_server import Reply, ScriptedEngine, scripted_server, tokenizer_of
from tests.support.call_writer import written

READ: Any = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
SCRIPT = [Reply("I read it.", "read", {"path": "a.txt"}), Reply("Done.")]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[OpenAI, ScriptedEngine]]:
    with scripted_server(DEMO_FOLDER) as (url, engine):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), engine


def wait_for_idle_work(engine: ScriptedEngine) -> None:
    """Until the reply was evaluated as the next prompt shows it."""
    deadline = time.monotonic() + 120
    # In this order: idle work that begins between the two looks is then seen as open.
    while not any(exchange.is_idle_work for exchange in engine.exchanges) or engine.stats().num_open:
        assert time.monotonic() < deadline, "the engine did not work while it was idle"
        time.sleep(0.005)


def test_an_agents_turns_follow_the_script(served: tuple[OpenAI, ScriptedEngine]) -> None:
    client, engine = served
    engine.begin(SCRIPT)
    messages: list[Any] = [{"role": "user", "content": "Read a.txt."}]
    first = client.chat.completions.create(model="demo", messages=messages, tools=[READ])
    calls: Any = first.choices[0].message.tool_calls
    call = calls[0]
    assert (first.choices[0].message.content, call.function.arguments) == ("I read it.", '{"path": "a.txt"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "hello"}
    messages += [first.choices[0].message.model_dump(exclude_none=True), result]
    wait_for_idle_work(engine)
    last = client.chat.completions.create(model="demo", messages=messages, tools=[READ])
    assert last.choices[0].message.content == "Done."
    assert [exchange.cached_tokens > 0 for exchange in engine.answered()] == [False, True]
    assert engine.reused_share() >= 0.95


def test_a_reply_in_the_tokenizers_own_tokens_is_reused_at_once() -> None:
    with (
        scripted_server(DEMO_FOLDER, binder=Spelling(DEMO_FOLDER)) as (url, engine),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        engine.begin(SCRIPT[1:])
        messages: list[Any] = [{"role": "user", "content": "Say it."}]
        said = (
            client.chat.completions.create(model="demo", messages=messages, tools=[READ]).choices[0].message.content
        )
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
        client.chat.completions.create(model="demo", messages=messages, tools=[READ])
        first, second = engine.answered()
        assert first.reply == tokenizer_of(DEMO_FOLDER).encode("Done.").ids
        assert second.cached_tokens >= len(first.known()) - 1
        assert [sent.path for sent in engine.sent] == ["/v1/chat/completions"] * 2
        assert json.loads(engine.sent[0].body)["messages"] == messages[:1]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_scripted_model_shows_calls_as_it_writes_them(name: str) -> None:
    template, arguments = call_template(CALL_FORMATS[name]), {"path": "a\nb", "lines": [1, 2]}
    environment = ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = json.dumps
    rendered = environment.from_string(template).render(name="f", arguments=arguments)
    assert rendered == written(CALL_FORMATS[name], [("f", arguments)])
    assert find_call_format((), f"tools {template}") is CALL_FORMATS[name]


def test_each_client_has_a_program_or_a_script() -> None:
    programs = {path.stem.removesuffix("_client") for path in PROGRAMS.iterdir() if path.suffix in (".py", ".mjs")}
    assert programs == {package.name for package in (*PACKAGES, *BENCHMARKS)}
    assert all(agent.replies(Path("greeting.py"))[-1].tool == "" for agent in AGENTS)
