"""`/api/pull` of a real server and a hub on loopback, through the `ollama` package."""

from collections.abc import Iterator

import httpx
import ollama
import pytest

from tests.models.test_hub import MODEL, WEIGHTS
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.pulling_server import DEADLINE_SECONDS, serving_beside

SMALL = "mlx-community/Qwen3-0.6B-4bit"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        hub.repositories[SMALL] = dict(MODEL)
        hub.repositories["org/model"] = dict(MODEL)
        yield hub


@pytest.fixture(scope="module")
def address(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_beside(hub, tmp_path_factory.mktemp("home")) as address:
        yield address


@pytest.fixture
def client(address: str) -> ollama.Client:
    return ollama.Client(address, timeout=DEADLINE_SECONDS)


def test_a_pull_is_told_step_by_step_and_the_model_is_there(client: ollama.Client) -> None:
    steps = list(client.pull("qwen3:0.6b", stream=True))
    assert [steps[0].status, *(step.status for step in steps[-3:])] == [
        "pulling manifest",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    fetched = [step for step in steps if step.digest]
    assert fetched[-1].completed == fetched[-1].total == len(WEIGHTS)
    assert fetched[-1].digest is not None and fetched[-1].digest.startswith("sha256:")
    assert client.pull("qwen3:0.6b").status == "success"


def test_what_cannot_be_pulled_is_an_error_in_its_words(client: ollama.Client, address: str, hub: FakeHub) -> None:
    with pytest.raises(ollama.ResponseError, match="no repository org/modle") as missing:
        client.pull("org/modle")
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="no repository org/modle"):
        list(client.pull("org/modle", stream=True))
    with pytest.raises(ollama.ResponseError, match=r"did you mean qwen3\.5:0\.8b|choose a size"):
        client.pull("qwen3:0.7b")
    for fields in ({}, {"model": ""}, {"model": 5}, {"model": "../x"}, {"model": "/etc/passwd"}):
        assert httpx.post(f"{address}/api/pull", json=fields).status_code in (400, 404), fields
    assert not any("etc" in path for _, path, _ in hub.requests)


def test_a_page_of_another_site_cannot_pull(address: str, hub: FakeHub) -> None:
    before = len(hub.requests)
    for headers in ({"Origin": "https://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}):
        answer = httpx.post(f"{address}/api/pull", json={"model": "org/model"}, headers=headers)
        assert answer.status_code == 403, answer.text
    assert len(hub.requests) == before


def test_a_client_that_leaves_loses_nothing_for_the_next(client: ollama.Client, address: str, hub: FakeHub) -> None:
    hub.pause_after_bytes = 22_000_000
    with httpx.stream("POST", f"{address}/api/pull", json={"model": "org/model"}, timeout=DEADLINE_SECONDS) as answer:
        for line in answer.iter_lines():
            if '"completed":' in line and '"completed":0' not in line.replace(" ", ""):
                break
    hub.pause_after_bytes = None
    hub.resume.set()
    assert client.pull("org/model").status == "success"
    assert client.show("org/model").details is not None
