"""The manifest: what is written is read, nothing is lost, and damage is told and kept."""

import json
import multiprocessing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import InvalidParameter, StoreError
from models.store.manifest import FILE_NAME, Manifest, data_folder
from models.store.stored_model import (
    SAMPLING_DEFAULTS,
    ExampleMessage,
    ModelDefaults,
    StoredModel,
    WeightsPlace,
    find_full_name,
    parse_full_name,
)

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def model(name: str = "writer:latest", **defaults: object) -> StoredModel:
    return StoredModel(name, WeightsPlace("built-in", "demo"), NOW, NOW, ModelDefaults(**defaults))  # type: ignore[arg-type]


def store(manifest: Manifest, *models: StoredModel) -> None:
    with manifest.change() as stored:
        stored.update({one.name: one for one in models})


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    told = StoredModel(
        "writer:v2",
        WeightsPlace("repository", "org/name", "a" * 40),
        NOW,
        NOW,
        ModelDefaults(
            system="Be brief. Ünïcödé “ok”",
            messages=(ExampleMessage("user", "Hi"), ExampleMessage("assistant", "Yes?")),
            sampling={"temperature": 0.25, "top_k": 40, "seed": 2**62 + 1},
            stop=("\n\n", "END"),
            max_tokens=7,
            context_tokens=512,
            template_arguments={"enable_thinking": False, "nested": {"list": [1, "two"]}},
        ),
        license="MIT",
    )
    store(Manifest(tmp_path), told)
    assert Manifest(tmp_path).models() == {"writer:v2": told}
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def test_a_change_of_another_process_is_seen_and_kept(tmp_path: Path) -> None:
    one, other = Manifest(tmp_path), Manifest(tmp_path)
    store(one, model("a:latest"))
    assert set(other.models()) == {"a:latest"}
    store(other, model("b:latest"))
    store(one, model("c:latest"))
    assert set(other.models()) == {"a:latest", "b:latest", "c:latest"}


def _store_many(folder: Path, prefix: str) -> None:
    for number in range(10):
        store(Manifest(folder), model(f"{prefix}{number}:latest"))


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    writers = [context.Process(target=_store_many, args=(tmp_path, prefix)) for prefix in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert set(Manifest(tmp_path).models()) == {
        f"{prefix}{number}:latest" for prefix in "abc" for number in range(10)
    }


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model())
    before = manifest.path.read_bytes()
    with pytest.raises(ZeroDivisionError), manifest.change() as stored:
        stored["other:latest"] = model(max_tokens=1 // 0)
    assert manifest.path.read_bytes() == before
    assert set(manifest.models()) == {"writer:latest"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"models": []}',
        b'{"version": 1}',
        b'{"version": 1, "models": [{"name": "../x"}]}',
        b'{"version": "1", "models": []}',
    ],
)
def test_a_damaged_file_is_set_aside_once_and_kept(tmp_path: Path, text: bytes) -> None:
    manifest = Manifest(tmp_path)
    for number in (1, 2):
        manifest.path.write_bytes(text)
        with pytest.raises(StoreError, match=f"set aside as {FILE_NAME}.damaged-{number}"):
            manifest.models()
        assert (tmp_path / f"{FILE_NAME}.damaged-{number}").read_bytes() == text
        assert manifest.models() == {}
    manifest.path.write_bytes(text)
    with pytest.raises(StoreError, match="set aside"), manifest.change():
        pass
    store(manifest, model())
    assert set(manifest.models()) == {"writer:latest"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../x:latest"),
        ("name", "UPPER:latest"),
        ("defaults", {"sampling": {"temperature": 9}}),
        ("defaults", {"sampling": {"logit_bias": 1}}),
        ("defaults", {"stop": [""]}),
        ("defaults", {"context_tokens": 1}),
        ("weights", {"kind": "address", "name": "x"}),
    ],
)
def test_a_value_that_could_not_have_been_written_is_damage(tmp_path: Path, field: str, value: object) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model())
    found = json.loads(manifest.path.read_bytes())
    found["models"][0][field] = value
    manifest.path.write_text(json.dumps(found))
    with pytest.raises(StoreError, match="set aside"):
        manifest.models()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    manifest.path.write_text('{"version": 2, "models": {}}')
    with pytest.raises(StoreError, match="newer mlx-serve"), manifest.change():
        pass
    assert manifest.path.read_text() == '{"version": 2, "models": {}}'


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    manifest = Manifest(tmp_path / "file" / "mlx-serve")
    with pytest.raises(StoreError, match="cannot be used"), manifest.change():
        pass


def test_the_folder_is_that_of_the_environment() -> None:
    assert data_folder({"XDG_DATA_HOME": "/data"}) == Path("/data/mlx-serve")
    assert data_folder({}) == Path.home() / ".local" / "share" / "mlx-serve"


HOSTILE = [
    "../x",
    "/etc",
    "~",
    "a/b/c",
    "C:\\",
    "a\0b",
    "ä",
    "x" * 10_240,
    "",
    ":",
    "a:",
    ":b",
    "a:b:c",
    ".",
    "..",
    "-a",
    "a\n",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_none(name: str) -> None:
    assert find_full_name(name) is None
    with pytest.raises(StoreError, match="is no name for a model") as caught:
        parse_full_name(name)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=200))
def test_no_name_is_a_path_or_a_repository(text: str) -> None:
    full = find_full_name(text)
    if full is not None:
        assert not set(full) - set("abcdefghijklmnopqrstuvwxyz0123456789._-:")
        assert full[0] not in ".-:~"
        assert find_full_name(full) == full == find_full_name(full.upper())


def test_the_tag_is_latest_where_none_is_said(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model("writer:latest"), model("writer:v2"))
    for name in ("writer", "Writer:latest", "WRITER"):
        found = manifest.find(name)
        assert found is not None
        assert (found.name, found.short_name) == ("writer:latest", "writer")
    assert manifest.find("writer:v3") is None


@pytest.mark.parametrize("name", SAMPLING_DEFAULTS)
def test_each_sampling_default_is_checked(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ModelDefaults(sampling={name: 2.0**70}).check()


def test_a_request_that_has_a_system_prompt_keeps_it() -> None:
    defaults = ModelDefaults(
        system="Be brief.", messages=(ExampleMessage("user", "1"), ExampleMessage("assistant", "2"))
    )
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "Be long."}
    assert [one["role"] for one in defaults.conversation([user])] == ["system", "user", "assistant", "user"]
    assert defaults.conversation([own, user])[0] is own
    assert len(defaults.conversation([own, user])) == 4
    assert ModelDefaults().conversation([own, user]) == [own, user]
