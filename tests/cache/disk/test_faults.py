"""The disk tier when things go wrong: no wrong token, no exception but DiskFault, one warning."""

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache.budget import DiskFault, FolderError
from cache.disk.tier import DiskTier
from cache.disk.tree import StoredFile
from tests.support import disk_driver
from tests.support.disk_driver import (
    CountingFiles,
    FailingFiles,
    FileSpan,
    KillingFiles,
    assert_all_right,
    assert_snapshot,
    assert_span,
    conversation,
    open_tier,
    snap,
    stored_names,
    tokens_of,
    touch,
    write,
)

TRUNK = tokens_of(range(30))
LEFT = np.concatenate([TRUNK, tokens_of([1] * 10)])
RIGHT = np.concatenate([TRUNK[:20], tokens_of([2] * 10)])
TOKENS = (TRUNK, LEFT, RIGHT)


def filled(folder: Path) -> None:
    """Makes a folder with a few spans and snapshots."""
    tier = open_tier(folder)
    for tokens in TOKENS:
        write(tier, tokens)
        snap(tier, tokens)
    assert tier.flush(120)
    tier.close()


def assert_right_or_gone(tier: DiskTier) -> int:
    """Asserts that every entry and snapshot loads what its tokens say, or raises DiskFault; returns how many do."""
    num_right = 0

    def check(tokens: np.ndarray, span: FileSpan, snapshot: StoredFile | None) -> None:
        nonlocal num_right
        try:
            assert_span(tier, span, tokens)
            num_right += 1
            if snapshot is not None:
                assert_snapshot(tier, snapshot, tokens)
                num_right += 1
        except DiskFault:
            pass

    disk_driver.restorable(tier, check)
    tier.tree.check()
    return num_right


def use(folder: Path, files: CountingFiles) -> None:
    """Does everything a server does with a tier, in a folder that holds something already."""
    try:
        tier = open_tier(folder, files=files)
    except FolderError:
        return
    for number, tokens in enumerate((*TOKENS, tokens_of(range(100, 140)))):
        span, snapshot = write(tier, tokens), snap(tier, tokens)
        tier.flush(120)
        with contextlib.suppress(DiskFault):
            if span is not None and span.is_written:
                tier.reader.prefetch(span.parts)
                assert_span(tier, span, tokens)
        with contextlib.suppress(DiskFault):
            if snapshot is not None and snapshot.is_written:
                tier.reader.prefetch([snapshot.whole])
                assert_snapshot(tier, snapshot, tokens)
        if number == 2:
            write(tier, LEFT, namespace="other")
            tier.clear("other")
        tier.tree.check()
    touch(tier, TRUNK)
    tier.flush(120)
    tier.close()


def num_sound(folder: Path) -> int:
    """Asserts that what is in a folder is right and nothing else is there; returns how many entries are."""
    tier = open_tier(folder)
    found = assert_all_right(tier)
    held = {part.file.name for entry in disk_driver.entries(tier) for part in entry.span.parts}
    held |= {entry.snapshot.name for entry in disk_driver.entries(tier) if entry.snapshot}
    assert stored_names(folder) == held
    tier.close()
    return len(found)


# ----------------------------------------------------------------------------------------- every operation fails


@pytest.mark.parametrize(
    ("forever", "code"), [(False, errno.EIO), (True, errno.ENOSPC)], ids=["once", "from_then_on"]
)
def test_whatever_operation_fails(forever: bool, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "filled")
    fails_at, has_failed = 0, True
    while has_failed:
        fails_at += 1
        folder = tmp_path / str(fails_at)
        shutil.copytree(tmp_path / "filled", folder)
        files = FailingFiles(fails_at, forever=forever, code=code)
        use(folder, files)
        has_failed = files.has_failed
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) <= 1, f"operation {fails_at}: {warnings}"
        assert all(record.levelname in ("WARNING", "DEBUG") for record in caplog.records)
        caplog.clear()
        num_sound(folder)
        shutil.rmtree(folder)
    assert fails_at > 100, "hardly anything was done"


def test_without_failures_everything_is_kept(tmp_path: Path) -> None:
    use(tmp_path, CountingFiles())
    assert num_sound(tmp_path) == 5


# -------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "longer", "zeros", "deleted", "folder", "pipe", "link", "unreadable"]
)
def test_a_damaged_file_is_a_miss_and_no_more(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "filled")
    for name in sorted(stored_names(tmp_path / "filled")):
        folder = tmp_path / name[:8]
        shutil.copytree(tmp_path / "filled", folder)
        tier = open_tier(folder)
        spoil(folder / name, damage)
        num_right = assert_right_or_gone(tier)
        if damage != "unreadable" or os.geteuid():
            assert num_right < 7 and tier.num_gone == 1
            assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert write(tier, TRUNK) is not None, "one bad file does not stop the rest"
        assert tier.flush(120)
        tier.close()
        assert num_sound(folder) > 0 or damage == "folder", "no file can be where a folder is"
        caplog.clear()


def spoil(path: Path, damage: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "link":
        path.with_name("elsewhere").write_bytes(data)
        path.symlink_to(path.with_name("elsewhere"))
    elif damage == "unreadable":
        path.write_bytes(data)
        path.chmod(0)
    elif damage != "deleted":
        contents = {"cut": data[:-1], "empty": b"", "longer": data + b"\0", "zeros": bytes(len(data))}
        path.write_bytes(contents[damage])


@pytest.mark.parametrize("is_open", [True, False], ids=["while_open", "before_opening"])
def test_any_flipped_bit_is_found(is_open: bool, tmp_path: Path) -> None:
    filled(tmp_path / "filled")
    random = np.random.default_rng(3)
    names = sorted(stored_names(tmp_path / "filled"))
    for number in range(30):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "filled", folder)
        path = folder / names[number % len(names)]
        data = bytearray(path.read_bytes())
        tier = open_tier(folder) if is_open else None
        data[random.integers(len(data))] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        tier = tier or open_tier(folder)
        assert assert_right_or_gone(tier) < 7
        assert tier.num_gone == 1, "a flipped bit went unnoticed"
        tier.close()
        shutil.rmtree(folder)


def test_files_that_changed_places_with_their_rows_are_found(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    one, two = tokens_of([1] * 30), tokens_of([2] * 30)
    write(tier, one)
    write(tier, two)
    assert tier.flush(120)
    tier.close()
    first, second = sorted(stored_names(tmp_path))
    columns = "num_bytes, header_bytes, checksums_bytes, digest"
    with sqlite3.connect(tmp_path / "index.sqlite3") as database:
        receipts = [
            database.execute(f"SELECT {columns} FROM files WHERE name = ?", (n,)).fetchone() for n in (first, second)
        ]
        for name, receipt in ((first, receipts[1]), (second, receipts[0])):
            database.execute(f"UPDATE files SET ({columns}) = (?, ?, ?, ?) WHERE name = ?", (*receipt, name))
    database.close()
    (tmp_path / first).rename(tmp_path / "other")
    (tmp_path / second).rename(tmp_path / first)
    (tmp_path / "other").rename(tmp_path / second)
    tier = open_tier(tmp_path)
    assert len(disk_driver.entries(tier)) == 2 and assert_right_or_gone(tier) == 0
    tier.close()


def test_a_file_with_its_row_in_another_folder_is_not_read(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        filled(tmp_path / folder)
    shutil.copy(tmp_path / "one" / "index.sqlite3", tmp_path / "two" / "index.sqlite3")
    for name in stored_names(tmp_path / "one"):
        shutil.copy(tmp_path / "one" / name, tmp_path / "two" / name)
    tier = open_tier(tmp_path / "two")
    assert disk_driver.entries(tier) == [] and stored_names(tmp_path / "two") == set()
    tier.close()


# ------------------------------------------------------------------------------------------------- damaged index


@pytest.mark.parametrize("content", [b"", b"no database at all" * 500, b"SQLite format 3\0" + bytes(5000)])
def test_an_index_that_is_none_means_a_fresh_start(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    (tmp_path / "index.sqlite3").write_bytes(content)
    tier = open_tier(tmp_path)
    assert disk_driver.entries(tier) == [] and stored_names(tmp_path) == set()
    assert len(caplog.records) == (1 if content else 0)
    assert write(tier, TRUNK) is not None
    assert tier.flush(120)
    tier.close()
    assert num_sound(tmp_path) == 1


def test_an_index_of_another_program_means_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for statement in ("CREATE TABLE files (name TEXT)", "PRAGMA user_version = 99"):
        with sqlite3.connect(tmp_path / "index.sqlite3") as database:
            database.execute(statement)
        database.close()
        tier = open_tier(tmp_path)
        assert write(tier, TRUNK) is not None
        assert tier.flush(120)
        tier.close()
        assert num_sound(tmp_path) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_any_damage_to_the_index_gives_no_wrong_token(tmp_path: Path) -> None:
    filled(tmp_path / "filled")
    random = np.random.default_rng(7)
    for number in range(50):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "filled", folder)
        path = folder / "index.sqlite3"
        data = bytearray(path.read_bytes())
        for position in random.integers(len(data), size=1 + number % 20):
            data[position] ^= 1 << int(random.integers(8))
        path.write_bytes(data[: random.integers(len(data))] if number % 10 == 9 else data)
        tier = open_tier(folder)
        assert_right_or_gone(tier)
        write(tier, LEFT)
        snap(tier, LEFT)
        assert tier.flush(120)
        tier.close()
        again = open_tier(folder)
        assert_right_or_gone(again)
        again.close()
        shutil.rmtree(folder)


def test_text_in_the_index_that_is_no_utf_8_costs_the_state_and_no_start(tmp_path: Path) -> None:
    filled(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite3") as database:
        database.execute("UPDATE state SET fingerprint = CAST(x'ff80' AS TEXT)")
    database.close()
    tier = open_tier(tmp_path)
    assert disk_driver.entries(tier) == []
    write(tier, LEFT)
    assert tier.flush(120)
    tier.close()
    assert num_sound(tmp_path) == 1


@pytest.mark.parametrize(
    "column", ["tokens", "start", "stop", "key", "parent_key", "namespace", "digest", "is_snapshot"]
)
def test_a_row_that_was_changed_gives_no_wrong_token(column: str, tmp_path: Path) -> None:
    filled(tmp_path / "filled")
    with sqlite3.connect(tmp_path / "filled" / "index.sqlite3") as database:
        rows = database.execute("SELECT name FROM files").fetchall()
    database.close()
    for (name,) in rows:
        shutil.copytree(tmp_path / "filled", tmp_path / "changed")
        with sqlite3.connect(tmp_path / "changed" / "index.sqlite3") as database:
            (value,) = database.execute(f"SELECT {column} FROM files WHERE name = ?", (name,)).fetchone()
            database.execute(f"UPDATE files SET {column} = ? WHERE name = ?", (changed(value), name))
        database.close()
        tier = open_tier(tmp_path / "changed")
        num_right = assert_right_or_gone(tier)
        assert num_right < 7 or column == "namespace", "a snapshot goes by its key alone"
        tier.close()
        shutil.rmtree(tmp_path / "changed")


def changed(value: object) -> object:
    """Returns a value of the same type and length, different."""
    if isinstance(value, bytes):
        return bytes([*value[:-4], value[-4] ^ 1, *value[-3:]]) if value else b"\1\0\0\0"
    return value ^ 1 if isinstance(value, int) else f"{value}x"


def test_a_lost_secret_means_a_fresh_start(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    tier = open_tier(tmp_path)
    assert disk_driver.entries(tier) == [] and stored_names(tmp_path) == set()
    tier.close()
    filled(tmp_path)
    assert num_sound(tmp_path) == 4


# ------------------------------------------------------------------------------------------------------ kill -9


def write_until_killed(folder: Path, seed: int, dies_at: int) -> None:
    """Writes conversations until an operation ends the process."""
    random = np.random.default_rng(seed)
    tier = open_tier(folder, files=KillingFiles(dies_at), budget_bytes=60_000)
    known: list[np.ndarray] = []
    while True:
        tokens = conversation(random, known)
        known.append(tokens)
        namespace = "" if random.random() < 0.8 else "other"
        write(tier, tokens, namespace=namespace)
        snap(tier, tokens, namespace)
        if random.random() < 0.1:
            tier.clear("other")
        tier.flush(0.001)


def kill_once(folder: Path, seed: int) -> int:
    """Has another process killed at an operation that `seed` chooses; returns how many entries it left."""
    dies_at = int(np.random.default_rng(seed).integers(30, 1500))
    command = [sys.executable, "-m", "tests.cache.disk.test_faults", str(folder), str(seed), str(dies_at)]
    ended = subprocess.run(command, timeout=300, check=False, cwd=Path(__file__).parents[3])
    assert ended.returncode == -9
    return num_sound(folder)


def test_a_kill_at_any_moment_leaves_only_right_state(tmp_path: Path) -> None:
    assert kill_once(tmp_path, 1) > 0
    assert kill_once(tmp_path, 2) > 0, "a second life in the same folder"


def kill_often(folder: Path, num_kills: int) -> None:
    """Has `num_kills` lives of a few folders end at random; each writes and is looked at in a process of its own."""
    num_left = 0
    for seed in range(num_kills):
        place = folder / str(seed % 5)
        dies_at = int(np.random.default_rng(seed).integers(5, 1500))
        _, status = os.waitpid(_fork(lambda: write_until_killed(place, seed, dies_at)), 0)  # noqa: B023
        assert os.waitstatus_to_exitcode(status) == -9, f"life {seed} ended otherwise"
        _, status = os.waitpid(_fork(lambda: os._exit(min(99, num_sound(place)))), 0)  # noqa: B023
        code = os.waitstatus_to_exitcode(status)
        assert code >= 0 and code != 120, f"life {seed} left something wrong"
        num_left += code
    print(f"{num_kills} kills, {num_left} entries left, all of them right")  # noqa: T201


def _fork(run: Callable[[], object]) -> int:
    """Runs something in a copy of this process, which has used no arrays yet, and returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        run()
    finally:
        os._exit(120)


if __name__ == "__main__":
    if sys.argv[1] == "kills":
        with tempfile.TemporaryDirectory() as scratch:
            kill_often(Path(scratch), int(sys.argv[2]))
    else:
        write_until_killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
