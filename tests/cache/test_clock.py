"""What the cache counts as the passing of time."""

import pytest

from cache import slots
from cache.prefix_cache import PrefixCache
from cache.slots import NEW_SESSION_COUNT, RequestClock
from tests.support import cache_driver, fake_model


def passed(requests: RequestClock, session_id: str | None, namespace: str = "", **fields: bool) -> int:
    """Returns what one more beginning counts."""
    before = requests.now
    requests.begin(namespace, session_id, **fields)
    return requests.now - before


def test_a_request_counts_as_it_begins_and_as_it_ends() -> None:
    cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=1, budget_bytes=1 << 30)
    assert passed(cache.memory.clock, None) == 1
    cache_driver.run(cache, [1, 2, 3])
    assert cache.memory.clock.now == 3


def test_a_conversation_counts_more_as_it_begins_once_and_in_each_namespace() -> None:
    requests = RequestClock()
    assert [passed(requests, "a"), passed(requests, "a"), passed(requests, "b")] == [
        1 + NEW_SESSION_COUNT,
        1,
        1 + NEW_SESSION_COUNT,
    ]
    assert passed(requests, "a", "other") == 1 + NEW_SESSION_COUNT
    assert passed(requests, "title", is_background=True) == 1


def test_the_names_heard_of_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SESSIONS", 2)
    requests = RequestClock()
    for name in ("a", "b", "a", "c"):
        requests.begin("", name)
    assert passed(requests, "a") == 1
    assert passed(requests, "b") == 1 + NEW_SESSION_COUNT
