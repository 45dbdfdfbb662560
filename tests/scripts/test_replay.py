"""The replay: that its tokens share what the records share, and that its figures mean what they are called."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.types import common_prefix_length
from scripts.replay import together, traces
from scripts.replay.conversations import (
    BLOCK_TOKENS,
    BlockNumbers,
    Conversation,
    Script,
    TraceError,
    read_conversations,
    scripts_of,
)
from scripts.replay.drive import GENERATION_HEADER_TOKENS, Outcome, Sample, requests_of
from scripts.replay.generator import generate
from scripts.replay.layout import SizedCache, SizedLayout, SizedSegment
from scripts.replay.report import Oracle, figures_of, losses, prefill_seconds
from scripts.replay.rivals import CopyRival, Sizes, TreeRival
from scripts.replay.schedule import MAX_GAP_SECONDS, plan_arrivals, with_one_shots
from scripts.replay.together import Replay

SIZES = ["--kv-bytes-per-token", "1000", "--snapshot-bytes", "100000"]


def request(t: float, num_prompt: int, out: int, ids: Sequence[int], stop: str = "tool_use") -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_prompt, "out": out, "hash_ids": list(ids), "stop": stop}


def write_trace(folder: Path, name: str, requests: Sequence[dict[str, Any]], head: int = 128) -> None:
    content = {"id": name, "block_size": 64, "tool_tokens": head - 28, "system_tokens": 28, "requests": requests}
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


def conversation(folder: Path, requests: Sequence[dict[str, Any]]) -> Conversation:
    write_trace(folder, "one", requests)
    return read_conversations(folder)[0]


def script(folder: Path, requests: Sequence[dict[str, Any]]) -> Script:
    return Script(conversation(folder, requests), BlockNumbers())


GROWING = [
    request(0, 200, 30, [0, 1, 2]),
    request(10, 300, 20, [0, 1, 2, 3]),
    request(20, 330, 500, [0, 1, 2, 3, 4], "end_turn"),
    request(9000, 500, 10, [0, 1, 2, 3, 4, 5, 6]),
    request(9010, 320, 10, [0, 1, 2, 8, 9]),
]


class TestTokens:
    def test_a_prompt_has_its_exact_length_and_distinct_tokens(self, tmp_path: Path) -> None:
        one = script(tmp_path, GROWING)
        assert [len(one.prompt(i)) for i in range(5)] == [200, 300, 330, 500, 320]
        assert len(np.unique(one.prompt(3))) == 500

    def test_an_extension_holds_the_whole_prompt_and_the_reply(self, tmp_path: Path) -> None:
        one = script(tmp_path, GROWING)
        said = np.concatenate([one.prompt(0), one.output(0)])
        assert common_prefix_length(said, one.prompt(1)) == len(said) == 230

    def test_a_reply_that_does_not_fit_before_the_next_message_never_comes_back(self, tmp_path: Path) -> None:
        one = script(tmp_path, GROWING)
        assert one.is_extension(3)
        assert not one.is_replayed(2)
        assert len(one.output(2)) == 500
        assert not np.isin(one.output(2), one.prompt(3)).any()

    def test_a_rewind_shares_full_blocks_only(self, tmp_path: Path) -> None:
        one = script(tmp_path, GROWING)
        assert not one.is_extension(4)
        assert common_prefix_length(one.prompt(3), one.prompt(4)) == 3 * BLOCK_TOKENS

    def test_files_share_their_heads_and_nothing_else(self, tmp_path: Path) -> None:
        write_trace(tmp_path, "left", GROWING, head=128)
        write_trace(tmp_path, "right", GROWING, head=128)
        left, right = scripts_of(read_conversations(tmp_path), BlockNumbers())
        assert common_prefix_length(left.prompt(3), right.prompt(3)) == 128
        assert len(np.intersect1d(left.prompt(3), right.prompt(3))) == 128

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"requests": [{}]}', b"[1]"])
    def test_a_file_that_is_no_trace_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(TraceError, match=r"broken\.json"):
            read_conversations(tmp_path)


class TestGenerator:
    def test_one_seed_is_one_history(self) -> None:
        first, again, other = generate(4, 1), generate(4, 1), generate(4, 2)
        assert [c.turns[0].num_prompt for c in first] == [c.turns[0].num_prompt for c in again]
        assert [c.turns[0].num_prompt for c in first] != [c.turns[0].num_prompt for c in other]

    def test_the_shapes_are_those_asked_for(self) -> None:
        made = generate(300, 0)
        starts = [c.turns[0].num_prompt for c in made]
        counts = [len(c.turns) for c in made]
        assert np.percentile(starts, [10, 50, 90]) == pytest.approx([13_600, 19_200, 30_900], rel=0.1)
        assert np.percentile(counts, [10, 50, 90]) == pytest.approx([7, 46, 160], rel=0.3)
        turns = [(a, b) for c in made for a, b in zip(c.turns, c.turns[1:], strict=False)]
        assert 0.96 < np.mean([b.extends(a) for a, b in turns]) < 0.99
        growth = [b.num_prompt - a.num_prompt for a, b in turns if b.extends(a)]
        assert np.median(growth) == pytest.approx(np.exp(6.63), rel=0.05)

    def test_prompts_have_the_blocks_of_their_length(self) -> None:
        for turn in generate(3, 5)[2].turns:
            assert len(turn.blocks) == turn.num_prompt // BLOCK_TOKENS


class TestSchedule:
    def test_conversations_keep_their_order_and_long_gaps_are_capped(self, tmp_path: Path) -> None:
        arrivals = plan_arrivals([script(tmp_path, GROWING)], 3, seed=0)
        seconds = [a.seconds - arrivals[0].seconds for a in arrivals]
        assert [a.index for a in arrivals] == [0, 1, 2, 3, 4]
        assert seconds == pytest.approx([0, 10, 20, 20 + MAX_GAP_SECONDS, 30 + MAX_GAP_SECONDS])

    def test_no_more_conversations_run_than_lanes(self) -> None:
        scripts = list(scripts_of(generate(12, 3), BlockNumbers()))
        arrivals = plan_arrivals(scripts, 3, seed=3)
        last = {id(a.script): a.seconds for a in arrivals}
        running: set[int] = set()
        for arrival in arrivals:
            running = {key for key in running if last[key] > arrival.seconds} | {id(arrival.script)}
            assert len(running) <= 3

    def test_one_shots_are_the_share_asked_for(self, tmp_path: Path) -> None:
        arrivals = plan_arrivals([script(tmp_path, GROWING * 20)], 1, seed=0)
        mixed = with_one_shots(arrivals, 0.5, seed=0)
        added = [a for a in mixed if a.script is None]
        assert len(added) == len(arrivals) == 100
        assert all(1_000 <= a.one_shot_tokens <= 8_000 for a in added)
        assert [a for a in mixed if a.script is not None] == arrivals


class TestLayout:
    def test_state_put_back_at_another_offset_is_refused(self) -> None:
        layout = SizedLayout(10, 100)
        state = layout.take_recurrent([SizedCache(5)])
        layout.put_recurrent([SizedCache(5)], state)
        with pytest.raises(AssertionError):
            layout.put_recurrent([SizedCache(6)], state)

    def test_rows_with_a_gap_are_refused(self) -> None:
        layout, live = SizedLayout(10, 100), [SizedCache()]
        layout.load_spans(live, [SizedSegment(0, 4, 10)], keep=0, offset=4, capacity=9)
        with pytest.raises(AssertionError):
            layout.load_spans(live, [SizedSegment(5, 8, 10)], keep=4, offset=8, capacity=9)

    def test_sequences_on_a_head_own_the_rest(self) -> None:
        layout, first, head, second = SizedLayout(10, 100), [SizedCache(8)], [SizedCache()], [SizedCache()]
        layout.split_at_head(first, head, 5)
        layout.put_on_head(second, head)
        layout.load_spans(second, [SizedSegment(5, 7, 10)], keep=5, offset=7, capacity=9)
        assert [layout.live_bytes(caches) for caches in (head, first, second)] == [50, 130, 120]
        assert [layout.origin(caches) for caches in (head, first, second)] == [0, 5, 5]
        assert layout.capacity(head) == 5
        with pytest.raises(AssertionError):
            layout.live_rows(first, 4, 8)


class TestRivals:
    def test_the_last_tip_alone_loses_a_rewind(self, tmp_path: Path) -> None:
        def hits(rival: TreeRival | CopyRival) -> list[int]:
            numbers = BlockNumbers()
            scripts = [Script(read_conversations(tmp_path)[0], numbers)]
            return [rival.run(r).hit_tokens for r in requests_of(plan_arrivals(scripts, 1, 0), numbers)]

        write_trace(tmp_path, "one", GROWING)
        sizes = Sizes(1000, 100_000, 1e12)
        assert hits(TreeRival(sizes)) == [0, 229, 319, 329, 0]
        assert hits(TreeRival(sizes, keeps_last_only=True)) == [0, 199, 299, 329, 0]
        assert hits(CopyRival(sizes)) == [0, 229, 319, 329, 0]

    @pytest.mark.parametrize("make", [TreeRival, CopyRival])
    def test_no_more_is_held_than_the_budget(self, make: type[TreeRival] | type[CopyRival]) -> None:
        sizes = Sizes(1000, 100_000, 60e6)
        rival, numbers = make(sizes), BlockNumbers()
        arrivals = plan_arrivals(list(scripts_of(generate(3, 1), numbers)), 2, 1)[:60]
        for one in requests_of(arrivals, numbers):
            rival.run(one)
            assert rival.outcome([]).memory_bytes <= 60e6


class TestTogether:
    @pytest.mark.parametrize("name", ["qwen3-4b", "qwen3.5-4b"])
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


class TestFigures:
    def test_depth_halves_the_speed(self) -> None:
        shallow, deep = prefill_seconds(0, 1), prefill_seconds(65_536, 65_537)
        assert shallow == pytest.approx(1 / 1_200, rel=1e-3)
        assert deep == pytest.approx(2 / 1_200, rel=1e-3)

    def test_one_shots_do_not_count_into_the_hit_rate(self) -> None:
        agent = Sample("a 1", False, True, 1000, match_tokens=950, hit_tokens=900)
        other = Sample("one-shot 2", True, False, 1000)
        figures = figures_of(Outcome([agent, other], 0, 0, 0, 0, 0))
        assert figures["hit_rate"] == pytest.approx(0.9)
        assert figures["hit_rate_all"] == pytest.approx(0.45)
        assert figures["reevaluated_tokens"] == 100

    def test_every_evaluated_token_has_one_cause(self) -> None:
        sample = Sample("a 1", False, True, 1000, match_tokens=700, hit_tokens=300)
        ideal = Sample("a 1", False, True, 1000, match_tokens=900, hit_tokens=800)
        found = losses([sample], [ideal], {"a 1": 900})["extension"]
        assert found == {
            "requests": 1,
            "new": 100,
            "no_restore_point": 100,
            "span_evicted": 100,
            "snapshot_evicted": 400,
        }

    def test_the_oracle_knows_what_was_evaluated_before(self, tmp_path: Path) -> None:
        numbers, oracle = BlockNumbers(), Oracle()
        scripts = [Script(conversation(tmp_path, GROWING), numbers)]
        for one in requests_of(plan_arrivals(scripts, 1, 0), numbers):
            oracle.see(one)
        assert list(oracle.known.values()) == [0, 229, 319, 330, 192]


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

    def test_attention_alone_is_restored_anywhere(self, tmp_path: Path) -> None:
        write_trace(tmp_path, "one", GROWING)
        report = self.replayed(tmp_path, "--traces", str(tmp_path), "--policy", "cache", "--snapshot-bytes", "0")
        assert report["snapshots"] == 0
        assert report["reevaluated_tokens"] == 200 + 71 + 11 + 170 + 128

    @pytest.mark.parametrize("options", [["--one-shot-share", "1"], ["--traces", "/nowhere"]])
    def test_what_cannot_be_replayed_is_refused(self, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            traces.main(options)
        assert options[0].removeprefix("--traces") in capsys.readouterr().err
