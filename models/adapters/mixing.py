"""Tests whether rows of different adapters may be evaluated in one model call.

Rows are evaluated together, each with its adapter, and each is compared with itself alone. What differs must be small
beside what an adapter changes: mixed-up rows differ by that.
Worker thread only.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cache.types import LayerCache
from models.adapters.adapter import NO_ADAPTER
from models.adapters.switch import AdapterSet
from models.inference.ragged import RaggedBatch, ragged_attention
from models.mlx_lm_import import make_prompt_cache

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 5
_STEPS = 2
_LARGEST_SHARE = 0.1
"""Of what adapters change, the largest difference that is rounding."""
_ROUNDING = 16
"""Or so many units in the last place of the largest logit, where adapters change next to nothing."""


def can_mix(model: Any, adapters: AdapterSet, vocab_size: int, *, seed: int = 0) -> bool:
    """True if rows of different adapters are shown to give the same together as alone; they may be ragged."""
    if not adapters.can_mix:
        logger.info("rows of different adapters take turns: not all layers of the adapters are plain LoRA")
        return False
    rows = [NO_ADAPTER, *(adapter.index for adapter in adapters.adapters), NO_ADAPTER]
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (len(rows), _PROMPT_TOKENS + _STEPS))
    try:
        alone = np.stack([_alone(model, adapters, index, row) for index, row in zip(rows, tokens, strict=True)])
        bare = np.stack([_alone(model, adapters, NO_ADAPTER, row) for row in tokens])
        together, eps = _together(model, adapters, rows, tokens)
    except Exception as reason:  # an error only shows that this model cannot be called in this way
        logger.info("rows of different adapters take turns: %s: %s", type(reason).__name__, reason)
        return False
    effect = float(np.abs(alone - bare).max())
    error = float(np.abs(together - alone).max())
    allowed = max(_LARGEST_SHARE * effect, _ROUNDING * eps * float(np.abs(alone).max()))
    if not error <= allowed:
        logger.info("rows of different adapters take turns: together they differ from each alone by %.3g", error)
    return error <= allowed


def _alone(model: Any, adapters: AdapterSet, adapter: int, tokens: Any) -> Any:
    """Returns the logits `[steps, vocab_size]` of one row."""
    caches = _prefilled(model, adapters, adapter, tokens)
    found = []
    for step in range(_STEPS):
        with adapters.selecting([adapter]):
            found.append(model(mx.array([[int(tokens[_PROMPT_TOKENS + step])]]), cache=caches)[0, -1])
    return np.array(mx.stack(found).astype(mx.float32))


def _together(model: Any, adapters: AdapterSet, rows: Sequence[int], tokens: Any) -> tuple[Any, float]:
    """Returns the logits `[num_rows, steps, vocab_size]`, and the precision of the model's numbers."""
    batch = RaggedBatch([_prefilled(model, adapters, index, row) for index, row in zip(rows, tokens, strict=True)])
    found = []
    for step in range(_STEPS):
        fed = mx.array(tokens[:, _PROMPT_TOKENS + step, None].astype(np.int32))
        with adapters.selecting(rows), ragged_attention():
            found.append(model(fed, cache=batch.layers)[:, -1])
    logits = mx.stack(found, axis=1)
    return np.array(logits.astype(mx.float32)), float(mx.finfo(logits.dtype).eps)


def _prefilled(model: Any, adapters: AdapterSet, adapter: int, tokens: Any) -> list[LayerCache]:
    caches = list(make_prompt_cache(model))
    with adapters.selecting([adapter]):
        model(mx.array([tokens[:_PROMPT_TOKENS].tolist()]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches
