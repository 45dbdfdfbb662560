"""A live sequence never holds more bytes than it was counted with, whatever its windows do in between."""

from collections.abc import Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.types import LayerCache, TokenArray
from tests.cache.worlds import RealWorld
from tests.support import tiny_models
from tests.support.cache_driver import prefill

pytestmark = pytest.mark.usefixtures("exact_buffers")

W = tiny_models.WINDOW
WINDOW_MODELS = ("llama_swa", "gemma3", "gpt_oss", "llama4", "gemma4", "gemma3n")
CHUNKS = (1, 7, W, 300)
"""A token, shorter than a window, as long, and longer than the steps in which buffers grow."""
ONE_OF_A_CLASS = ("llama_swa", "llama4")
"""One model for each class of windows: the steps differ by class alone. All models are tried with one more chunk."""


class CountedWorld(RealWorld):
    """After each call, compares what a sequence holds with what it is counted with."""

    lease: Lease

    def __init__(self, name: str, chunk_tokens: int) -> None:
        super().__init__(name)
        self.chunk_tokens = chunk_tokens
        self.prefix_cache = PrefixCache(
            self.make_caches, num_slots=1, budget_bytes=1 << 30, chunk_tokens=chunk_tokens
        )
        sample = self.make_caches()
        self.evaluate(sample, np.arange(3, dtype=np.int32))
        self.prefix_cache.layout.calibrate(sample)

    def evaluate(self, caches: Sequence[LayerCache], tokens: TokenArray) -> None:
        """Evaluates no logits: nothing here reads them, and they are most of the work."""
        self.model(mx.array(tokens)[None], cache=list(caches))
        mx.eval([cache.state for cache in caches])

    def evaluate_counted(self, caches: object, tokens: TokenArray) -> None:
        self.evaluate(self.lease.caches, tokens)
        slot = self.prefix_cache.pager.slots[0]
        counted = self.prefix_cache.layout.bytes_for(slot.reserved_tokens)
        held = self.prefix_cache.pager.layout.live_bytes(slot.caches)
        assert held <= counted, f"{held} bytes held at {self.lease.offset}, {counted} counted"

    def run(self, tokens: TokenArray, num_generated: int) -> int:
        """Runs a request to its end; returns how many tokens were restored."""
        lease = self.prefix_cache.begin(CacheRequest(Lookup(tokens), expected_tokens=num_generated))
        assert lease is not None
        self.lease = lease
        prefill(lease, tokens, self.evaluate_counted, chunk_tokens=self.chunk_tokens)
        for token in tokens[-1:].tolist() * num_generated:
            self.evaluate_counted(lease.caches, np.array([token], np.int32))
            lease.append(token)
        lease.close()
        return lease.hit_tokens


@pytest.mark.parametrize(
    ("name", "chunk_tokens"), [*product(WINDOW_MODELS, [W + 1]), *product(ONE_OF_A_CLASS, CHUNKS)]
)
def test_a_sequence_holds_no_more_bytes_than_are_counted(name: str, chunk_tokens: int) -> None:
    world = CountedWorld(name, chunk_tokens)
    assert world.prefix_cache.pager.layout.window == W
    tokens = np.random.default_rng(1).integers(1, tiny_models.VOCAB, 3 * W + 5).astype(np.int32)
    assert world.run(tokens, W + 3) == 0
    world.prefix_cache.pager.page_out(world.prefix_cache.pager.slots[0], 0)
    assert world.run(np.append(tokens[:-1], tokens[:40]).astype(np.int32), 3) > 0
    # Buffers grow in steps of 256 tokens.
    for length in (2, W - 1, W, W + 1, 400 if chunk_tokens > 1 else 260):
        other = np.random.default_rng(length).integers(1, tiny_models.VOCAB, length).astype(np.int32)
        world.run(other, 3)
