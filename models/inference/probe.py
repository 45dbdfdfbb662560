"""Tests whether a model decodes ragged batches correctly.

A model may do anything with its layer caches, so a list of model classes cannot answer this. Rows of different
lengths are decoded together, and each is compared with the same row decoded alone: the logits, and what every layer
writes into its caches, where a wrong position shows at once. There are rows before, at and beyond every length at
which the model may change what it does (`models.inference.borders`); the long ones are made up
(`models.inference.probe_rows`).

The same arithmetic in another order rounds differently. So each row is also evaluated alone as one chunk: the
*spread* between that and token by token says how much difference is rounding. Rounding may also change a discrete
choice, such as of an expert, and then much differs. New random tokens change other choices, but a fault comes back at
the same row, step and layer; only faults that come back count.

The time is bounded. A model that is not proven correct within it decodes its rows one after another.
Worker thread only.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cache.types import LayerCache
from models.inference.borders import find_borders, spy_on_masks
from models.inference.probe_rows import bytes_per_token, copy_row, fill, last_rows
from models.inference.ragged import RaggedBatch, leaves, ragged_attention
from models.mlx_lm_import import ArraysCache, make_prompt_cache

logger = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""Time limit of the whole probe, which one model call may exceed. A slower machine gains little from ragged
decode."""
MAX_STATE_BYTES = 2 << 30
"""The most bytes that all synthetic rows of a trial take together."""

_NUM_TRIALS = 4
_SPREADS = 3.0
"""A larger difference, in spreads, is not rounding. Both are maxima over several values of the same kind."""
_LARGEST_ERROR = 0.25
"""The largest difference that is allowed, however large the spread is."""
_SMALLEST_SPREAD = 1e-5
"""Lower bound of the spread; one unit in the last place is another."""

_SHORT_TOKENS = 7
_GROWTH_TOKENS = 256
"""mlx-lm's caches grow by so many tokens at once: a border for every model."""
_STEPS = ((0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 1))
"""Which rows decode together in each step. In the last one a row has left and the order has changed."""


class NotProven(Exception):
    """The probe would take too long or too much memory to say anything."""


class _Observed(NamedTuple):
    """Names one array of a row's evaluation: where it comes from, and the row's step; -1 for state after the last."""

    place: tuple[int, int]
    """Layer cache and component; layer cache -1 for logits."""
    row: int
    step: int


_Trace: TypeAlias = dict[_Observed, NDArray[np.float32]]


def is_ragged(
    model: Any,
    vocab_size: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    max_seconds: float = MAX_SECONDS,
    seed: int = 0,
) -> bool:
    """True if rows of different lengths are proven to give the same together as alone, within `max_seconds`."""
    try:
        fault = _find_fault(_Evaluator(model, clock, max_seconds), vocab_size, seed)
    except NotProven as reason:
        logger.warning("rows decode one after another: not proven that they may together: %s", reason)
        return False
    except Exception as reason:  # an error only shows that this model cannot be called in this way
        logger.info("rows decode one after another: %s: %s", type(reason).__name__, reason)
        return False
    if fault is not None:
        logger.info("rows decode one after another: together they differ from each alone, %s", fault)
    return fault is None


# ------------------------------------------------------------------------------------------------ evaluation


class _Evaluator:
    """Calls the model and keeps the time. Raises `NotProven` instead of a call that would end too late."""

    def __init__(self, model: Any, clock: Callable[[], float], max_seconds: float) -> None:
        self._model = model
        self._clock = clock
        self._max_seconds = max_seconds
        self._started = clock()
        self._token_seconds = 0.0
        self.eps = 0.0

    def make_caches(self) -> list[LayerCache]:
        return list(make_prompt_cache(self._model))

    def measure(self) -> list[int]:
        """Times the second evaluation of one token, since the first may compile kernels.

        Returns the lengths at which the model may change what it does.
        """
        self([[0]], self.make_caches())
        begun, caches = self._clock(), self.make_caches()
        windows = spy_on_masks(caches)
        logits = self([[0]], caches)
        self._token_seconds = self._clock() - begun
        self.eps = max(float(mx.finfo(array.dtype).eps) for array in (logits, *_arrays(caches)))
        return find_borders(self._model, caches, windows)

    def require(self, num_tokens: int) -> None:
        """Raises `NotProven` if so many tokens would not be evaluated in time."""
        needed = self._clock() - self._started + num_tokens * self._token_seconds
        if needed > self._max_seconds:
            pace = f"at {self._token_seconds:.2g} s per token"
            raise NotProven(f"that takes {needed:.0f} s, {pace}, more than {self._max_seconds:.0f} s")

    def __call__(self, tokens: list[list[int]], caches: Sequence[LayerCache]) -> mx.array:
        """Returns the evaluated logits `[num_rows, num_tokens, vocab_size]`."""
        self.require(len(tokens) * len(tokens[0]))
        logits: mx.array = self._model(mx.array(tokens), cache=caches)
        mx.eval(logits)
        return logits


class _Rows:
    """Three rows: a short one, one that reaches the border while it decodes, and one beyond it."""

    def __init__(self, evaluate: _Evaluator, border: int, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng([border, seed])
        self.tokens: list[list[int]] = rng.integers(0, vocab_size, (3, len(_STEPS))).tolist()
        self._evaluate = evaluate
        self._border = border
        self._seed = seed
        self._lengths = (_SHORT_TOKENS, max(1, border - 2), border + min(border // 3, 64) + 5)
        self._short = evaluate.make_caches()
        prompt = rng.integers(0, vocab_size, _SHORT_TOKENS).tolist()
        for part in (prompt[:4], prompt[4:]):
            evaluate([part], self._short)
        self._require_memory()

    def _require_memory(self) -> None:
        needed = sum(self._lengths) * bytes_per_token(self._short)
        if needed > MAX_STATE_BYTES:
            raise NotProven(f"rows of {self._border} tokens, where attention changes, are {needed >> 20} MiB")

    def make(self, row: int) -> list[LayerCache]:
        """The row's caches before its first step, made anew."""
        caches = self._evaluate.make_caches()
        if row == 0:
            copy_row(caches, self._short)
        else:
            fill(caches, self._short, self._lengths[row], [self._border], 2 * self._seed + row)
        return caches

    def alone(self) -> _Trace:
        """Each row by itself, token by token."""
        trace: _Trace = {}
        for row in range(3):
            caches = self.make(row)
            logits = [self._evaluate([[token]], caches)[0, -1] for token in self._fed(row)]
            trace |= _observe(row, caches, logits)
        return trace

    def in_chunks(self) -> _Trace:
        """Each row by itself, all of its tokens in one call."""
        trace: _Trace = {}
        for row in range(3):
            caches = self.make(row)
            trace |= _observe(row, caches, list(self._evaluate([self._fed(row)], caches)[0]))
        return trace

    def together(self) -> _Trace:
        """All rows, as `_STEPS` says."""
        caches = [self.make(row) for row in range(3)]
        logits: list[list[mx.array]] = [[], [], []]
        for members, steps in groupby(_STEPS):
            batch = RaggedBatch([caches[row] for row in members])
            for _ in steps:
                tokens = [[self.tokens[row][len(logits[row])]] for row in members]
                with ragged_attention():
                    found = self._evaluate(tokens, batch.layers)
                for row, last in zip(members, found[:, -1], strict=True):
                    logits[row].append(last)
            for index, row in enumerate(members):
                batch.extract(index, caches[row])
        return {key: value for row in range(3) for key, value in _observe(row, caches[row], logits[row]).items()}

    def _fed(self, row: int) -> list[int]:
        return self.tokens[row][: sum(row in members for members in _STEPS)]


_TOKENS_PER_TRIAL = 2 * _SHORT_TOKENS + 3 * sum(len(members) for members in _STEPS)


def _arrays(caches: Sequence[LayerCache]) -> Iterator[mx.array]:
    """The arrays of floats that the layer caches hold, with buffers as large as they are."""
    for cache in leaves(caches):
        held = cache.cache if isinstance(cache, ArraysCache) else (cache.keys, cache.values)
        yield from (array for array in held if array is not None and mx.issubdtype(array.dtype, mx.floating))


def _observe(row: int, caches: Sequence[LayerCache], logits: Sequence[mx.array]) -> _Trace:
    """The logits after each of a row's steps, what each step wrote into the caches, and point state at the end."""
    found = {_Observed((-1, 0), row, step): array for step, array in enumerate(logits)}
    for layer, cache in enumerate(leaves(caches)):
        if isinstance(cache, ArraysCache):
            states = [state for state in cache.cache if state is not None]
            found |= {_Observed((layer, part), row, -1): state for part, state in enumerate(states)}
        else:
            for part, rows in enumerate(last_rows(cache, len(logits))):
                found |= {_Observed((layer, part), row, step): rows[0, :, step] for step in range(len(logits))}
    found = {key: array.astype(mx.float32) for key, array in found.items()}
    mx.eval(found)
    return {key: np.array(array) for key, array in found.items()}


# ------------------------------------------------------------------------------------------------ comparison


def _find_fault(evaluate: _Evaluator, vocab_size: int, seed: int) -> str | None:
    """Says where rows together differ from each alone; None if they do not."""
    RaggedBatch([evaluate.make_caches()] * 2)  # raises for a class without ragged form, before anything is evaluated
    borders = sorted({*evaluate.measure(), _GROWTH_TOKENS})
    evaluate.require(len(borders) * _TOKENS_PER_TRIAL)
    for border in borders:
        if fault := _find_fault_at(evaluate, border, vocab_size, seed):
            return fault
    return None


def _find_fault_at(evaluate: _Evaluator, border: int, vocab_size: int, seed: int) -> str | None:
    """As above, with rows around one border. Tells a fault from chance by having it come back."""
    suspects: dict[_Observed, float] = {}
    for trial in range(_NUM_TRIALS):
        evaluate.require(_TOKENS_PER_TRIAL)
        found = _suspects(_Rows(evaluate, border, vocab_size, seed + trial), evaluate.eps)
        suspects = found if trial == 0 else {key: found[key] for key in suspects if key in found}
        if not suspects:
            return None
    key, error = max(suspects.items(), key=lambda item: item[1])
    return f"by {error:.2g} of a value, row {key.row} at {border} tokens"


def _suspects(rows: _Rows, eps: float) -> dict[_Observed, float]:
    """Where rows together differ more from each alone than rounding explains, and by how much."""
    alone, in_chunks, together = rows.alone(), rows.in_chunks(), rows.together()
    spreads: dict[tuple[int, int], float] = defaultdict(lambda: max(eps, _SMALLEST_SPREAD))
    for key, array in alone.items():
        spreads[key.place] = max(spreads[key.place], _difference(in_chunks[key], array))
    errors = {key: min(_difference(together[key], one[key]) for one in (alone, in_chunks)) for key in alone}
    return {key: error for key, error in errors.items() if error > min(_LARGEST_ERROR, _SPREADS * spreads[key.place])}


def _difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square of the differences, each relative to the size of its value plus the median size.

    Relative, since a few large values, as biased keys have, would hide all other differences.
    """
    size = np.abs(expected)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = (found - expected) / (size + np.median(size))
    parts = np.where(found == expected, 0.0, parts)
    error = float(np.sqrt(np.mean(parts * parts)))
    return error if error == error else float("inf")
