"""Two worlds in which a scenario can be played: token-carrying fakes, and real tiny models.

A scenario speaks of tokens such as `1, 2, 3`. In a world of scale n each of them stands for n tokens in a row, so
that the same scenario also runs past sliding windows and chunk borders.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cache.disk.tier import DiskTier
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import Lookup
from cache.types import LayerCache, TokenArray
from tests.support import cache_driver, fake_model, tiny_models

# isort: split
from mlx_lm.models.cache import make_prompt_cache

BUDGET_BYTES = 1 << 30


class World:
    """A prefix cache, and something to evaluate tokens with; subclasses say what must be right afterwards."""

    restores_anywhere: bool
    is_inflated = False
    """Whether stored segments claim to be larger than they are."""

    def __init__(self, *, scale: int, num_slots: int, budget_bytes: int, disk: DiskTier | None) -> None:
        self.scale = scale
        self.prefix_cache = PrefixCache(
            self.make_caches,
            num_slots=num_slots,
            budget_bytes=budget_bytes,
            chunk_tokens=cache_driver.CHUNK_TOKENS,
            disk=disk,
        )

    def make_caches(self) -> list[LayerCache]:
        raise NotImplementedError

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        raise NotImplementedError

    def assert_right(self, lease: Lease, tokens: list[int], num_generated: int) -> None:
        raise NotImplementedError

    def spell(self, units: Sequence[int]) -> list[int]:
        """Returns the tokens of a scenario's units; the first of each is the unit itself."""
        return [token for unit in units for token in (unit, *_more_tokens(unit, self.scale - 1))]

    def request(self, prompt: Sequence[int], generated: Sequence[int] = (), **options: Any) -> int:
        """Runs a request to its end and returns how many tokens of its prompt were evaluated."""
        tokens, reply = self.spell(prompt), self.spell(generated)
        options["explicit"] = [offset * self.scale for offset in options.get("explicit", ())]
        if "stop_at" not in options:
            options["inspect"] = lambda lease: self.assert_right(lease, tokens + reply, len(reply))
        return cache_driver.run(self.prefix_cache, tokens, reply, evaluate=self.evaluate, **options).left

    def match(self, *units: int) -> float:
        """Returns how many leading units the trie knows."""
        trie = self.prefix_cache.pager.trie("")
        return trie.match(np.array(self.spell(units), np.int32)).length / self.scale

    def restorable(self, *units: int) -> float:
        """Returns how many leading units could be restored for a prompt of `units` and something new."""
        tokens = np.array([*self.spell(units), 0], np.int32)
        return self.prefix_cache.peek(Lookup(tokens)) / self.scale


def _more_tokens(unit: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(unit).integers(100, tiny_models.VOCAB, num_tokens)]


class FakeWorld(World):
    """Layers that hold the tokens themselves."""

    def __init__(
        self,
        layout: str,
        *,
        scale: int = 1,
        num_slots: int = 2,
        budget_bytes: int = BUDGET_BYTES,
        disk: DiskTier | None = None,
    ) -> None:
        self.layout = layout
        self.restores_anywhere = layout == "T"
        super().__init__(scale=scale, num_slots=num_slots, budget_bytes=budget_bytes, disk=disk)

    def make_caches(self) -> list[LayerCache]:
        return fake_model.make_caches(self.layout)

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        fake_model.evaluate(caches, tokens)

    def assert_right(self, lease: Lease, tokens: list[int], num_generated: int) -> None:
        fake_model.assert_holds(lease.caches, tokens)
        fake_model.assert_stored_right(self.prefix_cache)
        if not self.is_inflated:
            assert self.prefix_cache.ledger.stored_bytes == fake_model.stored_bytes(self.prefix_cache)


class RealWorld(World):
    """A tiny model: its logits after a restore are those of a run on fresh caches."""

    def __init__(
        self,
        name: str,
        *,
        scale: int = 1,
        num_slots: int = 2,
        budget_bytes: int = BUDGET_BYTES,
        disk: DiskTier | None = None,
    ) -> None:
        self.model: Any = tiny_models.build(name)
        self.logits: list[np.ndarray] = []
        self.restores_anywhere = not any(hasattr(cache, "max_size") or hasattr(cache, "cache")
                                         for cache in self.make_caches())  # fmt: skip
        super().__init__(scale=scale, num_slots=num_slots, budget_bytes=budget_bytes, disk=disk)

    def make_caches(self) -> list[LayerCache]:
        return list(make_prompt_cache(self.model))

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        logits = self.model(mx.array(tokens)[None], cache=list(caches))
        mx.eval(logits, [cache.state for cache in caches])
        self.logits.append(np.array(logits[0, -1]))

    def assert_right(self, lease: Lease, tokens: list[int], num_generated: int) -> None:
        cold = np.array(self.model(mx.array(tokens)[None], cache=self.make_caches())[0, -1 - num_generated :])
        warm = np.stack(self.logits[-1 - num_generated :])
        assert np.array_equal(cold.argmax(-1), warm.argmax(-1)), "other tokens than a cold run"
        assert np.allclose(cold, warm, atol=2e-3), "other logits than a cold run"
