"""What a model can do on this machine, and what its calls cost: found by trials as it is loaded. Worker thread only.

With several ranks nothing follows from a rank's own clock: rank 0's measurements count, and no limit of time.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np

from cache.layers.kinds import leaves_of, make_caches, split_at_head
from cache.layers.layout import EXACT, StoredForm
from cache.types import LayerCache
from models import lora
from models.inference.batch import Choose, DecodeBatch
from models.inference.drafters import Drafter
from models.inference.grouping import GROWTH_TOKENS, Buffer, Costs, Row, Wanted, capacity_for
from models.inference.probe import MAX_SECONDS, Form, Probe
from models.inference.ragged import ragged_attention
from models.inference.rewind import unchanged
from models.inference.row import DecodeRow
from models.lora import AdapterSet
from models.mlx_lm_import import KVCache
from models.ranks import ONE_RANK, Ranks

logger = logging.getLogger(__name__)

_Measured = TypeVar("_Measured")

MAX_FEED_TOKENS = 33
"""A known token and the longest draft."""


@dataclass
class Feeds:
    """Steps in which a row feeds several tokens."""

    step_seconds: Mapping[int, float]
    """Seconds of a model call, by one row's tokens."""
    together: bool
    """Rows with several tokens share a model call."""
    max_tokens: int = MAX_FEED_TOKENS
    """The most of a row in a step."""
    draft_seconds: float | None = None
    """Seconds for a token that the drafter drafts; None without a drafter."""


@dataclass
class Abilities:
    """How one model's rows may be evaluated on this machine, in code and in words for a person."""

    form: Form
    rows_form: str
    """How several rows decode; for a person, and why not better."""
    drafts_form: str
    """What answers are drafted from, or why not; for a person."""
    stored_form: StoredForm = EXACT
    """Which state may be stored in 8 bits."""
    costs: Costs | None = None
    """What members of a batch cost; None without groups."""
    head_tokens: float | None = None
    """Tokens from which a head for two rows makes steps faster, maybe infinite; None without heads."""
    mixes: bool = False
    """Rows of different adapters are evaluated in one call."""
    feeds: Feeds | None = None
    """None where a row feeds one token a step: more are not proven, or not wanted."""

    @property
    def max_feed_tokens(self) -> int:
        return 1 if self.feeds is None else self.feeds.max_tokens

    @property
    def feeds_together(self) -> bool:
        return self.feeds is not None and self.feeds.together


@dataclass(eq=False)
class Trials:
    """Tries one model, with its drafter and adapters."""

    model: Any
    vocab_size: int
    drafter: Drafter | None = None
    adapters: AdapterSet | None = None
    ranks: Ranks = ONE_RANK
    max_probe_seconds: float = MAX_SECONDS

    def find(self, *, shares_heads: bool = True, rounds_stored: bool = False, drafts: bool = True) -> Abilities:
        """Tries what is wanted, with short calls."""
        probed = self.model if self.drafter is None else self.drafter.probed
        probe = Probe(probed, self.vocab_size, max_seconds=self.max_probe_seconds, ranks=self.ranks)
        abilities = Abilities(*probe.find_form(shares_heads=shares_heads), "off")
        if rounds_stored:
            abilities.stored_form = probe.find_stored_form()
        if abilities.form in (Form.GROUPS, Form.HEADS):
            abilities.costs = Costs(*self._measure(lambda caches: astuple(measure_costs(caches))))
        if abilities.form is Form.HEADS:
            abilities.head_tokens = self._measure(measure_head_tokens)
        if self.adapters is not None and abilities.form is not Form.ALONE:
            abilities.mixes = lora.can_mix(self.model, self.adapters, self.vocab_size)
        if drafts:
            abilities.feeds, abilities.drafts_form = self._find_feeds(probe, abilities.form)
            logger.debug("drafts: %s", abilities.drafts_form)
        return abilities

    def _find_feeds(self, probe: Probe, form: Form) -> tuple[Feeds | None, str]:
        if fault := probe.find_feed_fault():
            return None, f"none, because {fault}"
        drafter = "" if self.drafter is None else f" and by {self.drafter.name}"
        sources = f"from earlier text{drafter}, where they pay"
        fault = probe.find_flat_fault(form) if form is not Form.ALONE else None
        sources += "" if fault is None else f"; each request in steps of its own, because {fault}"
        left_seconds = probe.left_seconds
        measured = self._measure(
            lambda caches: [*measure_step_seconds(self._whole, caches, self.vocab_size, left_seconds).items()]
        )
        feeds = Feeds(dict(measured), together=fault is None and form is not Form.ALONE)
        if self.drafter is not None:
            feeds.draft_seconds = self._measure(partial(measure_draft_seconds, self.drafter))
        return feeds, sources

    @property
    def _whole(self) -> Any:
        return self.drafter or self.model

    def _measure(self, measure: Callable[[Sequence[LayerCache]], _Measured]) -> _Measured:
        """Measures plain data with layer caches that hold a token."""
        caches = make_caches(self._whole)
        mx.eval(self._whole(mx.array([[0]]), cache=caches))
        return self.ranks.share(measure(caches))


# ------------------------------------------------------------------------------------------ steps of one token

MAX_MEMBER_TOKENS, MAX_MASKED_TOKEN = 65_536.0, 16.0
"""Assumed costs where reading costs nothing measurable."""

_NUM_ROWS, _NUM_LAYERS = 4, 3
_MIN_TRIALS, _MAX_TRIALS, _TRIAL_SECONDS = 5, 20, 0.15
_SHORT_TOKENS, _LONG_TOKENS = 512, 2048
_TAIL_TOKENS = 64
_QUERIES_PER_KEY = 4
"""Query heads for each key head, as in models of today."""


def measure_costs(caches: Sequence[LayerCache]) -> Costs:
    """Times attention in layers like those of `caches`: rows by themselves, in a group, and under a mask."""
    short, long = [_SHORT_TOKENS] * _NUM_ROWS, [_LONG_TOKENS] * _NUM_ROWS
    uneven, long_uneven = ([num - row for row, num in enumerate(lengths)] for lengths in (short, long))
    sides: list[_Side] = [(short, None, 0), (long, None, 0), (short, _one_group, 0)]
    sides += [(uneven, _one_group, 0), (long_uneven, _one_group, 0)]
    alone, longer, grouped, masked, longer_masked = _best_seconds(caches, sides)
    num_tokens = _NUM_ROWS * (_LONG_TOKENS - _SHORT_TOKENS)
    token = max(1e-12, (longer - alone) / num_tokens)
    masked_token = min(max(1.0, (longer_masked - masked) / num_tokens / token), MAX_MASKED_TOKEN)
    member = (alone - grouped) / (_NUM_ROWS - 1) / token
    mask = (masked - grouped) / token - (masked_token - 1) * _NUM_ROWS * _SHORT_TOKENS
    member, mask = (min(max(0.0, cost), MAX_MEMBER_TOKENS) for cost in (member, mask))
    return Costs(member, mask, masked_token)


def measure_head_tokens(caches: Sequence[LayerCache]) -> float:
    """Tokens from which two rows on one head are faster than with a copy each; maybe infinite.

    Timed at two lengths; the gain counts as linear between and beyond.
    """
    lengths = _SHORT_TOKENS, _LONG_TOKENS
    sides: Sequence[_Side] = [
        ([num + _TAIL_TOKENS] * 2, _one_group, num * is_headed) for is_headed in (False, True) for num in lengths
    ]
    short_copied, long_copied, short_headed, long_headed = _best_seconds(caches, sides)
    short_gain, long_gain = short_copied - short_headed, long_copied - long_headed
    per_token = (long_gain - short_gain) / (_LONG_TOKENS - _SHORT_TOKENS)
    if long_gain <= 0 or per_token <= 0:
        return float("inf")
    return max(0.0, _SHORT_TOKENS - short_gain / per_token)


_Side: TypeAlias = tuple[Sequence[int], Choose | None, int]
"""Tokens of each row, the choice of groups, and tokens on one head."""


def _best_seconds(caches: Sequence[LayerCache], sides: Sequence[_Side]) -> list[float]:
    """The best of several for each side, in turns: other work of the machine only adds."""
    like = next(cache for cache in leaves_of(caches) if DecodeRow([cache]).length and cache.keys is not None)
    steps = [_timed_step(like, *side) for side in sides]
    timed, begun = list[list[float]](), time.perf_counter()
    while len(timed) < _MIN_TRIALS or (len(timed) < _MAX_TRIALS and time.perf_counter() - begun < _TRIAL_SECONDS):
        timed.append([step() for step in steps])
    return [min(times) for times in zip(*timed, strict=True)]


def _timed_step(
    like: LayerCache, lengths: Sequence[int], choose: Choose | None, head_tokens: int
) -> Callable[[], float]:
    """What returns the seconds of attention of rows without content in layers but the first, step after step.

    The first `head_tokens` of the rows are on one head.
    """
    rows = [DecodeRow([_made_up(like, num_tokens) for _ in range(_NUM_LAYERS)]) for num_tokens in lengths]
    head = [KVCache() for _ in range(_NUM_LAYERS)]
    for row in rows if head_tokens else ():
        split_at_head(row.caches, head, head_tokens)
    batch, (_, num_heads, _, width) = DecodeBatch(choose), like.keys.shape
    queries = mx.zeros((len(rows), _QUERIES_PER_KEY * num_heads, 1, width), like.keys.dtype)
    added = [mx.zeros((len(rows), num_heads, 1, old.shape[3]), like.keys.dtype) for old in (like.keys, like.values)]

    def attend(layer: LayerCache) -> mx.array:
        mask = layer.make_mask(1, window_size=None, return_array=False)
        keys, values = layer.update_and_fetch(*added)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)

    def seconds() -> float:
        first, *layers = batch.arrange(rows, float("inf"))
        with ragged_attention():
            mx.eval(attend(first))  # with what is made once a step
            seconds = _seconds_of(lambda: [attend(layer) for layer in layers])
        batch.advance()
        return seconds

    return seconds


def _made_up(like: LayerCache, num_tokens: int) -> LayerCache:
    cache = KVCache()
    shapes = [(*rows.shape[:2], num_tokens + GROWTH_TOKENS, rows.shape[3]) for rows in (like.keys, like.values)]
    cache.keys, cache.values = (mx.zeros(shape, like.keys.dtype) for shape in shapes)
    cache.offset = num_tokens
    mx.eval(cache.keys, cache.values)
    return cache


def _one_group(rows: Sequence[Row], groups: Sequence[Buffer], *, spare_tokens: float) -> list[Wanted]:
    return [Wanted(tuple(range(len(rows))), Buffer(len(rows), capacity_for(rows)))]


# ------------------------------------------------------------------------------- steps of several tokens, and drafts

_WIDTHS = (1, 2, 4, 8, 16, 32)
_STEP_TRIALS = 2
"""More would not tell what steps cost beside other work: that is learned while serving."""
_DRAFT_TRIALS, _TRIED_TOKENS = 4, 3


def measure_step_seconds(
    model: Any, caches: Sequence[LayerCache], vocab_size: int, max_seconds: float
) -> dict[int, float]:
    """Best seconds of a call with each of `_WIDTHS` tokens of one row, which has a few in `caches`.

    Tokens are distinct, as experts are chosen by token. Widths that exceed the time count as proportional.
    """
    rng, begun, best = np.random.default_rng(0), time.perf_counter(), dict[int, float]()
    for _, width in product(range(_STEP_TRIALS), _WIDTHS):
        if best and time.perf_counter() - begun > max_seconds:
            break
        tokens = mx.array(rng.choice(vocab_size, (1, width), replace=False))
        with unchanged(leaves_of(caches)):
            seconds = _seconds_of(partial(model, tokens, cache=caches))
        best[width] = min(best.get(width, seconds), seconds)
    longest = max(best)
    return {width: best.get(width, best[longest] * width / longest) for width in _WIDTHS}


def measure_draft_seconds(drafter: Drafter, caches: Sequence[LayerCache]) -> float:
    """Seconds of one drafted token, for a row with a few tokens in `caches`: the best of some tries."""
    (before,) = drafter.evaluate(mx.array([[0]]), drafter.make_cache(), [1], [None]).states
    draft = partial(drafter.draft_alone, caches, [0], before[1:], _TRIED_TOKENS)
    return min(_seconds_of(draft) for _ in range(_DRAFT_TRIALS)) / _TRIED_TOKENS


def _seconds_of(compute: Callable[[], Any]) -> float:
    """Seconds until all that `compute` returns is evaluated."""
    begun = time.perf_counter()
    mx.eval(compute())
    return time.perf_counter() - begun
