"""The proofs under load: what they send is bounded and repeatable, and what they compare is what must not change."""

import argparse
import json
import re
from random import Random
from typing import Any

import pytest

from scripts.load import fuzz, idle
from scripts.load.answers import essence, streamed_text
from scripts.load.attacks import attack
from scripts.load.bodies import EXAMPLES
from scripts.load.mutations import MAX_BYTES, as_json, from_schema, mutated, mutated_bytes
from scripts.load.streams import CITIES, NAMES, request_body
from scripts.load.wire import Reply
from server.api.app import APIS, openapi_document

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


def test_mutations_change_a_copy_and_stay_bounded() -> None:
    body: Any = {"messages": [{"role": "user", "content": "Hi"}], "n": 1}
    before = json.dumps(body)
    random = Random(1)
    seen = set()
    for _ in range(300):
        changed: Any = body
        for _ in range(3):
            changed = mutated(changed, random)
        raw = as_json(changed, random)
        assert len(raw) <= MAX_BYTES
        seen.add(raw)
        mutated_bytes(raw[:1000], random)
    assert json.dumps(body) == before and len(seen) > 250


def test_values_are_made_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/components/schemas/A"}, "b": {"enum": ["x"]}},
        "required": ["a", "b"],
    }
    made = from_schema(schema, {"A": {"type": "array", "items": {"type": "integer", "minimum": 3}}}, Random(1))
    assert made["b"] == "x" and all(type(one) is int and one >= 3 for one in made["a"])


def reply(body: Any, kind: str = "application/json") -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(200, {"content-type": kind}, raw)


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


def test_every_question_of_a_stream_is_another() -> None:
    bodies = {json.dumps(request_body("/api/chat", name, city)) for name in NAMES for city in CITIES}
    assert len(bodies) == len(NAMES) * len(CITIES)


def test_a_short_fuzz_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fuzz, "WARM_UP_REQUESTS", 20)
    assert fuzz.run(argparse.Namespace(requests=60, first=0, seed=1, seconds=60, leak=0)), capsys.readouterr().out
    assert "60 requests" in capsys.readouterr().out


def test_a_server_that_works_while_idle_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "SECONDS", 0.5)
    monkeypatch.setattr(idle, "NUM_CONNECTIONS", 3)
    monkeypatch.setattr(idle, "MAX_SHARE", -1.0)
    assert not idle.run(argparse.Namespace())


@pytest.mark.parametrize(
    ("used_bytes", "held_bytes", "words"),
    [(10 << 20, 60 << 20, ""), (20 << 20, 0, "1049 bytes for each"), (0, 70 << 20, "70 MB more are held")],
)
def test_a_leak_of_a_kilobyte_for_each_request_is_found(used_bytes: int, held_bytes: int, words: str) -> None:
    floor = fuzz.Memory(50 << 20, 200 << 20)
    memory = fuzz.Memory(floor.used_bytes + used_bytes, floor.held_bytes + held_bytes)
    assert words in memory.excess(floor, 20_000)
    assert bool(memory.excess(floor, 20_000)) == bool(words)
