"""Which tokens hold a text."""

from models.output import detokenizer
from models.output.detokenizer import TokenSearch

PIECES = [b"a", b"\n", b" b\n\n", b'"', b"", b"\xc3", "é:".encode()]


def test_tokens_are_found_by_what_they_hold() -> None:
    asked: list[int] = []

    def piece(token_id: int) -> bytes:
        asked.append(token_id)
        return PIECES[token_id]

    search = TokenSearch(piece, len(PIECES))
    assert [search.containing(text) for text in ("\n", "\n\n", "é", ":", '"', "x")] == [
        *((1, 2), (2,), (6,), (6,), (3,), ()),
    ]
    assert search.containing("\n") == (1, 2)
    assert asked == list(range(len(PIECES)))


def test_what_is_kept_of_searches_is_bounded() -> None:
    search = TokenSearch(lambda token_id: b"%d" % token_id, 1000)
    for number in range(3 * detokenizer.MAX_KEPT):
        assert number in search.containing(str(number))
    assert len(search._found) <= detokenizer.MAX_KEPT
