"""Tests whether a model decodes ragged batches correctly. Worker thread only.

Rows of different lengths are decoded together, and each is compared with the same row alone: logits, and what every
layer writes into its caches. Rows lie before, at and beyond every length where attention may change (`find_borders`).
Long rows are synthetic, drawn from a few real tokens, with large values at borders: a mask wrong by one token then
shows.

The *spread* between a row alone as one chunk and token by token tells the size of rounding. Rounding may change a
discrete choice, such as of an expert; only a fault comes back with new random tokens at the same row, step and layer.
A model not proven correct in bounded time decodes its rows one after another.

Feeds of several tokens, some taken back, are compared with the same tokens one by one: of one row, and of several in
one call.
"""

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from cache.layers.layout import leaves_of, row_leaf, split_at_head, tail_of
from cache.layers.state import arrays_in
from cache.types import LayerCache
from models.inference.batch import DecodeBatch
from models.inference.feeds import Rewind, copied_state, find_fixed
from models.inference.grouping import Buffer, Row, Wanted, capacity_for
from models.inference.groups import BatchRow
from models.inference.ragged import NotRagged, RaggedBatch, inputs_of, ragged_attention
from models.mlx_lm_import import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

logger = logging.getLogger(__name__)

_BORDER_TOKENS = 6
"""Large values around a border: a row passes it in fewer steps."""
_MAX_GAIN = 16.0
"""Half precision must not overflow."""


def fill(
    caches: Sequence[LayerCache], short: Sequence[LayerCache], num_tokens: int, borders: Sequence[int], seed: int
) -> None:
    """Fills fresh `caches` with a row of `num_tokens`, like the few in `short`; deterministic for a seed.

    `borders` are distances from the row's end. Raises NotRagged.
    """
    gains = _gains(num_tokens, borders)
    for index, (cache, source) in enumerate(zip(leaves_of(caches), leaves_of(short), strict=True)):
        rng = np.random.default_rng([seed, index])
        if isinstance(source, ArraysCache):
            cache.cache = [None if state is None else _varied(state, rng) for state in source.cache]
        elif (leaf := row_leaf(source)) is None:
            raise NotRagged(f"rows of {type(source).__name__} cannot be made up")
        elif source.keys is not None:  # some models leave caches unused, whose layers share others' keys
            num_rows = min(num_tokens, leaf.window or num_tokens)
            leaf.load(cache, _drawn_rows(leaf.arrays(source), num_rows, gains, rng), num_rows, num_tokens)
            if isinstance(cache, RotatingKVCache) and num_tokens > num_rows:
                # As one that went round, its oldest row in the middle.
                cache._idx = num_tokens % num_rows or num_rows
                cache.keys, cache.values = (mx.roll(rows, cache._idx, 2) for rows in (cache.keys, cache.values))


def last_rows(cache: LayerCache, count: int) -> list[mx.array]:
    """Keys and values of the last `count` tokens, `[1, num_heads, count, head_dim]`; empty if unused."""
    cache = tail_of(cache)
    leaf = row_leaf(cache)
    if cache.keys is None or leaf is None:
        return []
    return [rows[..., rows.shape[2] - count :, :] for rows in leaf.arrays(cache)]


def _gains(num_tokens: int, borders: Sequence[int]) -> NDArray[np.float64]:
    from_end = np.arange(num_tokens, 0, -1)
    at_border = np.isin(from_end, (1, num_tokens))
    for border in borders:
        at_border |= abs(from_end - border) < _BORDER_TOKENS
    return np.where(at_border, min(num_tokens**0.5, _MAX_GAIN), 1.0)


def _varied(state: mx.array, rng: np.random.Generator) -> mx.array:
    return state * mx.array(rng.uniform(0.5, 1.5, state.shape)).astype(state.dtype)


def _drawn_rows(
    found: Sequence[mx.array], num_rows: int, gains: NDArray[np.float64], rng: np.random.Generator
) -> list[mx.array]:
    keys, values = found
    # Keys around those of real tokens: attention keeps its sharpness.
    one, other, third = (_drawn(keys, num_rows, rng) for _ in range(3))
    # Values of either sign: many nearly cancel, and one large value shows.
    signs = mx.array((gains[-num_rows:] * rng.choice([-1.0, 1.0], num_rows))[:, None]).astype(values.dtype)
    return [one + (other - third) * mx.array(0.3, keys.dtype), _drawn(values, num_rows, rng) * signs]


def _drawn(rows: mx.array, num_rows: int, rng: np.random.Generator) -> mx.array:
    return mx.take(rows, mx.array(rng.integers(0, rows.shape[2], num_rows)), axis=2)


MAX_NAMED_TOKENS = 8192
"""Larger numbers of a configuration often repeat the context."""

_SIZE = re.compile(r"(window|window_size|chunk_size|index_topk)$")
_BLOCKS = re.compile(r"^(.*)topk_blocks$")


def find_borders(model: Any, caches: Sequence[LayerCache], asked_windows: set[int]) -> list[int]:
    """Ascending lengths in tokens where attention may change; `asked_windows` is of `spy_on_masks`."""
    kept = {leaf.window for leaf in map(row_leaf, leaves_of(caches)) if leaf is not None}
    named = {size for size in _named_sizes(model, set()) if size <= MAX_NAMED_TOKENS}
    return sorted(size for size in kept | asked_windows | named if size > 1)


def spy_on_masks(caches: Sequence[LayerCache]) -> set[int]:
    """Collects the windows for which a model asks masks."""
    windows: set[int] = set()
    for cache in leaves_of(caches):
        if hasattr(cache, "make_mask"):
            cache.make_mask = partial(_make_mask, windows, cache.make_mask)
    return windows


def _make_mask(windows: set[int], make_mask: Any, *args: Any, **options: Any) -> Any:
    asked = (*args[1:2], options.get("window_size"))
    windows.update(size for size in asked if isinstance(size, int) and not isinstance(size, bool))
    return make_mask(*args, **options)


def _named_sizes(value: Any, seen: set[int]) -> Iterator[int]:
    if id(value) in seen:
        return
    seen.add(id(value))
    fields = _fields(value)
    for name, field in fields.items():
        if isinstance(field, int) and not isinstance(field, bool):
            if _SIZE.search(str(name)):
                yield field
            elif (blocks := _BLOCKS.match(str(name))) and isinstance(fields.get(f"{blocks[1]}block_size"), int):
                yield field * fields[f"{blocks[1]}block_size"]  # an indexer that selects whole blocks
        elif isinstance(field, dict | list | tuple) or hasattr(field, "__dict__"):
            yield from _named_sizes(field, seen)


def _fields(value: Any) -> dict[Any, Any]:
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    own = dict(value) if isinstance(value, dict) else {}
    return own | (vars(value) if hasattr(value, "__dict__") and (isinstance(value, Module) or not own) else {})


MAX_SECONDS = 30.0
MAX_STATE_BYTES = 2 << 30

_NUM_TRIALS = 4
_SPREADS = 3.0
"""A difference of more spreads is not rounding."""
_LARGEST_ERROR = 0.25
_SMALLEST_SPREAD = 1e-5

_SHORT_TOKENS = 7
_GROWTH_TOKENS = 256
"""By which mlx-lm's caches grow."""
_Steps: TypeAlias = Sequence[Mapping[int, tuple[int, int]]]
"""For each step and row, the tokens fed, and how many of them stay."""
_ONE_TOKEN: _Steps = [dict.fromkeys(rows, (1, 1)) for rows in ((0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 1))]
"""The last step lacks one row and has another order."""
_FEEDS: _Steps = [{1: feed} for feed in ((3, 2), (1, 1), (5, 3), (2, 1), (1, 1))]
_FLAT_FEEDS: _Steps = [
    {0: (3, 2), 1: (1, 1), 2: (2, 1)},
    {0: (1, 1), 1: (5, 3), 2: (4, 2)},
    {0: (5, 1), 1: (2, 1), 2: (2, 2)},
    {0: (1, 1), 1: (3, 1), 2: (1, 1)},
    {0: (1, 1), 1: (1, 1), 2: (1, 1)},
]


class NotProven(Exception):
    """Proving anything would take too much time or memory."""


class _Observed(NamedTuple):
    """One array of a row's evaluation; step -1 for state after the last."""

    place: tuple[int, int]
    """Layer cache, -1 for logits, and component."""
    row: int
    step: int


_Trace: TypeAlias = dict[_Observed, NDArray[np.float32]]


class Form(Enum):
    """How several rows are evaluated, in the words of the start report; the best first."""

    HEADS = "together, in groups, common beginnings held once"
    """As `GROUPS`, and rows that begin alike on one head."""
    GROUPS = "together, in groups"
    """In one model call, rows of like lengths in shared buffers."""
    ROWS = "together"
    """In one model call, each row over its own caches."""
    ALONE = "one by one"


@dataclass(frozen=True)
class FoundForm:
    """The best form that is proven, and why it is no better one."""

    form: Form
    reason: str | None = None

    @property
    def text(self) -> str:
        """For a person."""
        if self.reason is None:
            return self.form.value
        missing = {Form.ROWS: ", not in groups", Form.GROUPS: ", without heads"}.get(self.form, "")
        return f"{self.form.value}{missing}, because {self.reason}"


class _Trial(NamedTuple):
    """How three rows are evaluated in one comparison; a group has one row more later."""

    groups: Sequence[Sequence[int]] = ()
    on_head: Sequence[int] = ()
    """Rows whose beginning is one head."""
    in_chunks: bool = False
    """Rows on the head are evaluated one by one, as in prefill."""


_TRIALS: dict[Form, Sequence[_Trial]] = {
    Form.ROWS: [_Trial()],
    Form.GROUPS: [_Trial([[0, 1, 2]]), _Trial([[0, 1]])],
    Form.HEADS: [_Trial([[1, 2]], (1, 2)), _Trial((), (1, 2)), _Trial((), (1, 2), in_chunks=True)],
}
"""With one group a model may make masks itself; with more members only their caches can."""
_FLAT_TRIALS: dict[Form, Sequence[_Trial]] = {
    Form.ROWS: [_Trial()],
    Form.GROUPS: [_Trial([[0, 1, 2]]), _Trial([[1, 2]])],
    Form.HEADS: [_Trial([[1, 2]], (1, 2)), _Trial((), (1, 2))],
}
"""As `_TRIALS`, for rows that feed several tokens in one call."""


def _best_form(faults: dict[Form, str]) -> FoundForm:
    """The ladder's highest step with none refused below."""
    found = Form.ALONE
    for form in _TRIALS:
        if form in faults:
            return FoundForm(found, faults[form])
        found = form
    return FoundForm(found)


def _refusal(error: Exception) -> str:
    if isinstance(error, NotRagged):
        return str(error)
    return f"the model cannot be called in this way: {type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------------ evaluation


@dataclass(eq=False)
class Probe:
    """Finds out how one model may be called, within `max_seconds` at the pace of a token alone.

    Beyond that pace calls may take any time: a GPU compiles kernels at their first use.
    """

    model: Any
    vocab_size: int
    clock: Callable[[], float] = time.monotonic
    max_seconds: float = MAX_SECONDS
    seed: int = 0
    _token_seconds: float = 0.0
    _num_evaluated: int = 0
    """Tokens."""

    @property
    def left_seconds(self) -> float:
        return self.max_seconds - self._seconds_after(0)

    def find_form(self, *, shares_heads: bool = True) -> FoundForm:
        """The best form proven to give rows of different lengths the same as alone."""
        try:
            faults = self._find_faults({} if shares_heads else {Form.HEADS: "they are turned off"})
        except NotProven as error:
            found = FoundForm(Form.ALONE, f"it is not proven that they may together: {error}")
            logger.warning("rows decode %s", found.text)
            return found
        except Exception as error:  # it only shows that this model cannot be called in this way
            faults = {Form.ROWS: _refusal(error)}
        found = _best_form(faults)
        logger.info("rows decode %s", found.text)
        return found

    def find_feed_fault(self) -> str | None:
        """Why no step may feed a row several tokens; None where proven the same as one by one."""
        fixed = find_fixed(self.make_caches())
        fault = f"{fixed} cannot forget its last tokens" if fixed else self._find_feed_fault(_FEEDS, [_Rows.in_feeds])
        if fault is not None:
            logger.info("a step takes one token of a row, because %s", fault)
        return fault

    def find_flat_fault(self, form: Form) -> str | None:
        """Why rows that feed several tokens cannot share a call; None where proven the same in all ways of `form`."""
        forms = list(_FLAT_TRIALS)
        trials = [trial for one in forms[: forms.index(form) + 1] for trial in _FLAT_TRIALS[one]]
        fault = self._find_feed_fault(_FLAT_FEEDS, _ways_of(trials))
        if fault is not None:
            logger.info("rows with several tokens in a step take turns, because %s", fault)
        return fault

    def make_caches(self) -> list[LayerCache]:
        """Empty, of one row."""
        return list(make_prompt_cache(self.model))

    @cached_property
    def _borders(self) -> list[int]:
        """Lengths where the model may change; times the second evaluation."""
        self([[0]], self.make_caches())
        begun, caches = self.clock(), self.make_caches()
        windows = spy_on_masks(caches)
        logits, leaves = self([[0]], caches), leaves_of(caches)
        self._token_seconds = self.clock() - begun
        self._can_share = BatchRow(caches).used_leaves() is not None
        self._has_spans = any(type(cache) is KVCache and cache.keys is not None for cache in leaves)
        floating = (array for array in (logits, *arrays_in(caches)) if mx.issubdtype(array.dtype, mx.floating))
        self._eps = max(float(mx.finfo(array.dtype).eps) for array in floating)
        for cache in leaves:
            cache.__dict__.pop("make_mask", None)  # which refers to the cache: its arrays would not be freed at once
        return sorted({*find_borders(self.model, caches, windows), _GROWTH_TOKENS})

    def _affords(self, num_tokens: int) -> bool:
        return self._seconds_after(num_tokens) <= self.max_seconds

    def _seconds_after(self, num_tokens: int) -> float:
        return (self._num_evaluated + num_tokens) * self._token_seconds

    def _require(self, num_tokens: int) -> None:
        if not self._affords(num_tokens):
            needed, pace = self._seconds_after(num_tokens), f"at {self._token_seconds:.2g} s per token"
            raise NotProven(f"that takes {needed:.0f} s, {pace}, more than {self.max_seconds:.0f} s")

    def __call__(self, tokens: list[list[int]] | mx.array, caches: Sequence[LayerCache]) -> mx.array:
        """Evaluated logits `[num_rows, num_tokens, vocab_size]`."""
        tokens = mx.array(tokens)
        self._require(tokens.size)
        self._num_evaluated += tokens.size
        logits: mx.array = self.model(tokens, cache=caches)
        mx.eval(logits)
        return logits

    def draw_tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        """Random ones."""
        return cast(list[int], rng.integers(0, self.vocab_size, count).tolist())

    def _find_faults(self, unwanted: dict[Form, str]) -> dict[Form, str]:
        """Why forms are refused; where time is short, groups are refused untried."""
        RaggedBatch([BatchRow(self.make_caches())] * 2)  # raises for a class without ragged form, at no cost
        faults, num = unwanted.copy(), len(self._borders)
        if not self._can_share:
            faults[Form.GROUPS] = "the model has no layer in which rows could share buffers"
        elif not self._affords(num * _tokens_for([Form.ROWS, Form.GROUPS])):
            faults[Form.GROUPS] = "trying it takes too much time"
        elif not self._has_spans:
            faults[Form.HEADS] = "no layer keeps all tokens"
        elif not unwanted and not self._affords(num * _tokens_for(_TRIALS)):
            faults[Form.HEADS] = "trying it takes too much time"
        self._require(num * _tokens_for([Form.ROWS]))
        for border in self._borders:
            forms = list(_TRIALS)[: min((list(_TRIALS).index(form) for form in faults), default=None)]
            ways = {form: _ways_of(_TRIALS[form]) for form in forms}
            faults |= self._find_faults_at(border, _ONE_TOKEN, ways, "they differ from each alone")
            if Form.ROWS in faults:
                break
        return faults

    def _find_feed_fault(self, steps: _Steps, ways: Sequence["_Way"]) -> str | None:
        """At the first border at which one of the `ways` differs from one by one."""
        what = "several at once differ from one by one"
        try:
            # Recurrent layers evaluate some tokens again, at most all.
            self._require(len(self._borders) * _tokens_per_trial(steps, len(ways) + 1))
            faults = (self._find_faults_at(border, steps, {"": ways}, what) for border in self._borders)
            return next((fault[""] for fault in faults if fault), None)
        except NotProven as error:
            return f"it is not proven that there may be more: {error}"
        except Exception as error:  # it only shows that this model cannot be called in this way
            return _refusal(error)

    def _find_faults_at(
        self, border: int, steps: _Steps, ways: Mapping["_Key", Sequence["_Way"]], what: str
    ) -> dict["_Key", str]:
        """For each key, why one of its ways is refused: `what` is said of a difference."""
        faults, suspects = dict[_Key, str](), dict[_Key, dict[_Observed, float]]()
        for trial in range(_NUM_TRIALS):
            pending = [key for key in ways if key not in faults and (trial == 0 or suspects[key])]
            if not pending:
                break
            self._require(_tokens_per_trial(steps, sum(len(ways[key]) for key in pending)))
            rows = _Rows(self, border, trial, steps)
            alone, in_chunks = rows.alone(), rows.in_chunks()
            for key in pending:
                try:
                    found = _suspects([way(rows) for way in ways[key]], self._eps, alone, in_chunks)
                except NotProven:
                    raise
                except Exception as error:  # it only shows that this model cannot be called in this way
                    faults[key], suspects[key] = _refusal(error), {}
                    continue
                suspects[key] = {place: found[place] for place in suspects.get(key, found) if place in found}
        return faults | {key: f"{what} by {_told(found, border)}" for key, found in suspects.items() if found}


class _Rows:
    """A short row, one that reaches the border within `steps`, and one beyond; only those that the steps feed."""

    def __init__(self, evaluate: Probe, border: int, trial: int, steps: _Steps) -> None:
        self._seed = evaluate.seed + trial
        rng = np.random.default_rng([border, self._seed])
        num_kept = Counter[int]()
        for step in steps:
            num_kept.update({row: kept for row, (_, kept) in step.items()})
        self._tokens = {row: evaluate.draw_tokens(rng, num_kept[row]) for row in sorted(num_kept)}
        self._max_fed = max(fed for step in steps for fed, _ in step.values())
        self._rejected = evaluate.draw_tokens(rng, self._max_fed)
        self._steps = steps
        self._evaluate = evaluate
        self._border = border
        self._lengths = (_SHORT_TOKENS, max(1, border - 2), border + min(border // 3, 64) + 5)
        self._head_tokens = -(-self._lengths[1] // 2)
        """With which rows 1 and 2 begin."""
        self._short = evaluate.make_caches()
        prompt = evaluate.draw_tokens(rng, _SHORT_TOKENS)
        for part in (prompt[:4], prompt[4:]):
            evaluate([part], self._short)
        needed = sum(self._lengths) * BatchRow(self._short).bytes_per_token
        if needed > MAX_STATE_BYTES:
            raise NotProven(f"rows of {border} tokens, where attention changes, are {needed >> 20} MiB")

    def make(self, row: int) -> list[LayerCache]:
        caches, num_tokens = self._evaluate.make_caches(), self._lengths[row]
        if row == 0:
            for cache, original in zip(leaves_of(caches), leaves_of(self._short), strict=True):
                vars(cache).update(copied_state(original))
            return caches
        borders = [self._border, num_tokens - self._head_tokens]
        fill(caches, self._short, num_tokens, borders, 2 * self._seed + row)
        for cache, other in zip(leaves_of(caches), leaves_of(self.make(1)), strict=True) if row == 2 else ():
            if type(cache) is KVCache and cache.keys is not None:
                cache.keys[:, :, : self._head_tokens] = other.keys[:, :, : self._head_tokens]
                cache.values[:, :, : self._head_tokens] = other.values[:, :, : self._head_tokens]
        return caches

    def alone(self) -> _Trace:
        """Token by token."""
        return self._each(
            lambda row, caches: [self._evaluate([[token]], caches)[0, -1] for token in self._tokens[row]]
        )

    def in_chunks(self, made: dict[int, BatchRow] | None = None) -> _Trace:
        return self._each(lambda row, caches: list(self._evaluate([self._tokens[row]], caches)[0]), made)

    def in_feeds(self) -> _Trace:
        """Each row by itself."""
        return self._each(self._feed_alone)

    def _each(
        self, evaluate: Callable[[int, list[LayerCache]], Sequence[mx.array]], made: dict[int, BatchRow] | None = None
    ) -> _Trace:
        trace: _Trace = {}
        for row in self._tokens:
            caches = self.make(row) if made is None else made[row].caches
            trace |= _observe(row, caches, evaluate(row, caches))
        return trace

    def _feed_alone(self, row: int, caches: Sequence[LayerCache]) -> list[mx.array]:
        known, logits = list[int](), list[mx.array]()
        for num_fed, num_kept in (step[row] for step in self._steps):
            fed = [*known, *self._feed(row, len(logits), num_fed, num_kept)]
            kept = fed[: len(known) + num_kept]
            rewind = Rewind(caches, len(fed))
            logits += list(self._evaluate([fed], caches)[0, len(known) : len(kept)])
            known = kept[rewind.keep(len(kept)) :]
        return logits

    def together(self, trial: _Trial) -> _Trace:
        rows, head = {row: BatchRow(self.make(row)) for row in self._tokens}, self._evaluate.make_caches()
        for row in trial.on_head:
            # The first row moves what both begin with into `head`.
            split_at_head(rows[row].caches, head, self._head_tokens)
        if trial.in_chunks:
            return self.in_chunks(rows)
        batch, logits = DecodeBatch(None, 2 * self._max_fed), {row: list[mx.array]() for row in rows}
        known = {row: list[int]() for row in rows}
        for step in self._steps:
            peers = [row for row in step if not trial.on_head or row in trial.on_head]
            groups = [[peers.index(row) for row in group if row in peers] for group in trial.groups]
            batch.choose = partial(_choose_these, groups)
            fed = {row: [*known[row], *self._feed(row, len(logits[row]), *step[row])] for row in step}
            layers = batch.arrange([rows[row] for row in step], float("inf"), [*map(len, fed.values())])
            order = [row for one in batch.rows for row in step if rows[row] is one]
            kept = {row: fed[row][: len(known[row]) + step[row][1]] for row in order}
            line, lengths = mx.array([token for row in order for token in fed[row]]), [len(fed[row]) for row in order]
            inputs, seen = inputs_of(line, lengths, layers)
            with ragged_attention():
                evaluated = self._evaluate(inputs, layers).flatten(0, 1)
            found = iter(evaluated if seen is None else evaluated[seen])
            batch.advance()
            stays = {rows[row]: len(kept[row]) for row in order}
            batch.settle(stays)
            for row in order:
                logits[row] += [next(found) for _ in fed[row]][len(known[row]) : len(kept[row])]
                known[row] = kept[row][stays[rows[row]] :]
        batch.dissolve()
        return self._each(lambda row, _: logits[row], rows)

    def _feed(self, row: int, start: int, num_fed: int, num_kept: int) -> list[int]:
        return [*self._tokens[row][start : start + num_kept], *self._rejected[: num_fed - num_kept]]


def _choose_these(
    members: Sequence[Sequence[int]], rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float
) -> list[Wanted]:
    """Puts each member's rows into one group with room for one more; keeps a group while its rows fit."""
    wanted = list[Wanted]()
    for places in (tuple(member) for member in members if 1 < len(member) <= len(rows)):
        found = [rows[place] for place in places]
        kept = found[0].group
        if kept is None or max(row.tokens for row in found) >= groups[kept].capacity:
            wanted.append(Wanted(places, Buffer(len(places) + 1, capacity_for(found))))
        else:
            wanted.append(Wanted(places, groups[kept], kept))
    return wanted


def _tokens_per_trial(steps: _Steps, num_ways: int) -> int:
    """Tokens to make up rows and to evaluate each alone, in chunks and in so many ways."""
    num_fed, num_kept = (sum(feed[part] for step in steps for feed in step.values()) for part in (0, 1))
    return 2 * _SHORT_TOKENS + 2 * num_kept + num_ways * num_fed


def _tokens_for(forms: Iterable[Form]) -> int:
    return _tokens_per_trial(_ONE_TOKEN, sum(len(_TRIALS[form]) for form in forms))


def _observe(row: int, caches: Sequence[LayerCache], logits: Sequence[mx.array]) -> _Trace:
    found = {_Observed((-1, 0), row, step): array for step, array in enumerate(logits)}
    for layer, cache in enumerate(leaves_of(caches)):
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

_Way: TypeAlias = Callable[[_Rows], _Trace]
_Key = TypeVar("_Key")


def _ways_of(trials: Iterable[_Trial]) -> list[_Way]:
    return [partial(_Rows.together, trial=trial) for trial in trials]


def _told(suspects: dict[_Observed, float], border: int) -> str:
    key, error = max(suspects.items(), key=lambda item: item[1])
    return f"{error:.2g} of a value, row {key.row} at {border} tokens"


def _suspects(traces: Sequence[_Trace], eps: float, alone: _Trace, in_chunks: _Trace) -> dict[_Observed, float]:
    """Where, and by how much, a trace differs by more than rounding."""
    spreads: dict[tuple[int, int], float] = defaultdict(lambda: max(eps, _SMALLEST_SPREAD))
    errors = dict[_Observed, float]()
    for key, expected in alone.items():
        known = [(one, _scale(one)) for one in (expected, in_chunks[key])]
        spreads[key.place] = max(spreads[key.place], _difference(in_chunks[key], *known[0]))
        errors[key] = max(min(_difference(trace[key], *one) for one in known) for trace in traces)
    return {key: error for key, error in errors.items() if error > min(_LARGEST_ERROR, _SPREADS * spreads[key.place])}


def _scale(expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """The size of each value plus the median size."""
    size = np.abs(expected)
    # `np.median` imports `numpy.ma`, 6 MB for this line.
    middle = np.sort(size, axis=None)[(size.size - 1) // 2 : size.size // 2 + 1].mean()
    return cast(NDArray[np.float32], size + middle)


def _difference(found: NDArray[np.float32], expected: NDArray[np.float32], scale: NDArray[np.float32]) -> float:
    """Root mean square, each relative to its `scale`."""
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = (found - expected) / scale
    parts = np.where(found == expected, 0.0, parts)
    error = float(np.sqrt(np.mean(parts * parts)))
    return error if error == error else float("inf")
