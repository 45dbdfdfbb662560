"""Bundles: what is written is read, and nothing that was changed, cut or made up does harm."""

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.disk.bundle import (
    MAX_PIECE_BYTES,
    BundleError,
    BundleHead,
    BundlePiece,
    BundleReader,
    BundleTooLarge,
    bundled,
)
from cache.disk.files import Receipt
from tests.support.bundles import reader_of

HEAD = BundleHead("qwen3:8b", "weights mtp", 7)


def piece(
    tokens: list[int], start: int, data: bytes, *, is_snapshot: bool = False, session: str | None = "s"
) -> BundlePiece:
    receipt = Receipt(len(data), 8, 16, bytes(16))
    return BundlePiece("key/salt", session, np.array(tokens, np.int32), start, is_snapshot, receipt)


PIECES = [
    (piece([1, 2, 3], 0, b"abc"), b"abc"),
    (piece([1, 2, 3], 1, b"d", is_snapshot=True), b"d"),
    (piece([1, 2, 3, -4, 2**31 - 1], 3, bytes(600)), bytes(600)),
    (piece([1, 9], 1, b"x", session=None), b"x"),
]


def written(pieces: list[tuple[BundlePiece, bytes]] = PIECES, head: BundleHead = HEAD) -> bytes:
    return b"".join(bundled(head, pieces))


HEAD_BYTES = 2 * 512
"""The first member."""
END = bytes(2 * 512)


def test_what_is_written_is_read() -> None:
    reader = reader_of(written())
    assert reader.head == HEAD
    for (got, data), (wanted, expected) in zip(reader.pieces(), PIECES, strict=True):
        assert (got.tokens.tolist(), data) == (wanted.tokens.tolist(), expected)
        names = ("namespace", "session_id", "start", "is_snapshot", "receipt")
        assert [getattr(got, name) for name in names] == [getattr(wanted, name) for name in names]


def test_other_programs_list_it() -> None:
    with tarfile.open(fileobj=io.BytesIO(written())) as listed:
        names = [(one.name, one.mode) for one in listed.getmembers()]
    assert names[:3] == [("bundle.json", 0o600), ("000000.json", 0o600), ("000000.safetensors", 0o600)]
    assert len(names) == 1 + 2 * len(PIECES)


def test_it_is_read_however_it_arrives() -> None:
    stream = io.BytesIO(written())
    assert len(list(BundleReader(iter(lambda: stream.read(7), b""), 1 << 20).pieces())) == len(PIECES)


def read_all(data: bytes, max_bytes: int = 1 << 20) -> list[tuple[BundlePiece, bytes]]:
    return list(reader_of(data, max_bytes).pieces())


@given(st.integers(0, len(written()) - len(END) - 1))
def test_a_cut_bundle_says_so(length: int) -> None:
    with pytest.raises(BundleError, match=r"cut off|no bundle|damaged|missing"):
        read_all(written()[:length])


def test_what_is_before_a_cut_is_read_first() -> None:
    whole = written()
    pieces = reader_of(whole[: len(whole) - len(END) - 100]).pieces()
    assert [len(next(pieces)[0].tokens) for _ in range(3)] == [3, 3, 5]
    with pytest.raises(BundleError, match="cut off"):
        next(pieces)


@given(st.integers(0, len(written()) - 1), st.integers(1, 255))
def test_a_changed_byte_costs_no_more_than_an_error(place: int, change: int) -> None:
    data = bytearray(written())
    data[place] ^= change
    try:
        for one, _ in read_all(bytes(data)):
            assert 0 <= one.start <= len(one.tokens)
    except BundleError:
        pass


@given(st.binary(max_size=2000))
def test_anything_else_is_no_bundle(data: bytes) -> None:
    with pytest.raises(BundleError):
        read_all(data)


def member(name: str, data: bytes, change: Callable[[tarfile.TarInfo], object] = lambda info: None) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    change(info)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def with_fields(**changed: object) -> bytes:
    """A bundle whose first piece says something else."""
    whole = written()
    text = whole[HEAD_BYTES + 512 :]
    fields = json.loads(text[: text.index(b"\0")])
    return whole[:HEAD_BYTES] + member("000000.json", json.dumps({**fields, **changed}).encode()) + END


RECEIPT = {"num_bytes": 3, "header_bytes": 8, "checksums_bytes": 16, "digest": "00" * 16}


@pytest.mark.parametrize(
    "changed",
    [
        {"start": -1},
        {"start": 4},
        {"start": 3},
        {"start": "0"},
        {"start": True},
        {"kept": 1},
        {"kept": -1},
        {"tokens": [2**31]},
        {"tokens": [1.5]},
        {"tokens": [[1]]},
        {"tokens": None},
        {"tokens": "123"},
        {"is_snapshot": 1},
        {"namespace": None},
        {"session_id": 5},
        {"receipt": {**RECEIPT, "num_bytes": -1}},
        {"receipt": {**RECEIPT, "digest": "zz"}},
        {"receipt": {**RECEIPT, "digest": 5}},
        {"receipt": []},
        {"receipt": {**RECEIPT, "num_bytes": 4}},
    ],
)
def test_a_piece_that_contradicts_itself_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(BundleError, match="damaged"):
        read_all(with_fields(**changed))


@pytest.mark.parametrize("name", ["../000000.json", "/etc/passwd", "000001.json", "bundle.json", "a\nb"])
def test_names_lead_nowhere(name: str) -> None:
    with pytest.raises(BundleError, match=r"stands where 000000\.json is expected"):
        read_all(written()[:HEAD_BYTES] + member(name, b"{}") + END)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE]
)
def test_only_plain_files_are_members(kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, "elsewhere"

    with pytest.raises(BundleError, match="expected"):
        read_all(written()[:HEAD_BYTES] + member("000000.json", b"{}", change) + END)


@pytest.mark.parametrize("num_bytes", [10 << 30, MAX_PIECE_BYTES + 1])
def test_a_piece_of_ten_gigabytes_is_refused_by_its_head(num_bytes: int) -> None:
    huge = replace(PIECES[0][0], receipt=Receipt(num_bytes, 8, 16, bytes(16)))
    begun = b"".join(bundled(HEAD, [(huge, b"")]))[: -len(END) - 512]
    info = tarfile.TarInfo("000000.safetensors")
    info.size = num_bytes
    read = list[int]()
    stream = io.BytesIO(begun + info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))

    def counted() -> bytes:
        read.append(4096)
        return stream.read(4096)

    with pytest.raises(BundleTooLarge, match=str(MAX_PIECE_BYTES)):
        list(BundleReader(iter(counted, b""), 1 << 50).pieces())
    assert sum(read) < 1 << 20


def test_the_whole_is_bounded() -> None:
    assert len(read_all(written(), max_bytes=len(written()))) == len(PIECES)
    with pytest.raises(BundleTooLarge, match="more than the 900 bytes"):
        read_all(written(), max_bytes=900)


@pytest.mark.parametrize(
    "head", [b"", b"[]", b"{}", b'{"model": 1, "fingerprint": "f"}', b'{"model": "m", "fingerprint": "f", "more": 1}']
)
def test_a_head_of_another_form_is_no_bundle(head: bytes) -> None:
    with pytest.raises(BundleError, match="this is no bundle"):
        reader_of(member("bundle.json", head) + END)


def test_another_format_is_named() -> None:
    with pytest.raises(BundleError, match="format 9, this version reads 1"):
        reader_of(written(head=replace(HEAD, format=9)))


def test_deep_json_is_an_error() -> None:
    with pytest.raises(BundleError):
        reader_of(member("bundle.json", b"[" * 200_000) + END)


def test_what_comes_after_the_end_is_not_read() -> None:
    assert len(read_all(written() + b"rest" * 1000)) == len(PIECES)


def test_conversations_are_told_apart() -> None:
    first, snapshot, more, other = (one for one, _ in PIECES)
    assert first.begins(snapshot) and snapshot.begins(more) and not more.begins(other)
    assert not first.begins(replace(more, namespace="b"))
