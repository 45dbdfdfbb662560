"""What planning costs as rows, nodes, messages and tools grow: lines of product code that run, not seconds.

Each case is planned for `n` and for `2 n`; the second may take at most `growth` times the first's lines.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cache import snapshots
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from models.inference.grouping import Buffer, Costs, Row, plan
from models.prompt.tool_definitions import ToolDefinitions
from server.diagnosis.compare import Turn, find_changes_between
from server.diagnosis.prompt import Part, Prompt
from server.engine.request import GenerationRequest
from server.engine.scheduler import Scheduled, Scheduler
from tests.support import cache_driver, fake_model

PRODUCT = tuple(str(Path(__file__).parents[1] / name) for name in ("cache", "models", "server"))
LINEAR, QUADRATIC = 2.6, 4.4


def num_lines(action: Callable[[], object]) -> int:
    """Lines of product code that run."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    def enter(frame: FrameType, event: str, _: object) -> Any:
        return trace if frame.f_code.co_filename.startswith(PRODUCT) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def rows_alone(num: int) -> Callable[[], object]:
    spread = random.Random(1)
    rows = [Row(tokens, tokens + 512) for tokens in (spread.randrange(50, 8000) for _ in range(num))]
    return lambda: plan(rows, [], costs=Costs(1e6), spare_tokens=1e9)


def row_joins(num: int) -> Callable[[], object]:
    rows = [Row(1000 + row, 2000, row // 4) for row in range(num)]
    groups = [Buffer(4, 4096) for _ in range(num // 4)]
    return lambda: plan([*rows, Row(777, 1200)], groups, costs=Costs(300.0, 200.0, 2.0), spare_tokens=1e9)


def waiting_requests(num: int) -> Callable[[], object]:
    scheduler = Scheduler[Scheduled](256)
    for arrival in range(num):
        tokens = np.arange(1000 * arrival, 1000 * arrival + 40, dtype=np.int32)
        scheduler.add(Scheduled(GenerationRequest(str(arrival), tokens, 1, session_id="one"), arrival))
    return lambda: scheduler.choose_prefill(lambda _: 0, 256)


def running_on_one_head(num: int) -> Callable[[], object]:
    """Each of `num` rows has a path of its own after a common head."""
    cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=num + 1, budget_bytes=1 << 40)
    for row in range(num):
        tokens = np.array([*range(1, 40), 1000 + row, 7], np.int32)
        lease = cache.begin(CacheRequest(Lookup(tokens)))
        assert lease is not None
        cache_driver.prefill(lease, tokens, fake_model.evaluate)
    return lambda: cache.reclaimer._best(16.0, None)


def with_conversations(num: int) -> PrefixCache:
    cache = PrefixCache(lambda: fake_model.make_caches("TR"), num_slots=1, budget_bytes=1 << 40)
    cache.check = lambda: None  # type: ignore[method-assign]
    add_conversations(cache, range(num))
    return cache


def add_conversations(cache: PrefixCache, names: range) -> None:
    for name in names:
        cache_driver.run(cache, [1, 2, 3, 4, 5000 + name, 6], [7], session_id=str(name))


def beside_stored_conversations(num: int) -> Callable[[], object]:
    """Thirty more; many changed nodes are valued at once, now and then."""
    cache = with_conversations(num)
    return lambda: add_conversations(cache, range(num, num + 30))


def evicting_all(num: int) -> Callable[[], object]:
    cache = with_conversations(num)
    return lambda: cache.memory.evict(0, ())


def restore_points(num: int) -> Callable[[], object]:
    points = [snapshots.KeptPoint(100 * number, None, is_branch=False) for number in range(1, num)]
    return lambda: snapshots.superseded(points, 500)


def tools_loaded_later(num: int) -> Callable[[], object]:
    tools = {f"tool_{number}": {"function": {"name": f"tool_{number}"}} for number in range(num)}
    definitions = ToolDefinitions(lambda shown: "".join(f"<tool>{tool}</tool>" for tool in shown))
    return lambda: definitions.block(list(tools), tools, "place")


def messages_moved_by_one(num: int) -> Callable[[], object]:
    """One message more at the beginning of many of one role."""
    parts = tuple(Part("user", f"message {number}") for number in range(num))
    return lambda: find_changes_between(Turn(Prompt(parts)), Prompt((Part("user", "a new one"), *parts)))


@pytest.mark.parametrize(
    ("make", "num", "growth"),
    [
        (rows_alone, 32, QUADRATIC),
        (row_joins, 32, LINEAR),
        (waiting_requests, 64, LINEAR),
        (running_on_one_head, 16, LINEAR),
        (beside_stored_conversations, 100, 1.1),
        (evicting_all, 40, LINEAR),
        (restore_points, 200, LINEAR),
        (tools_loaded_later, 50, LINEAR),
        (messages_moved_by_one, 500, LINEAR),
    ],
)
def test_planning_grows_no_faster_than_this(
    make: Callable[[int], Callable[[], object]], num: int, growth: float
) -> None:
    small, large = num_lines(make(num)), num_lines(make(2 * num))
    assert small > num // 4 and large <= growth * small, f"{small} lines, then {large}"
