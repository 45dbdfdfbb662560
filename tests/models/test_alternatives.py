"""A smaller model is named by what short names say of sizes."""

import pytest

from models.names import suggest_smaller

GB = 10**9


@pytest.mark.parametrize(
    ("name", "limit_bytes", "smaller"),
    [
        ("qwen3:30b", 6 * GB, "qwen3:8b"),
        ("mlx-community/Qwen3-30B-A3B-4bit", 3 * GB, "qwen3:4b"),
        ("llama3.1:8b", 3 * GB, "llama3.2:3b"),
        ("mlx-community/Llama-3.3-70B-Instruct-4bit", 6 * GB, "llama3.1:8b"),
        ("org/unknown", 1_100_000_000, "qwen3:1.7b"),
        ("gemma3:12b", 4 * GB, "gemma3:4b"),
        ("qwen3:8b", 4 * 10**7, None),
    ],
)
def test_the_largest_that_fits_of_the_same_family_if_there_is_one(
    name: str, limit_bytes: int, smaller: str | None
) -> None:
    assert suggest_smaller(name, limit_bytes) == smaller
