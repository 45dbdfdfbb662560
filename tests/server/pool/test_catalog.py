"""Which models may be asked for, under which names and for how long, and that a name is never a path."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ModelBroken
from models.names import BUILT_IN, DEMO_FOLDER
from models.store.manifest import FILE_NAME, Manifest
from models.store.stored_model import ModelDefaults, StoredModel, WeightsPlace
from server.pool import catalog
from server.pool.catalog import Catalog
from server.pool.names import (
    FOREVER,
    Alias,
    ModelSource,
    ModelUnknown,
    parse_alias,
    parse_keep_alive,
    served_instead,
    spellings,
)
from tests.models.test_names import COMMIT, hub_cache, write_download, write_model

NAMED = ModelSource("qwen3:0.6b", Path("/models/qwen"))


@pytest.mark.parametrize(
    "name", ["qwen3:0.6b", "mlx-community/Qwen3-0.6B-4bit", "https://huggingface.co/mlx-community/Qwen3-0.6B-4bit"]
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


ALIASES = (Alias("gpt-*", "qwen3:8b"), Alias("gpt-4o", "demo"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", ["demo"]),
        ("demo:latest", ["demo:latest", "demo"]),
        ("gpt-5", ["gpt-5", "qwen3:8b"]),
        ("gpt-5:latest", ["gpt-5:latest", "gpt-5", "qwen3:8b"]),
        ("gpt-4o", ["demo"]),
        ("gpt-4o:latest", ["demo"]),
    ],
)
def test_a_name_stands_for_itself_before_any_pattern_but_after_an_alias_of_its_own(
    name: str, expected: list[str]
) -> None:
    assert spellings(name, ALIASES) == expected


def test_an_alias_is_written_with_an_equals_sign() -> None:
    assert parse_alias(" gpt-* = qwen3:8b ") == Alias("gpt-*", "qwen3:8b")
    for text in ("", "gpt", "=demo", "gpt="):
        with pytest.raises(ValueError, match="write it like"):
            parse_alias(text)


def test_an_unknown_name_is_answered_with_names_like_it_or_with_all() -> None:
    assert served_instead("Qwen3:8", ["demo", "qwen3:8b"]) == "did you mean qwen3:8b?"
    assert served_instead("x" * 300, ["demo"]) == "only demo is served here"
    assert served_instead("zzz", [f"m{i}" for i in range(10)]).endswith("m7 and 2 more are served here")
    assert len(str(ModelUnknown("x" * 10_000, ""))) < 300


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("90", 90), (90, 90), (0, 0), ("0", 0), ("0s", 0),
        ("500ms", 0.5), (-1, FOREVER), ("-1", FOREVER), ("-1m", FOREVER), ("forever", FOREVER),
        ("2d", 172_800), (10**400, FOREVER), ("9" * 400 + "h", FOREVER), (2.5, 2.5),
    ],
)  # fmt: skip
def test_a_duration_is_read(text: str | float, seconds: float) -> None:
    assert parse_keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "m", "1h m", True, float("nan"), "٣m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str | float) -> None:
    with pytest.raises(ValueError, match="write it like 30m"):
        parse_keep_alive(text)
