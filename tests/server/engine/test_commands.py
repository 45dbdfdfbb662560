"""Commands, run by the worker over the fake model."""

from collections.abc import Callable

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
from tests.support.engine_driver import Collected, Harness
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


def test_the_cache_is_described_with_its_first_tokens() -> None:
    harness = Harness()
    harness.run(harness.submit(STORY, namespace="ours", max_tokens=0))
    (edge,) = describe_cache(harness.worker, "ours", 10).nodes
    assert edge.stop == 40 and edge.first_tokens.tolist() == STORY[:24]
    assert describe_cache(harness.worker, "theirs", 10).nodes == []


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


def test_a_request_that_runs_is_not_harmed_by_a_clear() -> None:
    harness = Harness(chunk_tokens=8)
    sink = harness.submit(STORY, max_tokens=12, ignore_eos=True)
    for _ in range(30):
        harness.step()
        clear_cache(harness.worker, "")
        harness.prefix_cache.check()
    harness.run()
    assert sink.tokens == reference(STORY, 12, ignore_eos=True)


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


def test_a_forgotten_session_is_pinned_no_longer() -> None:
    harness = budgeted(300)
    harness.run(harness.submit(STORY, session_id="s", max_tokens=2))
    pin_session(harness.worker, "", "s")
    forget_session(harness.worker, "", "s")
    fill(harness)
    assert known(harness, STORY) == 0


@pytest.mark.parametrize("seconds", [PIN_SECONDS / 2, PIN_SECONDS + 1])
def test_a_turn_is_held_for_as_long_as_most_tools_take(seconds: float) -> None:
    harness = budgeted(300)
    sink = harness.submit(STORY, max_tokens=6, ignore_eos=True)
    harness.run()
    pin_turn(harness.worker, "", "s", np.array(STORY, np.int32), sink.tokens)
    harness.now += seconds
    fill(harness)
    assert (known(harness, STORY) > 0) == (seconds < PIN_SECONDS)


def test_a_turn_that_is_held_keeps_nobody_waiting() -> None:
    harness = budgeted(300)
    harness.run(harness.submit(STORY, max_tokens=2))
    pin_turn(harness.worker, "", "s", np.array(STORY, np.int32), [])
    large = harness.submit(list(range(50, 330)), max_tokens=2)
    harness.run()
    assert large.started.hit_tokens == 0 and known(harness, STORY) == 0


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


def test_an_answer_that_has_just_ended_is_cleared_with_the_rest() -> None:
    harness = Harness()
    ask(harness, PROMPT, "s")
    clear_cache(harness.worker, "")
    harness.step(2)
    harness.prefix_cache.check()
    assert known(harness, PROMPT) == 0


def test_a_session_can_be_pinned_as_soon_as_its_first_answer_has_ended() -> None:
    harness = Harness()
    ask(harness, PROMPT, "s")
    assert pin_session(harness.worker, "", "s") >= len(PROMPT)


def test_a_running_request_of_a_forgotten_session_goes_on() -> None:
    harness = Harness()
    sink = harness.submit(PROMPT, session_id="s", max_tokens=6, ignore_eos=True)
    harness.step(4)
    forget_session(harness.worker, "", "s")
    harness.run(sink)
    assert len(sink.tokens) == 6
    harness.step(2)
    assert harness.worker.state.last("", "s") is not None


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
