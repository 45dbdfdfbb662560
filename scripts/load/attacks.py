"""One request of the fuzzer, chosen by a seed: what is sent, in which pieces, and when its client leaves. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any, TypeAlias

from scripts.load.bodies import EXAMPLES, Example
from scripts.load.mutations import as_json, from_schema, mutated, mutated_bytes
from scripts.load.wire import Headers, request_bytes


class Leaving(Enum):
    """When a client goes, and how."""

    NEVER = "reads its answer"
    IN_BODY = "leaves before its body is complete"
    AT_ONCE = "leaves when all is sent"
    RESET = "is killed when all is sent"
    IN_ANSWER = "leaves with a part of its answer"


@dataclass(frozen=True)
class Attack:
    """Bytes for one connection, and what their sender does then."""

    kind: str
    raw: bytes
    method: str = "POST"
    leaving: Leaving = Leaving.NEVER
    may_be_silent: bool = False
    """Whether no answer may come, since what was sent is no complete request."""
    wants_new_connection: bool = False
    """Whether what was sent may leave the connection in a state that no other request should follow."""


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    headers: Headers
    body: bytes | None

    def raw(self) -> bytes:
        return request_bytes(self.method, self.target, self.headers, self.body)


_JSON = ("Content-Type", "application/json")


def _request(example: Example, body: bytes | None) -> _Request:
    kind = [] if body is None else [_JSON]
    return _Request(example.method, example.path, [*kind, *example.headers.items()], body)


def _plain(random: Random) -> _Request:
    example = random.choice(EXAMPLES)
    return _request(example, None if example.body is None else as_json(example.body, random))


def _mutated_body(random: Random) -> Attack:
    example = random.choice([candidate for candidate in EXAMPLES if candidate.body])
    body: Any = example.body
    for _ in range(random.choice((1, 1, 1, 2, 2, 5))):
        body = mutated(body, random)
    return Attack("a mutated body", _request(example, as_json(body, random)).raw())


def _mutated_json(random: Random) -> Attack:
    example = random.choice([candidate for candidate in EXAMPLES if candidate.body])
    raw = as_json(example.body, random)
    for _ in range(random.choice((1, 1, 3))):
        raw = mutated_bytes(raw, random)
    return Attack("broken JSON", _request(example, raw).raw())


CONTENT_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "application/JSON", "application/problem+json", "", "x", "application/json, text/plain", "\xff",
)  # fmt: skip
HEADERS: Headers = (
    ("Origin", "https://evil.example"), ("Origin", "null"), ("Host", "evil.example"), ("Host", ""), ("Host",
    "127.0.0.1:1"),
    ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Content-Encoding", "gzip, gzip"), ("Accept",
    "image/png"),
    ("Authorization", "Bearer " + "x" * 5000), ("Authorization", "Basic Og=="), ("Authorization", "\xff"),
    ("x-api-key", ""), ("anthropic-version", "2099-01-01"), ("anthropic-version", "\xff"), ("X-Session-Id",
    "x" * 5000),
    ("X-Session-Id", "\xc3\xa9"), ("X-Session-Id", ""), ("Expect", "100-continue"), ("Expect", "x"),
    ("Connection", "close"),
    ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("Range", "bytes=0-1"), ("Cookie",
    "a" * 9000),
    ("X-" + "y" * 3000, "1"), ("X-Request-Id", "\x01"), ("Accept-Encoding", "gzip"), ("If-None-Match", "*"),
    ("TE", "trailers"),
    ("X-Forwarded-For", "1.2.3.4, evil"), ("Content-Length", "1"), ("Idempotency-Key", "x"), ("traceparent",
    "00-zz"),
)  # fmt: skip


def _odd_headers(random: Random) -> Attack:
    request = _plain(random)
    added = [random.choice(HEADERS) for _ in range(random.choice((1, 1, 2, 6)))]
    kept = [header for header in request.headers if random.random() < 0.8]
    if random.random() < 0.3:
        kept = [("Content-Type", random.choice(CONTENT_TYPES))]
    raw = replace(request, headers=[*kept, *added]).raw()
    # A length that is wrong has the rest taken for a request, or has the server wait for more.
    return Attack("odd headers", raw, request.method, may_be_silent=True, wants_new_connection=True)


METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "FOO", "M" * 200)


def _odd_method(random: Random) -> Attack:
    request = replace(_plain(random), method=random.choice(METHODS))
    return Attack("an odd method", request.raw(), request.method, wants_new_connection=True)


PARTS = (
    "..", "%2e%2e", "%00", "%", "%zz", "%ff", "%C3%28", "a" * 3000, "", "//", "v1", "v2", "models", "demo",
    "responses",
    "resp_1", "sessions", "conversations", "api", "blobs", "sha256:0", "threads", "files", "batches", "\u00e9",
    "?x", "#x", ";",
    "*", "cache", "items", "%0d%0aX:1", "{id}", "'", "assistants", "embeddings", "metrics", "docs", "favicon.ico",
)  # fmt: skip
QUERIES = (
    "limit=", "limit=-1", "limit=1e9", "limit=" + "9" * 500, "order=up", "after=%00",
    "cache_salt=" + "x" * 400, "namespace=%ff",
    "model=none", "model=", "stream=true", "stream=1", "include[]=x", "&&&=", "limit=1&limit=2",
    "namespace=..", "%ff=%ff",
    "fail_on_no_slot=1", "beta=true", "cache_salt=%ED%A0%80", "limit=%D9%A1",
)  # fmt: skip


def _odd_path(random: Random) -> Attack:
    request = _plain(random)
    target = request.target
    if random.random() < 0.6:
        parts = target.split("/")
        parts.insert(random.randrange(1, len(parts) + 1), random.choice(PARTS))
        target = "/".join(parts) if random.random() < 0.7 else random.choice(PARTS)
    if random.random() < 0.6:
        target += ("&" if "?" in target else "?") + random.choice(QUERIES)
    return Attack("an odd path", replace(request, target=target).raw(), request.method, wants_new_connection=True)


def _odd_name(random: Random) -> Attack:
    """Asks for an answer, a conversation or a session by a name that is none, or that of another."""
    example = random.choice([known for known in EXAMPLES if "_1" in known.path or "/one" in known.path])
    name = random.choice((*PARTS, "conv_1", "resp_1", "one"))
    target = example.path.replace("resp_1", name).replace("conv_1", name).replace("/one", f"/{name}")
    body = None if example.body is None else as_json(example.body, random)
    raw = replace(_request(example, body), target=target).raw()
    return Attack("an odd name", raw, example.method, wants_new_connection=True)


FRAMES = (
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n",
    b"\x00" * 500,
    b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 80_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n folded: x\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
)  # fmt: skip


def _no_http(random: Random) -> Attack:
    raw = random.choice(FRAMES)
    if random.random() < 0.5:
        raw = mutated_bytes(raw if random.random() < 0.3 else _plain(random).raw(), random)
    return Attack("no HTTP", raw, may_be_silent=True, wants_new_connection=True)


def _disconnect(random: Random) -> Attack:
    example = random.choice([candidate for candidate in EXAMPLES if candidate.body])
    raw = _request(example, as_json(example.body, random)).raw()
    leaving = random.choice([candidate for candidate in Leaving if candidate is not Leaving.NEVER])
    if leaving is Leaving.IN_BODY:
        raw = raw[: random.randrange(1, len(raw))]
    return Attack("a client that leaves", raw, leaving=leaving, wants_new_connection=True)


def _pipelined(random: Random) -> Attack:
    """Several requests at once; the answer to the first one is read."""
    requests = [_plain(random) for _ in range(random.randrange(2, 5))]
    raw = b"".join(request.raw() for request in requests)
    return Attack("several at once", raw, requests[0].method, wants_new_connection=True)


NAMES = {"{response_id}": "resp_1", "{conversation_id}": "conv_1", "{session_id}": "one"}


def _described(random: Random, document: Mapping[str, Any]) -> Attack:
    """Asks with a body that the document allows, and at times with one thing in it otherwise."""
    definitions = document["components"]["schemas"]
    operations = [(path, item["post"]["requestBody"]) for path, item in document["paths"].items() if "post" in item
                  and "application/json" in item["post"].get("requestBody", {}).get("content", ())]  # fmt: skip
    path, described = random.choice(operations)
    body = from_schema(described["content"]["application/json"]["schema"], definitions, random)
    if random.random() < 0.3:
        body = mutated(body, random)
    target = re.sub(r"{\w+}", lambda match: NAMES[match[0]], path)
    return Attack("a body as described", _Request("POST", target, [_JSON], as_json(body, random)).raw())


_Make: TypeAlias = Callable[[Random], Attack]
_KINDS: Sequence[tuple[_Make, int]] = (
    (_mutated_body, 45), (_mutated_json, 12), (_odd_headers, 8), (_odd_method, 4), (_odd_path, 5), (_odd_name, 4),
    (_no_http, 3), (_disconnect, 6), (_pipelined, 2),
)  # fmt: skip
_DESCRIBED = 11


def attack(seed: str, document: Mapping[str, Any]) -> Attack:
    """Returns the request of that seed; `document` is the server's OpenAPI document."""
    random = Random(seed)
    makes, weights = zip(*_KINDS, strict=True)
    make = random.choices([*makes, None], [*weights, _DESCRIBED])[0]
    return _described(random, document) if make is None else make(random)
