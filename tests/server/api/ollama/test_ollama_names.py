"""Names of our own through the `ollama` package: made, asked, shown, copied, removed; a name is only a name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.store.manifest import Manifest
from models.store.stored_model import WeightsPlace
from server.pool.pool import ModelPool
from tests.server.api.test_stored_models import serving_names

USER = {"role": "user", "content": "Tell me of the sea."}


class Served:
    def __init__(self, address: str, manifest: Manifest, folder: Path, pool: ModelPool) -> None:
        self.address = address
        self.manifest = manifest
        self.folder = folder
        self.pool = pool
        self.client = ollama.Client(address, timeout=120)
        self.http = httpx.Client(base_url=address, timeout=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_names(tmp_path_factory.mktemp("names")) as (address, pool, manifest, folder):
        yield Served(address, manifest, folder, pool)


@pytest.fixture(autouse=True)
def _empty(served: Served) -> None:
    with served.manifest.change() as stored:
        stored.clear()


def test_a_model_is_made_asked_shown_copied_and_removed(served: Served) -> None:
    client = served.client
    made: Any = list(
        client.create(
            "writer",
            from_="base",
            system="Be brief.",
            parameters={"temperature": 0, "stop": ["###", "END"], "num_predict": 3, "num_ctx": 900},
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}],
            license=["MIT", "and mine"],
            stream=True,
        )
    )
    assert made[-1].status == "success"
    answer = client.chat("writer", [USER])
    assert answer.eval_count is not None
    assert answer.eval_count <= 3
    shown = client.show("writer")
    raw = served.http.post("/api/show", json={"model": "writer"}).json()
    assert (raw["system"], len(raw["messages"])) == ("Be brief.", 2)
    assert shown.modelfile is not None
    assert shown.modelfile.startswith("FROM base\n")
    assert 'stop                           "END"' in (shown.parameters or "")
    assert shown.license == "MIT\nand mine"
    assert shown.details is not None
    assert shown.details.parent_model == "base"
    assert client.copy("writer", "editor:v2").status == "success"
    assert {model.model for model in client.list().models} >= {"base:latest", "writer:latest", "editor:v2"}
    assert client.delete("writer").status == "success"
    assert "writer:latest" not in {model.model for model in client.list().models}
    assert client.chat("editor:v2", [USER]).message.content == answer.message.content
    assert list(served.pool.engines) == ["base"], "the weights are loaded once"
    assert served.manifest.models()["editor:v2"].weights == WeightsPlace("folder", str(served.folder))


def test_a_modelfile_is_taken_and_hands_on_what_its_parent_has(served: Served) -> None:
    served.client.create("parent", from_="demo", system="Be kind.", parameters={"top_k": 7})
    text = "FROM parent\nPARAMETER temperature 0.5"
    answer = served.http.post("/api/create", json={"name": "child", "modelfile": text, "stream": False})
    assert answer.json() == {"status": "success"}
    child = served.manifest.models()["child:latest"]
    assert child.weights == WeightsPlace("built-in", "demo")
    assert (child.defaults.system, child.defaults.sampling) == ("Be kind.", {"top_k": 7, "temperature": 0.5})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/api/create", {"from": "base"}, 400, "model is required"),
        ("POST", "/api/create", {"model": "x"}, 400, "from: name the model"),
        ("POST", "/api/create", {"model": "x", "from": "nope"}, 404, "model 'nope' not found"),
        ("POST", "/api/create", {"model": "demo", "from": "base"}, 400, "comes with mlx-serve"),
        ("POST", "/api/create", {"model": "qwen3:8b", "from": "base"}, 400, "short name of models to pull"),
        ("POST", "/api/create", {"model": "x", "from": "base", "template": "{{ .Prompt }}"}, 400, "template"),
        ("POST", "/api/create", {"model": "x", "from": "base", "adapters": {"a": "b"}}, 400, "--adapter NAME=FOLDER"),
        ("POST", "/api/create", {"model": "x", "from": "base", "quantize": "q4"}, 400, "quantize"),
        ("POST", "/api/create", {"model": "x", "from": "base", "files": {"a": "b"}}, 400, "files"),
        ("POST", "/api/create", {"model": "x", "from": "base", "parameters": {"temprature": 1}}, 400, "temperature?"),
        ("POST", "/api/create", {"model": "x", "modelfile": "FROM base\nADAPTER x"}, 400, "line 2: ADAPTER"),
        ("POST", "/api/create", {"model": "x", "modelfile": "FROM /etc"}, 404, "not found"),
        ("POST", "/api/copy", {"source": "base"}, 400, "destination"),
        ("POST", "/api/copy", {"source": "nope", "destination": "x"}, 404, "not found"),
        ("DELETE", "/api/delete", {"model": "nope"}, 404, "model 'nope' not found"),
        ("DELETE", "/api/delete", {"model": "base"}, 400, "mlx-serve rm"),
        ("DELETE", "/api/delete", {}, 400, "model is required"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error_in_its_words(
    served: Served, method: str, path: str, body: Any, status: int, said: str
) -> None:
    answer = served.http.request(method, path, json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert said in answer.json()["error"]
    assert served.manifest.models() == {}


def test_only_who_runs_the_server_may(served: Served) -> None:
    served.client.create("writer", from_="demo")
    bodies = {
        ("POST", "/api/create"): {"model": "writer", "from": "demo"},
        ("POST", "/api/copy"): {"source": "demo", "destination": "x"},
        ("DELETE", "/api/delete"): {"model": "writer"},
    }
    for (method, path), body in bodies.items():
        for headers in (
            {"Origin": "https://evil.example"},
            {"X-Forwarded-For": "10.0.0.1"},
            {"Authorization": "Bearer x"},
        ):
            assert served.http.request(method, path, json=body, headers=headers).status_code == 403
    assert set(served.manifest.models()) == {"writer:latest"}


def test_a_manifest_of_a_newer_version_is_left_alone(served: Served) -> None:
    before = served.manifest.path.read_bytes()
    served.manifest.path.write_text('{"version": 99}')
    try:
        for method, path, body in (
            ("POST", "/api/copy", {"source": "demo", "destination": "x"}),
            ("DELETE", "/api/delete", {"model": "x"}),
        ):
            answer = served.http.request(method, path, json=body)
            assert (answer.status_code, "newer mlx-serve" in answer.text) == (503, True)
        assert served.client.show("demo").details is not None
        assert served.manifest.path.read_text() == '{"version": 99}'
    finally:
        served.manifest.path.write_bytes(before)


HOSTILE = [
    "../x", "/etc", "~", "a/b/c", "C:\\", "a\0b", "ünï", "x" * 10_240, "..", ".", "a:b:c", "org/name",
    "hf.co/org/name",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_a_path_or_a_repository(served: Served, name: str) -> None:
    before = sorted(served.manifest.path.parent.rglob("*"))
    for method, path, body in (
        ("POST", "/api/create", {"model": name, "from": "demo"}),
        ("POST", "/api/create", {"model": "x", "from": name}),
        ("POST", "/api/create", {"model": "x", "modelfile": f"FROM {name}"}),
        ("POST", "/api/copy", {"source": "demo", "destination": name}),
        ("POST", "/api/copy", {"source": name, "destination": "x"}),
        ("DELETE", "/api/delete", {"model": name}),
        ("POST", "/api/show", {"model": name}),
    ):
        answer = served.http.request(method, path, json=body)
        assert answer.status_code in (400, 404), (path, body)
        assert len(answer.text) < 2000
    assert served.manifest.models() == {}
    assert sorted(served.manifest.path.parent.rglob("*")) == before


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_any_name_is_taken_or_refused(served: Served, name: str) -> None:
    answer = served.http.post("/api/copy", json={"source": "demo", "destination": name})
    assert answer.status_code in (200, 400)
    assert (answer.status_code == 200) == (
        served.http.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
    )
