"""Which tokens hold a text."""

from models.output.detokenizer import MAX_KEPT, token_search

PIECES = [b"a", b"\n", b" b\n\n", b'"', b"", b"\xc3", "é:".encode()]


def test_tokens_are_found_by_what_they_hold() -> None:
    asked: list[int] = []

    def piece(token_id: int) -> bytes:
        asked.append(token_id)
        return PIECES[token_id]

    containing = token_search(piece, len(PIECES))
    assert [containing(text) for text in ("\n", "\n\n", "é", ":", '"', "x")] == [
        *((1, 2), (2,), (6,), (6,), (3,), ()),
    ]
    assert containing("\n") == (1, 2)
    assert asked == list(range(len(PIECES)))


def test_what_is_kept_of_searches_is_bounded() -> None:
    containing = token_search(lambda token_id: b"%d" % token_id, 1000)
    for number in range(3 * MAX_KEPT):
        assert number in containing(str(number))
    assert containing.cache_info().currsize == MAX_KEPT  # type: ignore[attr-defined]
