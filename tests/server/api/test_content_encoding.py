"""Compressed bodies are expanded with a bound, and what is none of them is told so."""

import gzip
import json
import zlib
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.errors import ApiError
from server.api.wire import MAX_MEMBERS, expand
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
MAX_BYTES = 4096
JSON = {"Content-Type": "application/json"}


def bare(raw: bytes) -> bytes:
    """Returns a stream without any head."""
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(raw) + stream.flush()


def post(content: bytes, encoding: str, engine: FakeEngine | None = None) -> Any:
    app = create_app(engine or FakeEngine(), fake_model(), ServerConfig(max_body_bytes=MAX_BYTES))
    return TestClient(app).post(CHAT, content=content, headers={**JSON, "Content-Encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZip", gzip.compress(BODY[:7]) + gzip.compress(BODY[7:])),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=["gzip", "two members", "x-gzip", "deflate", "bare deflate", "identity", "none"],
)
def test_a_compressed_body_is_read(encoding: str, content: bytes) -> None:
    engine = FakeEngine()
    assert post(content, encoding, engine).status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "nonsense"])
def test_another_encoding_is_415_and_says_what_is_taken(encoding: str) -> None:
    answer = post(BODY, encoding)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_encoding"
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("num_bytes", [MAX_BYTES + 1, 1 << 24])
def test_what_expands_beyond_the_bound_is_413(encoding: str, num_bytes: int) -> None:
    raw = b" " * num_bytes
    content = gzip.compress(raw) if encoding == "gzip" else zlib.compress(raw)
    answer = post(content[:MAX_BYTES], encoding)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "content",
    [BODY, b"", gzip.compress(BODY)[:-9], gzip.compress(BODY) + b"more", gzip.compress(b"") * (MAX_MEMBERS + 1)],
    ids=["plain", "empty", "cut", "followed", "members"],
)
def test_what_is_not_compressed_as_it_says_is_400(content: bytes) -> None:
    answer = post(content, "gzip")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Content-Encoding"


def test_the_bound_is_exact() -> None:
    raw = b"x" * 1000
    assert expand(gzip.compress(raw), "gzip", 1000) == raw
    assert expand(gzip.compress(raw), "gzip", 999) is None
    assert expand(gzip.compress(raw[:500]) * 2, "gzip", 999) is None
    with pytest.raises(ApiError):
        expand(b"", "deflate", 10)
