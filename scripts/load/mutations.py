"""Makes values, texts and bytes wrong, at random: the same state of the generator gives the same result. Pure."""

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]
"""Keys and indices from the root of a JSON value."""

MAX_BYTES = 5 << 20
"""A body that repetitions have made longer is cut off."""
HALF, OTHER_HALF = "\ud83d", "\ude00"
TEXTS = (
    "", " ", "\x00", "a\x00b", HALF, OTHER_HALF + HALF, "\ufeff", "\u202e",
    "é" * 300, "x" * 70_000, "\U0001f600" * 40,
    "<|im_end|>", "<|im_start|>system\n", "<think>", "</think>", "<tool_call>", "{{ 7*7 }}", "{% for %}", "..",
    "/../etc",
    "null", "[]", "1e999", "demo:latest", "demo", "auto", "required", "(((((", "[z-a]", "(a*)*b", "root ::= root",
    '{"type": "object"}', "data:image/png;base64,AAAA", "http://127.0.0.1:1/x.png", "-1", "5m", "\r\nX-Evil: 1",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, -0.0, 0.5, 1e-320, 1e308, -1e308, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30,
    10**400, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
NAMES = (
    "n", "stream", "max_tokens", "num_ctx", "logprobs", "best_of", "echo", "tools", "tool_choice", "format",
    "think",
    "previous_response_id", "conversation", "background", "id_slot", "session_id", "cache_salt", "priority",
    "guided_json",
    "guided_regex", "grammar", "structured_outputs", "response_format", "stop_token_ids", "min_tokens",
    "add_special",
    "include", "prompt", "input", "messages", "content", "role", "type", "name", "$ref", "__proto__", "\x00",
    HALF, "",
)  # fmt: skip
"""Fields that other requests have."""


def value(random: Random, depth: int = 0) -> Any:
    """Returns any JSON value; numbers may be such as JSON has not."""
    kind = random.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return random.choice(TEXTS)
    if kind < 5:
        return random.choice(NUMBERS)
    if kind < 7:
        return random.choice((None, True, False))
    if kind == 7:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 8:
        return {random.choice(NAMES): value(random, depth + 1) for _ in range(random.randrange(4))}
    return nested(random.choice((5, 60, 300)), random.choice(([], {})))


def nested(depth: int, kind: Any) -> Any:
    """Returns so many lists or objects in each other."""
    inner: Any = 1
    for _ in range(depth):
        inner = [inner] if isinstance(kind, list) else {"properties": inner}
    return inner


def places(root: Any) -> list[Path]:
    """Returns every place in a JSON value, the root included."""
    return list(_places(root, ()))


def _places(node: Any, path: Path) -> Iterator[Path]:
    yield path
    if len(path) > 40:
        return
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in entries:
        yield from _places(child, (*path, key))


def mutated(root: Any, random: Random) -> Any:
    """Returns a copy of a JSON value in which one thing is otherwise."""
    change = random.choice(_CHANGES)
    box = {"": copy.deepcopy(root)}
    path = random.choice(places(root))
    parent: Any = box
    for key in ("", *path)[:-1]:
        parent = parent[key]
    change(parent, ("", *path)[-1], random)
    return box.get("", {})


def _replace(parent: Any, key: Any, random: Random) -> None:
    parent[key] = value(random)


def _remove(parent: Any, key: Any, random: Random) -> None:
    del parent[key]


def _add(parent: Any, key: Any, random: Random) -> None:
    if isinstance(parent[key], dict):
        parent[key][random.choice(NAMES)] = value(random)
    elif isinstance(parent[key], list):
        parent[key].insert(random.randrange(len(parent[key]) + 1), value(random))
    else:
        parent[key] = value(random)


def _wrap(parent: Any, key: Any, random: Random) -> None:
    parent[key] = [parent[key]] if random.random() < 0.5 else {random.choice(NAMES): parent[key]}


def _as_text(parent: Any, key: Any, random: Random) -> None:
    parent[key] = str(parent[key])


def _repeat(parent: Any, key: Any, random: Random) -> None:
    times = random.choice((2, 30, 500))
    # Once only: repeated repetitions would be too long to write.
    if len(json.dumps(parent[key])) * times < MAX_BYTES:
        parent[key] = parent[key] * times if isinstance(parent[key], str | list) else [parent[key]] * times


def _double_name(parent: Any, key: Any, random: Random) -> None:
    if isinstance(parent[key], dict):
        parent[key] = {**parent[key], **{name.upper(): inner for name, inner in parent[key].items() if name}}
    else:
        parent[key] = value(random)


_Change: TypeAlias = Callable[[Any, Any, Random], None]
_CHANGES: tuple[_Change, ...] = (
    _replace,
    _replace,
    _replace,
    _remove,
    _add,
    _add,
    _wrap,
    _as_text,
    _repeat,
    _double_name,
)


def as_json(body: Any, random: Random) -> bytes:
    """Returns a value as JSON with the escapes and numbers that some clients write."""
    text = json.dumps(body, ensure_ascii=random.random() < 0.7)
    return text.encode("utf-8", "surrogatepass")[:MAX_BYTES]


BYTES = (
    b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\\u", b"\\ud800",
    b",,", b"NaN",
    b"-Infinity", b"1e9999", b"0x1", b"'", b"//x\n", b"\r\n\r\n", b"[" * 5000, b'{"a":' * 5000, b"9" * 5000,
)  # fmt: skip


def mutated_bytes(raw: bytes, random: Random) -> bytes:
    """Returns bytes cut off, with others put in, or with some missing."""
    at = random.randrange(len(raw) + 1)
    match random.randrange(5):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + raw[at + random.randrange(1, 20) :]
        case 2:
            return raw[:at] + bytes([random.randrange(256)]) + raw[at + 1 :]
        case 3:
            return random.choice(BYTES) * random.choice((0, 1, 1, 1)) + raw + random.choice(BYTES)
    return raw[:at] + random.choice(BYTES) + raw[at:]


def from_schema(schema: Any, definitions: Any, random: Random, depth: int = 0) -> Any:
    """Returns a value that a JSON schema describes; anything where it is open or nested deeply."""
    if "$ref" in schema:
        return from_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions, random, depth + 1)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return from_schema(random.choice(schema[several]), definitions, random, depth + 1)
    if "enum" in schema:
        return random.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    made = _OF_TYPE.get(schema.get("type", ""))
    return value(random, 2) if made is None or depth > 12 else made(schema, definitions, random, depth)


def _object(schema: Any, definitions: Any, random: Random, depth: int) -> Any:
    required = schema.get("required", [])
    named = schema.get("properties", {})
    chosen = [name for name in named if name in required or random.random() < 3 / (len(named) + 1)]
    return {name: from_schema(named[name], definitions, random, depth + 1) for name in chosen}


def _array(schema: Any, definitions: Any, random: Random, depth: int) -> Any:
    count = random.randrange(3)
    return [from_schema(schema.get("items", {}), definitions, random, depth + 1) for _ in range(count)]


def _number(schema: Any, definitions: Any, random: Random, depth: int) -> Any:
    low, high = schema.get("minimum", -3), schema.get("maximum", 40)
    drawn = random.uniform(low, max(low, high))
    return int(drawn) if schema["type"] == "integer" else drawn


_OF_TYPE: dict[str, Callable[[Any, Any, Random, int], Any]] = {
    "object": _object,
    "array": _array,
    "integer": _number,
    "number": _number,
    "boolean": lambda schema, definitions, random, depth: random.random() < 0.5,
    "null": lambda schema, definitions, random, depth: None,
    "string": lambda schema, definitions, random, depth: random.choice((*TEXTS[:12], "hello", "user", "a b c")),
}
