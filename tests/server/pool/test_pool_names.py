"""From a request's name to a model's identity."""

import pytest

from server.pool.names import Alias, ModelUnknown, parse_alias, served_instead, spellings

ALIASES = (Alias("gpt-*", "qwen3:8b"), Alias("gpt-4o", "demo"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", ["demo"]),
        ("demo:latest", ["demo:latest", "demo"]),
        ("gpt-5", ["gpt-5", "qwen3:8b"]),
        ("gpt-5:latest", ["gpt-5:latest", "gpt-5", "qwen3:8b"]),
        ("gpt-4o", ["demo"]),
        ("gpt-4o:latest", ["demo"]),
    ],
)
def test_a_name_stands_for_itself_before_any_pattern_but_after_an_alias_of_its_own(
    name: str, expected: list[str]
) -> None:
    assert spellings(name, ALIASES) == expected


def test_an_alias_is_written_with_an_equals_sign() -> None:
    assert parse_alias(" gpt-* = qwen3:8b ") == Alias("gpt-*", "qwen3:8b")
    for text in ("", "gpt", "=demo", "gpt="):
        with pytest.raises(ValueError, match="write it like"):
            parse_alias(text)


def test_an_unknown_name_is_answered_with_names_like_it_or_with_all() -> None:
    assert served_instead("Qwen3:8", ["demo", "qwen3:8b"]) == "did you mean qwen3:8b?"
    assert served_instead("x" * 300, ["demo"]) == "only demo is served here"
    assert served_instead("zzz", [f"m{i}" for i in range(10)]).endswith("m7 and 2 more are served here")
    assert len(str(ModelUnknown("x" * 10_000, ""))) < 300
