"""What the `ollama` package, and clients that probe a server first, learn of the models."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import ollama
import pytest
from packaging.version import Version
from starlette.testclient import TestClient

from models.inference.sampling_params import SamplingParams
from models.output.call_formats import HARMONY
from models.output.pieces import ReasoningFormat
from server.app.config import ServerConfig
from server.pool.served import ModelFacts, architecture_facts
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model
from tests.support.live_server import running

FACTS = ModelFacts("qwen3", "f00", 751_632_384, 400, 1600, False, "4-bit", 28, 1024, "{{ messages }}", "<s>", "</s>")


def client_of(**changes: Any) -> TestClient:
    return TestClient(create_app(FakeEngine(), fake_model(facts=FACTS, **changes), ServerConfig()))


@pytest.fixture(scope="module")
def client() -> Iterator[ollama.Client]:
    model = fake_model(id="org/tiny", facts=FACTS, sampling=SamplingParams(temperature=0.7, top_k=20))
    with running(create_app(FakeEngine(), model, ServerConfig())) as address, ollama.Client(address) as client:
        yield client


def test_the_list_names_models_with_their_tag(client: ollama.Client) -> None:
    [model] = client.list().models
    assert (model.model, model.size, model.modified_at) == (
        "org/tiny:latest",
        400,
        datetime.fromtimestamp(1.7e9, UTC),
    )
    assert model.digest and len(model.digest) == 64
    assert model.details and model.details.model_dump() == {
        "parent_model": "", "format": "safetensors", "family": "qwen3", "families": ["qwen3"],
        "parameter_size": "751.63M", "quantization_level": "4-bit",
    }  # fmt: skip
    assert client.chat(str(model.model), [{"role": "user", "content": "Hi"}]).message.content == "Hello there."


def test_what_is_loaded_stays_so(client: ollama.Client) -> None:
    [model] = client.ps().models
    assert (model.name, model.size, model.size_vram, model.context_length) == ("org/tiny:latest", 1600, 0, 200)
    assert model.expires_at and model.expires_at > datetime.now(UTC) + timedelta(days=10_000)


def test_one_model_in_detail(client: ollama.Client) -> None:
    shown = client.show("org/tiny")
    assert shown.modelinfo == {
        "general.architecture": "qwen3", "general.basename": "org/tiny", "general.parameter_count": 751_632_384,
        "qwen3.context_length": 200, "qwen3.embedding_length": 1024, "qwen3.block_count": 28,
    }  # fmt: skip
    assert (shown.template, shown.capabilities) == ("{{ messages }}", ["completion", "tools"])
    assert shown.parameters and dict(line.split() for line in shown.parameters.splitlines()) == {
        "num_ctx": "200", "temperature": "0.7", "top_k": "20", "top_p": "1", "min_p": "0", "repeat_penalty": "1",
    }  # fmt: skip
    with pytest.raises(ollama.ResponseError, match="model 'other' not found") as missing:
        client.show("other")
    assert missing.value.status_code == 404


@pytest.mark.parametrize(
    ("changes", "capabilities"),
    [
        ({"reasoning_format": ReasoningFormat("<think>", "</think>")}, ["completion", "tools", "thinking"]),
        ({"call_format": None}, ["completion"]),
        ({"renderer": FakeRenderer(reads_tools=False)}, ["completion"]),
        ({"call_format": HARMONY}, ["completion", "tools", "thinking"]),
    ],
)
def test_capabilities_are_what_can_be_asked(changes: Any, capabilities: list[str]) -> None:
    shown = client_of(**changes).post("/api/show", json={"name": "tiny:latest", "verbose": True})
    assert shown.json()["capabilities"] == capabilities


def test_a_name_with_a_tag_keeps_it() -> None:
    client = client_of(id="qwen3:4b")
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["qwen3:4b"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (12_340, "12.34K"), (494_032_768, "494.03M"), (8_030_261_248, "8.0B")]
)
def test_parameters_are_counted_as_ollama_writes_them(count: int, text: str) -> None:
    model = fake_model(facts=ModelFacts(num_parameters=count))
    [listed] = TestClient(create_app(FakeEngine(), model, ServerConfig())).get("/api/tags").json()["models"]
    assert listed["details"]["parameter_size"] == text


def test_probes_find_a_server() -> None:
    client = client_of()
    for accept in ("*/*", "application/json", "text/plain"):
        assert client.get("/", headers={"accept": accept}).text == "Ollama is running"
    assert (client.head("/").status_code, client.head("/api/version").status_code) == (200, 200)


def test_clients_of_ollama_can_read_its_version_however_they_do() -> None:
    said = client_of().get("/api/version").json()["version"]
    cut_at_a_dash = re.sub(r"^v|-.*", "", said)
    semver = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)-0\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*", said)
    numbers = [int(one[0]) for part in said.split(".")[:3] if (one := re.match(r"\d+", part))]
    assert semver is not None and cut_at_a_dash.split(".") == list(semver.groups()[:3])
    assert (0, 6, 4) < tuple(numbers) == tuple(map(int, cut_at_a_dash.split(".")))
    assert Version("0.6.4") < Version(said) and "mlx.serve" in str(Version(said).local)


def test_other_apis_take_the_names_that_are_listed_here(client: ollama.Client) -> None:
    address = str(client._client.base_url)
    body = {"model": "org/tiny:latest", "messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{address}/v1/chat/completions", json=body).json()["model"] == "org/tiny"
    assert httpx.get(f"{address}/v1/models/org/tiny:latest").json()["id"] == "org/tiny"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("", "", 0, 0)),
        ({"model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 64}, ("llama", "BF16", 0, 64)),
        (
            {"model_type": "a", "quantization": {"bits": 4}, "text_config": {"num_hidden_layers": 3, "dtype": "x"}},
            ("a", "4-bit", 3, 0),
        ),
        ({"model_type": "a", "quantization": "none", "hidden_size": "big"}, ("a", "", 0, 0)),
    ],
)
def test_a_config_tells_what_the_model_is(config: Any, expected: tuple[Any, ...]) -> None:
    facts = ModelFacts(**architecture_facts(config))
    assert (facts.architecture, facts.weight_format, facts.num_layers, facts.hidden_size) == expected
