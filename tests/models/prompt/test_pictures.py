"""The places of pictures among tokens: ids, positions, chunks."""

import numpy as np
import pytest

from models.prompt.pictures import NO_PICTURES, RESERVED, digest_of, ids_of, words_at_end
from tests.support.fake_vision import picture_of, prompt_of


def test_ids_are_of_the_file_and_its_processing() -> None:
    one, other = digest_of(b"a", "2x4"), digest_of(b"a", "4x2")
    assert one != other and one != digest_of(b"b", "2x4")
    ids = ids_of(one, 500)
    assert (ids < -RESERVED).all() and len({*ids.tolist()}) == 500
    assert ids[:8].tolist() == ids_of(one, 8).tolist()
    assert ids[0] != ids_of(other, 1)[0]


def positions_by_hand(prompt: list[tuple[int, int] | None]) -> list[tuple[int, int, int]]:
    """Returns what transformers counts: words one by one, a picture as its longer side."""
    found, following = list[tuple[int, int, int]](), 0
    for part in prompt:
        rows, columns = part or (1, 1)
        found += [
            (following, following + row, following + column) for row in range(rows) for column in range(columns)
        ]
        following += max(rows, columns)
    return found


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_positions_have_three_axes_in_a_picture_and_a_shift_behind(chunk: int) -> None:
    tokens, pictures = prompt_of(
        [1, 2], picture_of(b"a", 2, 4), picture_of(b"b", 5, 3), [3], picture_of(b"c", 1, 1), [4]
    )
    wanted = positions_by_hand([None, None, (2, 4), (5, 3), None, (1, 1), None])
    starts = range(0, len(tokens), chunk)
    found = [pictures.positions(start, min(start + chunk, len(tokens))) for start in starts]
    assert [tuple(column) for column in np.concatenate(found, axis=1).T.tolist()] == wanted
    assert len(tokens) - 1 + pictures.shift(len(tokens)) == wanted[-1][0]
    words = [offset for offset, token in enumerate(tokens) if token >= 0]
    assert [offset + pictures.shift(offset) for offset in words] == [wanted[offset][0] for offset in words]


def test_chunks_end_at_both_ends_of_a_picture() -> None:
    tokens, pictures = prompt_of([1, 2, 3], picture_of(b"a"), [4, 5])
    assert [pictures.chunk_end(offset, len(tokens)) for offset in (0, 2, 3, 7, 11, 12)] == [3, 3, 11, 11, 13, 13]
    assert pictures.chunk_end(4, 6) == 6
    assert NO_PICTURES.chunk_end(4, 6) == 6


def test_words_stand_for_pictures_where_ids_must_be_words() -> None:
    tokens, pictures = prompt_of([1, 2], picture_of(b"a"), [4, 5])
    found = np.array(tokens, np.int32)
    assert pictures.in_words(found).tolist() == [1, 2, *[49] * 8, 4, 5]
    assert words_at_end(found).tolist() == [4, 5]
    assert words_at_end(found[:2]).tolist() == [1, 2]
    assert [one.start for one in pictures.until(9).placed] == [] and pictures.until(10).ranges == ((2, 10),)
