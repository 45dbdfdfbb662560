"""What holds for every endpoint that generates: texts, ends and counts, limits, errors, and clients that leave."""

import json
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from server.app.config import ServerConfig
from server.engine.request import EngineStopped, FinishReason, OutOfMemory, StepFailed
from tests.server.api.conformance.surfaces import SURFACES, Surface, Told
from tests.server.api.test_live import raw_post, until
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

PLAIN = Script(hit_tokens=2)
ENDLESS = Script(texts=("x",) * 100_000, step_seconds=0.02)
WAIT_SECONDS = 120.0

of_every_dialect = pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.path)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def client_of(engine: FakeEngine, **settings: Any) -> TestClient:
    return TestClient(create_app(engine, fake_model(), ServerConfig(**settings)))


def ask(surface: Surface, engine: FakeEngine, *, stream: bool = False, **fields: Any) -> httpx.Response:
    body = {**surface.body, **(surface.streams if stream else {}), **fields}
    client = client_of(engine)
    return client.post(surface.path, content=json.dumps(body), headers={"content-type": "application/json"})  # type: ignore[return-value]


def told(surface: Surface, answer: httpx.Response, stream: bool) -> Told:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == (surface.media_type if stream else "application/json")
    return surface.streamed(surface.payloads(answer.text)) if stream else surface.told(answer.json())


@of_every_dialect
@streamed_or_not
@pytest.mark.parametrize(
    ("reason", "index"), [(FinishReason.STOP, 0), (FinishReason.LENGTH, 1)], ids=["stop", "length"]
)
def test_text_end_and_counts_are_told(surface: Surface, stream: bool, reason: FinishReason, index: int) -> None:
    engine = FakeEngine(replace(PLAIN, reason=reason))
    limit = surface.limited(3) if reason is FinishReason.LENGTH else {}
    found = told(surface, ask(surface, engine, stream=stream, **limit), stream)
    assert found == ("Hello there.", surface.reasons[index], len(engine.requests[0].tokens), 2, 3)


@of_every_dialect
@streamed_or_not
def test_text_of_more_than_ascii_arrives_as_it_is_and_half_a_character_as_a_mark(
    surface: Surface, stream: bool
) -> None:
    engine = FakeEngine(Script(texts=("Zürich “🙂”\n", "a\ud83d", "b")))
    assert told(surface, ask(surface, engine, stream=stream), stream).text == "Zürich “🙂”\na\ufffdb"


@of_every_dialect
def test_a_limit_reaches_the_engine_and_is_cut_to_the_context(surface: Surface) -> None:
    engine = FakeEngine()
    # Some languages have one number type, and write 10000.0.
    for limit in (5, 10_000.0):
        assert ask(surface, engine, **surface.limited(limit)).status_code == 200
    short, long = engine.requests
    assert (short.max_tokens, long.max_tokens) == (5, 200 - len(long.tokens))


@of_every_dialect
def test_the_same_request_again_is_served_again(surface: Surface) -> None:
    engine = FakeEngine()
    first, second = (ask(surface, engine) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len({request.request_id for request in engine.requests}) == 2
    assert engine.requests[0].tokens.tolist() == engine.requests[1].tokens.tolist()


# ------------------------------------------------------------------------------------------------------------ errors


def refused(surface: Surface, answer: httpx.Response, status: int) -> str:
    """The message, after a look at what all refusals have in common."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert "Traceback" not in answer.text
    return surface.error(answer.json())


@of_every_dialect
@streamed_or_not
def test_a_full_queue_is_429_at_once(surface: Surface, stream: bool) -> None:
    answer = ask(surface, FakeEngine(max_waiting=0), stream=stream)
    assert "try again in 7 s" in refused(surface, answer, 429)
    assert answer.headers["retry-after"] == "7"


@of_every_dialect
@streamed_or_not
def test_a_stopped_engine_is_503(surface: Surface, stream: bool) -> None:
    answer = ask(surface, FakeEngine(is_running=False), stream=stream)
    assert "stopping" in refused(surface, answer, 503)
    assert int(answer.headers["retry-after"]) > 0


@of_every_dialect
def test_an_unknown_model_is_404_and_nothing_runs(surface: Surface) -> None:
    engine = FakeEngine()
    for name in ("other", "TINY", "x" * 10_000):
        assert len(refused(surface, ask(surface, engine, model=name), 404)) < 500
    assert engine.requests == []


@of_every_dialect
@streamed_or_not
def test_a_prompt_beyond_the_context_is_400_with_both_numbers(surface: Surface, stream: bool) -> None:
    long = "x" * 300
    prompt: Any = [{"role": "user", "content": long}] if surface.prompt == "messages" else long
    engine = FakeEngine()
    message = refused(surface, ask(surface, engine, stream=stream, **{surface.prompt: prompt}), 400)
    assert "30" in message and ("199" in message or "200" in message)
    assert engine.requests == []


@of_every_dialect
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000], ids=lambda raw: repr(raw[:3]))
def test_what_is_no_json_object_is_400(surface: Surface, raw: bytes) -> None:
    engine = FakeEngine()
    answer = client_of(engine).post(surface.path, content=raw, headers={"content-type": "application/json"})
    assert "JSON" in refused(surface, answer, 400)  # type: ignore[arg-type]
    assert engine.requests == []


@of_every_dialect
def test_another_method_is_405(surface: Surface) -> None:
    answer = client_of(FakeEngine()).delete(surface.path)
    refused(surface, answer, 405)  # type: ignore[arg-type]
    assert "POST" in answer.headers["allow"]


@of_every_dialect
@pytest.mark.parametrize("key", ["", "wrong", "secret2"])
def test_without_the_key_nothing_is_served(surface: Surface, key: str) -> None:
    engine = FakeEngine()
    client = client_of(engine, api_key="secret")
    name, before = surface.key
    answer = client.post(surface.path, json=surface.body, headers={name: f"{before}{key}"} if key else {})
    assert "secret" not in refused(surface, answer, 401).replace("secret2", "")  # type: ignore[arg-type]
    assert engine.requests == []
    assert client.post(surface.path, json=surface.body, headers={name: f"{before}secret"}).status_code == 200


FAILURES = [
    (OutOfMemory("the prompt does not fit"), 503),
    (StepFailed("tensor 7 at 0xdeadbeef"), 500),
    (EngineStopped("x"), 503),
    (RuntimeError("0xdeadbeef"), 500),
]


@of_every_dialect
@pytest.mark.parametrize(("error", "status"), FAILURES, ids=lambda value: type(value).__name__)
def test_a_failure_in_the_engine_is_told(surface: Surface, error: Exception, status: int) -> None:
    engine = FakeEngine(Script(error=error))
    answer = ask(surface, engine)
    assert "0xdeadbeef" not in refused(surface, answer, status)
    assert ("retry-after" in answer.headers) == (status == 503)
    engine.script = Script()
    assert ask(surface, engine).status_code == 200


@of_every_dialect
@pytest.mark.parametrize(("error", "status"), FAILURES, ids=lambda value: type(value).__name__)
def test_a_failure_after_the_stream_began_is_its_last_event(surface: Surface, error: Exception, status: int) -> None:
    answer = ask(surface, FakeEngine(Script(error=error)), stream=True)
    assert answer.status_code == 200 and "0xdeadbeef" not in answer.text
    *begun, last = surface.payloads(answer.text)
    assert begun and surface.error(last)


@of_every_dialect
@streamed_or_not
def test_an_answer_that_the_server_cut_short_is_no_success(surface: Surface, stream: bool) -> None:
    answer = ask(surface, FakeEngine(Script(reason=FinishReason.CANCELLED)), stream=stream)
    assert answer.status_code == (200 if stream else 503)
    assert "stopping" in surface.error(surface.payloads(answer.text)[-1] if stream else answer.json())


@dataclass
class BrokenEngine(FakeEngine):
    """Raises what no engine should."""

    def submit(self, request: Any) -> Any:
        raise ZeroDivisionError("secret detail")


@of_every_dialect
@streamed_or_not
def test_a_bug_of_ours_is_500_with_a_name_to_look_for(surface: Surface, stream: bool) -> None:
    answer = ask(surface, BrokenEngine(), stream=stream)
    assert answer.headers["x-request-id"] in refused(surface, answer, 500)
    assert "secret" not in answer.text


# ------------------------------------------------------------------------------------------------ clients that leave


@pytest.fixture(scope="module")
def served() -> Any:
    """An engine, and the address of a server before it."""
    engine = FakeEngine(ENDLESS)
    with running(create_app(engine, fake_model(), ServerConfig())) as address:
        yield engine, address


@of_every_dialect
@streamed_or_not
def test_a_client_that_leaves_ends_its_request(
    served: tuple[FakeEngine, str], surface: Surface, stream: bool
) -> None:
    engine, address = served
    engine.cancel_seen.clear()
    num_before = len(engine.requests)
    body = {**surface.body, **(surface.streams if stream else {})}
    with raw_post(address, surface.path, body) as connection:
        until(lambda: len(engine.requests) > num_before)
        assert not stream or connection.recv(1)
    assert engine.cancel_seen.wait(WAIT_SECONDS)
    assert engine.cancelled == {request.request_id for request in engine.requests}
