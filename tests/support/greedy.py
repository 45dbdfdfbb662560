"""Whether tokens are what a model says greedily, told by one call of the model by itself."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from cache.layers.kinds import make_caches

TIE = 1e-3
"""Of logits that differ by less, rounding chooses."""


def assert_greedy(model: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token of `output` is the likeliest after `prompt` and the tokens before it."""
    logits = model(mx.array([[*prompt, *output[:-1]]]), cache=make_caches(model))[0, len(prompt) - 1 :]
    assert max(output) < logits.shape[-1], "a token is beyond the vocabulary, where MLX reads anything"
    lacking = (logits.max(axis=-1) - mx.take_along_axis(logits, mx.array([*output])[:, None], axis=-1)[:, 0]).tolist()
    wrong = {place: lack for place, lack in enumerate(lacking) if not lack < TIE}
    assert not wrong, f"of {len(output)} tokens after {len(prompt)}, some are not the likeliest: {wrong}"
