"""Responses in the background, by the real `openai` package: clients leave, come back and cancel; limits; the end."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from server.api.errors import ApiError
from server.api.responses import create
from server.api.responses.conversation import UNFINISHED
from server.api.responses.store import FILE_NAME, ResponseStore, StoredResponse
from server.app.config import ServerConfig
from server.app.keys import ApiKey, KeyRing, digest_of
from server.app.log_events import RequestEnded
from server.engine.request import EngineStopped, FinishReason
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

WORDS = tuple(f"{number} " for number in range(40))
SLOW = Script(WORDS, step_seconds=0.02)
ENDLESS = Script(tuple(f"{number} " for number in range(1500)), step_seconds=0.02)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(SLOW)


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig(heartbeat_seconds=0.05))) as base:
        yield f"{base}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as client:
        yield client


def begin(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "Hi", "background": True, **fields})


def wait_for(told: Callable[[], Any]) -> Any:
    """What `told` returns once it is true."""
    deadline = time.monotonic() + 120
    while not (found := told()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def ended(client: openai.OpenAI, name: str) -> Any:
    return wait_for(lambda: (one := client.responses.retrieve(name)).status not in UNFINISHED and one)


def test_a_response_is_made_while_nobody_listens(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.max_texts = 10
    response = begin(client)
    assert response.status in UNFINISHED and response.background is True and response.output_text == ""
    partial = wait_for(lambda: (one := client.responses.retrieve(response.id)).output_text and one)
    assert partial.status == "in_progress" and "".join(WORDS).startswith(partial.output_text)
    engine.max_texts = None
    whole = ended(client, response.id)
    assert whole.status == "completed" and whole.output_text == "".join(WORDS) and whole.usage is not None
    items: list[Any] = client.responses.input_items.list(response.id).data
    assert [item.content[0].text for item in items] == ["Hi"]
    follow_up = client.responses.create(model="tiny", input="And?", previous_response_id=response.id, stream=True)
    follow_up.close()
    assert not engine.cancelled - {engine.requests[-1].request_id}


@pytest.mark.parametrize("left_after", [0, 1, 7, 30])
def test_a_stream_is_taken_up_where_it_was_left(client: openai.OpenAI, engine: FakeEngine, left_after: int) -> None:
    seen = []
    with begin(client, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.sequence_number == left_after:
                break
    assert [event.type for event in seen][:3] == ["response.created", "response.queued", "response.in_progress"][
        : left_after + 1
    ]
    name = seen[0].response.id
    seen += list(client.responses.retrieve(name, stream=True, starting_after=left_after))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "".join(WORDS)
    assert seen[-1].type == "response.completed" and not engine.cancelled
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]
    assert (
        next(iter(client.responses.retrieve(name, stream=True, starting_after=len(seen) - 2))).to_dict()
        == seen[-1].to_dict()
    )


def test_several_follow_one_response(address: str) -> None:
    async def follow(client: openai.AsyncOpenAI, name: str) -> str:
        events = await client.responses.retrieve(name, stream=True)
        return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

    async def converse() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="secret", max_retries=0) as client:
            response = await client.responses.create(model="tiny", input="Hi", background=True)
            return list(await asyncio.gather(*(follow(client, response.id) for _ in range(5))))

    assert asyncio.run(converse()) == ["".join(WORDS)] * 5


def test_a_response_is_cancelled_once_and_for_all(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    with begin(client, stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    name = wait_for(lambda: engine.requests[0].request_id)
    cancelled = client.responses.cancel(name)
    assert cancelled.status == "cancelled" and cancelled.output_text.startswith("0 ") and cancelled.error is None
    assert name in engine.cancelled
    assert client.responses.cancel(name).to_dict() == cancelled.to_dict() == client.responses.retrieve(name).to_dict()
    *_, last = client.responses.retrieve(name, stream=True)
    assert last.type == "response.cancelled"  # type: ignore[comparison-overlap]


def test_only_what_runs_in_the_background_is_cancelled_or_followed(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script()
    plain = client.responses.create(model="tiny", input="Hi")
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="stream: only responses in the background keep events"):
        client.responses.retrieve(plain.id, stream=True)
    for ask in (client.responses.cancel, lambda name: client.responses.retrieve(name, stream=True)):
        with pytest.raises(openai.NotFoundError):
            ask("resp_none")


def test_a_deleted_response_is_cancelled_and_gone(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    response = begin(client)
    client.responses.delete(response.id)
    assert response.id in engine.cancelled
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)


def test_a_response_that_fails_is_kept_with_its_reason(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(("Well, ",), error=EngineStopped("stopped"))
    response = ended(client, begin(client).id)
    assert response.status == "failed" and response.error.message == "the server is stopping"
    assert response.output_text == "Well, "
    engine.script = Script(reason=FinishReason.LENGTH)
    assert ended(client, begin(client).id).status == "incomplete"


def test_nothing_goes_on_from_a_response_that_is_made(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    response = begin(client)
    with pytest.raises(openai.BadRequestError, match="has not reached its end"):
        begin(client, previous_response_id=response.id)
    client.responses.cancel(response.id)


def test_a_conversation_gets_only_what_has_reached_its_end(client: openai.OpenAI, engine: FakeEngine) -> None:
    conversation = client.conversations.create().id
    engine.script = ENDLESS
    client.responses.cancel(begin(client, conversation=conversation).id)
    assert list(client.conversations.items.list(conversation)) == []
    engine.script = Script()
    ended(client, begin(client, conversation=conversation).id)
    assert len(list(client.conversations.items.list(conversation))) == 2


def test_no_key_or_salt_sees_anothers(address: str, client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ENDLESS
    name = begin(client, extra_body={"cache_salt": "mine"}).id
    other = openai.OpenAI(base_url=address, api_key="other", max_retries=0)
    for one in (client, other):
        for ask in (one.responses.retrieve, one.responses.cancel, one.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(name)
    assert client.responses.cancel(name, extra_query={"cache_salt": "mine"}).status == "cancelled"


def test_each_namespace_has_so_many_at_once(
    address: str, client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "MAX_RUNNING", 2)
    engine.script = ENDLESS
    first, _ = begin(client), begin(client, extra_body={"cache_salt": "mine"})
    with pytest.raises(openai.RateLimitError, match="2 responses are made in the background") as caught:
        begin(client)
    assert caught.value.response.headers["retry-after"] == "5"
    begin(openai.OpenAI(base_url=address, api_key="other", max_retries=0))
    client.responses.cancel(first.id)
    begin(client)


def test_events_are_bounded_in_bytes_and_runs_in_number(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "MAX_EVENT_BYTES", 12_000)
    monkeypatch.setattr(create, "MAX_RUNS", 2)
    engine.script = Script(WORDS)
    names = [ended(client, begin(client).id).id for _ in range(3)]
    assert client.responses.retrieve(names[-1]).output_text == "".join(WORDS)
    with pytest.raises(openai.APIError, match=r"first [0-9]+ events are not kept any more"):
        list(client.responses.retrieve(names[-1], stream=True))
    assert list(client.responses.retrieve(names[-1], stream=True, starting_after=45))[-1].type == "response.completed"
    with pytest.raises(openai.BadRequestError, match="keep events"):
        client.responses.retrieve(names[0], stream=True)
    assert client.responses.retrieve(names[0]).status == "completed"


class Runs(create.BackgroundRuns):
    """Runs without answers."""

    def begin(
        self, namespace: str, name: str, *, has_ended: bool = False, num_events: int = 0
    ) -> create.BackgroundRun:
        response: Any = SimpleNamespace(request=SimpleNamespace(namespace=namespace, request_id=name), now=dict)
        answer: Any = SimpleNamespace(progress="", is_refused=False)
        run = self.add(response, answer, ExitStack())
        run.has_ended = has_ended
        for _ in range(num_events):
            run.events.append(b"0123456789")
            run.num_bytes += 10
            self.note_bytes(10)
        return run


def test_a_key_over_its_share_of_runs_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "MAX_RUNS", 4)
    monkeypatch.setattr(create, "MAX_EVENT_BYTES", 100)
    runs = Runs(ServerConfig())
    runs.begin("one", "a", has_ended=True, num_events=3)
    for name in "bcde":
        runs.begin(f"two/{name}", name, has_ended=True, num_events=4)
    assert [runs.find(f"two/{name}", name) is not None for name in "bcde"] == [False, True, True, True]
    kept = runs.find("one", "a")
    assert kept is not None and len(kept.events) == 3, "within its share of bytes, and of runs"


def test_a_key_that_comes_later_finds_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "MAX_RUNS", 4)
    runs = Runs(ServerConfig())
    for namespace, is_taken in (("one", True), ("one/x", True), ("one", False), ("two", True), ("three", True)):
        with nullcontext() if is_taken else pytest.raises(ApiError, match="made in the background"):
            runs.begin(namespace, str(len(runs._runs)))


def test_a_response_takes_so_long_and_no_longer(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "MAX_SECONDS", 1)
    engine.script, engine.max_texts = Script(WORDS), 1
    response = ended(client, begin(client).id)
    assert response.status == "failed" and "may take 1 s" in response.error.message and response.output_text
    assert response.id in engine.cancelled


def test_events_go_some_time_after_the_end(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "KEPT_SECONDS", 0)
    engine.script = Script()
    name = ended(client, begin(client).id).id
    wait_for(lambda: _is_refused(client, name))
    assert client.responses.retrieve(name).output_text == "Hello there."
    engine.script = ENDLESS
    name = client.responses.cancel(begin(client).id).id
    wait_for(lambda: _is_refused(client, name))
    assert client.responses.retrieve(name).status == "cancelled"


def _is_refused(client: openai.OpenAI, name: str) -> bool:
    try:
        client.responses.retrieve(name, stream=True).close()
    except openai.BadRequestError:
        return True
    return False


def test_a_key_holds_its_permit_to_the_end_and_pays(engine: FakeEngine) -> None:
    engine.script = ENDLESS
    keys = KeyRing((ApiKey("mine", digest_of("secret"), concurrent_requests=1, tokens_per_minute=100_000),))
    app = create_app(engine, fake_model(), ServerConfig(api_key="unused"), keys=keys)
    app.state.api.rate_limits.clock = lambda: 0.0
    with running(app) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="secret", max_retries=0) as client:
        response = begin(client)
        with pytest.raises(openai.RateLimitError, match="1 at once"):
            begin(client)
        client.responses.cancel(response.id)
        engine.script = Script()
        begin(client)
        (usage,) = app.state.api.rate_limits.usages.values()
        wait_for(lambda: usage.num_running == 0)
        assert usage.left["tokens"] <= 100_000 - 2 * len(engine.requests[0].tokens) - 3


def test_each_has_one_line_in_the_log_and_one_record(
    client: openai.OpenAI, engine: FakeEngine, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        with begin(client, stream=True) as stream:
            next(iter(stream))
        name = engine.requests[0].request_id
        ended(client, name)
        lines = [one.msg for one in caplog.records if isinstance(one.msg, RequestEnded)]
    assert [(line.request_id, line.finish, line.predicted_tokens) for line in lines] == [(name, "stop", len(WORDS))]
    told = httpx.get(f"{address.removesuffix('/v1')}/metrics").text
    success = next(line for line in told.splitlines() if line.startswith("mlx_serve_request_success_total{"))
    assert 'endpoint="/v1/responses"' in success and 'finished_reason="stop"' in success and success.endswith(" 1.0")


def test_what_a_killed_server_was_making_has_failed(tmp_path: Path) -> None:
    body = {"id": "resp_a", "status": "in_progress", "background": True, "output": [], "error": None}
    ResponseStore(tmp_path / FILE_NAME).save("", StoredResponse("resp_a", body, [], None, "resp_a"))
    config = ServerConfig(cache_dir=str(tmp_path), cache_disk_bytes=1 << 20)
    with running(create_app(FakeEngine(), fake_model(), config)) as base:
        for ask in (httpx.get, lambda path: httpx.post(f"{path}/cancel")):
            told = ask(f"{base}/v1/responses/resp_a").json()
            assert (
                told["status"] == "failed" and told["error"]["message"] == "the server ended before the response did"
            )


SAMPLED: dict[str, Any] = {
    "seed": 7, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "typical_p": 0.9, "top_n_sigma": 2,
    "xtc_probability": 0.3, "xtc_threshold": 0.2, "repetition_penalty": 1.1, "repeat_last_n": 64,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "dry_multiplier": 0.8, "dry_base": 2, "stop": "The end",
    "logit_bias": {"5": -3}, "bad_words": ["alas"], "stop_token_ids": [9], "allowed_token_ids": [5, 6, 9],
}  # fmt: skip


def test_answers_are_sampled_as_those_of_chat_completions(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = Script()
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body=SAMPLED)
    client.responses.create(model="tiny", input="Hi", extra_body=SAMPLED)
    chat, response = ((one.sampling, one.stop, one.stop_token_ids) for one in engine.requests)
    assert response == chat and response[1] == ("The end",)
    assert chat[0].top_k == 20 and chat[0].dry_multiplier == 0.8
    with pytest.raises(openai.BadRequestError, match="min_p"):
        client.responses.create(model="tiny", input="Hi", extra_body={"min_p": 2})
