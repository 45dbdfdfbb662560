"""How sequences sample, vectorised over the rows of a decode step.

The order: a grammar's mask, logit bias, bans and penalties, temperature, filters (top-n-sigma, top-k, top-p, min-p,
typical-p, XTC), one draw. A draw adds Gumbel noise and takes the maximum (Maddison, Tarlow, Minka, "A* Sampling",
2014, section 2). Noise depends on the request's seed and earlier draws, not on other rows.

- A penalty's window has a fixed length, its newest token last; `_NO_TOKEN` stands for missing tokens and ids beyond
  the logits. It takes over its rows' windows when the rows change, counts sampled tokens unread, and gives the
  windows back. A grammar wins over tokens ruled out.
- A filter takes log-probabilities up to a constant, and keeps at least one token per row and all that tie with the
  last kept.
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from models.inference.sampling_params import ALL_TOKENS, MAX_REPEATED, SamplingParams
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob

_NO_TOKEN = -1

TokenIds: TypeAlias = Sequence[int] | NDArray[np.int32]

Stage: TypeAlias = Callable[[mx.array], mx.array]
"""Changes the logits of all rows of a step, float32 `[num_rows, vocab_size]`."""

_Window: TypeAlias = dict[str, mx.array]
"""The last tokens of one sequence at which a penalty looks, `recent`, and what it knows of them.

`recent` is int32 `[length]`, empty for an unbounded window, which no token leaves.
"""


def _windows_of(params: SamplingParams, texts: Sequence[TokenIds], vocab_size: int) -> tuple[_Window | None, ...]:
    """One for each of `_WINDOWED`, at the end of prompt and output, which are `texts`.

    Without `repeat_last_n`, repetition counts in prompt and output, the others in the output.
    """
    length, others = params.repeat_last_n, (params.presence_penalty, params.frequency_penalty)
    first = params.repetition_penalty, *(others if length is not None else (0.0, 0.0))
    longest_word = max(map(len, params.bad_words), default=0)
    second, length = (_NEUTRAL, length) if length is not None else ((1.0, *others), ALL_TOKENS)
    return (
        {"recent": mx.array(_last_tokens(texts[1:], longest_word - 1, vocab_size))} if longest_word else None,
        _counted(first, length, texts, vocab_size),
        _counted(second, length, texts[1:], vocab_size),
        _repeated_ends(params, texts, vocab_size) if params.is_dry else None,
    )


_NEUTRAL = 1.0, 0.0, 0.0
"""Penalties on repetition, presence and frequency."""


def _counted(penalties: tuple[float, ...], length: int, texts: Sequence[TokenIds], vocab_size: int) -> _Window | None:
    if penalties == _NEUTRAL or not length:
        return None
    tokens = _last_tokens(texts, length, vocab_size)
    counts = np.bincount(tokens[tokens != _NO_TOKEN], minlength=vocab_size)
    recent = mx.array([] if length == ALL_TOKENS else tokens, mx.int32)
    return {"recent": recent, "counts": mx.array(counts, mx.float32), "penalties": mx.array(penalties)}


def _repeated_ends(params: SamplingParams, texts: Sequence[TokenIds], vocab_size: int) -> _Window:
    """`lengths`: for each place, how many tokens before it equal the sequence's last ones; at most `MAX_REPEATED`."""
    assert params.dry_penalty_last_n != ALL_TOKENS, "`within` says how many all of them can become"
    recent = _last_tokens(texts, params.dry_penalty_last_n, vocab_size)
    lengths = _repeated_lengths(recent, (recent == _NO_TOKEN) | _breakers_of(params, vocab_size)[recent])
    return {"recent": mx.array(recent), "lengths": mx.array(lengths)}


def _breakers_of(params: SamplingParams, vocab_size: int) -> NDArray[np.bool_]:
    """The tokens across which no repetition reaches."""
    is_breaker = np.zeros(vocab_size, np.bool_)
    is_breaker[list(params.dry_breakers)] = True
    return is_breaker


def _repeated_lengths(recent: NDArray[np.int32], breaks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Tokens before each that equal the last ones, none of which `breaks`."""
    lengths = np.zeros(recent.size, np.int32)
    places = np.arange(recent.size)
    for length in range(1, min(MAX_REPEATED, recent.size - 1) + 1):
        places = places[places >= length]
        places = places[recent[places - length] == recent[-length]]
        if breaks[-length] or not places.size:
            break
        lengths[places] = length
    return lengths


def _last_tokens(texts: Sequence[TokenIds], length: int, vocab_size: int) -> NDArray[np.int32]:
    """The last `length` tokens of the lists `texts`, filled up in front, or all for `ALL_TOKENS`."""
    filler = np.full(max(0, length), _NO_TOKEN, np.int32)
    ids = np.concatenate([filler, *(np.asarray(token_ids, np.int32) for token_ids in texts)])
    known = np.where((ids >= 0) & (ids < vocab_size), ids, _NO_TOKEN).astype(np.int32)
    return known if length == ALL_TOKENS else known[ids.size - length :]


def column(values: Iterable[float]) -> mx.array:
    """One number per row, float32 `[num_rows, 1]`."""
    return mx.array(list(values), dtype=mx.float32)[:, None]


class RowSampling:
    """One sequence's sampling state. Worker thread only.

    While the sequence decodes in a batch, `BatchSampler` holds its penalties' newest state.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, *, prompt: TokenIds = (), emitted: TokenIds = ()
    ) -> None:
        """Without `params.seed` the seed is random."""
        self.params, self._vocab_size = params, vocab_size
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.position = len(emitted)
        self.windows = _windows_of(params, (prompt, emitted), vocab_size)

    def after(self, prompt: TokenIds, emitted: TokenIds) -> "RowSampling":
        """The state after the output `emitted`, which goes on as without a break."""
        state = RowSampling(self.params, self._vocab_size, prompt=prompt, emitted=emitted)
        state.seed = self.seed
        return state

    def ahead(self, draft: Sequence[int]) -> list["RowSampling"]:
        """This state, then the state after each token of a draft. No `BatchSampler` may hold newer penalties."""
        states = [self]
        penalties = _windowed([self], self._vocab_size) if draft and any(self.windows) else []
        for token in draft:
            state = object.__new__(RowSampling)
            vars(state).update(vars(states[-1]), position=states[-1].position + 1)
            counted = iter([penalty.counted(token) for penalty in penalties])
            state.windows = tuple([window and next(counted) for window in self.windows])
            states.append(state)
        return states

    def key(self, use: str = "") -> bytes:
        """8 random bytes of the next draw, for one use of them."""
        return hashlib.blake2b(f"{self.seed}:{self.position}{use}".encode(), digest_size=8).digest()

    def chance(self) -> float:
        """A random number in [0, 1), for XTC at the next draw."""
        return int.from_bytes(self.key(":xtc"), "little") / 2**64


MAX_PENALTY = 1e9
"""Nothing gets less likely above; infinity could leave a row without a token."""


def penalties_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Stage]:
    """What a row uses, in the order of applying: bias, bans, penalties."""
    windowed, early = _windowed(rows, vocab_size), _early_ends(rows, vocab_size)
    bad_words = [one for one in windowed if isinstance(one, _BadWords)]
    penalties = [_bias(rows), _allowed_tokens(rows, vocab_size), *bad_words, early, *windowed[len(bad_words) :]]
    return [one for one in penalties if one is not None]


def _windowed(rows: Sequence[RowSampling], vocab_size: int) -> "list[Penalty]":
    columns = zip(_WINDOWED, zip(*[row.windows for row in rows], strict=True), strict=True)
    return [make(rows, windows, vocab_size) for make, windows in columns if any(windows)]


def _bias(rows: Sequence[RowSampling]) -> Stage | None:
    entries = [(index, *entry) for index, row in enumerate(rows) for entry in row.params.logit_bias]
    if not entries:
        return None
    row_ids, token_ids, biases = zip(*entries, strict=True)
    places, added = (mx.array(row_ids), mx.array(token_ids)), mx.array(biases, dtype=mx.float32)
    return lambda logits: logits.at[places].add(added)


def _allowed_tokens(rows: Sequence[RowSampling], vocab_size: int) -> Stage | None:
    wanted = [row.params.allowed_token_ids for row in rows]
    if not any(wanted):
        return None
    ids = np.arange(vocab_size)
    is_allowed = mx.array(np.array([np.isin(ids, token_ids or ids) for token_ids in wanted]))
    return lambda logits: _unless_empty(mx.where(is_allowed, logits, -math.inf), logits)


def _early_ends(rows: Sequence[RowSampling], vocab_size: int) -> Stage | None:
    """The affected rows change with each draw."""
    if not [row for row in rows if row.position < row.params.min_tokens]:
        return None

    def exclude(logits: mx.array) -> mx.array:
        early = [(index, row.params) for index, row in enumerate(rows) if row.position < row.params.min_tokens]
        ends = [(index, token) for index, params in early for token in params.end_token_ids if token < vocab_size]
        if not ends:
            return logits
        places = tuple(map(mx.array, zip(*ends, strict=True)))
        return _unless_empty(logits.at[places].add(-math.inf), logits)

    return exclude


def _unless_empty(ruled_out: mx.array, logits: mx.array) -> mx.array:
    """`logits` for rows left without a token."""
    return mx.where(ruled_out.max(axis=-1, keepdims=True) > -math.inf, ruled_out, logits)


class Penalty:
    """A stage that looks at the last tokens of rows; its arrays have one row per row of the step."""

    def __init__(self, rows: Sequence[RowSampling], windows: Sequence[_Window | None], vocab_size: int) -> None:
        self._windows = windows
        self._lengths = [window["recent"].size if window else 0 for window in windows]
        self._longest = max(1, *self._lengths)
        self._recent = self._aligned("recent", _NO_TOKEN)

    def _aligned(self, name: str, filler: int) -> mx.array:
        """The array `name` of all windows, `[num_rows, longest]`, with `filler` in front."""
        columns = [window[name] if window else mx.array([], mx.int32) for window in self._windows]
        return mx.stack([mx.pad(one, (self._longest - one.size, 0), constant_values=filler) for one in columns])

    def __call__(self, logits: mx.array) -> mx.array:
        """Penalised logits."""
        raise NotImplementedError

    def count(self, tokens: mx.array) -> None:
        """Counts the sampled tokens, `[num_rows]`."""
        self._recent = mx.concatenate([self._recent[:, 1:], tokens[:, None].astype(mx.int32)], axis=1)

    def give_back(self) -> None:
        """Writes the newest state into the rows' windows."""
        for index, (window, length) in enumerate(zip(self._windows, self._lengths, strict=True)):
            if window:
                window |= self._state_of(index, self._longest - length)

    def counted(self, token: int) -> _Window:
        """The window of the only row, once it has counted one token more."""
        self.count(mx.array([token]))
        return {**(self._windows[0] or {}), **self._state_of(0, self._longest - self._lengths[0])}

    def _state_of(self, index: int, first: int) -> _Window:
        return {"recent": self._recent[index, first:]}


class _Counted(Penalty):
    """One window of each row, whose tokens' `counts`, float32 `[vocab_size]`, cost its `penalties`."""

    def __init__(self, rows: Sequence[RowSampling], windows: Sequence[_Window | None], vocab_size: int) -> None:
        super().__init__(rows, windows, vocab_size)
        self._counts = mx.stack([window["counts"] if window else mx.zeros(vocab_size) for window in windows])
        self._oldest = mx.array([min(self._longest - length, self._longest - 1) for length in self._lengths])[:, None]
        self._forgets = mx.array([float(length > 0) for length in self._lengths])
        penalties = mx.stack([window["penalties"] if window else mx.array(_NEUTRAL) for window in windows])
        self._repetition, self._presence, self._frequency = (penalties[:, kind, None] for kind in range(3))

    def __call__(self, logits: mx.array) -> mx.array:
        is_held = self._counts > 0
        divisors = mx.where(is_held, self._repetition, 1.0)
        repeated = mx.where(logits > 0, logits / divisors, logits * divisors)
        return repeated - self._presence * is_held - self._frequency * self._counts

    def count(self, tokens: mx.array) -> None:
        rows = mx.arange(tokens.size)
        leaving = mx.take_along_axis(self._recent, self._oldest, axis=-1)[:, 0]
        has_left = self._forgets * (leaving != _NO_TOKEN)
        counts = self._counts.at[rows, mx.maximum(leaving, 0)].add(-has_left)
        self._counts = counts.at[rows, tokens].add(mx.array(1.0))
        super().count(tokens)

    def _state_of(self, index: int, first: int) -> _Window:
        return {**super()._state_of(index, first), "counts": self._counts[index]}


class _Dry(Penalty):
    """Don't repeat yourself, as in llama.cpp: penalises continuing a repetition, more for longer ones."""

    def __init__(self, rows: Sequence[RowSampling], windows: Sequence[_Window | None], vocab_size: int) -> None:
        super().__init__(rows, windows, vocab_size)
        self._repeated = self._aligned("lengths", 0)
        params = [row.params if row.params.is_dry else SamplingParams() for row in rows]
        self._is_breaker = mx.array(np.stack([_breakers_of(one, vocab_size) for one in params]))
        starts = mx.array([self._longest - length for length in self._lengths])[:, None]
        self._num_before = mx.maximum(mx.arange(self._longest) - starts, 0)
        """Tokens of the row's window before each token."""
        self._multiplier = column([one.dry_multiplier for one in params])
        self._base = column([one.dry_base for one in params])
        self._allowed_length = mx.array([one.dry_allowed_length for one in params])[:, None]

    def __call__(self, logits: mx.array) -> mx.array:
        lengths = mx.where(self._recent == _NO_TOKEN, 0, mx.minimum(self._repeated, self._num_before))
        rows = mx.arange(logits.shape[0])[:, None]
        longest = mx.zeros(logits.shape, mx.int32).at[rows, mx.maximum(self._recent, 0)].maximum(lengths)
        beyond = longest - self._allowed_length
        penalties = self._multiplier * mx.minimum(self._base**beyond, MAX_PENALTY)
        return logits - mx.where(beyond >= 0, penalties, 0.0)

    def count(self, tokens: mx.array) -> None:
        newest = tokens[:, None].astype(mx.int32)
        # Windows move by one token a step, so lengths keep their places.
        goes_on = (self._recent == newest) & ~mx.take_along_axis(self._is_breaker, newest, axis=-1)
        self._repeated = mx.where(goes_on, mx.minimum(self._repeated + 1, MAX_REPEATED), 0)
        super().count(tokens)

    def _state_of(self, index: int, first: int) -> _Window:
        return {**super()._state_of(index, first), "lengths": self._repeated[index, first:]}


class _BadWords(Penalty):
    """Excludes a forbidden sequence's last token."""

    def __init__(self, rows: Sequence[RowSampling], windows: Sequence[_Window | None], vocab_size: int) -> None:
        super().__init__(rows, windows, vocab_size)
        sequences = [(index, ids) for index, row in enumerate(rows) for ids in row.params.bad_words]
        before = [[_NO_TOKEN] * (self._longest + 1 - len(ids)) + list(ids[:-1]) for _, ids in sequences]
        self._before = mx.array(np.array(before, np.int32))
        """Each sequence without its last token, right-aligned; `_NO_TOKEN` is any token."""
        self._row_ids = mx.array([index for index, _ in sequences])
        self._last = mx.array([ids[-1] for _, ids in sequences])

    def __call__(self, logits: mx.array) -> mx.array:
        is_met = ((self._before == _NO_TOKEN) | (self._before == self._recent[self._row_ids])).all(axis=-1)
        ruled_out = logits.at[self._row_ids, self._last].minimum(mx.where(is_met, -math.inf, math.inf))
        return _unless_empty(ruled_out, logits)


_WINDOWED: Sequence[type[Penalty]] = (_BadWords, _Counted, _Counted, _Dry)


# ---------------------------------------------------------------------------------------------------- filters


_ALL_MASS = 2.0
"""Never reached: rounding must not drop a row's tail."""


def filters_of(rows: Sequence[RowSampling], vocab_size: int) -> list[Stage]:
    """Filters that a row uses, in the order of applying.

    They take and return float32 `[num_rows, vocab_size]`, each row's maximum 0 at first, -inf for dropped tokens.
    """
    params = [SamplingParams() if row.params.is_greedy else row.params for row in rows]
    filters = [_near_maximum(params), _likeliest(params, vocab_size), _typical(params), _xtc(rows, params)]
    return [one for one in filters if one is not None]


def _near_maximum(params: Sequence[SamplingParams]) -> Stage | None:
    """Top-n-sigma: keeps logits within n standard deviations of the largest, which must be 0, at any temperature.

    (Tang, Liu, Xu et al., "Top-nσ: Not All Logits Are You Need", 2024, section 3.)
    """
    if max([p.top_n_sigma for p in params]) == 0:
        return None
    num_deviations = column([p.top_n_sigma for p in params])

    def keep(scaled: mx.array) -> mx.array:
        is_there = scaled > -math.inf
        count = is_there.sum(axis=-1, keepdims=True)
        mean = mx.where(is_there, scaled, 0.0).sum(axis=-1, keepdims=True) / count
        variance = mx.where(is_there, (scaled - mean) ** 2, 0.0).sum(axis=-1, keepdims=True) / count
        floor = mx.where(num_deviations > 0, -num_deviations * mx.sqrt(variance), -math.inf)
        return mx.where(scaled >= floor, scaled, -math.inf)

    return keep


def _likeliest(params: Sequence[SamplingParams], vocab_size: int) -> Stage | None:
    """Top-k, top-p and min-p: from the likeliest `num_sorted` tokens. Each row's maximum must be 0."""
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_p = [p.top_p if p.top_p < 1 else _ALL_MASS for p in params]
    is_uncut = [k == vocab_size and mass > 1 for k, mass in zip(top_k, top_p, strict=True)]
    num_sorted = max((k for k, whole in zip(top_k, is_uncut, strict=True) if not whole), default=0)
    has_least = max([p.min_p for p in params]) > 0
    if not num_sorted and not has_least:
        return None
    least = column([math.log(p.min_p) if p.min_p else -math.inf for p in params])
    ks, uncut, mass = mx.array(top_k)[:, None], mx.array(is_uncut)[:, None], column(top_p) if min(top_p) < 1 else None

    def keep(scaled: mx.array) -> mx.array:
        floor = mx.array(-math.inf)
        if num_sorted:
            floor = mx.where(uncut, floor, _floor_of_likeliest(_largest(scaled, num_sorted), ks, mass))
        if has_least:
            floor = mx.maximum(floor, least)
        return mx.where(scaled >= floor, scaled, -math.inf)

    return keep


def _floor_of_likeliest(descending: mx.array, top_k: mx.array, top_p: mx.array | None) -> mx.array:
    """The last token's value that top-k and top-p keep, `[num_rows, 1]`."""
    floor = mx.take_along_axis(descending, mx.minimum(top_k, descending.shape[-1]) - 1, axis=-1)
    if top_p is None:
        return floor
    num_kept = _num_within(mx.softmax(mx.where(descending >= floor, descending, -math.inf), axis=-1), top_p)
    return mx.maximum(floor, mx.take_along_axis(descending, num_kept - 1, axis=-1))


def _typical(params: Sequence[SamplingParams]) -> Stage | None:
    """Keeps tokens whose information is nearest to the expected, up to a share of the mass.

    Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", 2023, section 4.
    """
    if min([p.typical_p for p in params]) >= 1:
        return None
    mass = column([p.typical_p if p.typical_p < 1 else _ALL_MASS for p in params])

    def keep(scaled: mx.array) -> mx.array:
        log_probs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        probs = mx.exp(log_probs)
        entropy = -mx.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1, keepdims=True)
        distance = mx.abs(log_probs + entropy)
        order = mx.argsort(distance, axis=-1)
        num_kept = _num_within(mx.take_along_axis(probs, order, axis=-1), mass)
        last = mx.take_along_axis(order, num_kept - 1, axis=-1)
        return mx.where(distance <= mx.take_along_axis(distance, last, axis=-1), scaled, -math.inf)

    return keep


def _xtc(rows: Sequence[RowSampling], params: Sequence[SamplingParams]) -> Stage | None:
    """Exclude top choices, as in llama.cpp: in some draws only the least likely of the likely tokens is kept."""
    if max([p.xtc_probability for p in params]) == 0:
        return None

    def keep(scaled: mx.array) -> mx.array:
        thresholds = [
            p.xtc_threshold if p.xtc_probability and row.chance() < p.xtc_probability else _ALL_MASS
            for row, p in zip(rows, params, strict=True)
        ]
        if min(thresholds) >= _ALL_MASS:
            return scaled
        is_likely = (mx.softmax(scaled, axis=-1) >= column(thresholds)) & (scaled > -math.inf)
        ceiling = mx.where(is_likely, scaled, math.inf).min(axis=-1, keepdims=True)
        return mx.where(scaled <= ceiling, scaled, -math.inf)

    return keep


def _num_within(probs: mx.array, mass: mx.array) -> mx.array:
    """How many first `probs` add up to `mass`, at least 1: `[num_rows, 1]`."""
    return (mx.cumsum(probs, axis=-1) - probs < mass).sum(axis=-1, keepdims=True)


def _largest(values: mx.array, count: int) -> mx.array:
    negated = -values
    if count < values.shape[-1]:
        negated = mx.partition(negated, count - 1, axis=-1)[:, :count]
    return -mx.sort(negated, axis=-1)


# ---------------------------------------------------------------------------------------------------- a step


class BatchSampler:
    """Samples a token per row. Parameters become arrays once, when the rows change. Worker thread only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[RowSampling] = []
        self._penalties: list[Stage] = []

    def sample(
        self, logits: mx.array, rows: Sequence[RowSampling], masks: Sequence[MaskWords | None] = ()
    ) -> mx.array:
        """Each row's token, uint32 `[num_rows]`, lazy, from logits `[num_rows, vocab_size]`.

        `masks` holds the tokens that each row may sample, None for all; may be empty.
        """
        if len(rows) != len(self._rows) or any(map(is_not, rows, self._rows)):
            self.release()
            self._begin(list(rows))
        if [mask for mask in masks if mask is not None]:
            logits = mx.where(_allowed(masks, self._vocab_size), logits, -math.inf)
        logits = logits.astype(mx.float32)
        for penalise in self._penalties:
            logits = penalise(logits)
        tokens = mx.argmax(logits, axis=-1)
        if self._is_greedy is not None:
            tokens = mx.where(self._is_greedy, tokens, self._draw(logits))
        for penalty in self._penalties:
            if isinstance(penalty, Penalty):
                penalty.count(tokens)
        for row in self._rows:
            row.position += 1
        return tokens

    def _begin(self, rows: list[RowSampling]) -> None:
        params = [row.params for row in rows]
        is_greedy = [p.is_greedy for p in params]
        self._is_greedy = None if all(is_greedy) else mx.array(is_greedy)
        self._temperature = column([1.0 if p.is_greedy else p.temperature for p in params])
        self._filters = [] if all(is_greedy) else filters_of(rows, self._vocab_size)
        self._rows, self._penalties = rows, penalties_of(rows, self._vocab_size)

    def _draw(self, logits: mx.array) -> mx.array:
        # The maximum becomes 0 before the division, so no temperature can overflow it.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / self._temperature
        for keep in self._filters:
            scaled = keep(scaled)
        keys = np.frombuffer(b"".join(row.key() for row in self._rows), np.uint32).reshape(-1, 2)
        noise = mx.vmap(lambda key: mx.random.gumbel((self._vocab_size,), key=key))(mx.array(keys))
        return mx.argmax(scaled + noise, axis=-1)

    def release(self) -> None:
        """Gives the penalties' state back to the rows."""
        for penalty in self._penalties:
            if isinstance(penalty, Penalty):
                penalty.give_back()
        self._rows, self._penalties = [], []


def _allowed(masks: Sequence[MaskWords | None], vocab_size: int) -> mx.array:
    """Bool `[num_rows, vocab_size]`."""
    allowed = np.zeros((len(masks), vocab_size), np.bool_)
    for row, words in zip(allowed, masks, strict=True):
        if words is None:
            row[:] = True
            continue
        bits = np.unpackbits(words.view(np.uint8), count=min(words.size * 32, vocab_size), bitorder="little")
        row[: bits.size] = bits
    return mx.array(allowed)


# ------------------------------------------------------------------------------------------- log-probabilities


@dataclass(eq=False)
class StepLogprobs:
    """Distributions of rows that requested them; lazy until the step is evaluated."""

    num_top: dict[int, int]
    """How many likeliest tokens each row wants, in the order of the arrays."""
    all: mx.array
    """Natural logarithms, float32 `[num_telling, vocab_size]`."""
    top_ids: mx.array
    """The likeliest first, uint32 `[num_telling, max(num_top)]`, one column at least."""

    @classmethod
    def of(cls, logits: mx.array, wanted: Sequence[int | None]) -> "StepLogprobs | None":
        """The log-probabilities of rows that request them, if any, from logits `[num_rows, vocab_size]`."""
        num_top = {row: number for row, number in enumerate(wanted) if number is not None}
        if not num_top:
            return None
        chosen, most = logits[mx.array(list(num_top))].astype(mx.float32), max(1, *num_top.values())
        logprobs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
        order = mx.argsort(-mx.take_along_axis(logprobs, ids, axis=-1), axis=-1)
        return cls(num_top, logprobs, mx.take_along_axis(ids, order, axis=-1))

    def read(self, row: int, token: int) -> TokenLogprob:
        """Log-probability of `token`, sampled or not, in a requesting row of the step."""
        place = list(self.num_top).index(row)
        # Views where memory is shared: nothing is computed or copied.
        logprobs, ids = np.asarray(self.all)[place], np.asarray(self.top_ids)[place, : self.num_top[row]]
        return TokenLogprob(token, float(logprobs[token]), tuple((int(one), float(logprobs[one])) for one in ids))
