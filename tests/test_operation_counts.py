"""What planning costs as rows, nodes, messages and tools grow: lines of product code that run, not seconds.

Each case is planned for `n` and for `2 n`; the second may take at most `growth` times the first's lines.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cache import snapshots
from cache.history import History
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.views import view
from models.inference.abilities import Feeds
from models.inference.grouping import Buffer, Costs, Row, plan
from models.output.call_formats import HERMES
from models.output.call_grammar import BoundTool, CallGrammar
from models.prompt.tool_definitions import ToolDefinitions
from server.api.anthropic.tool_search import find_tools
from server.diagnosis.compare import Turn, find_changes_between
from server.diagnosis.prompt import Part, Prompt
from server.engine.decisions import trie_of
from server.engine.request import GenerationRequest, ScoredQuestion
from server.engine.scheduler import Scheduled, Scheduler
from server.engine.speculation import Speculation
from tests.support import cache_driver, fake_model
from tests.support.engine_driver import Harness

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


def beside_idle_slots(num: int) -> Callable[[], object]:
    """Admission, with a conversation idle in each slot."""
    cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=num, budget_bytes=1 << 40)
    add_conversations(cache, range(num))
    request = CacheRequest(Lookup(np.array([1, 2, 3, 4, 5000, 6, 7, 8], np.int32)))
    return lambda: cache.begin(request)


def drafting_rows(num: int, *, together: bool) -> Callable[[], object]:
    """Each copies its prompt."""
    speculation = Speculation(History(), Feeds({1: 1.0, 32: 1.1}, together))
    rows = []
    for row in range(num):
        text = [*range(1000 * row, 1000 * row + 40)]
        rows.append(speculation.begin(GenerationRequest(str(row), np.array(text, np.int32), 100), 0))
        for token in text[:8]:
            rows[-1].push(token)

    def plan_drafts() -> None:
        assert speculation.may_draft(rows) == together  # a call of each row's own does not pay
        speculation.plan(rows, [32] * num, lambda _: [], [1] * num)

    return plan_drafts


def drafts_apart(num: int) -> Callable[[], object]:
    return drafting_rows(num, together=False)


def drafts_together(num: int) -> Callable[[], object]:
    return drafting_rows(num, together=True)


def scored_questions(num: int) -> Callable[[], object]:
    """All steps of a worker that scores them."""
    state = [*range(1, 20)]
    questions = tuple(ScoredQuestion(np.array([*state, 20 + n], np.int32), ((3,), (5, 6))) for n in range(num))
    harness = Harness("T", num_slots=2)
    sink = harness.submit(state, max_tokens=0, questions=questions)
    return lambda: harness.run(sink)


def options_of_a_question(num: int) -> Callable[[], object]:
    options = [(1, 2, 3, number, number + 1) for number in range(num)]
    return lambda: [node.wanted(()) for node in trie_of(options)[0].line()]


def tree_for_the_console(num: int) -> Callable[[], object]:
    cache = with_conversations(num)
    return lambda: view(cache, "", max_nodes=num // 2)


def bound_tools(num: int) -> Callable[[], object]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [BoundTool(f"tool_{number}", schema) for number in range(num)]
    return lambda: CallGrammar(HERMES, tools, json.dumps).lazy()


def searched_tools(num: int) -> Callable[[], object]:
    tools = [{"function": {"name": f"tool_{n}", "description": f"Reads file {n}."}} for n in range(num)]
    return lambda: find_tools("tool_search_tool_bm25", {"query": "reads file"}, tools)


@pytest.mark.parametrize(
    ("make", "num", "growth"),
    [
        (rows_alone, 32, QUADRATIC),
        (row_joins, 32, LINEAR),
        (waiting_requests, 64, LINEAR),
        (running_on_one_head, 16, LINEAR),
        (beside_idle_slots, 16, LINEAR),
        (drafts_apart, 16, LINEAR),
        (drafts_together, 16, LINEAR),
        (scored_questions, 16, LINEAR),
        (options_of_a_question, 100, LINEAR),
        (tree_for_the_console, 100, LINEAR),
        (bound_tools, 30, LINEAR),
        (searched_tools, 100, LINEAR),
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
