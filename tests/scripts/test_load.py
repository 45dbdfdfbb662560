"""The proofs under load: what they send is bounded and repeatable, and what they compare is what must not change."""

import json
import re
from random import Random
from typing import Any

import pytest

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
