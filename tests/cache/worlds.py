"""Two worlds in which a scenario can be played: token-carrying fakes, and real tiny models."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cache.disk.tier import DiskTier
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.types import LayerCache, TokenArray
from tests.support import cache_driver, fake_model, tiny_models

# isort: split
from mlx_lm.models.cache import make_prompt_cache


class World:
    """A prefix cache, and something to evaluate tokens with; subclasses say what must be right afterwards."""

    def __init__(self, *, num_slots: int = 2, disk: DiskTier | None = None) -> None:
        self.prefix_cache = PrefixCache(
            self.make_caches,
            num_slots=num_slots,
            budget_bytes=1 << 30,
            chunk_tokens=cache_driver.CHUNK_TOKENS,
            disk=disk,
        )

    def make_caches(self) -> list[LayerCache]:
        raise NotImplementedError

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        raise NotImplementedError

    def assert_right(self, lease: Lease, tokens: list[int], num_generated: int) -> None:
        raise NotImplementedError

    def request(self, prompt: Sequence[int], generated: Sequence[int] = (), **options: Any) -> int:
        """Runs a request to its end and returns how many tokens of its prompt were evaluated."""
        tokens, reply = [*prompt], [*generated]
        options["inspect"] = lambda lease: self.assert_right(lease, tokens + reply, len(reply))
        return cache_driver.run(self.prefix_cache, tokens, reply, evaluate=self.evaluate, **options).left


class FakeWorld(World):
    """Layers that hold the tokens themselves."""

    def __init__(self, layout: str, **options: Any) -> None:
        self.layout = layout
        super().__init__(**options)

    def make_caches(self) -> list[LayerCache]:
        return fake_model.make_caches(self.layout)

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        fake_model.evaluate(caches, tokens)

    def assert_right(self, lease: Lease, tokens: list[int], num_generated: int) -> None:
        fake_model.assert_holds(lease.caches, tokens)
        fake_model.assert_stored_right(self.prefix_cache)
        fake_model.assert_bytes_known(self.prefix_cache)


class RealWorld(World):
    """A tiny model: its logits after a restore are those of a run on fresh caches."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model: Any = tiny_models.build(name)
        self.logits: list[np.ndarray] = []
        super().__init__(**options)

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
