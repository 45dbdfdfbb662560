"""Tests whether a model decodes ragged batches correctly. Worker thread only.

Rows of different lengths are decoded together, before, at and beyond every length where attention may change; each is
compared with the same row alone: logits, and what every layer writes into its caches. Long rows are synthetic, with
large values at such borders: a mask wrong by one token then shows. Feeds of several tokens, some taken back, are
compared with the same tokens one by one.

The *spread* between a row alone as one chunk and token by token tells the size of rounding. Rounding may change a
discrete choice, such as of an expert; only a fault comes back with new random tokens at the same row, step and layer.
"""

import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cache.layers.kinds import RowKind, kind_of, leaves_of, make_caches, split_at_head, tail_of
from cache.layers.layout import Layout, StoredForm
from cache.layers.state import GROUP, arrays_in
from cache.types import LayerCache
from models.inference import grouping
from models.inference.batch import DecodeBatch
from models.inference.grouping import Row, Wanted
from models.inference.ragged import NotRagged, inputs_of, join_layers, ragged_attention
from models.inference.rewind import copied_state
from models.inference.row import DecodeRow
from models.ranks import ONE_RANK, Ranks

logger = logging.getLogger(__name__)

_BORDER_TOKENS = 6
"""Large values around a border: a row passes it in fewer steps."""
_MAX_GAIN = 16.0
"""Half precision must not overflow."""


def _fill(
    caches: Sequence[LayerCache], short: Sequence[LayerCache], num_tokens: int, borders: Sequence[int], seed: int
) -> None:
    """Fills fresh `caches` with a row of `num_tokens`, like the few in `short`; deterministic for a seed.

    `borders` are distances from the row's end. Raises NotRagged.
    """
    gains = _gains(num_tokens, borders)
    for index, (cache, source) in enumerate(zip(leaves_of(caches), leaves_of(short), strict=True)):
        rng = np.random.default_rng([seed, index])
        kind = kind_of(source)
        if kind.is_merged:
            cache.cache = [None if state is None else _varied(state, rng) for state in source.cache]
        elif not isinstance(kind, RowKind):
            raise NotRagged(f"rows of {type(source).__name__} cannot be made up")
        elif source.keys is not None:  # some models leave caches unused, whose layers share others' keys
            num_rows = min(num_tokens, kind.window or num_tokens)
            kind.load(cache, _drawn_rows(kind.arrays(source), num_rows, gains, rng), num_rows, num_tokens)
            kind.turn(cache)


def last_rows(cache: LayerCache, count: int) -> list[mx.array]:
    """Keys and values of the last `count` tokens, `[1, num_heads, count, head_dim]`; empty if unused."""
    cache = tail_of(cache)
    kind = kind_of(cache)
    if not isinstance(kind, RowKind) or cache.keys is None:
        return []
    return [rows[..., rows.shape[2] - count :, :] for rows in kind.arrays(cache) if rows.size]


def _gains(num_tokens: int, borders: Sequence[int]) -> NDArray[np.float64]:
    from_end = np.arange(num_tokens, 0, -1)
    at_border = np.isin(from_end, (1, num_tokens))
    for border in borders:
        at_border |= abs(from_end - border) < _BORDER_TOKENS
    return np.where(at_border, min(num_tokens**0.5, _MAX_GAIN), 1.0)


def _varied(state: mx.array, rng: np.random.Generator) -> mx.array:
    return state * mx.array(rng.uniform(0.5, 1.5, state.shape)).astype(state.dtype)


def _drawn_rows(
    components: Sequence[mx.array], num_rows: int, gains: NDArray[np.float64], rng: np.random.Generator
) -> list[mx.array]:
    keys, *others = components
    # Keys around those of real tokens: attention keeps its sharpness.
    one, other, third = (_drawn(keys, num_rows, rng) for _ in range(3))
    # Values of either sign: many nearly cancel, and one large value shows.
    signs = mx.array((gains[-num_rows:] * rng.choice([-1.0, 1.0], num_rows))[:, None])
    varied = [_drawn(values, num_rows, rng) * signs.astype(values.dtype) for values in others]
    return [one + (other - third) * mx.array(0.3, keys.dtype), *varied]


def _drawn(rows: mx.array, num_rows: int, rng: np.random.Generator) -> mx.array:
    return mx.take(rows, mx.array(rng.integers(0, rows.shape[2], num_rows)), axis=2)


MAX_NAMED_TOKENS = 8192
"""Larger numbers of a configuration often repeat the context."""

_SIZE = re.compile(r"(window|window_size|chunk_size|index_topk)$")
_BLOCKS = re.compile(r"^(.*)topk_blocks$")


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


def named_sizes(value: Any, seen: set[int], pattern: re.Pattern[str] = _SIZE) -> Iterator[tuple[str, int]]:
    """Numbers in a model under names that `pattern` finds, and what blocks of an indexer hold together."""
    if id(value) in seen:
        return
    seen.add(id(value))
    own = value if isinstance(value, dict) else {}
    fields = dict(enumerate(value)) if isinstance(value, list | tuple) else {**own, **getattr(value, "__dict__", {})}
    for name, field in fields.items():
        if isinstance(field, int) and not isinstance(field, bool):
            if pattern.search(str(name)):
                yield str(name), field
            elif (blocks := _BLOCKS.match(str(name))) and isinstance(fields.get(f"{blocks[1]}block_size"), int):
                yield str(name), field * fields[f"{blocks[1]}block_size"]  # an indexer that selects whole blocks
        elif isinstance(field, dict | list | tuple) or hasattr(field, "__dict__"):
            yield from named_sizes(field, seen, pattern)


MAX_SECONDS = 30.0
MAX_STATE_BYTES = 2 << 30

_NUM_TRIALS = 4
_SPREADS = 3.0
"""A difference of more spreads is not rounding."""
_LARGEST_ERROR = 0.25
_SMALLEST_SPREAD = 1e-5

_SHORT_TOKENS = 7
GROWTH_TOKENS = 256
"""Tokens by which mlx-lm's caches grow."""


@dataclass(eq=False)
class _Plan:
    """Steps in which rows are compared with each alone."""

    difference: str
    """What a refusal says where rows differ."""
    steps: Sequence[Mapping[int, tuple[int, int]]]
    """For each step and row, the tokens fed, and how many of them stay."""

    def num_tokens(self, num_ways: int, *, with_reference: bool = True) -> int:
        """To evaluate rows in so many ways, and, unless that was done, alone, in chunks and their beginnings."""
        num_fed, num_kept = (sum(feed[part] for step in self.steps for feed in step.values()) for part in (0, 1))
        return num_ways * num_fed + with_reference * 2 * (_SHORT_TOKENS + num_kept)


_ALL = dict.fromkeys((0, 1, 2), (1, 1))
# The last step lacks one row and has another order.
_ONE_TOKEN = _Plan("they differ from each alone", [_ALL, _ALL, _ALL, {2: (1, 1), 1: (1, 1)}])
# Rows of one length need no mask, and have a kernel of their own.
_EVEN = _Plan(_ONE_TOKEN.difference, [{1: (1, 1), 3: (1, 1)}] * 3)
_SEVERAL = "several at once differ from one by one"
_FEEDS = _Plan(_SEVERAL, [{1: feed} for feed in ((3, 2), (1, 1), (5, 3), (2, 1), (1, 1))])
_FLAT_FEEDS = _Plan(
    _SEVERAL,
    [
        {0: (3, 2), 1: (1, 1), 2: (2, 1)},
        {0: (1, 1), 1: (5, 3), 2: (4, 2)},
        {0: (5, 1), 1: (2, 1), 2: (2, 2)},
        {0: (1, 1), 1: (3, 1), 2: (1, 1)},
        _ALL,
    ],
)


_RESTORED = _Plan("a restored row differs from itself", [{2: (1, 1)}] * 3)
_LARGEST_ROUNDING = 0.05
"""Of a value: where 8 bits give up to .03, 4 bits give up to .5."""


class _NotProven(Exception):
    """Proving anything would take too much time or memory."""


class _Observed(NamedTuple):
    """One array of a row's evaluation; step -1 for state after the last."""

    place: tuple[int, int]
    """Layer cache, -1 for logits, and component."""
    row: int
    step: int


_Trace: TypeAlias = dict[_Observed, NDArray[np.float32]]
_Made: TypeAlias = dict[tuple[int, int], "_Rows"]
"""By border and number of the comparison there."""


class Form(Enum):
    """How several rows are evaluated, in the words of the start report; the best first."""

    HEADS = "together, in groups, common beginnings held once"
    """As `GROUPS`, and rows that begin alike on one head."""
    GROUPS = "together, in groups"
    """In one model call, rows of like lengths in shared buffers."""
    ROWS = "together"
    """In one model call, each row over its own caches."""
    ALONE = "one by one"


def told(form: Form, fault: str | None) -> str:
    """The best form that is proven and, for a person, why it is no better one."""
    missing = {Form.ROWS: ", not in groups", Form.GROUPS: ", without heads"}.get(form, "")
    return form.value if fault is None else f"{form.value}{missing}, because {fault}"


class _Trial(NamedTuple):
    """A way to evaluate rows."""

    group: Sequence[int] = ()
    on_head: Sequence[int] = ()
    """Rows whose beginning is one head."""
    in_chunks: bool = False
    """Rows on the head are evaluated one by one, as in prefill."""
    is_alone: bool = False
    """The only row has a call of its own in each step."""


_TRIALS: dict[Form, Sequence[_Trial]] = {
    Form.ROWS: [_Trial()],
    Form.GROUPS: [_Trial((0, 1, 2)), _Trial((0, 1))],
    Form.HEADS: [_Trial((1, 2), (1, 2)), _Trial((), (1, 2)), _Trial((), (1, 2), in_chunks=True)],
}
"""With one group a model may make masks itself; with more members only their caches can."""


# ------------------------------------------------------------------------------------------------ evaluation


@dataclass(eq=False)
class Probe:
    """Finds out how one model may be called, in `max_seconds`.

    A call counts as no more than its tokens one by one: a GPU compiles kernels at their first use.
    """

    model: Any
    vocab_size: int
    clock: Callable[[], float] = time.monotonic
    max_seconds: float = MAX_SECONDS
    seed: int = 0
    ranks: Ranks = ONE_RANK
    """What one of them finds, all do: a call of the model is one of all ranks."""
    _token_seconds: float = 0.0
    _spent_seconds: float = 0.0

    @property
    def left_seconds(self) -> float:
        """Without limit for several ranks: no rank's clock decides which calls there are."""
        return self.max_seconds - self._spent_seconds if self.ranks.size == 1 else math.inf

    def find_form(self, *, shares_heads: bool = True) -> tuple[Form, str]:
        """The best form proven to give rows of different lengths the same as alone; for a person too, see `told`."""
        form, fault, rows = Form.ALONE, None, _Made()
        for better in _TRIALS:
            if fault := self._explained(self._find_form_fault, better, rows, shares_heads):
                break
            form = better
        logger.log(logging.WARNING if form is Form.ALONE else logging.DEBUG, "rows decode %s", told(form, fault))
        return form, told(form, fault)

    def _find_form_fault(self, form: Form, rows: _Made, shares_heads: bool) -> str | None:
        if form is Form.ROWS:
            join_layers([DecodeRow(self.make_caches())] * 2)  # raises for a class without ragged form, at no cost
        elif form is Form.GROUPS and not self._can_share:
            return "the model has no layer in which rows could share buffers"
        elif form is Form.HEADS and not (shares_heads and self._has_spans):
            return "no layer keeps all tokens" if shares_heads else "they are turned off"
        fault = self._find_fault(_ONE_TOKEN, _TRIALS[form], rows)
        return fault or (self._find_fault(_EVEN, [_Trial((1, 3))], _Made()) if form is Form.GROUPS else None)

    def find_feed_fault(self) -> str | None:
        """Why no step may feed a row several tokens; None where proven the same as one by one."""
        for cache in leaves_of(self.make_caches()):
            if not kind_of(cache).can_forget:
                return f"{type(cache).__name__} cannot forget its last tokens"
        return self._explained(self._find_fault, _FEEDS, [_Trial(is_alone=True)], _Made())

    def find_flat_fault(self, form: Form) -> str | None:
        """Why rows that feed several tokens cannot share a call; None where proven the same in all ways of `form`."""
        forms = list(_TRIALS)
        trials = [trial for one in forms[: forms.index(form) + 1] for trial in _TRIALS[one] if not trial.in_chunks]
        return self._explained(self._find_fault, _FLAT_FEEDS, trials, _Made())

    def find_stored_form(self) -> StoredForm:
        """What may be stored in 8 bits: made-up contexts, beyond each length that is known, go on as they would."""
        fault = self._explained(self._find_rounding_fault, StoredForm(rows=True))
        form = StoredForm(rows=fault is None)
        told = "in 8 bits" if form.rows else f"as it is, because {fault}"
        if Layout(self.make_caches()).has_recurrent:
            fault = self._explained(self._find_rounding_fault, replace(form, recurrent=True))
            form = replace(form, recurrent=fault is None)
            told += "; recurrent state " + ("too" if fault is None else f"as it is, because {fault}")
        logger.log(logging.WARNING if form.is_exact else logging.DEBUG, "state is stored %s", told)
        return replace(form, told=told)

    def _find_rounding_fault(self, form: StoredForm) -> str | None:
        for border in self._borders:
            for number in range(_NUM_TRIALS):
                if (error := self._rounding_error(form, border, number)) <= _LARGEST_ROUNDING:
                    break
            else:
                return f"what follows differs by {error:.2g} of a value at {border} tokens"
        return None

    def _rounding_error(self, form: StoredForm, border: int, number: int) -> float:
        self._require(_RESTORED.num_tokens(1))
        rows = _Rows(self, border, number, _RESTORED)
        restored = rows.restored(form)
        logits = {key: array for key, array in rows.alone.items() if key.place[0] < 0}
        return max(_difference(restored[key], array, _scale(array)) for key, array in logits.items())

    def _explained(self, find: Callable[..., str | None], *arguments: Any) -> str | None:
        """A fault that is found, or that it was not."""
        try:
            return find(*arguments)
        except _NotProven as error:
            return f"it could not be tested on this machine: {error}"
        except NotRagged as error:
            return str(error)
        except Exception as error:  # it only shows that this model cannot be called in this way
            if self.ranks.size > 1 and type(error) in (RuntimeError, MemoryError):
                raise  # of this machine's device: the others would wait within the call
            return f"the model cannot be called in this way: {type(error).__name__}: {error}"

    def make_caches(self) -> list[LayerCache]:
        """Empty, of one row."""
        return make_caches(self.model)

    @cached_property
    def _borders(self) -> list[int]:
        """Lengths where the model may change; times the second evaluation."""
        self([[0]], self.make_caches())
        begun, caches = self.clock(), self.make_caches()
        windows = spy_on_masks(caches)
        logits, leaves = self([[0]], caches), leaves_of(caches)
        self._token_seconds = self.clock() - begun
        self._spent_seconds = 2 * self._token_seconds
        self._can_share = DecodeRow(caches).used_leaves() is not None
        self._has_spans = any(kind_of(cache).can_share_head and cache.keys is not None for cache in leaves)
        floating = (array for array in (logits, *arrays_in(caches)) if mx.issubdtype(array.dtype, mx.floating))
        self._eps = max(float(mx.finfo(array.dtype).eps) for array in floating)
        for cache in leaves:
            cache.__dict__.pop("make_mask", None)  # which refers to the cache: its arrays would not be freed at once
        windows |= {kind_of(leaf).window for leaf in leaves}
        windows |= {size for _, size in named_sizes(self.model, set()) if size <= MAX_NAMED_TOKENS}
        return sorted({*(size for size in windows if size > 1), GROWTH_TOKENS})

    def _require(self, num_tokens: int) -> None:
        needed, pace = num_tokens * self._token_seconds, f"at {self._token_seconds:.2g} s per token"
        if needed > self.left_seconds:
            raise _NotProven(f"the test takes {needed:.0f} s, {pace}, more than {self.left_seconds:.0f} s")

    def __call__(self, tokens: list[list[int]] | mx.array, caches: Sequence[LayerCache]) -> mx.array:
        """Evaluated logits `[num_rows, num_tokens, vocab_size]`."""
        tokens = mx.array(tokens)
        self._require(tokens.size)
        begun = self.clock()
        logits: mx.array = self.model(tokens, cache=caches)
        mx.eval(logits)
        self._spent_seconds += min(self.clock() - begun, tokens.size * self._token_seconds)
        return logits

    def draw_tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        """Random ones."""
        return cast(list[int], rng.integers(0, self.vocab_size, count).tolist())

    def _find_fault(self, plan: _Plan, trials: Sequence[_Trial], made: _Made) -> str | None:
        """How rows differ, at the first border at which they do; some rows may be `made` already."""
        self._require(len(self._borders) * plan.num_tokens(len(trials), with_reference=not made))
        for border in self._borders:
            suspects = self._find_suspects(border, plan, trials, made)
            if self.ranks.any(bool(suspects)):
                return f"{plan.difference} by {_told(suspects, border) if suspects else 'what another machine has'}"
        return None

    def _find_suspects(
        self, border: int, plan: _Plan, trials: Sequence[_Trial], made: _Made
    ) -> dict[_Observed, float]:
        """What differs in each trial, and by how much."""
        suspects = dict[_Observed, float]()
        for number in range(_NUM_TRIALS):
            self._require(plan.num_tokens(len(trials), with_reference=(border, number) not in made))
            rows = made[border, number] = made.get((border, number)) or _Rows(self, border, number, plan)
            errors = _differences([rows.together(trial) for trial in trials], self._eps, rows.alone, rows.in_chunks)
            suspects = {place: error for place, error in errors.items() if number == 0 or place in suspects}
            if not self.ranks.any(bool(suspects)):
                break
        return suspects


class _Rows:
    """A short row, one that reaches the border within the plan's steps, one beyond, and one as long as the second.

    Only those that the steps feed.
    """

    def __init__(self, evaluate: Probe, border: int, number: int, plan: _Plan) -> None:
        self._seed = evaluate.seed + number
        rng = np.random.default_rng([border, self._seed])
        num_kept = Counter[int]()
        for step in plan.steps:
            num_kept.update({row: kept for row, (_, kept) in step.items()})
        self._tokens = {row: evaluate.draw_tokens(rng, num_kept[row]) for row in sorted(num_kept)}
        self._max_fed = max(fed for step in plan.steps for fed, _ in step.values())
        self._rejected = evaluate.draw_tokens(rng, self._max_fed)
        self._steps = plan.steps
        self._evaluate = evaluate
        self._border = border
        self._lengths = (_SHORT_TOKENS, max(1, border - 2), border + min(border // 3, 64) + 5, max(1, border - 2))
        self._head_tokens = -(-self._lengths[1] // 2)
        """Tokens of the head with which rows 1 and 2 begin."""
        self._short = evaluate.make_caches()
        prompt = evaluate.draw_tokens(rng, _SHORT_TOKENS)
        for part in (prompt[:4], prompt[4:]):
            evaluate([part], self._short)
        needed = sum(self._lengths[row] for row in self._tokens) * DecodeRow(self._short).bytes_per_token
        if needed > MAX_STATE_BYTES:
            raise _NotProven(f"rows of {border} tokens, where attention changes, are {needed >> 20} MiB")

    def make(self, row: int) -> list[LayerCache]:
        caches, num_tokens = self._evaluate.make_caches(), self._lengths[row]
        if row == 0:
            for cache, original in zip(leaves_of(caches), leaves_of(self._short), strict=True):
                vars(cache).update(copied_state(original))
            return caches
        borders = [self._border, num_tokens - self._head_tokens]
        _fill(caches, self._short, num_tokens, borders, 2 * self._seed + row)
        for cache, other in zip(leaves_of(caches), leaves_of(self.make(1)), strict=True) if row == 2 else ():
            if kind_of(cache).can_share_head and cache.keys is not None:
                cache.keys[:, :, : self._head_tokens] = other.keys[:, :, : self._head_tokens]
                cache.values[:, :, : self._head_tokens] = other.values[:, :, : self._head_tokens]
        return caches

    @cached_property
    def alone(self) -> _Trace:
        """Token by token."""
        return self._each(self._one_by_one)

    def _one_by_one(self, row: int, caches: list[LayerCache]) -> list[mx.array]:
        return [self._evaluate([[token]], caches)[0, -1] for token in self._tokens[row]]

    def restored(self, form: StoredForm) -> _Trace:
        """As `alone`, from what is stored of the rows. Raises NotRagged where that is not rounded."""
        layout, made = Layout(self._short, form=form), {row: DecodeRow(self.make(row)) for row in self._tokens}
        layout.calibrate(self._short)
        for row, live in made.items():
            num_tokens = self._lengths[row]
            (rows,) = layout.cut_spans(live.caches, [(0, num_tokens)])
            state = layout.take_recurrent(live.caches)
            if (form.rows and not rows.can_round) or (form.recurrent and not layout.can_round_recurrent(state)):
                raise NotRagged(f"it has no groups of {GROUP} numbers")
            layout.load_spans(live.caches, [layout.rounded(rows)], keep=0, offset=num_tokens, capacity=num_tokens)
            layout.put_recurrent(live.caches, layout.rounded_recurrent(state))
        return self._each(self._one_by_one, made)

    @cached_property
    def in_chunks(self) -> _Trace:
        return self._each(self._chunk)

    def _chunk(self, row: int, caches: list[LayerCache]) -> list[mx.array]:
        return list(self._evaluate([self._tokens[row]], caches)[0])

    def _each(
        self,
        evaluate: Callable[[int, list[LayerCache]], Sequence[mx.array]],
        made: dict[int, DecodeRow] | None = None,
    ) -> _Trace:
        trace: _Trace = {}
        for row in self._tokens:
            caches = self.make(row) if made is None else made[row].caches
            trace |= _observe(row, caches, evaluate(row, caches))
        return trace

    def together(self, trial: _Trial) -> _Trace:
        rows, head = {row: DecodeRow(self.make(row)) for row in self._tokens}, self._evaluate.make_caches()
        for row in trial.on_head:
            # The first row moves what both begin with into `head`.
            split_at_head(rows[row].caches, head, self._head_tokens)
        if trial.in_chunks:
            return self._each(self._chunk, rows)
        batch, trace = DecodeBatch(None, 2 * self._max_fed), {row: list[mx.array]() for row in rows}
        known = {row: list[int]() for row in rows}
        for step in self._steps:
            fed = {row: [*known[row], *self._feed(row, len(trace[row]), *step[row])] for row in step}
            kept = {row: fed[row][: len(known[row]) + step[row][1]] for row in step}
            logits = self._evaluated(batch, rows, fed, trial)
            stays = {rows[row]: len(kept[row]) for row in step}
            batch.settle(stays)
            for row in step:
                trace[row] += logits[row][len(known[row]) : len(kept[row])]
                known[row] = kept[row][stays[rows[row]] :]
        batch.dissolve()
        return self._each(lambda row, _: trace[row], rows)

    def _evaluated(
        self, batch: DecodeBatch, rows: Mapping[int, DecodeRow], fed: Mapping[int, list[int]], trial: _Trial
    ) -> dict[int, list[mx.array]]:
        """Each row's logits after its tokens of a step."""
        if trial.is_alone:
            ((row, tokens),) = fed.items()
            batch.hold(rows[row], len(tokens))
            return {row: list(self._evaluate([tokens], rows[row].caches)[0])}
        peers = [row for row in fed if not trial.on_head or row in trial.on_head]
        batch.choose = partial(_choose_these, [peers.index(row) for row in trial.group if row in peers])
        layers = batch.arrange([rows[row] for row in fed], float("inf"), [*map(len, fed.values())])
        order = [row for one in batch.rows for row in fed if rows[row] is one]
        line, lengths = mx.array([token for row in order for token in fed[row]]), [len(fed[row]) for row in order]
        inputs, seen = inputs_of(line, lengths, layers)
        with ragged_attention():
            evaluated = self._evaluate(inputs, layers).flatten(0, 1)
        batch.advance()
        logits = iter(evaluated if seen is None else evaluated[seen])
        return {row: [next(logits) for _ in fed[row]] for row in order}

    def _feed(self, row: int, start: int, num_fed: int, num_kept: int) -> list[int]:
        return [*self._tokens[row][start : start + num_kept], *self._rejected[: num_fed - num_kept]]


def _choose_these(members: Sequence[int], rows: Sequence[Row], *arguments: Any, spare_tokens: float) -> list[Wanted]:
    """As many as can be of the rows at these places share a buffer."""
    rows = [replace(row, can_share=place in members) for place, row in enumerate(rows)]
    return grouping.plan(rows, *arguments, costs=grouping.Costs(1e9), spare_tokens=spare_tokens)


def _observe(row: int, caches: Sequence[LayerCache], logits: Sequence[mx.array]) -> _Trace:
    observed = {_Observed((-1, 0), row, step): array for step, array in enumerate(logits)}
    for layer, cache in enumerate(leaves_of(caches)):
        if kind_of(cache).is_merged:
            states = [state for state in cache.cache if state is not None]
            observed |= {_Observed((layer, part), row, -1): state for part, state in enumerate(states)}
        else:
            for part, rows in enumerate(last_rows(cache, len(logits))):
                observed |= {_Observed((layer, part), row, step): rows[0, :, step] for step in range(len(logits))}
    observed = {key: array.astype(mx.float32) for key, array in observed.items()}
    mx.eval(observed)
    return {key: np.array(array) for key, array in observed.items()}


# ------------------------------------------------------------------------------------------------ comparison


def _told(suspects: dict[_Observed, float], border: int) -> str:
    key, error = max(suspects.items(), key=lambda item: item[1])
    return f"{error:.2g} of a value, row {key.row} at {border} tokens"


def _differences(traces: Sequence[_Trace], eps: float, alone: _Trace, in_chunks: _Trace) -> dict[_Observed, float]:
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


def _difference(actual: NDArray[np.float32], expected: NDArray[np.float32], scale: NDArray[np.float32]) -> float:
    """Root mean square, each relative to its `scale`."""
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = (actual - expected) / scale
    parts = np.where(actual == expected, 0.0, parts)
    error = float(np.sqrt(np.mean(parts * parts)))
    return error if error == error else float("inf")
