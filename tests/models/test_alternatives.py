"""A smaller model is named by what short names say of sizes."""

import pytest

from models.alternatives import estimated_bytes, suggest_smaller
from models.names import SHORT_NAMES

GB = 10**9


def test_every_short_name_says_its_size() -> None:
    assert all(10**8 < estimated_bytes(name) < 10**11 for name in SHORT_NAMES)


@pytest.mark.parametrize(
    ("name", "limit_bytes", "smaller"),
    [
        ("qwen3:30b", 6 * GB, "qwen3:8b"),
        ("mlx-community/Qwen3-30B-A3B-4bit", 3 * GB, "qwen3:4b"),
        ("llama3.1:8b", 3 * GB, "llama3.2:3b"),
        ("mlx-community/Llama-3.3-70B-Instruct-4bit", 6 * GB, "llama3.1:8b"),
        ("org/unknown", 1_100_000_000, "qwen3:1.7b"),
        ("qwen3:8b", 10**8, None),
    ],
)
def test_the_largest_that_fits_of_the_same_family_if_there_is_one(
    name: str, limit_bytes: int, smaller: str | None
) -> None:
    assert suggest_smaller(name, limit_bytes) == smaller
