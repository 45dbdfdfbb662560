"""`mlx-serve bench` as a person meets it, and what it says of MLX's kernels."""

import json
import os
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from server import measure
from server.app import memory_budget
from server.app.memory_budget import Claim
from server.cli import bench
from server.cli.bench import BenchResult, kernels_text
from server.cli.keys import scratch_folder
from server.cli.main import execute
from server.measure import Bench

pytestmark = pytest.mark.alone("only a model in one process is measured")


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("py3-none-macosx_26_0_arm64", "of MLX for macOS 26, with those of the M5"),
        (
            "py3-none-macosx_14_0_arm64",
            "of MLX for macOS 14, without what only MLX for macOS 26 has: those of the M5",
        ),
        (None, "of an MLX that was not installed from a wheel"),
    ],
)
def test_a_mac_tells_which_kernels_it_has(
    tag: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mlx_metal-0.31.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.31.0\n")
    if tag is not None:
        (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert kernels_text() == text


def test_a_mac_whose_mlx_is_no_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert kernels_text() == "of an MLX that was not installed from a wheel"


ROWS: dict[str, list[Any]] = {
    "decode": [{"rows": "1 × 500", "mlx-serve": 113.4, "BatchGenerator": 12_345.6, "ratio": 0.974}],
    "prefill": [],
    "turns": [{"tokens": 2000, "cold_ms": 2631.0}, {"tokens": 8000, "cold_ms": 26310.0, "restarted_ms": 3.456}],
    "left_out": ["prefill: no time"],
}


def test_a_terminal_gets_columns_and_markdown_tables() -> None:
    result = BenchResult({"chip": "M4", "mlx": "0.32.4"}, ROWS, "demo", 65.4)
    text = result.as_text()
    assert text.startswith("chip       M4\nmlx        0.32.4\n\n")
    assert "\nrows     mlx-serve  BatchGenerator  ratio\n1 × 500        113          12 346   0.97\n" in text
    assert "\ntokens    cold  restarted\n2 000    2 631          -\n8 000   26 310       3.46\n" in text
    assert (
        "Prefill" not in text
        and "\n\nLeft out: prefill: no time.\nTook 65 s.\n\nTo send it: mlx-serve bench demo --markdown" in text
    )
    markdown = result.as_markdown()
    assert markdown.startswith("chip M4, mlx 0.32.4\n\n") and "| 2 000  |  2 631 |         - |" in markdown
    assert "To send it" not in markdown


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keeps other servers of this machine out of sight; returns the only folder that is written to."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_SERVE_CACHE_DIR", str(tmp_path / "cache" / "below"))
    monkeypatch.setattr(measure, "DECODE_ROWS", ((5,), (5,) * 2, (5,) * 3, (9, 5), (9, 8, 7)))
    monkeypatch.setattr(measure, "TURN_TOKENS", (100, 200, 10**6))
    monkeypatch.setattr(measure, "CHUNKS", (16, 32))
    monkeypatch.setattr(measure, "PREFILL_TOKENS", (32,))
    monkeypatch.setattr(measure, "LOOK_TOKENS", 50)
    monkeypatch.setattr(measure, "NUM_BLOCKS", 1)
    return tmp_path


def test_it_measures_a_model_prints_json_and_leaves_nothing(capsys: pytest.CaptureFixture[str], alone: Path) -> None:
    assert execute(["bench", "demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["mlx-serve"] == version("mlx-serve") and told["machine"]["model"].startswith(
        "demo, 2 mill"
    )
    planned = 5 + 1 + 3
    turns, left_out = told["turns"], told["left_out"]
    assert len(told["decode"]) + bool(told["prefill"]) + len(turns) + len(left_out) == planned
    assert turns and "restarted_ms" in turns[0] and not told["is_stopped"]
    assert list(alone.iterdir()) == []


def test_ctrl_c_ends_it_with_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alone: Path
) -> None:
    turns = Bench._measure_turns

    def interrupted(self: Bench, num_tokens: int) -> None:
        turns(self, num_tokens)
        if self.rows["prefill"]:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Bench, "_measure_turns", interrupted)
    assert execute(["bench", "demo", "--json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["is_stopped"] and len(told["decode"]) == 4 and [row["tokens"] for row in told["turns"]] == [100, 200]
    assert list(alone.iterdir()) == []


def test_what_a_killed_process_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    """Not what a living one has, which holds its lock."""
    (tmp_path / "x-killed" / "state").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with scratch_folder(tmp_path, "x-") as first, scratch_folder(tmp_path, "x-") as second:
        assert {one.name for one in tmp_path.iterdir()} == {first.name, second.name, "other"}
    assert [one.name for one in tmp_path.iterdir()] == ["other"]


def test_a_running_server_is_not_measured_beside_unless_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(os.getpid(), "qwen3:8b", 5, "http://127.0.0.1:1")
    own, _ = memory_budget.take(memory_budget.runtime_folder(os.environ), claim)
    monkeypatch.setattr(bench, "LIMIT_SECONDS", 0)
    try:
        assert execute(["bench", "demo"]) == 1
        assert "a server of yours is running (qwen3:8b, process" in capsys.readouterr().err
        assert execute(["bench", "demo", "--force"]) == 0
        shown: Any = capsys.readouterr().out
        assert "beside     a server of yours is running (qwen3:8b" in shown and "Left out: everything" in shown
    finally:
        own.close()


def test_only_one_way_to_print() -> None:
    assert execute(["bench", "demo", "--json", "--markdown"]) == 2
