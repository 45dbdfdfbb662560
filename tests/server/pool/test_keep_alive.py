"""Durations as people and Ollama's clients write them."""

import pytest

from server.pool.names import FOREVER, parse_keep_alive


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("90", 90), (90, 90), (0, 0), ("0", 0), ("0s", 0),
        ("500ms", 0.5), (-1, FOREVER), ("-1", FOREVER), ("-1m", FOREVER), ("forever", FOREVER),
        ("2d", 172_800), (10**400, FOREVER), ("9" * 400 + "h", FOREVER), (2.5, 2.5),
    ],
)  # fmt: skip
def test_a_duration_is_read(text: str | float, seconds: float) -> None:
    assert parse_keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "m", "1h m", True, float("nan"), "٣m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str | float) -> None:
    with pytest.raises(ValueError, match="write it like 30m"):
        parse_keep_alive(text)
