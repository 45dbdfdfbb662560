"""Which models may be asked for, and that a name is never a path."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from models.names import BUILT_IN, DEMO_FOLDER
from server.pool import catalog
from server.pool.catalog import Catalog
from server.pool.names import ModelSource
from tests.models.test_names import write_download

NAMED = ModelSource("qwen3:0.6b", Path("/models/qwen"))


@pytest.mark.parametrize(
    "name",
    ["qwen3:0.6b", "mlx-community/Qwen3-0.6B-4bit", "https://huggingface.co/mlx-community/Qwen3-0.6B-4bit"],
)
def test_all_names_of_a_model_of_the_command_line_are_one_identity(name: str) -> None:
    assert Catalog([NAMED]).find(name) == NAMED


def test_installed_models_are_found_unless_the_server_has_one_only() -> None:
    assert Catalog([NAMED]).find("demo") == ModelSource("demo", DEMO_FOLDER)
    alone = Catalog([NAMED], has_others=False)
    assert alone.find("demo") is None
    assert alone.all() == [NAMED]


def test_a_model_is_listed_once() -> None:
    demo = ModelSource("demo", DEMO_FOLDER)
    assert [source.id for source in Catalog([demo]).all()].count("demo") == 1


def test_what_comes_and_goes_is_listed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog, "LISTING_SECONDS", 1e9)
    known = Catalog([NAMED])

    def listed() -> list[str]:
        return [source.name for source in known.all()]

    built_in = listed()
    assert built_in == ["qwen3:0.6b", *BUILT_IN]
    folder = write_download(tmp_path, "org/model", shards=2)
    assert listed() == [*built_in, "org/model"]
    (folder / "model-1.safetensors").unlink()
    assert listed() == built_in
    (folder / "model-1.safetensors").write_bytes(b"x")
    assert listed() == [*built_in, "org/model"]
    shutil.rmtree(tmp_path / "models--org--model")
    assert listed() == built_in


def test_a_name_is_never_taken_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    for file in DEMO_FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "org/model", "./org/model", "../org/model", "~", ".", "/", "a/../demo", "demo/", ""):
        assert Catalog([NAMED]).find(name) is None, name
