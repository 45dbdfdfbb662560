"""Names of our own in the catalog: one identity for one folder, and never a path."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ModelBroken
from models.names import DEMO_FOLDER
from models.store.manifest import FILE_NAME, Manifest
from models.store.stored_model import ModelDefaults, StoredModel, WeightsPlace
from server.pool.catalog import Catalog
from server.pool.names import ModelSource
from tests.models.test_names import COMMIT, hub_cache, write_download, write_model

__all__ = ["hub_cache"]

NOW = datetime(2026, 11, 23, tzinfo=UTC)
BRIEF = ModelDefaults(system="Be brief.", context_tokens=64)


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Manifest(tmp_path / "data" / "mlx-serve")


def store(manifest: Manifest, name: str, kind: str, place: str, commit: str = "") -> None:
    with manifest.change() as stored:
        weights = WeightsPlace(kind, place, commit)  # type: ignore[arg-type]
        stored[f"{name}:latest"] = StoredModel(f"{name}:latest", weights, NOW, NOW, BRIEF)


def test_a_stored_name_has_the_identity_of_its_weights(manifest: Manifest, hub_cache: Path) -> None:
    folder = write_download(hub_cache, "org/name")
    store(manifest, "writer", "built-in", "demo")
    store(manifest, "coder", "repository", "org/name", COMMIT)
    catalog = Catalog([])
    for name in ("writer", "WRITER", "writer:latest"):
        assert catalog.find(name) == ModelSource("demo", DEMO_FOLDER, label="writer", defaults=BRIEF)
    assert catalog.find("coder") == ModelSource("org/name", folder, label="coder", defaults=BRIEF)
    for name in ("org/name", f"org/name@{COMMIT}"):
        assert catalog.find(name) == ModelSource("org/name", folder)
    assert [source.name for source in catalog.all()] == ["demo", "demo-hybrid", "coder", "writer", "org/name"]


def test_names_of_one_folder_are_one_identity_without_a_path_in_it(manifest: Manifest, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tuned")
    store(manifest, "a", "folder", str(folder))
    store(manifest, "b", "folder", str(folder))
    catalog = Catalog([])
    a, b = catalog.find("a"), catalog.find("b")
    assert a is not None
    assert b is not None
    assert a.id == b.id
    assert str(tmp_path) not in a.id
    assert catalog.find(a.id) == ModelSource(a.id, folder), "what `ps` shows can be asked for"


def test_a_folder_of_the_command_line_is_the_same_model_under_a_stored_name(
    manifest: Manifest, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "tuned")
    (tmp_path / "link").symlink_to(folder)
    store(manifest, "writer", "folder", str(folder))
    catalog = Catalog([ModelSource("link", tmp_path / "link")])
    found = catalog.find("writer")
    assert found is not None
    assert (found.id, found.name) == ("link", "writer")


def test_a_stored_name_of_the_command_line_brings_its_model_under_its_own_id(manifest: Manifest) -> None:
    named = ModelSource("demo", DEMO_FOLDER, label="writer", defaults=BRIEF)
    for has_others in (True, False):
        catalog = Catalog([named], has_others=has_others)
        assert catalog.find("writer") == named
        assert catalog.find("demo") == ModelSource("demo", DEMO_FOLDER)
    assert [source.name for source in Catalog([named]).all()] == ["writer", "demo", "demo-hybrid"]


def test_weights_that_are_gone_are_told_without_their_path(manifest: Manifest, tmp_path: Path) -> None:
    store(manifest, "writer", "folder", str(tmp_path / "gone"))
    catalog = Catalog([])
    with pytest.raises(ModelBroken, match="weights of writer are not there") as caught:
        catalog.find("writer")
    assert str(tmp_path) not in str(caught.value)
    assert "writer" not in [source.name for source in catalog.all()]


def test_a_damaged_manifest_takes_its_own_names_only(manifest: Manifest) -> None:
    store(manifest, "writer", "built-in", "demo")
    manifest.path.write_text("{")
    catalog = Catalog([])
    assert catalog.find("demo") == ModelSource("demo", DEMO_FOLDER)
    assert catalog.find("writer") is None
    assert "demo" in [source.name for source in catalog.all()]
    assert manifest.path.with_name(f"{FILE_NAME}.damaged-1").read_text() == "{"


HOSTILE = [
    "../tuned",
    "/etc",
    "~",
    "a/b/c",
    "C:\\tuned",
    "t\0",
    "tünëd",
    "x" * 10_240,
    "tuned",
    "./tuned",
    "tuned-",
    ".",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_none(
    name: str, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "tuned")
    store(manifest, "writer", "folder", str(tmp_path / "tuned"))
    monkeypatch.chdir(tmp_path)
    assert Catalog([]).find(name) is None
    assert Catalog([]).find(str(tmp_path / name)) is None


@given(st.text(max_size=100))
def test_no_text_is_an_error(name: str) -> None:
    found = Catalog([]).find(name)
    assert found is None or found.id in ("demo", "demo-hybrid")
