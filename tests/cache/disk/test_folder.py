"""The folder of the disk tier: whose it is, what is left in it, and what comes of another version or another time."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cache.budget import FolderError
from cache.disk.files import FileSystem
from cache.disk.tier import RETRY_SECONDS, DiskTier
from tests.support.disk_driver import (
    CountingFiles,
    assert_recurrent,
    assert_rows,
    find_snapshot,
    find_span,
    open_tier,
    snap,
    stored_names,
    tokens_of,
    write,
)

SECRET = tokens_of(range(7_000_000, 7_000_300))


def holds_tokens(folder: Path) -> bool:
    """Whether any file of a folder holds two of the secret tokens in a row, as ids."""
    pairs = [SECRET[first : first + 2].tobytes() for first in range(0, len(SECRET), 10)]
    return any(pair in path.read_bytes() for path in folder.iterdir() if path.is_file() for pair in pairs)


@pytest.mark.parametrize("namespace", [None, "secret"])
def test_cleared_tokens_are_in_no_file_while_the_server_runs(
    namespace: str | None, tier: DiskTier, tmp_path: Path
) -> None:
    write(tier, SECRET, namespace="secret")
    write(tier, tokens_of(range(50)), namespace="other")
    assert tier.flush(120)
    assert holds_tokens(tmp_path)
    tier.clear(namespace)
    assert tier.flush(120)
    assert not holds_tokens(tmp_path)
    assert (find_span(tier, tokens_of(range(50)), namespace="other") is None) == (namespace is None)


@pytest.mark.parametrize("is_real", [True, False])
def test_deleted_rows_are_overwritten(is_real: bool, tmp_path: Path) -> None:
    files = FileSystem() if is_real else CountingFiles()
    database = files.connect(tmp_path / "index")
    assert database.execute("PRAGMA secure_delete").fetchone() == (1,)
    database.close()


def test_state_of_another_version_is_removed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path, fingerprint="model mlx 1")
    write(tier, SECRET)
    snap(tier, SECRET)
    assert tier.flush(120)
    tier.close()
    again = open_tier(tmp_path, fingerprint="model mlx 2")
    assert stored_names(tmp_path) == set() and not holds_tokens(tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "removed 2 files" in record.getMessage()
    again.close()
    caplog.clear()
    open_tier(tmp_path, fingerprint="model mlx 2").close()
    assert not caplog.records


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o720, 0o702):
        folder = tmp_path / str(mode)
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(FolderError, match=r"written to by other users .*chmod go-w"):
            open_tier(folder)
        assert [*folder.iterdir()] == []
        folder.chmod(0o755)
        open_tier(folder).close()


def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(FolderError, match="anyone can write to"):
        open_tier(tmp_path / "model")
    tmp_path.chmod(0o1777)
    open_tier(tmp_path / "model").close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    class Theirs(CountingFiles):
        def owner_and_mode(self, path: Path) -> tuple[int, int]:
            return os.geteuid() + 1, 0o700

    with pytest.raises(FolderError, match=f"belongs to another user \\(id {os.geteuid() + 1}\\)"):
        open_tier(tmp_path, files=Theirs())


def test_a_folder_in_one_of_another_user_is_refused(tmp_path: Path) -> None:
    class Inside(CountingFiles):
        owner = os.geteuid() + 1

        def owner_and_mode(self, path: Path) -> tuple[int, int]:
            return (self.owner if path == tmp_path else os.geteuid()), 0o700

    files = Inside()
    with pytest.raises(FolderError, match=f"in a folder that belongs to another user \\(id {files.owner}\\)"):
        open_tier(tmp_path / "model", files=files)
    files.owner = 0
    open_tier(tmp_path / "model", files=files).close()


def test_a_wall_clock_that_goes_back_keeps_nothing_from_being_written(tmp_path: Path) -> None:
    class Full(CountingFiles):
        is_full = True

        def before(self, operation: str) -> None:
            if operation == "write" and self.is_full:
                raise OSError("no space left")

    open_tier(tmp_path).close()
    wall, elapsed, files = [1e9], [50.0], Full()
    tier = open_tier(tmp_path, files=files, now=lambda: wall[0], elapsed=lambda: elapsed[0])
    write(tier, SECRET)
    assert tier.flush(120)
    files.is_full = False
    wall[0] -= 3600
    elapsed[0] += RETRY_SECONDS + 1
    assert write(tier, SECRET) is not None
    assert tier.flush(120)
    tier.close()


def test_what_another_thread_has_read_can_be_used_when_the_thread_is_gone(tier: DiskTier) -> None:
    """Arrays of a thread without streams any more: whatever was left to evaluate could be no longer."""
    write(tier, SECRET)
    snap(tier, SECRET)
    assert tier.flush(120)
    span, snapshot = find_span(tier, SECRET), find_snapshot(tier, SECRET)
    assert span is not None and snapshot is not None and snapshot.has_recurrent
    store = tier.store
    assert store is not None
    with ThreadPoolExecutor(1) as reader:
        rows, _ = reader.submit(store.read, span.parts[0]).result()
        _, state = reader.submit(store.read, snapshot.whole).result()
        reader.submit(mx.clear_streams).result()
    assert rows is not None and state is not None
    assert_rows(rows, SECRET)
    assert_recurrent(state, SECRET)
    assert np.array(mx.concatenate([rows.component(0), rows.component(0)], axis=2)).shape[2] == 2 * len(SECRET)


def test_threads_of_the_tier_give_their_streams_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[str] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: cleared.append(threading.current_thread().name), raising=False)
    tier = open_tier(tmp_path)
    write(tier, SECRET)
    assert tier.flush(120)
    span = find_span(tier, SECRET)
    assert span is not None
    tier.reader.prefetch(span.parts)
    tier.close()
    assert sorted(name.rstrip("_0") for name in cleared) == ["cache-disk-reader", "cache-disk-writer"]
