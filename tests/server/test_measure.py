"""What `mlx-serve bench` measures: both sides decode the same, a conversation is found again, limits are kept."""

import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cache.types import LayerCache, TokenArray
from models.inference.runner import Runner
from server import measure
from server.measure import Bench, MeasuredConversation, Subject, TimeUp, compare, rows_text
from tests.support import tiny_models


def subject_of(name: str) -> Subject:
    model = tiny_models.build(name)
    return Subject(model, Runner(model, vocab_size=tiny_models.VOCAB), tiny_models.VOCAB, chunk_tokens=64)


@pytest.fixture
def subject() -> Subject:
    return subject_of("llama")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the plan one of a tenth."""
    monkeypatch.setattr(measure, "DECODE_ROWS", ((50,), (50,) * 2, (50,) * 3, (400, 10, 10), (8000, 200, 50, 10)))
    monkeypatch.setattr(measure, "CHUNKS", (32, 64))
    monkeypatch.setattr(measure, "PREFILL_TOKENS", (128, 64))
    monkeypatch.setattr(measure, "TURN_TOKENS", (200, 8000, 32_000))
    monkeypatch.setattr(measure, "LOOK_TOKENS", 50)
    monkeypatch.setattr(measure, "NUM_BLOCKS", 1)


LIMITS: dict[str, Any] = {"until": math.inf, "context_tokens": 4096, "budget_bytes": 1 << 30, "folder": None}


def measured(subject: Subject, **limits: Any) -> tuple[list[str], dict[str, list[Any]]]:
    """Returns the names of what was begun, and the result."""
    bench = Bench(subject, **{**LIMITS, **limits})
    return list(bench.run()), bench.rows


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_both_sides_say_the_same(name: str) -> None:
    found = compare(subject_of(name), (90, 20, 7), num_blocks=2)
    assert found.equal_share == 1
    assert {len(row) for side in (found.ours, found.peer) for row in side.side.tokens()} == {11}
    assert found.ratio > 0 and min(found.speeds) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_next_turns_find_the_conversation_in_its_slot_in_memory_and_on_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(name)
    evaluated, prefill = list[int](), subject.runner.prefill

    def counted(caches: list[LayerCache], tokens: TokenArray) -> None:
        evaluated.append(len(tokens))
        prefill(caches, tokens)

    monkeypatch.setattr(subject.runner, "prefill", counted)
    with closing(MeasuredConversation(subject, 300, tmp_path / "disk")) as conversation:
        conversation.measure()
    assert conversation.figures.keys() == {
        *("tokens", "cold_ms", "live_ms", "paged_in_ms", "restarted_ms", "page_out_ms", "page_in_ms", "megabytes"),
    }
    # The prompt and nine turns of 64 tokens, but for the last of each, and at both openings 8 tokens to calibrate.
    assert 299 + 9 * 63 <= sum(evaluated) - 2 * 8 <= 299 + 9 * 65


def test_what_was_not_written_is_not_called_restarted(subject: Subject, tmp_path: Path) -> None:
    with closing(MeasuredConversation(subject, 300, tmp_path / "disk")) as conversation:
        conversation._restart = conversation._cache.clear  # type: ignore[method-assign]
        conversation.measure()
    assert "paged_in_ms" in conversation.figures and "restarted_ms" not in conversation.figures


@pytest.mark.usual
@pytest.mark.usefixtures("short")
def test_all_that_the_context_holds_is_measured_and_the_rest_named(subject: Subject, tmp_path: Path) -> None:
    begun, rows = measured(subject, folder=tmp_path)
    assert [row["rows"] for row in rows["decode"]] == ["1 × 50", "2 × 50", "3 × 50", "400 + 2 × 10"]
    assert [(row["chunk"], row["prompt"]) for row in rows["prefill"]] == [(32, 128), (64, 128)]
    assert [row["tokens"] for row in rows["turns"]] == [200] and "restarted_ms" in rows["turns"][0]
    assert rows["left_out"] == [
        "turns at 8000 tokens: longer than the context of 4096 tokens",
        "decoding 8000 + 200 + 50 + 10: longer than the context of 4096 tokens",
        "turns at 32000 tokens: longer than the context of 4096 tokens",
    ]
    assert len(begun) == 1 + 4 + 1 + 1


@pytest.mark.usual
@pytest.mark.usefixtures("short")
def test_what_memory_does_not_hold_is_left_out(subject: Subject) -> None:
    _, rows = measured(subject, budget_bytes=700_000)
    assert [row["rows"] for row in rows["decode"]] == ["1 × 50", "2 × 50", "3 × 50"]
    assert rows["turns"] == [] and len(rows["prefill"]) == 2
    assert sum("of memory, and there is 700.0 kB" in reason for reason in rows["left_out"]) == 2


def test_without_time_nothing_is_begun(subject: Subject) -> None:
    begun, rows = measured(subject, until=time.perf_counter())
    assert (begun, rows["decode"], rows["turns"]) == (["a quick first look"], [], [])
    assert rows["left_out"] == ["everything: no time was left once the model was loaded and tried"]


def test_a_measurement_ends_between_two_chunks_when_its_time_is_up(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def late(caches: list[LayerCache], tokens: TokenArray) -> None:
        calls.append(len(tokens))
        subject.until = -math.inf

    monkeypatch.setattr(subject.runner, "prefill", late)
    with pytest.raises(TimeUp):
        compare(subject, (500,), num_blocks=1)
    assert calls == [64]


@pytest.mark.usefixtures("short")
def test_an_error_of_one_measurement_does_not_end_the_rest(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(measure, "compare", fail)
    _, rows = measured(subject)
    assert len(rows["prefill"]) == 2 and len(rows["turns"]) == 1
    assert {"decoding 1 × 50: no memory", "restart at 200 tokens: no folder or no space on the disk"} < {
        *rows["left_out"]
    }


def test_lengths_are_told_shortly() -> None:
    assert rows_text((500,)) == "1 × 500"
    assert rows_text((500, 500)) == "2 × 500"
    assert rows_text((4000, 100, 100)) == "4000 + 2 × 100"
