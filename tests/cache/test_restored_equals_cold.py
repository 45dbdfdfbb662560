"""What was restored answers like what was computed anew: greedy tokens of real architectures, token for token.

One slot, so that every change of conversation goes through page-out and page-in.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.disk import connector
from cache.disk.tier import DiskTier
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.types import LayerCache
from tests.support import cache_driver, fake_model, tiny_models
from tests.support.disk_driver import open_tier

# isort: split
from mlx_lm.models.cache import make_prompt_cache

NUM_GENERATED = 6
SPAN_ONLY = ("llama", "llama_4bit", "qwen3", "gemma2", "deepseek_v32")


def some_tokens(seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, tiny_models.VOCAB, num_tokens)]


SYSTEM = some_tokens(1, 45)
QUESTION = some_tokens(2, 20)


class Greedy:
    """A model that answers with its likeliest tokens."""

    def __init__(self, name: str) -> None:
        self.model: Any = tiny_models.build(name)
        self.logits: Any = None

    def make_caches(self) -> list[LayerCache]:
        return list(make_prompt_cache(self.model))

    def evaluate(self, caches: Sequence[LayerCache], tokens: Any) -> None:
        self.logits = self.model(mx.array(tokens)[None], cache=list(caches))[0, -1]
        mx.eval(self.logits, [cache.state for cache in caches])

    def decode(self, caches: Sequence[LayerCache], token: int, record: Callable[[int], object]) -> list[int]:
        reply: list[int] = []
        while len(reply) < NUM_GENERATED:
            self.evaluate(caches, np.array([token], np.int32))
            record(token)
            token = int(np.argmax(np.array(self.logits)))
            reply.append(token)
        return reply


@functools.cache
def cold_reply(name: str, prompt: tuple[int, ...]) -> list[int]:
    """The reply on fresh caches; several tests have a prompt in common."""
    greedy = Greedy(name)
    caches = greedy.make_caches()
    greedy.evaluate(caches, np.array(prompt[:-1], np.int32))
    return greedy.decode(caches, prompt[-1], lambda _: None)


class Chat:
    """A model behind a prefix cache with one slot."""

    def __init__(self, name: str, num_slots: int = 1, disk: DiskTier | None = None) -> None:
        self.name = name
        self.greedy = Greedy(name)
        self.prefix_cache = PrefixCache(self.greedy.make_caches, num_slots=num_slots, budget_bytes=1 << 30, disk=disk)

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """Returns the greedy reply, which must be a cold run's, and how many prompt tokens were restored."""
        tokens = np.array(prompt, np.int32)
        points = [RestorePoint(len(SYSTEM), RestorePointKind.SYSTEM_END)]
        lease = self.prefix_cache.begin(
            CacheRequest(Lookup(tokens), restore_points=points, expected_tokens=NUM_GENERATED)
        )
        assert lease is not None
        cache_driver.prefill(lease, tokens, self.greedy.evaluate)
        reply = self.greedy.decode(lease.caches, prompt[-1], lease.append)
        lease.close()
        self.prefix_cache.check()
        expected = cold_reply(self.name, tuple(prompt))
        assert reply == expected, f"after {lease.hit_tokens} restored tokens of {len(prompt)}"
        return reply, lease.hit_tokens


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_restored_equals_cold(name: str) -> None:
    chat = Chat(name)
    first = [*SYSTEM, *QUESTION]
    reply, hit = chat.ask(first)
    assert hit == 0
    second = [*first, *reply, *some_tokens(3, 15)]
    reply, hit = chat.ask(second)
    assert hit == len(first) + NUM_GENERATED - 1, "the next turn goes on where the last one ended"
    third = [*second, *reply, *some_tokens(4, 9)]
    _, hit = chat.ask(third)
    assert hit == len(second) + NUM_GENERATED - 1

    _, hit = chat.ask([*SYSTEM, *some_tokens(5, 30)])
    assert hit == len(SYSTEM), "another conversation on the same system prompt"
    _, hit = chat.ask(third)
    assert hit == len(third) - 1, "back, and an exact repeat"

    edited = [*first[: len(SYSTEM) + 10], *some_tokens(6, 12)]
    _, hit = chat.ask(edited)
    assert hit == len(SYSTEM) + 10 if name in SPAN_ONLY else len(SYSTEM) <= hit <= len(SYSTEM) + 10
    _, hit = chat.ask(edited)
    assert hit == len(edited) - 1
    _, hit = chat.ask(second)
    assert hit == len(second) - 1
    fake_model.assert_bytes_known(chat.prefix_cache)


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_restored_from_disk_equals_cold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes on in another process, and a second one starts there on its system prompt."""
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 8)
    first = [*SYSTEM, *QUESTION]
    chat = Chat(name, disk=open_tier(tmp_path))
    reply, _ = chat.ask(first)
    chat.prefix_cache.end(120)
    tier = open_tier(tmp_path)
    again = Chat(name, disk=tier)
    _, hit = again.ask([*first, *reply, *some_tokens(3, 15)])
    assert hit == len(first) + NUM_GENERATED - 1
    again.prefix_cache.pager.page_out(again.prefix_cache.slots[0], 0)
    again.prefix_cache.memory.evict(0, ())
    _, hit = again.ask([*SYSTEM, *some_tokens(5, 30)])
    assert hit == len(SYSTEM)
    tier.close()


@pytest.mark.parametrize("name", ["llama", "llama_swa", "qwen3_5", "falcon_h1"])
def test_two_live_conversations_share_a_prefix(name: str) -> None:
    """The second slot copies the prefix out of the first; both outlive each other."""
    chat = Chat(name, num_slots=2)
    prompts = [[*SYSTEM, *some_tokens(seed, 20)] for seed in (7, 8, 9)]
    for prompt in prompts:
        reply, _ = chat.ask(prompt)
        prompt += [*reply, *some_tokens(10, 5)]
    for prompt in (*prompts, *reversed(prompts)):
        _, hit = chat.ask(prompt)
        assert hit >= len(prompt) - 6
    fake_model.assert_bytes_known(chat.prefix_cache)


@pytest.mark.parametrize("name", ["llama_swa", "gemma3", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("num_evaluated", [1, 31, 48, 64])
def test_a_cancelled_prefill_is_taken_up_again(name: str, num_evaluated: int) -> None:
    chat = Chat(name)
    prompt = [*SYSTEM, *QUESTION, *some_tokens(11, 30)]
    cache_driver.run(
        chat.prefix_cache, prompt, evaluate=chat.greedy.evaluate, stop_at=num_evaluated, explicit=(30, 60)
    )
    chat.ask(some_tokens(12, 8))
    _, hit = chat.ask(prompt)
    assert hit >= num_evaluated, "what was evaluated stays restorable"
