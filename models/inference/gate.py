"""Whether a provider's model may answer: one row, evaluated in three ways, must come out the same.

A row of random tokens is evaluated *whole*, in one call; in *pieces*, as chunks of a prompt and decoded tokens are;
and *restored* from state that was taken apart and put together, after another row was evaluated. All rows of all
layer caches are compared, and the logits after the last tokens, for rows that end beyond each length where attention
may change: windows, selected keys, pools. Rounding may change a discrete choice; only a fault comes back at the same
token with other tokens. The smallest quarter of a layer's differences tells how large rounding is.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeAlias, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cache.layers.kinds import RowKind, kind_of, leaves_of, make_caches
from cache.layers.layout import Layout
from cache.layers.state import arrays_in
from cache.types import LayerCache
from models.inference.probe import GROWTH_TOKENS, MAX_NAMED_TOKENS, named_sizes, spy_on_masks

_SIZE: Final = re.compile(
    r"^(?!vis|image|audio).*(window|window_size|chunk_size|topk|budget|block|block_size|pool|ratio)$"
)
_POOL: Final = re.compile(r"(pool|ratio)$")
_CHUNK_TOKENS: Final = 251
_DECODED_TOKENS: Final = 4
_MEASURED_TOKENS: Final = 64
_NUM_TRIALS: Final = 4
_SMALLEST_ERROR: Final = 1e-3
_SPREADS: Final = 8.0
"""A difference of more than so many spreads is not rounding."""
_ROOTS: Final = 3.0
"""Nor is one of more than so many square roots of the type's precision: 0.001, 0.27 in bfloat16."""

_PIECES: Final = "in pieces"

_Rows: TypeAlias = dict[tuple[int, int], mx.array]
"""By layer, -1 for logits, and component: a row for each of the last tokens; recurrent state is one."""
_Place: TypeAlias = tuple[str, int, int]
"""The way in which a row was evaluated, layer and component."""
_Differing: TypeAlias = dict[_Place, NDArray[np.bool_]]


class _TooSlow(Exception):
    pass


@dataclass(eq=False)
class Gate:
    """Tries one model, within `max_seconds`."""

    model: Any
    max_seconds: float
    clock: Callable[[], float] = time.monotonic
    _begun: float = field(init=False, default=0.0)
    _token_seconds: float = 0.0
    _vocab_size: int = 0
    _eps: float = 0.0

    def find_fault(self) -> str | None:
        """Why the model must not answer, as a clause; None where nothing was found."""
        self._begun = self.clock()
        try:
            lengths = self._lengths()
            for length in sorted(lengths):
                if (found := self._find_beyond(length)) is not None:
                    way, first = found
                    beyond = max((one for one in lengths if one <= first), default=length)
                    return f"a row {way} differs from token {first} on, beyond {beyond} ({lengths[beyond]})"
        except _TooSlow as error:
            return str(error)
        return None

    def _lengths(self) -> dict[int, str]:
        """Lengths where the model may change, and what says so; measures the model."""
        caches = make_caches(self.model)
        windows = spy_on_masks(caches)
        logits = self._call([0], caches)
        self._vocab_size = logits.shape[-1]
        floating = (one for one in (logits, *arrays_in(caches)) if mx.issubdtype(one.dtype, mx.floating))
        self._eps = max(float(mx.finfo(one.dtype).eps) for one in floating)
        before = self.clock()
        self._call([0] * _MEASURED_TOKENS, make_caches(self.model))
        self._token_seconds = (self.clock() - before) / _MEASURED_TOKENS
        named = [*named_sizes(self.model, set(), _SIZE), ("growing buffers", GROWTH_TOKENS)]
        pools = [(name, size) for name, size in named if _POOL.search(name)]
        selected = [(name, size) for name, size in named if name.endswith("topk")]
        pooled = [(f"{one} of {other}", size * by) for one, size in selected for other, by in pools]
        masks = [("a mask's window", size) for size in windows]
        return {size: name for name, size in (*pooled, *masks, *named) if 1 < size <= MAX_NAMED_TOKENS}

    def _find_beyond(self, length: int) -> tuple[str, int] | None:
        """In which way a row of more than `length` tokens differs, and from which token on."""
        suspects, end = _Differing(), length + min(length // 3, 64) + 5 + _DECODED_TOKENS
        for trial in range(_NUM_TRIALS):
            tokens = np.random.default_rng([length, trial]).integers(0, self._vocab_size, end)
            found = self._trial(tokens.tolist(), length)
            both = {place: differs & suspects.get(place, trial == 0) for place, differs in found.items()}
            suspects = {place: differs for place, differs in both.items() if differs.any()}
            if not suspects:
                return None
        way = next(iter(suspects))[0]
        return way, min(end - len(one) + int(one.argmax()) for place, one in suspects.items() if place[0] == way)

    def _trial(self, tokens: list[int], length: int) -> _Differing:
        """Which tokens differ in rows that were evaluated in another way."""
        differences = dict[_Place, NDArray[np.float32]]()
        for way, (actual, expected) in self._evaluated(tokens, length).items():
            differences |= {(way, *place): _differences(actual[place], rows) for place, rows in expected.items()}
        limit = self._find_limit([one for (way, *_), one in differences.items() if way == _PIECES])
        return {place: ~(one <= limit) for place, one in differences.items()}  # NaN differs

    def _evaluated(self, tokens: list[int], length: int) -> dict[str, tuple[_Rows, _Rows]]:
        """By way, a row and the same evaluated otherwise."""
        middle, end = length + 2, len(tokens)
        cuts = {3, 7, length - 2, length - 1, length, length + 1, *range(_CHUNK_TOKENS, end, _CHUNK_TOKENS)}
        first = sorted({0, middle, *(cut for cut in cuts if 0 < cut < middle)})
        rest = sorted({middle, *(cut for cut in cuts if middle < cut), *range(end - _DECODED_TOKENS, end + 1)})
        caches, other, restored = (make_caches(self.model) for _ in range(3))
        whole = self._rows(other, self._feed(tokens, other, [0, end]))
        self._feed(tokens, caches, first)
        layout = Layout(caches)
        layout.calibrate(caches)
        recurrent = layout.take_recurrent(caches)
        window = layout.cut_window(caches, layout.window_start(caches, middle), middle) if layout.window else None
        in_pieces = self._rows(caches, self._feed(tokens, caches, rest))
        # As in serving: spans are taken at any time later, other state at its offset.
        layout.load_spans(restored, layout.cut_spans(caches, [(0, middle)]), keep=0, offset=middle, capacity=middle)
        if window is not None:
            layout.load_windows(restored, [window], middle)
        layout.put_recurrent(restored, recurrent)
        self._feed(tokens[::-1], make_caches(self.model), [0, 5, 6])
        return {
            _PIECES: (in_pieces, whole),
            "restored": (self._rows(restored, self._feed(tokens, restored, rest)), in_pieces),
        }

    def _find_limit(self, differences: Sequence[NDArray[np.float32]]) -> float:
        """The largest difference that rounding explains.

        Layers with a row for each token, if any, show how large differences are in half precision.
        """
        most: float = _ROOTS * self._eps**0.5
        usual = [float(np.sort(one)[one.size // 4]) for one in differences if one.size > _DECODED_TOKENS]
        return min(most, max(_SMALLEST_ERROR, _SPREADS * max([self._eps, *(usual or [most])])))

    def _feed(self, tokens: Sequence[int], caches: list[LayerCache], cuts: Sequence[int]) -> mx.array:
        """Evaluates the tokens between `cuts`; returns the logits of the last ones."""
        logits = mx.zeros((0, self._vocab_size))
        for start, stop in pairwise(cuts):
            called = self._call(tokens[start:stop], caches)[0, -_DECODED_TOKENS:]
            logits = mx.concatenate([logits, called])[-_DECODED_TOKENS:]
            mx.eval(logits)
        return logits

    def _call(self, tokens: Sequence[int], caches: list[LayerCache]) -> mx.array:
        """Lazy logits; the layer caches are evaluated."""
        spent = self.clock() - self._begun
        if spent + len(tokens) * self._token_seconds > self.max_seconds:
            raise _TooSlow(f"its checks take more than {self.max_seconds:g} s; raise --provider-check")
        logits: mx.array = self.model(mx.array([tokens]), cache=caches)
        mx.eval(arrays_in(caches))
        return logits

    def _rows(self, caches: Sequence[LayerCache], logits: mx.array) -> _Rows:
        rows = {(-1, 0): logits}
        for layer, cache in enumerate(leaves_of(caches)):
            kind, arrays = kind_of(cache), list[mx.array]()
            if isinstance(kind, RowKind) and kind.length(cache):
                arrays = [array[0].swapaxes(0, 1).flatten(1)[-kind.window :] for array in kind.arrays(cache)]
            elif kind.is_merged:
                arrays = [state.reshape(1, -1) for state in cache.cache if state is not None]
            rows |= {(layer, part): array for part, array in enumerate(arrays) if array.size}
        return rows


def _differences(ours: mx.array, theirs: mx.array) -> NDArray[np.float32]:
    """By how much each of the last rows differs: root mean square, each value relative to its and the usual size."""
    num_rows = min(len(ours), len(theirs))
    actual, expected = (np.array(rows[len(rows) - num_rows :].astype(mx.float32)) for rows in (ours, theirs))
    size = np.abs(expected)
    usual = np.sort(size, axis=None)[size.size // 2]
    parts = (actual - expected) / (size + usual + np.finfo(np.float32).tiny)
    return cast(NDArray[np.float32], np.sqrt(np.mean(parts * parts, axis=1)))
