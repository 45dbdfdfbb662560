"""Finds out whether a model decodes ragged batches correctly, by trying it.

A model is free to do anything with its layer caches, so no list of classes can tell. Two rows of different lengths
decode together and are compared, logits by logits, with each row evaluated alone from the start. On the way one row
is prefilled in two pieces, and is prefilled further after it was taken out of the batch. Worker thread only.
"""

import logging
from typing import Any, cast

import mlx.core as mx

from models.mlx_lm_import import make_prompt_cache
from models.ragged import LayerCache, RaggedBatch, ragged_attention

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
_HALF_PRECISION_TOLERANCE = 0.05
"""Allowed differences, as parts of the logits' range; half precision rounds differently in each batch size."""


def is_ragged(model: Any, vocab_size: int) -> bool:
    """True if rows of different lengths give the same logits together as alone."""
    short, long = _tokens(12, 3, vocab_size), _tokens(16, 5, vocab_size)
    try:
        together = _evaluate_together(model, short, long)
        alone = [_evaluate_alone(model, tokens) for tokens in (short[:8], long[:14], short[:11])]
        error = max(_difference(a, b) for a, b in zip(together, alone, strict=True))
        tolerance = _TOLERANCE if alone[0].dtype == mx.float32 else _HALF_PRECISION_TOLERANCE
    except Exception as reason:  # what a model's code raises here tells only that it cannot be called like this
        logger.info("rows decode one after another: %s: %s", type(reason).__name__, reason)
        return False
    if error > tolerance:
        logger.info("rows decode one after another: together their logits are off by %.2g of their range", error)
    return error <= tolerance


def _tokens(count: int, stride: int, vocab_size: int) -> list[int]:
    return [(7 + stride * i * i) % min(vocab_size, 1000) for i in range(count)]


def _evaluate_together(model: Any, short: list[int], long: list[int]) -> list[mx.array]:
    """Logits of both rows after two steps together, then of the short row after it goes on alone."""
    caches = [list(make_prompt_cache(model)), list(make_prompt_cache(model))]
    for row, tokens in ((0, short[:3]), (0, short[3:6]), (1, long[:12])):
        _evaluate(model, [tokens], caches[row])
    batch = RaggedBatch(caches)
    with ragged_attention():
        for step in range(2):
            logits = _evaluate(model, [[short[6 + step]], [long[12 + step]]], batch.layers)
    batch.extract(0, caches[0])
    return [logits[0], logits[1], _evaluate(model, [short[8:11]], caches[0])[0]]


def _evaluate_alone(model: Any, tokens: list[int]) -> mx.array:
    return _evaluate(model, [tokens], list(make_prompt_cache(model)))[0]


def _evaluate(model: Any, tokens: list[list[int]], caches: list[LayerCache]) -> mx.array:
    """Returns the evaluated logits `[num_rows, vocab_size]` after the last token of each row."""
    logits: mx.array = model(mx.array(tokens), cache=caches)[:, -1]
    mx.eval(logits)
    return logits


def _difference(a: mx.array, b: mx.array) -> float:
    """The largest difference, as a part of the range of `b`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return cast(float, (mx.abs(a - b).max() / (b.max() - b.min())).item())
