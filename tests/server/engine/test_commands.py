"""Commands and primed prefixes, run by the worker over the fake model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache.history import HistoryFollower
from cache.slots import Lookup
from server.engine.commands import (
    PIN_SECONDS,
    clear_cache,
    describe_cache,
    describe_edge,
    forget_session,
    limit_idle,
    pin_session,
    pin_turn,
    unpin_session,
)
from server.engine.request import Delta, Finished, FinishReason
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_model import LAYOUTS
from tests.support.fake_runner import reference

pytestmark = pytest.mark.usefixtures("exact_buffers", "overlaps")
STORY = [1, 2, 3, 4, 5] * 8
PROMPT = list(range(2, 42))


def budgeted(num_tokens: int) -> Harness:
    """A worker with one slot and a budget of so many tokens."""
    harness = Harness(num_slots=1)
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, np.array([1, 2, 3, 4], np.int32))
    harness.prefix_cache.layout.calibrate(caches)
    harness.prefix_cache.ledger.budget_bytes = int(num_tokens * harness.prefix_cache.layout.bytes_per_token)
    return harness


def fill(harness: Harness) -> None:
    """Runs other requests until everything that may go is gone."""
    for number in range(11, 41):
        harness.run(harness.submit([number] * 40, session_id=str(number), max_tokens=0))


def known(harness: Harness, tokens: list[int]) -> int:
    return harness.prefix_cache.peek(Lookup(np.array([*tokens, 9], np.int32)))


def test_an_edge_is_looked_at_closely_by_its_number() -> None:
    harness = Harness()
    for number in range(3):
        harness.run(harness.submit([*STORY, number], namespace="ours", session_id=f"s{number % 2}", max_tokens=2))
    nodes = describe_cache(harness.worker, "ours", 10).nodes
    head = next(node for node in nodes if node.start == 0)
    edge = describe_edge(harness.worker, "ours", head.id, 30)
    assert edge is not None and (edge.start, edge.stop) == (0, 40)
    assert edge.first_tokens.tolist() == STORY[:30] and edge.sessions == ["s0", "s1"]
    assert edge.num_uses == head.num_uses == 2, "the first request evaluated it"
    assert describe_edge(harness.worker, "theirs", head.id, 30) is None
    assert describe_edge(harness.worker, "ours", 999, 30) is None


def test_clearing_says_what_it_freed_and_frees_no_more() -> None:
    harness = Harness()
    for namespace in ("ours", "theirs"):
        harness.run(harness.submit(STORY, namespace=namespace, max_tokens=0))
    ledger = harness.prefix_cache.ledger
    before = ledger.stored_bytes + ledger.live_bytes
    num_tokens, memory_bytes, disk_bytes = clear_cache(harness.worker, "ours")
    harness.prefix_cache.check()
    assert num_tokens == 40 and disk_bytes == 0
    assert memory_bytes == before - ledger.stored_bytes - ledger.live_bytes > 0
    assert clear_cache(harness.worker, "ours") == (0, 0, 0)
    assert harness.prefix_cache.peek(Lookup(np.array([*STORY, 9], np.int32), namespace="theirs")) == 40


def test_a_pinned_session_stays_with_all_its_turns_until_it_is_unpinned() -> None:
    harness = budgeted(300)
    first = harness.submit(STORY, session_id="s", max_tokens=4, ignore_eos=True)
    harness.run()
    assert pin_session(harness.worker, "", "s") >= len(STORY)
    longer = [*STORY, *first.tokens, 7, 8, 9]
    harness.run(harness.submit(longer, session_id="s", max_tokens=4, ignore_eos=True))
    fill(harness)
    assert known(harness, longer) == len(longer)
    assert unpin_session(harness.worker, "", "s")
    assert not unpin_session(harness.worker, "", "s")
    fill(harness)
    assert known(harness, longer) == 0


def test_a_session_of_another_namespace_or_none_cannot_be_pinned() -> None:
    harness = Harness()
    harness.run(harness.submit(STORY, session_id="s", namespace="theirs"))
    assert pin_session(harness.worker, "ours", "s") == 0
    assert pin_session(harness.worker, "theirs", "t") == 0


@pytest.mark.parametrize("seconds", [PIN_SECONDS / 2, PIN_SECONDS + 1])
def test_a_turn_is_held_for_as_long_as_most_tools_take(seconds: float) -> None:
    harness = budgeted(300)
    sink = harness.submit(STORY, max_tokens=6, ignore_eos=True)
    harness.run()
    pin_turn(harness.worker, "", "s", np.array(STORY, np.int32), sink.tokens, harness.now)
    harness.now += seconds
    fill(harness)
    assert (known(harness, STORY) > 0) == (seconds < PIN_SECONDS)


def ask(harness: Harness, prompt: list[int], session_id: str, namespace: str = "") -> Collected:
    sink = harness.submit(prompt, session_id=session_id, namespace=namespace, max_tokens=2)
    harness.run(sink)
    return sink


def test_a_forgotten_session_has_no_turn_before_but_its_tokens_are_still_reused() -> None:
    harness = Harness()
    ask(harness, PROMPT, "s")
    forget_session(harness.worker, "", "s")
    again = ask(harness, PROMPT, "s").started
    assert again.hit_tokens == len(PROMPT) - 1
    assert again.reuse.kept is None


def test_the_same_name_in_another_namespace_is_left_alone() -> None:
    harness = Harness()
    for namespace in ("ours", "theirs"):
        ask(harness, PROMPT, "s", namespace)
    forget_session(harness.worker, "ours", "s")
    harness.step(2)
    assert harness.worker.state.last("ours", "s") is None
    assert harness.worker.state.last("theirs", "s") is not None
    assert [slot.session_id for slot in harness.prefix_cache.slots if slot.namespace == "ours"] == [None]
    assert [slot.session_id for slot in harness.prefix_cache.slots if slot.namespace == "theirs"] == ["s"]


def test_idle_state_goes_as_far_as_asked_and_running_requests_keep_theirs() -> None:
    harness = Harness(num_slots=3)
    for number in range(6):
        harness.run(harness.submit([number] * 40, max_tokens=0))
    running = harness.submit([9] * 40, max_tokens=20, ignore_eos=True)
    harness.step(3)
    charged = harness.prefix_cache.ledger.charged_bytes
    limit_idle(harness.worker, charged)
    assert all(known(harness, [number] * 40) for number in range(6))
    harness.prefix_cache.history.add("", np.arange(99, dtype=np.int32))
    limit_idle(harness.worker, 1)
    assert harness.prefix_cache.history.namespaces
    limit_idle(harness.worker, 0)
    assert not harness.prefix_cache.history.namespaces
    assert not any(known(harness, [number] * 40) for number in range(6))
    assert 0 < harness.prefix_cache.ledger.charged_bytes < charged
    harness.run()
    assert running.tokens == reference([9] * 40, 20, ignore_eos=True)
    assert known(harness, [9] * 40)


def quoted(harness: Harness, namespace: str) -> list[int]:
    """What the history expects behind the first tokens of the story."""
    own = harness.prefix_cache.history.begin(namespace)
    follower = HistoryFollower(harness.prefix_cache.history, own)
    for token in STORY[:4]:
        own.push(token)
        follower.push(token)
    return follower.next_tokens(2)


@pytest.mark.parametrize(
    ("command", "given", "forgets"),
    [
        (forget_session, ("ours", "s"), True),
        (forget_session, ("ours", "another"), False),
        (forget_session, ("theirs", "s"), False),
        (clear_cache, ("ours",), True),
        (clear_cache, ("theirs",), False),
    ],
)
def test_what_is_forgotten_is_no_longer_quoted(
    command: Callable[..., object], given: tuple[str, ...], forgets: bool
) -> None:
    harness = Harness()
    for namespace in ("ours", "theirs"):
        harness.prefix_cache.history.add(namespace, np.array(STORY[:8], np.int32), "s")
    own = harness.prefix_cache.history.begin("ours", "s")
    command(harness.worker, *given)
    assert (quoted(harness, "ours") == []) == forgets
    for token in STORY[:8]:
        own.push(token)
    own.end(keeps=True)
    assert (quoted(harness, "ours") == []) == forgets
    harness.prefix_cache.clear()
    assert quoted(harness, "ours") == quoted(harness, "theirs") == []


PREFIX = [1, 2, 3, 4, 5] * 8


def prime(harness: Harness, prompt: list[int], **fields: Any) -> Collected:
    """Primes a prompt and returns its events."""
    sink = harness.submit(prompt, max_tokens=0, **fields)
    harness.run(sink)
    return sink


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_primed_prefix_is_restored_whole_and_nothing_was_sampled(layout: str) -> None:
    harness = Harness(layout)
    sink = prime(harness, PREFIX)
    assert isinstance(sink.last, Finished) and sink.last.reason is FinishReason.LENGTH
    assert sink.last.timings.predicted_tokens == 0 and not any(isinstance(e, Delta) for e in sink.events)
    assert all(kind == "prefill" for kind, *_ in harness.runner.log)
    for end in (7, 8):
        later = harness.submit([*PREFIX, end, 9, 9], max_tokens=3)
        harness.run(later)
        assert later.started.hit_tokens == len(PREFIX)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_end_of_a_primed_prefix_is_an_explicit_restore_point_also_where_it_was_known(layout: str) -> None:
    harness = Harness(layout)
    harness.run(harness.submit([*PREFIX, 6, 7, 8], max_tokens=4))
    prime(harness, PREFIX)
    nodes = list(harness.prefix_cache.memory.nodes())
    node = next(node for node in nodes if node.stop == len(PREFIX))
    assert node.is_explicit
    assert harness.prefix_cache.peek(Lookup(np.array([*PREFIX, 9, 9], np.int32))) == len(PREFIX)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prime_that_is_cancelled_keeps_its_progress(layout: str) -> None:
    harness = Harness(layout, chunk_tokens=8)
    harness.submit(PREFIX, max_tokens=0, request_id="p")
    harness.step(3)
    harness.worker.cancel("p")
    harness.run()
    again = prime(harness, PREFIX)
    assert again.started.match_tokens == 24
    if layout == "T":
        assert again.started.hit_tokens == 24


def test_any_request_that_somebody_waits_for_ends_what_is_evaluated_ahead() -> None:
    harness = Harness()
    ahead = [
        harness.submit([*range(start, start + 199)], max_tokens=0, is_idle_work=True, session_id=session)
        for start, session in ((1, "s"), (300, "other"))
    ]
    harness.step(3)
    turn = harness.submit([*range(1, 200), 7], session_id="s")
    assert [sink.last.reason for sink in ahead] == [FinishReason.CANCELLED] * 2
    harness.run()
    assert turn.started.hit_tokens > 0, "what was evaluated ahead stays"


def test_nothing_is_evaluated_ahead_while_a_prompt_waits_for_its_first_token() -> None:
    harness = Harness()
    turn = harness.submit([*range(1, 200)], max_tokens=4)
    harness.step(2)
    ahead = harness.submit([*range(300, 400)], max_tokens=0, is_idle_work=True)
    assert ahead.last.reason is FinishReason.CANCELLED
    harness.run()
    assert turn.last.reason is FinishReason.LENGTH


def test_what_is_evaluated_ahead_is_no_turn_of_its_session() -> None:
    harness = Harness()
    harness.submit([*range(1, 60)], session_id="s", max_tokens=2)
    harness.run()
    before = harness.worker.state.last("", "s")
    harness.submit([*range(1, 40), *range(100, 140)], max_tokens=0, is_idle_work=True, session_id="s")
    harness.run()
    after = harness.worker.state.last("", "s")
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()
