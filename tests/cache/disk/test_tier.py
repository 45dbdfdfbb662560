"""The disk tier: what is written once, what is found again, and what goes."""

import contextlib
import stat
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.budget import DiskFault, DiskInUse, FolderError
from cache.disk import tier as tier_module
from cache.disk.tier import RETRY_SECONDS, DiskTier
from cache.types import TokenArray, common_prefix_length
from tests.support import disk_driver
from tests.support.disk_driver import (
    CountingFiles,
    FileSpan,
    assert_all_right,
    assert_rows,
    assert_snapshot,
    assert_span,
    close_if_open,
    conversation,
    find_span,
    open_tier,
    segment_of,
    snap,
    stored_names,
    tokens_of,
    touch,
    wait_until_read,
    write,
    write_snapshot,
)

FIRST = tokens_of(range(100))
BRANCH = np.concatenate([FIRST[:60], tokens_of([7] * 30)])


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.seconds = 1_000_000_000.0

    def __call__(self) -> float:
        return self.seconds


class HeldFiles(CountingFiles):
    """Files that are written only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def before(self, operation: str) -> None:
        super().before(operation)
        if operation == "rename":
            assert self.gate.wait(120)


@contextlib.contextmanager
def reopened(tier: DiskTier, folder: Path) -> Iterator[DiskTier]:
    """Ends a tier in good order and opens its folder again."""
    assert tier.flush(120)
    tier.close()
    again = open_tier(folder)
    yield again
    again.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = open_tier(tmp_path)
    yield made
    made.tree.check()
    close_if_open(made)


def is_gone(span: FileSpan) -> bool:
    return any(part.file.is_gone for part in span.parts)


def size_of(num_tokens: int) -> int:
    """Returns the bytes of rows of so many tokens, without their file's header."""
    return num_tokens * disk_driver.NUM_COMPONENTS * disk_driver.NUM_HEADS * disk_driver.WIDTH * 4


# ----------------------------------------------------------------------------------------------- written once


def test_a_snapshot_with_more_replaces_one_with_less(tier: DiskTier, tmp_path: Path) -> None:
    write(tier, FIRST)
    window = segment_of(FIRST, 96, 2)
    less = write_snapshot(tier, FIRST, window, None)
    more = snap(tier, FIRST)
    assert tier.flush(120)
    assert less is not None and more is not None
    assert less.is_gone and more.is_written and tier.num_gone == 1
    again = write_snapshot(tier, FIRST, window, None)
    assert again is not None and again is more
    with reopened(tier, tmp_path) as later:
        assert_all_right(later)
        assert len(stored_names(tmp_path)) == 2


# ----------------------------------------------------------------------------------------------------- restart


def test_leftovers_are_cleared_and_files_of_others_are_not(tier: DiskTier, tmp_path: Path) -> None:
    write(tier, FIRST)
    assert tier.flush(120)
    (name,) = stored_names(tmp_path)
    (tmp_path / f"{'0' * 32}.safetensors").write_bytes(b"no row")
    (tmp_path / f"{'1' * 32}.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    with reopened(tier, tmp_path):
        assert stored_names(tmp_path) == {name, "model.safetensors"}
        assert (tmp_path / "notes.txt").exists()


def test_random_histories_match_a_list_of_what_was_written(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    tier = open_tier(tmp_path)
    histories: dict[str, list[TokenArray]] = {"": [], "other": []}
    for number in range(150):
        namespace = "" if random.random() < 0.7 else "other"
        written = histories[namespace]
        tokens = conversation(random, written)
        held = max((common_prefix_length(tokens, other) for other in written), default=0)
        start = int(random.integers(0, held + 1))
        span = write(tier, tokens, start, namespace)
        snap(tier, tokens, namespace)
        assert span is not None
        written.append(tokens)
        tier.tree.check()
        if number % 50 == 20:
            tier.flush(120)
            tier.close()
            tier = open_tier(tmp_path)
        if number % 50 == 40:
            tier.clear("other")
            histories["other"].clear()
    assert tier.flush(120)
    for namespace, written in histories.items():
        for tokens in written:
            held_span = find_span(tier, tokens, namespace=namespace)
            assert held_span is not None
            assert_span(tier, held_span, tokens)
    tier.close()
    tier = open_tier(tmp_path)
    found = assert_all_right(tier)
    for namespace, written in histories.items():
        of_namespace = [prefix for name, prefix in found if name == namespace]
        assert all(any(prefix.startswith(tokens.tobytes()) for prefix in of_namespace) for tokens in written)
    tier.close()


# ------------------------------------------------------------------------------------------------------ budget


@pytest.mark.parametrize("seed", range(3))
def test_a_small_budget_is_kept_under_random_use(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    tier = open_tier(tmp_path, budget_bytes=60_000)
    written: list[TokenArray] = []
    for _ in range(80):
        tokens = conversation(random, written)
        write(tier, tokens)
        snap(tier, tokens)
        written.append(tokens)
        touch(tier, written[int(random.integers(len(written)))])
        assert tier.tree.num_bytes <= tier.budget_bytes
        tier.tree.check()
    assert tier.num_gone > 0
    with reopened(tier, tmp_path) as again:
        assert len(assert_all_right(again)) > 3
        assert sum((tmp_path / name).stat().st_size for name in stored_names(tmp_path)) == again.tree.num_bytes


def test_nothing_goes_for_what_would_hang_on_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, budget_bytes=size_of(900))
    tokens = tokens_of(range(1000))
    trunk = write(tier, tokens[:500])
    assert trunk is not None and tier.flush(120)
    assert write(tier, tokens, 500) is None
    assert tier.num_gone == 0, "the trunk went for its own leaf"
    assert write(tier, tokens_of([5] * 500)) is not None
    assert tier.num_gone == 1
    tier.close()


def test_no_more_waits_in_memory_than_allowed_and_a_slow_disk_is_given_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_module, "WAIT_SECONDS", 0.0)
    files, clock = HeldFiles(), Clock()
    tier = open_tier(tmp_path, files=files, max_in_flight_bytes=size_of(100), elapsed=clock)
    assert write(tier, tokens_of([1] * 200)) is not None, "one piece is always taken"
    assert write(tier, tokens_of([2] * 10)) is None
    assert "the disk is slower than what is to be written" in caplog.text
    files.gate.set()
    assert tier.flush(120)
    assert write(tier, tokens_of([2] * 10)) is None, "a disk that is too slow is left alone for a while"
    clock.seconds += RETRY_SECONDS
    assert write(tier, tokens_of([2] * 50)) is not None
    assert write(tier, tokens_of([3] * 50)) is not None
    tier.close()


def open_gate_while_waiting(files: HeldFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens the gate once something waits for writes."""
    wait = futures.wait

    def opens(ahead: list[Any], seconds: float | None) -> Any:
        if ahead:
            files.gate.set()
        return wait(ahead, seconds)

    monkeypatch.setattr(futures, "wait", opens)


def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = HeldFiles()
    open_gate_while_waiting(files, monkeypatch)
    tier = open_tier(tmp_path, files=files, max_in_flight_bytes=size_of(100))
    texts = [tokens_of([value] * 60) for value in range(1, 4)]
    assert write(tier, texts[0]) is not None
    assert not files.gate.is_set()
    assert all(write(tier, text) is not None for text in texts[1:]), "nothing is refused where the disk is able"
    assert tier.flush(120)
    assert all(find_span(tier, text) is not None for text in texts)
    tier.close()


def test_a_write_that_waits_for_one_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingRename(HeldFiles):
        def rename(self, source: Path, target: Path) -> None:
            self.before("rename")
            raise OSError("the disk is full")

    files = FailingRename()
    open_gate_while_waiting(files, monkeypatch)
    tier = open_tier(tmp_path, files=files, max_in_flight_bytes=size_of(100))
    assert write(tier, tokens_of([1] * 60)) is not None
    assert write(tier, tokens_of([2] * 60)) is None
    assert tier.flush(120) and tier.tree.num_bytes == 0
    assert files.counts["rename"] == 1, "the second was never tried"
    tier.close()


def test_what_was_forgotten_before_it_was_written_never_is(tmp_path: Path) -> None:
    files = HeldFiles()
    tier = open_tier(tmp_path, files=files)
    first, second = write(tier, FIRST), write(tier, tokens_of([5] * 10))
    tier.clear()
    assert first is not None and second is not None and is_gone(first) and is_gone(second)
    files.gate.set()
    assert tier.flush(10)
    assert stored_names(tmp_path) == set() and tier.tree.num_bytes == tier.queue.waiting_bytes == 0
    span = write(tier, FIRST)
    assert tier.flush(10)
    assert span is not None
    assert_span(tier, span, FIRST)
    tier.close()


def test_closing_drops_what_waits_to_be_written(tmp_path: Path) -> None:
    files = HeldFiles()
    tier = open_tier(tmp_path, files=files)
    spans = [write(tier, tokens_of([value] * 10)) for value in range(20)]
    files.gate.set()
    tier.close()
    assert any(span is not None and is_gone(span) for span in spans)
    again = open_tier(tmp_path)
    assert_all_right(again)
    again.close()


# ------------------------------------------------------------------------------------------------- going away


# --------------------------------------------------------------------------------------------------- isolation


def test_one_folder_serves_one_process(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(DiskInUse, match="in use by another process"):
        open_tier(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    tier = open_tier(folder)
    write(tier, FIRST)
    snap(tier, FIRST)
    assert tier.flush(120)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    tier.close()


def test_namespaces_share_nothing_not_even_names(tmp_path: Path) -> None:
    names: list[set[str]] = []
    for folder in ("one", "two"):
        tier = open_tier(tmp_path / folder)
        for namespace in ("a", "b"):
            assert write(tier, FIRST, namespace=namespace) is not None
            assert tier.flush(10)
        names.append(stored_names(tmp_path / folder))
        assert find_span(tier, FIRST, namespace="c") is None
        tier.clear("a")
        assert find_span(tier, FIRST, namespace="b") is not None
        tier.close()
    assert len(names[0] | names[1]) == 4, "a name tells who has the same tokens"


# ---------------------------------------------------------------------------------------------------- prefetch


def test_what_was_read_ahead_is_loaded_without_reading(tmp_path: Path) -> None:
    files = CountingFiles()
    tier = open_tier(tmp_path, files=files)
    span, snapshot = write(tier, FIRST), snap(tier, FIRST)
    assert span is not None and snapshot is not None
    assert tier.flush(120)
    ahead = tier.reader.prefetch([*span.parts, snapshot.whole])
    wait_until_read(ahead)
    files.counts.clear()
    assert_span(tier, span.clipped(0, 40), FIRST)
    assert_snapshot(tier, snapshot, FIRST)
    assert files.counts == {}
    assert_span(tier, span, FIRST)
    assert files.counts["open"] == 1, "each piece is handed out once"
    ahead.cancel()
    tier.close()


def test_what_several_wait_for_is_read_once_and_stays_until_the_last_one_gives_up(tmp_path: Path) -> None:
    files = CountingFiles()
    tier = open_tier(tmp_path, files=files)
    span, snapshot = write(tier, FIRST), snap(tier, FIRST)
    assert span is not None and snapshot is not None
    assert tier.flush(120)
    files.counts.clear()
    waiting = [tier.reader.prefetch([*span.parts, snapshot.whole])]
    waiting += [tier.reader.prefetch([*span.clipped(0, 40).parts, snapshot.whole]), tier.reader.prefetch(span.parts)]
    for ahead in waiting:
        wait_until_read(ahead)
    num_read = files.counts["open"]
    for ahead in waiting[:2]:
        ahead.cancel()
        ahead.cancel()
    late = tier.reader.prefetch(span.parts)
    segment = tier.reader.load_rows(span.parts)
    assert_rows(segment, FIRST)
    assert files.counts["open"] == num_read <= 3, "rows, window and recurrent state, each once"
    assert late.is_done
    assert_snapshot(tier, snapshot, FIRST)
    assert files.counts["open"] > num_read, "the last one who waited for the snapshot gave it up"
    kept = weakref.ref(segment)
    del segment
    assert kept() is None, "who waits for nothing any more still holds what was loaded"
    waiting[2].cancel()
    late.cancel()
    tier.close()


def test_reading_ahead_is_bounded_and_can_be_cancelled(tmp_path: Path) -> None:
    files = CountingFiles()
    tier = open_tier(tmp_path, files=files, max_in_flight_bytes=size_of(250))
    spans = []
    for value in range(4):
        spans.append(write(tier, tokens_of([value] * 100)))
        tier.flush(120)
    for _ in range(2):
        files.counts.clear()
        ahead = tier.reader.prefetch([part for span in spans if span is not None for part in span.parts])
        wait_until_read(ahead)
        assert files.counts["open"] == 2, "as many as there is memory for"
        ahead.cancel()
        ahead.cancel()
    for value, span in enumerate(spans):
        assert span is not None
        assert_span(tier, span, tokens_of([value] * 100))
    tier.close()


def test_damage_found_ahead_is_told_where_it_is_loaded(tier: DiskTier, tmp_path: Path) -> None:
    span = write(tier, FIRST)
    assert span is not None and tier.flush(120)
    (name,) = stored_names(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    ahead = tier.reader.prefetch(span.parts)
    with pytest.raises(DiskFault, match="damaged"):
        tier.reader.load_rows(span.parts)
    ahead.cancel()
    assert is_gone(span) and tier.num_gone == 1 and tier.flush(120)
    assert stored_names(tmp_path) == set()
    again = write(tier, FIRST)
    assert again is not None and tier.flush(120)
    assert_span(tier, again, FIRST)


# ------------------------------------------------------------------------------------------------------- others


def test_writing_goes_on_some_time_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, is_full = Clock(), True

    class Full(CountingFiles):
        def before(self, operation: str) -> None:
            if operation == "write" and is_full:
                raise OSError("no space left")

    open_tier(tmp_path).close()
    tier = open_tier(tmp_path, files=Full(), elapsed=clock)
    failed = [write(tier, tokens_of([value] * 10)) for value in range(3)]
    assert tier.flush(120)
    assert all(span is None or is_gone(span) for span in failed)
    assert write(tier, FIRST) is None
    clock.seconds += RETRY_SECONDS + 1
    is_full = False
    span = write(tier, FIRST)
    assert span is not None and tier.flush(120)
    assert_span(tier, span, FIRST)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert stored_names(tmp_path) == {span.parts[0].file.name}
    tier.close()


def test_an_unusable_folder_is_told_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FolderError, match=r"file/cache cannot be used: not a directory"):
        open_tier(tmp_path / "file" / "cache")
