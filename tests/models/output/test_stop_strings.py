"""A text ends at its first stop string, wherever it is cut, and no more than needed is held back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.output.pieces import MarkerSearch


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = MarkerSearch(stops)
    emitted = ""
    for piece in pieces:
        text, stop, _ = matcher.push(piece)
        emitted += text
        if stop is not None:
            return emitted, stop
    return emitted + matcher.flush(), None


def find_whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same by looking at all of the text: the stop that ends first, the longer of two that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


STOPS = st.lists(st.text("ab", min_size=1, max_size=3) | st.text("ab", min_size=1, max_size=6), max_size=4)


@settings(max_examples=500, deadline=None)
@example(["b", "ab"], ["a", "b"])
@example(["abab", "ba"], ["aba", "b"])
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_any_cut_of_a_text_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert run_matcher(stops, pieces) == find_whole(stops, "".join(pieces))


@given(STOPS, st.text("abc", max_size=12))
def test_no_more_is_held_back_than_could_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = MarkerSearch(stops)
    emitted, stop, _ = matcher.push(text)
    if stop is None:
        held = text[len(emitted) :]
        assert not held or any(other.startswith(held) for other in stops)


@pytest.mark.parametrize("stop", ["amm", "gamma"])
def test_a_stop_across_token_borders(stop: str) -> None:
    assert run_matcher([stop], ["beta ga", "m", "ma delta"]) == ("beta gamma"[: "beta gamma".index(stop)], stop)
