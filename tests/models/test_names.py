"""What a MODEL name resolves to, on a made-up Hugging Face cache and without any network."""

import json
import os
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from models import names
from models.errors import ModelBroken, ModelNotFound
from models.names import (
    FAMILIES,
    SHORT_NAMES,
    RepositoryName,
    folder_of,
    installed,
    installed_place,
    model_id,
    parse_repository,
    resolve,
    shorten,
    suggest,
    suggest_smaller,
    used_last,
)
from models.store.stored_model import WeightsPlace

COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for downloads; like a new user's, it does not exist yet."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def write_model(folder: Path, shards: int = 1, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    names = [f"model-{n}.safetensors" for n in range(shards)] if shards > 1 else ["model.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"x" * 1000)
    if shards > 1:
        index = {"weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_download(
    cache: Path, repository: str, commit: str = COMMIT, revision: str = "main", shards: int = 1, **config: object
) -> Path:
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(commit)
    return write_model(home / "snapshots" / commit, shards, **config)


def test_demo_is_the_packaged_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "demo")
    monkeypatch.setitem(names.BUILT_IN, "demo", folder)
    monkeypatch.chdir(tmp_path)
    assert resolve("demo") == folder


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "org" / "mine")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/mine") == (tmp_path / "org" / "mine").resolve()
    assert resolve(str(tmp_path / "org" / "mine")) == tmp_path / "org" / "mine"


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "~/gone", "../gone"])
def test_a_path_that_is_not_there_is_never_taken_for_a_repository(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no folder .* `mlx-serve list` shows"):
        resolve(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.touch()
    with pytest.raises(ModelNotFound, match=r"is a GGUF file.*mlx-serve convert"):
        resolve(str(file))
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve(__file__)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match=r"lacks config\.json, model\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelBroken, match=r"lacks model\.safetensors"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("index", ['{"weight_map": 3}', '{"weight_map": {"w": 3}}', "{"])
def test_a_damaged_index_keeps_no_model_from_being_listed(index: str, hub_cache: Path) -> None:
    folder = write_download(hub_cache, "org/damaged")
    (folder / "model.safetensors.index.json").write_text(index)
    assert "org/damaged" in [model.name for model in names.installed()]


def test_a_cached_repository_is_found_by_name_revision_commit_and_short_name(hub_cache: Path) -> None:
    main = write_download(hub_cache, "mlx-community/Qwen3-0.6B-4bit")
    old = write_download(hub_cache, "mlx-community/Qwen3-0.6B-4bit", OTHER_COMMIT, "v1")
    assert resolve("mlx-community/Qwen3-0.6B-4bit") == main
    assert resolve("mlx-community/Qwen3-0.6B-4bit@v1") == old
    assert resolve(f"mlx-community/Qwen3-0.6B-4bit@{OTHER_COMMIT}") == old
    assert resolve("qwen3:0.6b") == main
    assert resolve("Qwen3:0.6B") == main


@pytest.mark.parametrize("name", ["org/model", "org/model@v2", "qwen3:8b"])
def test_what_is_not_cached_comes_with_the_command_that_fetches_it(name: str, hub_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"mlx-serve pull {name}$"):
        resolve(name)


def test_a_repository_in_other_letters_is_the_same_model(hub_cache: Path) -> None:
    folder = write_download(hub_cache, "mlx-community/Qwen3-8B-4bit")
    for name in (
        "MLX-Community/qwen3-8b-4bit",
        "mlx-community/Qwen3-8B-4bit",
        "https://hf.co/MLX-community/qwen3-8b-4BIT",
    ):
        assert resolve(name) == folder
        assert installed_place(name) == WeightsPlace("repository", "mlx-community/Qwen3-8B-4bit", folder.name)
        assert folder_of(installed_place(name)) == folder
        assert model_id(name) == "mlx-community/Qwen3-8B-4bit"
    assert model_id("Other/Model--x@v2") == "Other/Model--x@v2"


def test_another_revision_than_the_cached_one_is_not_served_in_its_place(hub_cache: Path) -> None:
    write_download(hub_cache, "org/model")
    write_model(hub_cache / "models--org--model" / "snapshots" / COMMIT / "inside")
    for revision in ("v2", f"{COMMIT}/inside"):
        with pytest.raises(ModelNotFound, match=f"org/model@{revision} is not on this machine"):
            resolve(f"org/model@{revision}")


def test_an_interrupted_download_is_not_taken_for_a_model(hub_cache: Path) -> None:
    folder = write_download(hub_cache, "org/model", shards=2)
    (folder / "model-0.safetensors").unlink()
    with pytest.raises(ModelBroken, match="resume it: mlx-serve pull org/model"):
        resolve("org/model")
    assert [model.name for model in installed() if model.name not in names.BUILT_IN] == []


def test_a_misspelt_short_name_gets_a_suggestion(hub_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"choose a size: qwen3:0\.6b"):
        resolve("qwen3:0.5b")
    with pytest.raises(ModelNotFound, match=r"did you mean qwen3:0\.6b\?"):
        resolve("qwne3:0.6b")
    with pytest.raises(ModelNotFound, match="did you mean demo"):
        resolve("demoo")
    with pytest.raises(ModelNotFound, match=r"No model of the family llama3\.2 is on this machine"):
        resolve("llama3.2")


@pytest.mark.parametrize(
    "name", ["", "a b", "org/model/extra", "org/", "/", "--flag/x", "org/na\nme", "..", "org/.."]
)
def test_a_name_that_can_be_nothing_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ModelNotFound, ModelBroken)):
        resolve(name)


def test_installed_tells_size_architecture_and_quantization(hub_cache: Path) -> None:
    write_download(hub_cache, "zeta/plain", model_type="gemma3")
    write_download(hub_cache, "mlx-community/Qwen3-4B-4bit", model_type="qwen3", quantization={"bits": 4})
    write_download(hub_cache, "zeta/plain", OTHER_COMMIT, "v1", quantization=None)
    (hub_cache / "datasets--org--data").mkdir()
    (hub_cache / "models--broken").write_text("not a folder")
    models = {model.name: model for model in installed() if model.name not in names.BUILT_IN}
    assert list(models) == ["mlx-community/Qwen3-4B-4bit", "zeta/plain", "zeta/plain@v1"]
    qwen = models["mlx-community/Qwen3-4B-4bit"]
    assert (qwen.architecture, qwen.quantization, qwen.short_name) == ("qwen3", "4 bit", "qwen3:4b")
    assert qwen.size_bytes == 1000 + len((qwen.path / "config.json").read_text())
    assert models["zeta/plain"].quantization == models["zeta/plain@v1"].quantization == ""


def test_every_listed_model_resolves_by_its_listed_name(hub_cache: Path) -> None:
    write_download(hub_cache, "org/model")
    write_download(hub_cache, "org/model", OTHER_COMMIT, "v1")
    for model in installed():
        assert resolve(model.name) == model.path


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("http://www.huggingface.co/org/name/", "org/name"),
        ("huggingface.co/org/name?library=mlx#files", "org/name"),
        ("hf.co/org/name", "org/name"),
        ("https://hf.co/org/name/tree/main", "org/name"),
        ("https://huggingface.co/org/name/tree/v1.0", "org/name@v1.0"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", "org/name@refs/pr/3"),
        ("https://huggingface.co/org/name/tree/refs/pr/3", "org/name@refs/pr/3"),
        ("https://huggingface.co/org/name/blob/dev/config.json", "org/name@dev"),
    ],
)
def test_an_address_of_the_hub_is_the_repository(address: str, name: str) -> None:
    assert shorten(address) == name
    assert str(parse_repository(address)) == name


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/org",
        "https://huggingface.co/datasets/org/name",
        "https://example.com/org/name",
        "hf.co",
        "hf.co/org",
        "www.hf.co/org",
    ],
)
def test_an_address_of_anything_else_is_no_repository(address: str) -> None:
    assert shorten(address) == address
    assert parse_repository(address) is None


def test_a_family_is_the_largest_of_its_models_that_is_here(hub_cache: Path) -> None:
    for size in ("1.7B", "4B"):
        folder = write_download(hub_cache, f"mlx-community/Qwen3-{size}-4bit")
        assert resolve("qwen3") == resolve("Qwen3:latest") == folder
    assert names.model_id("qwen3") == "qwen3:4b"
    assert names.identity_of(installed_place("qwen3")) == "mlx-community/Qwen3-4B-4bit"
    assert names.model_id("org/name") == "org/name"
    with pytest.raises(ModelNotFound, match="No model of the family gemma3 is on this machine"):
        installed_place("gemma3")


def read_at(folder: Path, seconds: int) -> None:
    for path in folder.iterdir():
        os.utime(path, (seconds, 1))


def test_the_model_used_last_is_a_whole_one_that_chats(hub_cache: Path) -> None:
    assert used_last() is None
    chats = {name: write_download(hub_cache, f"org/{name}") for name in ("old", "new", "half", "vectors", "branch")}
    (hub_cache / "models--org--branch" / "refs" / "main").rename(hub_cache / "models--org--branch" / "refs" / "v1")
    (chats["half"] / "model.safetensors").unlink()
    for when, (name, folder) in enumerate(chats.items()):
        if name == "old":
            (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
        elif name != "vectors":
            (folder / "chat_template.jinja").write_text("{{ messages }}")
        read_at(folder, 1_000_000 + when)
    assert used_last() == "org/new"
    read_at(chats["old"], 2_000_000)
    assert used_last() == "org/old"


GB = 10**9


@pytest.mark.parametrize(
    ("name", "limit_bytes", "smaller"),
    [
        ("qwen3:30b", 6 * GB, "qwen3:8b"),
        ("mlx-community/Qwen3-30B-A3B-4bit", 3 * GB, "qwen3:4b"),
        ("llama3.1:8b", 3 * GB, "llama3.2:3b"),
        ("mlx-community/Llama-3.3-70B-Instruct-4bit", 6 * GB, "llama3.1:8b"),
        ("org/unknown", 1_100_000_000, "qwen3:1.7b"),
        ("gemma3:12b", 4 * GB, "gemma3:4b"),
        ("qwen3:8b", 4 * 10**7, None),
    ],
)
def test_the_largest_that_fits_of_the_same_family_if_there_is_one(
    name: str, limit_bytes: int, smaller: str | None
) -> None:
    assert suggest_smaller(name, limit_bytes) == smaller


def test_every_name_stands_for_a_repository_of_a_plausible_size() -> None:
    for name, one in SHORT_NAMES.items():
        assert re.fullmatch(r"[a-z0-9.-]+:e?[0-9.]+[mb](-(4bit|6bit|8bit|bf16|mxfp4))?", name), name
        assert name == one.name and name.partition(":")[0] in FAMILIES
        assert parse_repository(name) == RepositoryName(one.repository)
        assert 5 * 10**7 < one.num_bytes < 2 * 10**11


def test_one_quantization_of_a_size_is_the_usual_one() -> None:
    usual, named = SHORT_NAMES["qwen3:8b"], SHORT_NAMES["qwen3:8b-4bit"]
    assert usual.repository == named.repository == "mlx-community/Qwen3-8B-4bit"
    assert usual in FAMILIES["qwen3"] and named not in FAMILIES["qwen3"]
    assert usual.num_bytes < SHORT_NAMES["qwen3:8b-8bit"].num_bytes < SHORT_NAMES["qwen3:8b-bf16"].num_bytes


def test_sizes_are_about_those_of_the_files() -> None:
    # As their pages on the hub say.
    for name, num_bytes in {"qwen3:8b": 4.6, "llama3.2:3b": 1.8, "qwen3:30b": 17.2, "gpt-oss:20b": 12.1}.items():
        assert SHORT_NAMES[name].num_bytes == pytest.approx(num_bytes * GB, rel=0.15)


def test_beginnings_name_all_families_that_begin_so() -> None:
    assert suggest("llama3.2") == "choose a size: llama3.2:1b, llama3.2:3b"
    assert set(suggest("Qwen-3:7b").split()) > set(suggest("qwen3.5").split())
    assert suggest("").startswith("give ") and suggest(":8b").startswith("give ")
