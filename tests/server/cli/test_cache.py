"""`mlx-serve cache`: the folders of models, as a person lists and removes them."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache.budget import DiskInUse
from cache.disk import model_folders
from cache.disk.model_folders import find_all, place
from server.cli.main import execute
from tests.support.disk_driver import open_tier, tokens_of, write

FIRST = tokens_of(range(40))
QWEN, GEMMA = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for model, fingerprint in (("org/qwen", QWEN), ("gemma", GEMMA)):
        tier = open_tier(place(tmp_path, model, fingerprint * 2))
        assert write(tier, FIRST) is not None and tier.flush(10)
        tier.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], parent: Path, *arguments: str) -> tuple[int, str, str]:
    status = execute(["cache", *arguments, "--cache-dir", str(parent)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@contextmanager
def held(folder: Path) -> Iterator[None]:
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def names(parent: Path) -> list[str]:
    return [folder.path.name for folder in find_all(parent)]


def test_a_folder_has_the_models_name_and_is_found_under_any_other(parent: Path) -> None:
    assert names(parent) == [f"gemma-{GEMMA}", f"org-qwen-{QWEN}"]
    assert place(parent, "called/otherwise", QWEN * 2) == parent / f"org-qwen-{QWEN}"
    assert place(parent / "absent", "../..", QWEN * 2) == parent / "absent" / f"model-{QWEN}"
    assert len(place(parent / "absent", "x" * 500, QWEN).name) < 120


def test_a_folder_without_a_name_gets_one(tmp_path: Path) -> None:
    (tmp_path / QWEN).mkdir()
    assert place(tmp_path, "qwen3:4b", QWEN * 2) == tmp_path / f"qwen3-4b-{QWEN}"
    assert (tmp_path / f"qwen3-4b-{QWEN}").is_dir() and not (tmp_path / QWEN).exists()


def test_the_list_is_for_people_or_programs(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(parent / f"gemma-{GEMMA}"):
        status, output, _ = run(capsys, parent, "list")
        records = json.loads(run(capsys, parent, "list", "--json")[1])
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == ["FOLDER", f"gemma-{GEMMA}", f"org-qwen-{QWEN}"]
    assert [line.endswith("in use") for line in output.rstrip().splitlines()] == [False, True, False]
    assert [(record["model"], record["in_use"]) for record in records] == [("gemma", True), ("org-qwen", False)]
    written = [path for path in (parent / f"gemma-{GEMMA}").iterdir() if path.suffix == ".safetensors"]
    assert records[0]["bytes"] > written[0].stat().st_size and records[0]["last_used"] > 1_700_000_000


def test_nothing_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing is kept" in run(capsys, tmp_path / "absent", "list")[1]
    assert run(capsys, tmp_path / "absent", "list", "--json")[1] == "[]\n"
    assert run(capsys, tmp_path / "absent", "rm", "--all")[:2] == (0, "There is nothing to remove.\n")


@pytest.mark.parametrize("name", ["gemma", f"gemma-{GEMMA}"])
def test_one_is_removed_and_the_other_stays(name: str, parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run(capsys, parent, "rm", name, name)
    assert (status, output.count("Removed gemma-")) == (0, 1)
    assert names(parent) == [f"org-qwen-{QWEN}"]


def test_all_are_removed_and_what_is_not_ours_stays(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (parent / "notes").mkdir()
    (parent / f"gemma-{GEMMA}" / "mine.txt").write_text("x")
    status, output, _ = run(capsys, parent, "rm", "--all")
    assert status == 0 and "did not write stay" in output
    assert sorted(path.name for path in parent.iterdir()) == [f"gemma-{GEMMA}", "notes"]
    assert [path.name for path in (parent / f"gemma-{GEMMA}").iterdir()] == ["mine.txt"]


def test_what_a_server_has_open_is_refused_and_nothing_removed(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(parent / f"org-qwen-{QWEN}"):
        status, output, errors = run(capsys, parent, "rm", "--all")
    assert (status, output) == (1, "") and "in use by a running server" in errors
    assert len(names(parent)) == 2


def test_a_server_that_opens_it_meanwhile_keeps_it(parent: Path) -> None:
    (folder,) = [entry for entry in find_all(parent) if entry.model == "gemma"]
    with held(folder.path), pytest.raises(DiskInUse):
        model_folders.remove(folder)
    assert folder.path.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["rm"], 2, "or --all"),
        (["rm", "gemma", "--all"], 2, "or --all"),
        (["rm", "gamma"], 1, "no folder 'gamma'"),
        (["rm", "../gemma"], 1, "no folder"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], status: int, words: str, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, output, errors = run(capsys, parent, *arguments)
    assert (found, output) == (status, "") and words in errors and errors.count("\n") == 1
    assert len(names(parent)) == 2


def test_a_name_that_two_folders_have_must_be_whole(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (parent / f"gemma-{'a' * 16}").mkdir()
    assert "several folders" in run(capsys, parent, "rm", "gemma")[2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_told(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent.chmod(0)
    try:
        assert "cannot be used: permission denied" in run(capsys, parent, "list")[2]
    finally:
        parent.chmod(0o700)
