"""The short names: each is well formed, and a family's models are known by size."""

import re

import pytest

from models.names import (
    FAMILIES,
    SHORT_NAMES,
    RepositoryName,
    find_family,
    largest,
    parse_repository,
    suggest,
)

GB = 10**9


def test_every_name_stands_for_a_repository_of_a_plausible_size() -> None:
    for name, one in SHORT_NAMES.items():
        assert re.fullmatch(r"[a-z0-9.-]+:e?[0-9.]+[mb](-(4bit|6bit|8bit|bf16|mxfp4))?", name), name
        assert name == one.name and name.partition(":")[0] in FAMILIES
        assert parse_repository(name) == RepositoryName(one.repository)
        assert 5 * 10**7 < one.num_bytes < 2 * 10**11


def test_one_quantization_of_a_size_is_the_usual_one() -> None:
    usual, named = SHORT_NAMES["qwen3:8b"], SHORT_NAMES["qwen3:8b-4bit"]
    assert usual.repository == named.repository == "mlx-community/Qwen3-8B-4bit"
    assert usual in FAMILIES["qwen3"] and named not in FAMILIES["qwen3"]
    assert usual.num_bytes < SHORT_NAMES["qwen3:8b-8bit"].num_bytes < SHORT_NAMES["qwen3:8b-bf16"].num_bytes


def test_sizes_are_about_those_of_the_files() -> None:
    # As their pages on the hub say.
    for name, num_bytes in {"qwen3:8b": 4.6, "llama3.2:3b": 1.8, "qwen3:30b": 17.2, "gpt-oss:20b": 12.1}.items():
        assert SHORT_NAMES[name].num_bytes == pytest.approx(num_bytes * GB, rel=0.15)


def test_names_are_found_in_whatever_case() -> None:
    assert parse_repository("Qwen3:8B") == parse_repository("qwen3:8b") is not None
    assert [one.name for one in find_family("Qwen3:latest")][:2] == ["qwen3:0.6b", "qwen3:1.7b"]
    assert not find_family("qwen") and not find_family("qwen3:8b")


def test_beginnings_name_all_families_that_begin_so() -> None:
    assert suggest("llama3.2") == "choose a size: llama3.2:1b, llama3.2:3b"
    assert set(suggest("Qwen-3:7b").split()) > set(suggest("qwen3.5").split())
    assert suggest("").startswith("give ") and suggest(":8b").startswith("give ")


def test_the_largest_that_fits() -> None:
    found = largest(find_family("qwen3"), 6 * GB)
    assert found is not None and found.name == "qwen3:8b"
    assert largest(find_family("qwen3"), 10**7) is None
