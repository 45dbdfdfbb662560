"""The replay: that its tokens share what the records share, and that its figures mean what they are called."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.replay import together, traces
from scripts.replay.drive import GENERATION_HEADER_TOKENS
from scripts.replay.rivals import Sizes
from scripts.replay.together import Replay

SIZES = ["--kv-bytes-per-token", "1000", "--snapshot-bytes", "100000"]


def request(t: float, num_prompt: int, out: int, ids: Sequence[int], stop: str = "tool_use") -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_prompt, "out": out, "hash_ids": list(ids), "stop": stop}


def write_trace(folder: Path, name: str, requests: Sequence[dict[str, Any]], head: int = 128) -> None:
    content = {"id": name, "block_size": 64, "tool_tokens": head - 28, "system_tokens": 28, "requests": requests}
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


GROWING = [
    request(0, 200, 30, [0, 1, 2]),
    request(10, 300, 20, [0, 1, 2, 3]),
    request(20, 330, 500, [0, 1, 2, 3, 4], "end_turn"),
    request(9000, 500, 10, [0, 1, 2, 3, 4, 5, 6]),
    request(9010, 320, 10, [0, 1, 2, 8, 9]),
]


class TestTogether:
    @pytest.mark.parametrize("name", ["qwen3.5-4b"])
    def test_heads_leave_more_memory_to_what_is_stored(self, name: str) -> None:
        model = replace(together.MODELS[name], head_tokens=1280)
        sizes = Sizes(model.bytes_per_token, model.snapshot_bytes, 8000 * model.bytes_per_token + 4e8)
        found = [
            Replay(together.make_agents(4, model, 1), sizes, num_slots=4, heads=heads, is_checked=True).run()
            for heads in (False, True)
        ]
        for one in found:
            assert len(one.order) == len({request.name for request in one.order}) > 50
            assert one.num_prefilled >= one.num_prompt - one.num_hit - len(one.order)
        assert found[0].reuse < found[1].reuse


class TestProgram:
    def replayed(self, tmp_path: Path, *options: str) -> dict[str, Any]:
        out = tmp_path / "figures.json"
        assert traces.main([*SIZES, "--check", "--json", str(out), *options]) == 0
        report: dict[str, Any] = json.loads(out.read_text())
        return report

    def test_with_memory_for_all_only_new_text_is_evaluated(self, tmp_path: Path) -> None:
        write_trace(tmp_path, "one", GROWING[:4])
        report = self.replayed(tmp_path, "--traces", str(tmp_path), "--policy", "cache", "--policy", "unlimited")
        assert report["zero_hit_extensions"] == 0
        found = list(report["losses"].values())
        assert sum(counts["new"] for counts in found) == 200 + 71 + 11 + 170
        assert sum(counts["no_restore_point"] for counts in found) <= GENERATION_HEADER_TOKENS
        assert not any(counts["span_evicted"] or counts["snapshot_evicted"] for counts in found)
        causes = [v for counts in found for cause, v in counts.items() if cause != "requests"]
        assert sum(causes) == report["reevaluated_tokens"]
        assert report["compared"]["unlimited"]["hit_rate"] == report["hit_rate"]

    def test_the_figures_come_by_name_for_every_cache(self, tmp_path: Path) -> None:
        report = self.replayed(tmp_path, "--sessions", "2", "--memory-gb", "0.1", "--one-shot-share", "0.2")
        assert set(report["compared"]) == {"unlimited", "lru", "last-tip", "whole-copy"}
        assert report["one_shots"] == pytest.approx(report["requests"] / 4, abs=1)
        for name in ("hit_rate", "ttft_p99_seconds", "snapshots", "evictions", "memory_bytes", "policy_ms_p99"):
            assert report[name] >= 0
            assert all(name in figures for figures in report["compared"].values())
        assert report["hit_rate"] <= report["compared"]["unlimited"]["hit_rate"]

    def test_what_does_not_fit_memory_comes_back_from_disk(self, tmp_path: Path) -> None:
        options = ("--sessions", "3", "--concurrent", "3", "--memory-gb", "0.1", "--policy", "cache")
        without = self.replayed(tmp_path, *options)
        report = self.replayed(tmp_path, *options, "--disk-gb", "4")
        assert report["hit_rate"] > without["hit_rate"]
        assert report["zero_hit_extensions"] == 0
        assert 0 < report["disk_bytes"] <= report["disk_written_bytes"]

    @pytest.mark.parametrize("options", [["--one-shot-share", "1"], ["--traces", "/nowhere"]])
    def test_what_cannot_be_replayed_is_refused(self, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            traces.main(options)
        assert options[0].removeprefix("--traces") in capsys.readouterr().err
