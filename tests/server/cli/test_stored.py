"""Names of one's own, and the files of models, from the command line."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from models import loader
from models.errors import ModelBroken
from models.names import DEMO_FOLDER, find_stored, resolve
from models.store.library import create
from server.app.config import ServerConfig
from server.app.memory_budget import Claim, Machine, runtime_folder, take
from server.app.service import ServiceOpener, source_of
from server.cli import pull
from server.cli.main import execute
from server.cli.serve import _in_use
from server.pool.memory import PoolMemory
from tests.models.test_names import COMMIT, hub_cache, write_model
from tests.support import tiny_vision

__all__ = ["hub_cache"]


@pytest.fixture(autouse=True)
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "mlx-serve" / "models.json"


@pytest.fixture
def modelfile(tmp_path: Path) -> Path:
    file = tmp_path / "Modelfile"
    file.write_text('FROM demo\nPARAMETER temperature 0.5\nPARAMETER num_gpu 1\nSYSTEM """Be\nbrief."""\n')
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = execute(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_model_is_made_shown_copied_and_removed(capsys: pytest.CaptureFixture[str], modelfile: Path) -> None:
    status, output, _ = run(capsys, "create", "Writer", "-f", str(modelfile))
    assert status == 0
    assert "num_gpu has no effect here" in output
    assert resolve("writer") == DEMO_FOLDER
    assert run(capsys, "cp", "writer", "editor")[0] == 0
    assert run(capsys, "tag", "editor", "v1")[0] == 0
    _, output, _ = run(capsys, "list")
    assert [line.split()[0] for line in output.splitlines()[1:]] == [
        "demo",
        "demo-hybrid",
        "editor",
        "editor:v1",
        "writer",
    ]
    shown = json.loads(run(capsys, "show", "editor:v1", "--json")[1])
    assert (shown["system"], shown["parameters"]) == ("Be\nbrief.", [["temperature", "0.5"]])
    _, output, _ = run(capsys, "rm", "editor", "--force")
    assert "The weights of demo stay; editor:v1, writer use them, too." in output
    assert find_stored("editor") is None
    assert find_stored("editor:v1") is not None


def test_a_folder_with_a_tower_is_said_to_see(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny_vision.write("qwen3_vl", tmp_path / "tiny")
    (folder / "preprocessor_config.json").unlink()
    for has_tower in (True, False):
        assert ("images       seen" in run(capsys, "show", str(folder))[1]) is has_tower
        assert open_opener().describe(source_of(str(folder))).capabilities[1:] == ("vision",) * has_tower
        (folder / "model-vision.safetensors").unlink(missing_ok=True)


def open_opener() -> ServiceOpener:
    return ServiceOpener(ServerConfig(), PoolMemory(1 << 30), None)


def test_what_show_prints_as_a_modelfile_makes_the_same(
    capsys: pytest.CaptureFixture[str], modelfile: Path, tmp_path: Path
) -> None:
    run(capsys, "create", "writer", "-f", str(modelfile))
    _, printed, _ = run(capsys, "show", "writer", "--modelfile")
    (tmp_path / "again").write_text(printed)
    assert run(capsys, "create", "again", "-f", str(tmp_path / "again"))[0] == 0
    writer, again = find_stored("writer"), find_stored("again")
    assert writer is not None
    assert again is not None
    assert writer.defaults == again.defaults


def test_a_model_made_from_a_name_has_its_defaults(
    capsys: pytest.CaptureFixture[str], modelfile: Path, tmp_path: Path
) -> None:
    run(capsys, "create", "writer", "-f", str(modelfile))
    (tmp_path / "child").write_text("FROM writer\nPARAMETER top_k 3\n")
    run(capsys, "create", "child", "-f", str(tmp_path / "child"))
    child = find_stored("child")
    assert child is not None
    assert (child.defaults.system, child.defaults.sampling) == ("Be\nbrief.", {"temperature": 0.5, "top_k": 3})


def test_a_folder_is_named_from_where_the_modelfile_lies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "place" / "tuned")
    (tmp_path / "place" / "Modelfile").write_text("FROM ./tuned\n")
    assert run(capsys, "create", "tuned", "-f", str(tmp_path / "place" / "Modelfile"))[0] == 0
    assert resolve("tuned") == folder.resolve()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cp", "demo", "../x"), "is no name for a model"),
        (("cp", "demo", "demo"), "demo stands for a model that comes with mlx-serve"),
        (("cp", "demo", "qwen3:8b"), "qwen3:8b is a short name of models to pull"),
        (("cp", "demo", "qwen3"), "qwen3 is a short name of models to pull"),
        (("cp", "nope-nope", "x"), "There is no model 'nope-nope'"),
        (("cp", "demo", "taken"), "there is a name taken already"),
        (("tag", "demo", "v1"), "mlx-serve cp demo NAME"),
        (("rm", "demo", "--force"), "comes with mlx-serve"),
        (("rm", "nope-nope"), "There is no model 'nope-nope' to be removed"),
        (("rm", "taken"), "--force removes it at once"),
        (("create", "x", "-f", "/gone/Modelfile"), "there is no /gone/Modelfile; write it first: printf"),
        (("create", "x", "-f", "/"), "/ cannot be read: is a directory"),
        (("show", "demo", "--modelfile"), "demo is no name of your own"),
    ],
)
def test_what_cannot_be_done_is_told(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "cp", "demo", "taken")
    status, _, complaint = run(capsys, *arguments)
    assert status == 1
    assert said in complaint
    assert complaint.count("\n") == 1
    assert find_stored("taken") is not None


def test_a_mistake_in_a_modelfile_is_told_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM demo\nPARAMETER temprature 1\n")
    status, _, complaint = run(capsys, "create", "x", "-f", str(tmp_path / "Modelfile"))
    assert status == 1
    assert "did you mean temperature?" in complaint
    assert find_stored("x") is None


WEIGHTS = json.dumps({"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
FILES = {
    "model.safetensors": struct.pack("<Q", len(WEIGHTS)) + WEIGHTS + bytes(100),
    "config.json": b'{"model_type": "llama"}',
}


def pulled(cache: Path, home_name: str = "models--org--name") -> Path:
    """Writes a repository into the cache as huggingface_hub does."""
    home = cache / home_name
    snapshot = home / "snapshots" / COMMIT
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for name, text in FILES.items():
        is_large = name.endswith(".safetensors")
        digest = hashlib.sha256(text) if is_large else hashlib.sha1(b"blob %d\0" % len(text) + text)
        (home / "blobs" / digest.hexdigest()).write_bytes(text)
        (snapshot / name).symlink_to(os.path.relpath(home / "blobs" / digest.hexdigest(), snapshot))
    return snapshot


def test_whole_files_are_said_to_be_whole(capsys: pytest.CaptureFixture[str], hub_cache: Path) -> None:
    pulled(hub_cache)
    run(capsys, "cp", "org/name", "mine")
    for name in ("org/name", "mine"):
        assert run(capsys, "verify", name) == (0, f"{name} is whole: 2 files have the hub's hash.\n", "")
    assert "demo has its 7 files. No hash is known of 7;" in run(capsys, "verify", "demo")[1]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("model.safetensors", FILES["model.safetensors"][:-1], "incomplete: "),
        ("model.safetensors", FILES["model.safetensors"][:20], "damaged: "),
        ("model.safetensors", b"<html>" + bytes(90), "damaged: "),
        ("model.safetensors", FILES["model.safetensors"][:-1] + b"x", "damaged: its hash is not the hub's"),
        ("config.json", b'{"model_type": "llamb"}', "damaged: its hash is not the hub's"),
        ("config.json", None, "missing"),
        ("model.safetensors", None, "missing"),
    ],
)
def test_each_fault_is_named_and_can_be_removed(
    name: str, text: bytes | None, fault: str, capsys: pytest.CaptureFixture[str], hub_cache: Path
) -> None:
    blob = (pulled(hub_cache) / name).resolve()
    blob.unlink() if text is None else blob.write_bytes(text)
    status, output, complaint = run(capsys, "verify", "org/name")
    assert status == 1
    assert output.startswith(f"{name}: {fault}")
    assert output.count("\n") == 1
    assert f"mlx-serve pull org/name@{COMMIT}" in complaint
    run(capsys, "verify", "org/name", "--remove-damaged")
    assert not blob.exists()
    assert json.loads(run(capsys, "verify", "org/name", "--json")[1])["faults"] == [
        {"file": name, "fault": "missing"}
    ]


def test_weights_that_a_name_or_a_server_needs_are_not_deleted(
    capsys: pytest.CaptureFixture[str], hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    snapshot, copy = pulled(hub_cache), pulled(hub_cache, "models--copied--name")
    run(capsys, "cp", "org/name", "mine")
    status, _, complaint = run(capsys, "rm", "org/name", "--force")
    assert (status, snapshot.is_dir()) == (1, True)
    assert "mine would have no weights; remove these names first: mlx-serve rm mine" in complaint
    run(capsys, "rm", "mine", "--force")
    # The draft model may have gone meanwhile.
    used = _in_use(["demo", f"org/name@{COMMIT}"], ServerConfig(speculate="draft=qwen3"))
    server, _ = take(runtime_folder(os.environ), Claim(os.getppid(), used, 0, "http://127.0.0.1:1"))
    assert "org/name is in use by the server at http://127.0.0.1:1" in run(capsys, "rm", "org/name", "--force")[2]
    short = pulled(hub_cache, "models--mlx-community--Qwen3-0.6B-4bit")
    assert "qwen3:0.6b is in use by the server" in run(capsys, "rm", "qwen3:0.6b", "--force")[2]
    server.close()
    assert snapshot.is_dir()
    assert short.is_dir()
    status, output, _ = run(capsys, "rm", "org/name", "--force")
    assert (status, snapshot.exists(), copy.is_dir()) == (0, False, True), "a copy has the same commit, and stays"
    assert "is deleted" in output


def test_a_download_that_stays_is_not_said_to_be_deleted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hub_cache: Path
) -> None:
    snapshot = pulled(hub_cache)
    part = snapshot.parents[1] / "blobs" / "newer.part"
    with part.open("ab") as arriving:
        fcntl.flock(arriving, fcntl.LOCK_EX)
        status, _, complaint = run(capsys, "rm", "org/name", "--force")
        assert (status, "is being pulled" in complaint, part.exists()) == (1, True, True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(PermissionError))
        status, output, complaint = run(capsys, "rm", "org/name", "--force")
        assert (status, output, "not all its files were deleted" in complaint) == (1, "", True)
    (snapshot / "model.safetensors").resolve().unlink()
    status, output, complaint = run(capsys, "rm", "org/name", "--force")
    assert (status, output, snapshot.is_dir()) == (1, "", True)
    assert f"is not whole, and was not deleted; mend it first: mlx-serve pull org/name@{COMMIT}" in complaint


def test_weights_are_converted_into_a_name_of_ones_own(capsys: pytest.CaptureFixture[str], manifest: Path) -> None:
    status, output, _ = run(capsys, "convert", str(DEMO_FOLDER), "small", "--quantize", "4")
    folder = manifest.parent / "converted" / "small"
    assert (status, output) == (0, f"small is here: {folder}\nTry it: mlx-serve run small\n")
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == 4
    loaded = loader.load(resolve("small"), "small")
    assert loaded.tokenizer.chat_template == loader.load(DEMO_FOLDER, "demo").tokenizer.chat_template
    assert run(capsys, "convert", str(DEMO_FOLDER), "--quantize", "8")[0] == 0
    assert find_stored("demo-8bit") is not None
    for given, words in (
        (("demo", "small"), "there is a small already"),
        (("demo", "other", "--quantize", "7"), "--quantize is '7'; it must be one of 2, 3, 4, 5, 6, 8"),
        ((str(folder), "other", "--quantize", "8"), "is quantized already"),
        (("x.gguf", "other"), "is a GGUF file"),
        (("/gone", "other"), "no folder /gone"),
    ):
        status, _, errors = run(capsys, "convert", *given)
        assert status > 0 and words in errors


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelBroken("it breaks"), OSError(28, "No space left")])
def test_nothing_is_left_of_half_a_conversion(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, manifest: Path
) -> None:
    def write_half(path: Path, name: str, target: Path, bits: object, tell: object) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(loader, "convert_weights", write_half)
    assert run(capsys, "convert", "demo", "other")[0] == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert list((manifest.parent / "converted").iterdir()) == []
    assert find_stored("other") is None


def test_ctrl_c_just_as_weights_are_named_leaves_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, manifest: Path
) -> None:
    def write(path: Path, name: str, target: Path, bits: object, tell: object) -> None:
        shutil.copytree(path, target)

    def interrupted(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return create(*arguments)

    monkeypatch.setattr(loader, "convert_weights", write)
    monkeypatch.setattr(pull, "create", interrupted)
    assert run(capsys, "convert", str(DEMO_FOLDER), "other")[0] == 0
    assert find_stored("other") is not None and (manifest.parent / "converted" / "other" / "config.json").exists()


def test_what_no_memory_can_hold_is_not_converted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.cli.pull.this_machine", lambda: Machine(310 << 20))
    monkeypatch.setattr("server.cli.pull.total_bytes", lambda folder: 12 * 10**9)
    _, _, errors = run(capsys, "convert", "demo", "other")
    assert "would take 12.0 GB, and this machine has memory for 24.1 MB; --quantize 4 takes 1.3 MB" in errors
