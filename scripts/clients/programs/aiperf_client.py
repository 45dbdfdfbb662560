"""aiperf replays a made-up trace of a coding agent with a subagent; none fails, and what is shared is reused."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "demo"
BLOCK, NUM_OUT, NUM_TURNS = 16, 8, 4


def request(second: float, blocks: list[int]) -> dict[str, object]:
    """A turn: each holds the blocks of the one before."""
    sizes = {"in": len(blocks) * BLOCK, "out": NUM_OUT}
    return {"t": second, "type": "s", "model": "demo", "hash_ids": blocks, "api_time": 0.1, **sizes}


def trace(number: int) -> dict[str, object]:
    """A conversation whose second turn starts a subagent."""
    turns = [request(turn * 0.2, list(range(4 + 3 * turn))) for turn in range(NUM_TURNS)]
    inner = [request(0.25, [*range(2), 100, 101]), request(0.3, [*range(2), 100, 101, 102])]
    subagent = {
        "t": 0.25,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "models": ["demo"],
    }
    subagent |= {
        "duration_ms": 100,
        "total_tokens": 200,
        "tool_use_count": 1,
        "status": "completed",
        "requests": inner,
    }
    made = {"id": f"trace_{number}", "models": ["demo"], "block_size": BLOCK, "hash_id_scope": "local"}
    return {**made, "requests": [turns[0], turns[1], subagent, *turns[2:]]}


with tempfile.TemporaryDirectory() as place:
    traces = Path(place) / "traces"
    traces.mkdir()
    for number in range(2):
        (traces / f"trace_{number}.json").write_text(json.dumps(trace(number)))
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--url", os.environ["BASE_URL"]]
    command += ["--model", "demo", "--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER)]
    command += ["--custom-dataset-type", "weka_trace", "--input-file", str(traces), "--concurrency", "2"]
    command += ["--ui", "none", "--output-artifact-dir", f"{place}/out"]
    variables = {**os.environ, "HOME": place}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    report = json.loads((Path(place) / "out" / "profile_export_aiperf.json").read_text())
    possible, reused = (
        report["theoretical_prefix_cache_hit"]["avg"],
        report["overall_usage_prompt_cache_read_pct"]["avg"],
    )
    assert not report["error_summary"] and report["request_count"]["avg"] >= 2 * NUM_TURNS, report["error_summary"]
    assert reused >= possible, f"{reused} % of the prompts were reused, of {possible} %"
