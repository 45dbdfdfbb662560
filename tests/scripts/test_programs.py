"""Programs for developers: agents, loads, the demo model, the versions `make compat` tries, what fits a Mac."""

import json
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai import OpenAI
from packaging.requirements import Requirement

from cache.layers.kinds import make_caches
from models import names
from models.mlx_lm_import import load_model, load_tokenizer
from models.names import DEMO_FOLDER
from models.output.call_formats import find_call_format
from scripts import compat
from scripts.clients.__main__ import CALL_FORMATS
from scripts.clients.agents import AGENTS
from scripts.clients.interleaved import Spelling
from scripts.clients.packages import BENCHMARKS, PACKAGES, PROGRAMS
from scripts.clients.scripted_model import call_template
from scripts.clients.scripted_server import Reply, ScriptedEngine, scripted_server, tokenizer_of
from scripts.fits import SHAPES, machine_of, table
from scripts.load import wire
from scripts.load.answers import essence, streamed_text
from scripts.load.attacks import attack
from scripts.load.bodies import EXAMPLES
from server.api.app import APIS, openapi_document
from server.app.memory_budget import comfortable_weights_bytes
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


def test_the_versions_are_those_that_the_project_allows_up_to_the_locked_one() -> None:
    project = tomllib.loads((compat.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(
        requirement for text in project["dependencies"] if (requirement := Requirement(text)).name == "mlx-lm"
    )
    assert all(allowed.specifier.contains(version) for version in compat.VERSIONS)
    assert compat.VERSIONS[0] == str(next(iter(allowed.specifier)).version).replace("*", "0")
    assert compat.VERSIONS[-1] == compat.locked_version("mlx-lm", compat.LOCK.read_text(encoding="utf-8"))


def test_a_package_leaves_a_lock_file_with_its_hashes() -> None:
    before, after = "# made\nmlx==1 \\\n    --hash=a\n", "numpy==3 \\\n    --hash=d\n"
    lock = f"{before}mlx-lm==2 ; x \\\n    --hash=b \\\n    --hash=c\n{after}"
    assert compat.without("mlx-lm", lock) == before + after


def test_the_tests_that_it_runs_are_there() -> None:
    assert all((compat.ROOT / path).exists() for path in compat.TESTS)


DOCS = (Path(__file__).parents[2] / "docs" / "macs.md").read_text(encoding="utf-8")


def test_the_docs_have_the_table_that_the_program_prints() -> None:
    assert table(16, 25_000) in DOCS


def test_what_pull_chooses_of_a_family_is_the_largest_that_the_table_has_it_take() -> None:
    rows = [line.split(" | ") for line in table(16, 25_000).splitlines()[2:]]
    taken = {row[0].strip("|` ") for row in rows if row[2].strip() == "yes"}
    chosen = names.largest(names.find_family("qwen3"), comfortable_weights_bytes(machine_of(16)))
    assert chosen is not None and chosen.name in taken
    larger = [name for name in SHAPES if names.SHORT_NAMES[name].num_bytes > chosen.num_bytes]
    assert larger and not taken & set(larger)


DOCUMENT = openapi_document(APIS)
KINDS = {
    *("a mutated body", "broken JSON", "odd headers", "an odd method", "an odd path", "an odd name", "no HTTP"),
    *("a client that leaves", "several at once", "a body as described"),
}


def test_a_seed_is_one_request_and_all_kinds_come() -> None:
    attacks = [attack(f"1/{number}", DOCUMENT) for number in range(300)]
    assert attacks == [attack(f"1/{number}", DOCUMENT) for number in range(300)]
    assert {one.kind for one in attacks} == KINDS
    assert attacks[0] != attack("2/0", DOCUMENT)


def test_every_path_has_an_example() -> None:
    paths = {re.sub(r"{\w+}", "[^/]+", path) for path in DOCUMENT["paths"]}
    # Those without /v1 are served by the same functions.
    wanted = {path for path in paths if f"/v1{path}" not in paths}
    examples = [example.path.partition("?")[0] for example in EXAMPLES]
    assert [path for path in wanted if not any(re.fullmatch(path, example) for example in examples)] == []


def reply(body: Any, kind: str = "application/json") -> wire.Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return wire.Reply(200, {"content-type": kind}, raw)


def test_an_answers_essence_is_what_it_says() -> None:
    one = {"id": "a", "choices": [{"message": {"content": "Ada"}}], "usage": {"completion_tokens": 3}}
    other = {**one, "id": "b", "timings": {"predicted_ms": 3}}
    assert essence(reply(one)) == essence(reply(other))
    assert essence(reply(one)) != essence(reply({**one, "choices": [{"message": {"content": "Bob"}}]}))


@pytest.mark.parametrize(
    ("frame", "end"),
    [
        ('data: {"choices": [{"delta": {"content": "%s"}}]}\n\n', "data: [DONE]\n\n"),
        ('event: x\ndata: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "%s"}}\n\n', ""),
        ('data: {"type": "response.output_text.delta", "delta": "%s"}\n\n', ""),
        ('{"message": {"role": "assistant", "content": "%s"}, "done": false}\n', '{"done": true}\n'),
        ('{"response": "%s", "done": false}\n', ""),
    ],
)
def test_a_streams_text_is_the_same_however_it_is_cut(frame: str, end: str) -> None:
    whole, cut = ("".join(frame % part for part in parts) + end for parts in (["Hi Ada"], ["Hi", " Ada"]))
    assert streamed_text(whole.encode()) == streamed_text(cut.encode()) == "Hi Ada"


Messages = list[dict[str, Any]]


class Demo:
    """Answers greedily, without the server."""

    def __init__(self) -> None:
        self.model: Any = load_model(DEMO_FOLDER)[0]
        self.tokenizer: Any = load_tokenizer(DEMO_FOLDER)

    def answer(self, messages: Messages, tools: Messages | None = None) -> str:
        """Up to 60 tokens; "" if the answer does not end."""
        options = {"add_generation_prompt": True, "enable_thinking": False}
        prompt = self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        caches, tokens = make_caches(self.model), list[int]()
        logits = self.model(mx.array(prompt)[None], cache=caches)
        while len(tokens) < 60:
            token = int(mx.argmax(logits[0, -1]).item())  # type: ignore[arg-type]
            if token in self.tokenizer.eos_token_ids:
                return str(self.tokenizer.decode(tokens))
            tokens.append(token)
            logits = self.model(mx.array([[token]]), cache=caches)
        return ""


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


def _asked(*texts: str, system: str = "") -> Messages:
    """Alternating user and assistant texts."""
    opening = [{"role": "system", "content": system}] if system else []
    return opening + [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def test_it_calls_the_tool_that_it_was_given(demo: Demo) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    answer = demo.answer(_asked("What is the weather in Dublin?"), [weather])
    call = answer.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(call) == {"name": "get_weather", "arguments": {"city": "Dublin"}}


def test_it_stays_small() -> None:
    assert sum(file.stat().st_size for file in DEMO_FOLDER.iterdir()) <= 10_000_000
