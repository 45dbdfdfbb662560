"""Replays conversations through the real prefix cache without a model, and reports how much is evaluated again.

Tokens, trie, slots, placement, eviction and ledger are the server's own; only the layers' state is replaced by
objects that have a size. Conversations are recorded ones (`--traces DIR`), or generated from a seed.

    python -m scripts.replay.traces --traces DIR --concurrent 6 --kv-bytes-per-token 20480 \\
        --snapshot-bytes 66060288 --memory-gb 12
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.layers.layout import EXACT, StoredForm
from scripts.replay.conversations import (
    BlockNumbers,
    Conversation,
    TraceError,
    read_conversations,
    scripts_of,
)
from scripts.replay.drive import CacheDriver, Contestant, Outcome, Request, requests_of
from scripts.replay.generator import generate
from scripts.replay.layout import SizedLayout
from scripts.replay.report import Oracle, figures_of, loss_table, losses, table
from scripts.replay.rivals import CopyRival, Sizes, TreeRival
from scripts.replay.schedule import Arrival, plan_arrivals, with_one_shots

DEFAULT_SESSIONS = 40
ROUNDED = {"nothing": EXACT, "rows": StoredForm(rows=True), "all": StoredForm(rows=True, recurrent=True)}
POLICIES = ("cache", "unlimited", "lru", "last-tip", "whole-copy")


@dataclass(frozen=True)
class Settings:
    """The options of one replay. `memory_bytes` may be infinite."""

    traces: Path | None
    sessions: int | None
    concurrent: int
    slots: int
    memory_bytes: float
    disk_bytes: int
    bytes_per_token: int
    snapshot_bytes: int
    rounds: str
    seed: int
    one_shot_share: float
    policies: tuple[str, ...]
    is_checked: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 <= options.one_shot_share < 1:
        parser.error("--one-shot-share must be at least 0 and less than 1")
    settings = _settings(options)
    try:
        conversations = load(settings)
    except TraceError as error:
        parser.error(str(error))
    report = replay(conversations, settings)
    print(_text(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def load(settings: Settings) -> list[Conversation]:
    """Returns the conversations to replay. Raises TraceError."""
    if settings.traces is not None:
        return read_conversations(settings.traces, settings.sessions)
    return generate(settings.sessions or DEFAULT_SESSIONS, settings.seed)


def replay(conversations: Sequence[Conversation], settings: Settings) -> dict[str, Any]:
    """Runs every contestant over the same requests; returns the figures, those of the cache itself at the top."""
    oracle = Oracle()
    outcomes: dict[str, Outcome] = {}
    for number, policy in enumerate(settings.policies):
        see = oracle.see if number == 0 else None
        outcomes[policy] = _run(conversations, settings, make_contestant(policy, settings), see)
    figures = {policy: figures_of(outcome) for policy, outcome in outcomes.items()}
    first, *others = settings.policies
    report = {**figures[first], "policy": first, "compared": {name: figures[name] for name in others}}
    if "unlimited" in outcomes:
        samples = outcomes[first].samples
        report["losses"] = losses(samples, outcomes["unlimited"].samples, oracle.known)
    return report


def make_contestant(policy: str, settings: Settings) -> Contestant:
    """Returns a cache that has seen nothing yet."""
    sizes = Sizes(settings.bytes_per_token, settings.snapshot_bytes, settings.memory_bytes)
    makers: dict[str, Callable[[], Contestant]] = {
        "cache": lambda: _driver(settings, settings.memory_bytes, settings.disk_bytes),
        "unlimited": lambda: _driver(settings, math.inf, 0),
        "lru": lambda: TreeRival(sizes),
        "last-tip": lambda: TreeRival(sizes, keeps_last_only=True),
        "whole-copy": lambda: CopyRival(sizes),
    }
    return makers[policy]()


def _driver(settings: Settings, memory_bytes: float, disk_bytes: int) -> CacheDriver:
    return CacheDriver(
        num_slots=settings.slots,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        layout=SizedLayout(settings.bytes_per_token, settings.snapshot_bytes, ROUNDED[settings.rounds]),
        is_checked=settings.is_checked,
    )


def _run(
    conversations: Sequence[Conversation],
    settings: Settings,
    contestant: Contestant,
    see: Callable[[Request], None] | None,
) -> Outcome:
    numbers = BlockNumbers()
    arrivals = _arrivals(conversations, settings, numbers)
    samples = []
    for request in requests_of(arrivals, numbers):
        if see is not None:
            see(request)
        samples.append(contestant.run(request))
    return contestant.outcome(samples)


def _arrivals(conversations: Sequence[Conversation], settings: Settings, numbers: BlockNumbers) -> list[Arrival]:
    scripts = list(scripts_of(conversations, numbers))
    arrivals = plan_arrivals(scripts, settings.concurrent, settings.seed)
    return with_one_shots(arrivals, settings.one_shot_share, settings.seed)


def _text(report: dict[str, Any]) -> str:
    rows = {report["policy"]: report, **report["compared"]}
    text = [
        f"{report['requests']} requests, {report['prompt_tokens'] / 1e6:.1f} M prompt tokens, "
        f"{report['one_shots']} one-shots; {report['zero_hit_extensions']} extensions hit nothing",
        table(rows),
    ]
    if "losses" in report:
        text += [loss_table(report["losses"], report["prompt_tokens"])]
    return "\n\n".join(text)


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        traces=options.traces,
        sessions=options.sessions,
        concurrent=options.concurrent,
        slots=options.slots,
        memory_bytes=options.memory_gb * 1e9,
        disk_bytes=int(options.disk_gb * 1e9),
        bytes_per_token=options.kv_bytes_per_token,
        snapshot_bytes=options.snapshot_bytes,
        rounds=options.rounds,
        seed=options.seed,
        one_shot_share=options.one_shot_share,
        policies=tuple(dict.fromkeys(options.policy or POLICIES)),
        is_checked=options.check,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replay_traces", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--traces", type=Path, metavar="DIR", help="folder of recorded conversations; without it they are generated")
    add("--sessions", type=_positive, metavar="N", help=f"conversations at most (generated: {DEFAULT_SESSIONS})")
    add("--concurrent", type=_positive, default=6, metavar="N", help="conversations at a time")
    add("--slots", type=_positive, default=8, metavar="N", help="slots of the cache, as the server's --slots")
    add("--kv-bytes-per-token", type=_positive, default=20_480, metavar="N", help="attention state of a token")
    add("--snapshot-bytes", type=int, default=63 << 20, metavar="N", help="whole state; 0 for attention only")
    add(
        "--rounds",
        choices=ROUNDED,
        default="nothing",
        help="what is stored in 8 bits, as by --cache-bits",
    )
    add("--memory-gb", type=float, default=12.0, metavar="X", help="budget in 10^9 bytes; inf for no limit")
    add("--disk-gb", type=float, default=0.0, metavar="Y", help="disk budget; 0 for none")
    add("--one-shot-share", type=float, default=0.0, metavar="S", help="share of one-shot prompts among all requests")
    add("--seed", type=int, default=0, metavar="S", help="of the schedule, the one-shots and the generator")
    add("--policy", action="append", choices=POLICIES, help="what to run, may be repeated; by default all")
    add("--check", action="store_true", help="assert the cache's invariants after each request (slow)")
    add("--json", type=Path, metavar="FILE", help="write the figures by name")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
