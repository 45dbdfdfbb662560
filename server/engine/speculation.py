"""Drafts from texts that rows follow, as long as drafts pay. Pure.

A row *follows* a text while its output agrees with it: a text of the history, or the client's prediction. The text's
next tokens are the row's draft. A step's draft lengths are chosen together, for the most tokens per second. The odds
of a token, by kind of match, and the seconds of a step, by its tokens, are learned while serving; odds from every
token, drafted or not, so that no draft need be tried to see whether drafts pay.

Knows neither model nor clock: seconds are handed in. Worker thread only.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache.history import History, LiveText
from server.engine.request import DraftSource, DraftStats, GenerationRequest, TokenArray

MIN_GAIN = 0.03
"""Part of the tokens per second that drafts must add, for each plain step that a step with them lasts."""
MIN_CHANCE = 0.02
"""A draft ends before a token that is less likely to be reached and accepted."""
NGRAM = 3
"""Tokens that must agree before a text is followed."""
MAX_OWN_TOKENS = 8192
"""Of a prompt that must not join the history."""
_RELAX = 0.01
HOPE = 0.97
"""The best odds of a draft's tokens after the first."""

_EDGES = (3, 4, 8, 16, 32)
"""The last match length of each class of odds but the last."""
_CLASSES = [bisect_left(_EDGES, length) for length in range(_EDGES[-1] + 2)]
_LONGEST = len(_CLASSES) - 1


PRIOR_ODDS = {
    DraftSource.HISTORY: (0.45, 0.55, 0.65, 0.75, 0.85, 0.95),
    DraftSource.PREDICTION: (0.6, 0.65, 0.75, 0.85, 0.9, 0.95),
    DraftSource.MTP: (0.8, 0.7, 0.65, 0.6),
    DraftSource.GRAMMAR: (0.99,) * 6,
}
"""By class of match length, of the MTP module by place in a draft; before anything is known of a model."""


# --------------------------------------------------------------------------------------------------- what is followed


class Follower(Protocol):
    """Follows a text with a row's output."""

    @property
    def match_length(self) -> int:
        """Tokens on which row and text agree; 0 if the row follows nothing."""

    def push(self, token: int) -> None:
        """Takes the row's next token."""

    def next_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens of the text from here on."""


class PredictionFollower:
    """Follows a client's prediction.

    After a divergence the row's last `NGRAM` tokens are looked up: their next place counts, else the first.
    """

    def __init__(self, prediction: TokenArray) -> None:
        self._tokens = array("i", prediction.tobytes())
        self._at = 0
        """Place of the next token; after a divergence, of the last one that agreed."""
        self.match_length = 1
        """Before the first token nothing disagrees."""
        self._last: tuple[int, ...] = ()
        codes = _codes(prediction)
        # Sorted by code, then by place.
        order = np.argsort(codes, kind="stable")
        self._codes, self._stops = codes[order], order + NGRAM
        self._is_said = bytearray(len(prediction))
        self._num_apart = 0
        """Tokens of the row since both agreed."""

    @property
    def num_confirmed(self) -> int:
        return self._is_said.count(1)

    @property
    def num_missed(self) -> int:
        return self._is_said.count(0)

    def push(self, token: int) -> None:
        """Takes the row's next token."""
        self._last = (*self._last[1 - NGRAM :], token)
        self._num_apart += 1
        if self.match_length and self._at < len(self._tokens) and self._tokens[self._at] == token:
            self._at += 1
            self.match_length += 1
            self._confirm()
        else:
            self._find()

    def next_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens of the prediction."""
        return self._tokens[self._at : self._at + limit].tolist() if self.match_length else []

    def _find(self) -> None:
        self.match_length = 0
        if len(self._last) < NGRAM:
            return
        (code,) = _codes(np.array(self._last, np.int32))
        first, end = np.searchsorted(self._codes, (code, code + 1))
        if first < end:
            place = first + np.searchsorted(self._stops[first:end], self._at, side="right")
            self.match_length, self._at = NGRAM, int(self._stops[place if place < end else first])
            self._confirm()

    def _confirm(self) -> None:
        num_tokens = min(self._num_apart, NGRAM)
        self._is_said[self._at - num_tokens : self._at] = bytes([1]) * num_tokens
        self._num_apart = 0


class ForcedText:
    """Follows what an output must say next."""

    def __init__(self, forced: Callable[[], Sequence[int]]) -> None:
        """`forced` returns all of it that is known."""
        self._forced = forced
        self._tokens = [*forced()]

    @property
    def match_length(self) -> int:
        """All forced tokens have the same odds."""
        return _LONGEST if self._tokens else 0

    def push(self, token: int) -> None:
        """Takes the row's next token."""
        self._tokens = self._tokens[1:] if self._tokens[:1] == [token] else []
        self._tokens = self._tokens or [*self._forced()]

    def next_tokens(self, limit: int) -> list[int]:
        """As of any followed text."""
        return self._tokens[:limit]


def _codes(tokens: TokenArray) -> NDArray[np.int64]:
    """A number for each `NGRAM` tokens in a row, 21 bits a token."""
    wide = tokens.astype(np.int64)
    return wide[:-2] << 42 | wide[1:-1] << 21 | wide[2:]


# ------------------------------------------------------------------------------------------------------------- odds


class Odds:
    """How often the next token of a followed text came true, by class of match length. Older tries count less."""

    def __init__(self, prior: Sequence[float], *, weight: float, decay: float) -> None:
        """The prior counts as `weight` tries."""
        self.values = list(prior)
        self._decay = decay
        self._tried = [weight] * len(prior)
        self._true = [weight * value for value in prior]

    def learn(self, kind: int, came_true: bool) -> None:
        """Takes one try."""
        self._tried[kind] = tried = self._tried[kind] * self._decay + 1
        self._true[kind] = true = self._true[kind] * self._decay + came_true
        self.values[kind] = true / tried

    def relax(self, values: Sequence[float], share: float) -> None:
        """Moves by `share` of the way to other odds."""
        for kind, (tried, value) in enumerate(zip(self._tried, values, strict=True)):
            self._true[kind] += share * (value * tried - self._true[kind])
            self.values[kind] = self._true[kind] / tried


class FollowedText:
    """A followed text, and the odds of its next tokens."""

    def __init__(self, source: DraftSource, follower: Follower, shared: Odds) -> None:
        self.source = source
        self._follower = follower
        self._shared = shared
        self._odds = Odds(shared.values, weight=4, decay=0.95)
        self._expected: int | None = None
        self._kind = 0
        self.promise = 0.0
        """The odds of the next token; 0 if nothing is followed."""
        self._look()

    def push(self, token: int) -> None:
        """Takes the row's next token."""
        if self._expected is not None:
            came_true = token == self._expected
            self._odds.learn(self._kind, came_true)
            self._shared.learn(self._kind, came_true)
        self._follower.push(token)
        self._look()

    def _look(self) -> None:
        length = self._follower.match_length
        following = self._follower.next_tokens(1) if length else ()
        if not following:
            self._expected, self.promise = None, 0.0
            return
        self._expected = following[0]
        self._kind = _CLASSES[min(length, _LONGEST)]
        self.promise = self._odds.values[self._kind]

    def draft(self, limit: int) -> list[int]:
        """The text's next tokens."""
        return self._follower.next_tokens(limit)

    def chances(self, limit: int, ahead: int = 0) -> list[float]:
        """For each token of a draft, the chance that it and all before it are accepted; without hopeless tokens.

        Assumes that `ahead` more tokens agree.
        """
        chances, chance, odds = [], 1.0, self._odds.values
        num_tokens, agreed = len(self._follower.next_tokens(limit + ahead)), self._follower.match_length
        for length in range(agreed + ahead, agreed + num_tokens):
            chance *= odds[_CLASSES[length if length < _LONGEST else _LONGEST]]
            if chance < MIN_CHANCE:
                break
            chances.append(chance)
        return chances


class ExpectedText:
    """What the model's MTP module expects a row to say, drafted once its length is chosen."""

    source = DraftSource.MTP

    def __init__(self, shared: Odds, token_cost: Callable[[], float]) -> None:
        """`token_cost`: of drafting a token, in tokens that a plain step would give meanwhile."""
        self._shared = shared
        self._token_cost = token_cost
        self._odds = Odds(shared.values, weight=4, decay=0.95)
        self.promise = 0.0
        """The odds of the next token, less its cost."""
        self._look()

    def push(self, token: int) -> None:
        """Odds that forbid drafts return slowly to those of all rows."""
        self._odds.relax(self._shared.values, _RELAX)
        self._look()

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Takes how many drafted tokens came true."""
        for place in range(min(num_drafted, num_accepted + 1)):
            kind = min(place, len(self._odds.values) - 1)
            self._odds.learn(kind, place < num_accepted)
            self._shared.learn(kind, place < num_accepted)

    def _look(self) -> None:
        self.promise = max(self._odds.values[0] - self._token_cost(), 0.0)

    def chances(self, limit: int, ahead: int = 0) -> list[float]:
        """As of a followed text, each less the token's cost."""
        chances, chance, odds, cost = list[float](), 1.0, self._odds.values, self._token_cost()
        for place in range(limit):
            chance *= odds[min(place, len(odds) - 1)]
            if chance - cost < MIN_CHANCE:
                break
            chances.append(chance - cost)
        return chances


# ------------------------------------------------------------------------------------------------------------- cost

_TRIED_SHARE = 0.75
"""Of the longest call allowed; a longer one doubles that."""
_PLAIN_SHARE = 0.1
_DRAFT_SHARE = 0.2
"""By which part of its error an estimate is corrected."""
_MAX_ERROR = 0.25
"""Of the estimate: a longer step waited for something else."""
_FORGET = 0.001
"""Part by which each step returns what was learned to what was measured at load: outliers heal."""
_TRUST_DECAY = 0.1
"""Part by which each step with drafts discounts earlier expectations and gains."""
_NUM_FIRST = 4
"""Plain steps of so many rows that are believed without bounds."""
_FLOOR_STEPS = 16
"""Steps after which `StepCost.floor` is computed again."""


class StepCost:
    """Seconds of a decode step, by rows and by the tokens evaluated.

    Drafts add their tokens' seconds, on a piecewise linear curve, and the overlap with other steps that is lost.
    """

    def __init__(self, step_seconds: Mapping[int, float], *, feeds_together: bool, feeds_again: bool) -> None:
        """`feeds_again`: after a rejection the accepted tokens are evaluated again with the next step."""
        self._together = feeds_together
        self._again = feeds_again
        self._knots = sorted(step_seconds)
        self._curve = [max(step_seconds[knot] for knot in self._knots[: i + 1]) for i in range(len(self._knots))]
        self._measured = list(self._curve)
        self._extend()
        self.overlap = 0.0
        self._plain: dict[int, float] = {}
        self._num_plain: dict[int, int] = {}
        self._floors: dict[tuple[int, int], float] = {}
        self._num_steps = 0

    def _extend(self) -> None:
        """Adds a knot: a token costs what the last ones did, at least half the mean."""
        last, seconds = self._knots[-1], self._curve[-1]
        slope = (seconds - self._curve[-2]) / (last - self._knots[-2]) if len(self._knots) > 1 else 0.0
        self._knots.append(2 * last)
        self._curve.append(seconds + max(slope, seconds / last / 2) * last)
        self._measured.append(self._curve[-1])

    def tokens(self, num_tokens: int) -> float:
        """Seconds of a model call, on the curve."""
        knots, curve = self._knots, self._curve
        right = max(min(bisect_left(knots, num_tokens), len(knots) - 1), 1)
        low, seconds = knots[right - 1], curve[right - 1]
        return seconds + (curve[right] - seconds) * (num_tokens - low) / (knots[right] - low)

    def longer(self, num_tokens: int) -> Iterator[float]:
        """Seconds of calls of one token more, two more, and so on, up to twice what was tried."""
        seconds = self.tokens(num_tokens)
        for right in range(bisect_right(self._knots, num_tokens), len(self._knots)):
            low, high = self._knots[right - 1], self._knots[right]
            slope = (self._curve[right] - self._curve[right - 1]) / (high - low)
            for _ in range(max(low, num_tokens), high):
                seconds += slope
                yield seconds

    def plain(self, num_rows: int) -> float:
        """Seconds of a step without drafts; 0 for no rows."""
        if num_rows in self._plain or not num_rows:
            return self._plain.get(num_rows, 0.0)
        if not self._plain:
            return self.tokens(num_rows)
        known = min(self._plain, key=lambda other: abs(other - num_rows))
        return self._plain[known] * self.tokens(num_rows) / self.tokens(known)

    def feed(self, num_tokens: int) -> float:
        """Seconds of one row's call of its own."""
        return self.plain(1) + self.tokens(num_tokens) - self.tokens(1)

    def row_calls(self, chances: Sequence[float], shared_seconds: float) -> list[tuple[float, float]]:
        """For each length of a row's draft, the expected accepted tokens and seconds of its own call.

        Without a call of its own a row takes `shared_seconds`.
        """
        calls, tokens, again, reached = [], 0.0, 0.0, 1.0
        base = self.plain(1) - self.tokens(1)
        for number, (chance, seconds) in enumerate(zip(chances, self.longer(1), strict=False)):
            tokens += chance
            if self._again:
                again += (reached - chance) * self.again(number, shared_seconds)
                reached = chance
            calls.append((tokens, base + seconds + again))
        return calls

    def again(self, num_accepted: int, shared_seconds: float) -> float:
        """Seconds that a rejection behind `num_accepted` tokens costs the next step; never negative."""
        return max(0.0, self.feed(2 + num_accepted) + self.overlap - shared_seconds) if self._again else 0.0

    def step(self, feeds: Sequence[int]) -> float:
        """Seconds of a step with drafts that feeds rows so many tokens."""
        num_rows = len(feeds)
        if self._together:
            return self.plain(num_rows) + self.tokens(sum(feeds)) - self.tokens(num_rows) + self.overlap
        longer = [num_tokens for num_tokens in feeds if num_tokens > 1]
        return self.plain(num_rows - len(longer)) + sum(map(self.feed, longer)) + self.overlap

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes a plain step."""
        expected, number = self.plain(num_rows), self._num_plain.get(num_rows, 0)
        error = seconds - expected
        if number >= _NUM_FIRST:
            error = _bounded(error, expected)
        self._plain[num_rows] = expected + error * max(_PLAIN_SHARE, 1 / (number + 2))
        self._num_plain[num_rows] = number + 1
        self._num_steps += 1
        if self._num_steps % _FLOOR_STEPS == 0:
            self._forget(_FORGET * _FLOOR_STEPS)

    def learn(self, feeds: Sequence[int], seconds: float) -> float:
        """Corrects lost overlap and curve by a step's error; returns the step's seconds without most of a stall."""
        calls = [sum(feeds)] if self._together else [num_tokens for num_tokens in feeds if num_tokens > 1]
        while max(calls) > _TRIED_SHARE * self._knots[-1]:
            self._extend()
        expected = self.step(feeds)
        bounded = _bounded(seconds - expected, expected)
        error = _DRAFT_SHARE * bounded
        weights = self._weights(calls)
        norm = 1 + sum(weight * weight for weight in weights.values())
        self.overlap = max(self.overlap + error / norm, 0.0)
        for place, weight in weights.items():
            self._curve[place] = max(self._curve[place] + error * weight / norm, self._curve[0])
        self._num_steps += 1
        if self._num_steps % _FLOOR_STEPS == 0:
            self._floors.clear()
        return expected + bounded

    def _weights(self, calls: Sequence[int]) -> dict[int, float]:
        """How much each knot counts in calls of so many tokens."""
        weights: dict[int, float] = {}
        for num_tokens in calls:
            right = bisect_left(self._knots, num_tokens)
            low, high = self._knots[right - 1], self._knots[right]
            share = (num_tokens - low) / (high - low)
            weights[right] = weights.get(right, 0.0) + share
            if right > 1:  # the first knot is the plain step of one row
                weights[right - 1] = weights.get(right - 1, 0.0) + 1 - share
        return weights

    def _forget(self, share: float) -> None:
        self._floors.clear()
        self.overlap *= 1 - share
        self._curve = [
            value + share * (measured - value) for value, measured in zip(self._curve, self._measured, strict=True)
        ]

    def floor(self, num_rows: int, num_following: int) -> float:
        """The least odds of the next token with which so many rows' drafts could pay."""
        found = self._floors.get((num_rows, num_following))
        if found is None:
            found = self._floors[num_rows, num_following] = self._floor(num_rows, num_following)
        return found

    def _floor(self, num_rows: int, num_following: int) -> float:
        least, plain = float("inf"), self.plain(num_rows)
        for num_tokens in (1, 2, 4, 8, 16, 32):
            hoped = (1 - HOPE**num_tokens) / (1 - HOPE)
            feeds = [1 + num_tokens] * num_following + [1] * (num_rows - num_following)
            steps = self.step(feeds) / plain
            least = min(least, num_rows * (steps * (1 + MIN_GAIN * steps) - 1) / (num_following * hoped))
        return least


def _bounded(error: float, expected: float) -> float:
    return max(-_MAX_ERROR * expected, min(error, _MAX_ERROR * expected))


# ---------------------------------------------------------------------------------------------- lengths of the drafts


@dataclass(frozen=True)
class Lengths:
    """A draft length for each row, and the tokens and seconds expected of the step."""

    tokens_of: list[int]
    tokens: float
    """That all rows put out."""
    seconds: float

    def gain(self, plain_seconds: float) -> float:
        """Plain steps that are saved."""
        return self.tokens / len(self.tokens_of) - self.seconds / plain_seconds


def choose_together(chances: Sequence[Sequence[float]], cost: StepCost) -> Lengths | None:
    """The fastest draft lengths where one call evaluates all feeds; None if no drafts are faster.

    A token costs the same in each row: the likeliest of all rows are taken, as long as they pay.
    """
    num_rows = len(chances)
    likeliest = [(chance, row) for row, ahead in enumerate(chances) for chance in ahead]
    likeliest.sort(key=itemgetter(0), reverse=True)
    plain = cost.plain(num_rows)
    base = plain + cost.overlap - cost.tokens(num_rows)
    best, best_tokens, best_seconds = 0, float(num_rows), plain
    tokens = float(num_rows)
    for number, ((chance, _), call_seconds) in enumerate(zip(likeliest, cost.longer(num_rows), strict=False), 1):
        tokens += chance
        seconds = base + call_seconds
        if tokens * best_seconds > best_tokens * seconds:
            best, best_tokens, best_seconds = number, tokens, seconds
    if not best:
        return None
    tokens_of = [0] * num_rows
    for _, row in likeliest[:best]:
        tokens_of[row] += 1
    return Lengths(tokens_of, best_tokens, best_seconds)


def choose_apart(chances: Sequence[Sequence[float]], cost: StepCost) -> Lengths | None:
    """As `choose_together`, where a row with a draft has a call of its own.

    At a given price of a second, in tokens, rows are independent but for the call of those without a draft, which
    only their number decides. The price rises to the best speed that it allows (Dinkelbach 1967).
    """
    num_rows, best = len(chances), None
    plain = [cost.plain(number) for number in range(num_rows + 1)]
    calls = [cost.row_calls(ahead, plain[num_rows] - plain[num_rows - 1]) for ahead in chances]
    price = num_rows / plain[num_rows]
    while True:
        found = _at_price(price, calls, plain, cost.overlap)
        if found is None or found.tokens <= price * found.seconds * (1 + 1e-9):
            return best
        best, price = found, found.tokens / found.seconds


def _at_price(
    price: float, calls: Sequence[Sequence[tuple[float, float]]], plain: Sequence[float], overlap: float
) -> Lengths | None:
    """The lengths with the most tokens beyond the price of their seconds; None without drafts."""
    num_rows, options = len(calls), []
    for row, ahead in enumerate(calls):
        values = [tokens - price * seconds for tokens, seconds in ahead]
        if values:
            value = max(values)
            options.append((value, row, values.index(value)))
    options.sort(reverse=True)
    total, best, best_value = 0.0, 0, -price * plain[num_rows]
    for number, (value, _, _) in enumerate(options, 1):
        total += value
        if total - price * (overlap + plain[num_rows - number]) > best_value:
            best, best_value = number, total - price * (overlap + plain[num_rows - number])
    if not best:
        return None
    tokens_of, tokens, seconds = [0] * num_rows, float(num_rows), overlap + plain[num_rows - best]
    for _, row, place in options[:best]:
        tokens_of[row] = place + 1
        tokens += calls[row][place][0]
        seconds += calls[row][place][1]
    return Lengths(tokens_of, tokens, seconds)


# ------------------------------------------------------------------------------------------------------- the planner


class Trust:
    """How much of drafts' expected gain has come true, in all and lately."""

    def __init__(self) -> None:
        self._expected = self._gained = 1.0

    @property
    def value(self) -> float:
        """At most 1; negative where drafts cost more than they brought."""
        return min(self._gained / self._expected, 1.0)

    def learn(self, expected: float, gained: float) -> None:
        """Takes a step with drafts, in plain steps saved."""
        self._expected += expected - self._expected * _TRUST_DECAY
        self._gained += gained - self._gained * _TRUST_DECAY

    def regain(self) -> None:
        """After a plain step: some day drafts are tried again."""
        self._gained += (self._expected - self._gained) * _FORGET


class Drafting:
    """What is drafted for one sequence. It survives replays."""

    def __init__(
        self,
        texts: Sequence[FollowedText | ExpectedText],
        own: LiveText,
        prediction: PredictionFollower | None,
        *,
        is_kept: bool,
    ) -> None:
        self._texts = texts
        self._own = own
        self._prediction = prediction
        self._is_kept = is_kept
        self._chosen: FollowedText | ExpectedText | None = None
        self.promise = 0.0
        self.source = DraftSource.HISTORY
        """Of the last draft."""
        self._choose()

    @property
    def accepted_prediction(self) -> int:
        return self._prediction.num_confirmed if self._prediction is not None else 0

    @property
    def rejected_prediction(self) -> int:
        return self._prediction.num_missed if self._prediction is not None else 0

    def push(self, token: int) -> None:
        """Takes the output's next token."""
        self._own.push(token)
        for text in self._texts:
            text.push(token)
        self._choose()

    def end(self) -> None:
        """Ends the output, which joins the history where it may."""
        self._own.end(self._is_kept)

    def chances(self, limit: int, ahead: int = 0) -> list[float]:
        """See `FollowedText.chances`."""
        return self._chosen.chances(limit, ahead) if self._chosen is not None and limit > 0 else []

    @property
    def is_expected(self) -> bool:
        """Whether the MTP module is to draft."""
        return isinstance(self._chosen, ExpectedText)

    def draft(self, num_tokens: int) -> list[int]:
        """Next tokens of the followed text; none where the MTP module drafts."""
        if self._chosen is None or not num_tokens:
            return []
        self.source = self._chosen.source
        return self._chosen.draft(num_tokens) if isinstance(self._chosen, FollowedText) else []

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Takes what became of the last draft."""
        for text in self._texts:
            if isinstance(text, ExpectedText) and self.source is DraftSource.MTP:
                text.learn(num_drafted, num_accepted)

    def _choose(self) -> None:
        self._chosen, self.promise = None, 0.0
        for text in self._texts:
            if text.promise > self.promise:
                self._chosen, self.promise = text, text.promise


class Speculation:
    """The drafts of one engine."""

    def __init__(
        self,
        history: History,
        step_seconds: Mapping[int, float],
        *,
        feeds_together: bool,
        max_feed_tokens: int,
        feeds_again: bool = False,
        draft_seconds: float | None = None,
    ) -> None:
        """`step_seconds`: of a model call, by its tokens. `feeds_again`: see `StepCost`.

        `draft_seconds`: of a token that the model's MTP module drafts, if it has one.
        """
        self._history = history
        self._draft_seconds = draft_seconds
        self._together = feeds_together
        self._limit = max_feed_tokens - 1
        self._cost = StepCost(step_seconds, feeds_together=feeds_together, feeds_again=feeds_again)
        self._odds = {source: Odds(prior, weight=16, decay=0.998) for source, prior in PRIOR_ODDS.items()}
        self._drafted = dict.fromkeys(DraftSource, 0)
        self._accepted = dict.fromkeys(DraftSource, 0)
        self._num_steps = self._num_tokens = 0
        self._trust: dict[int, Trust] = {}
        """By the number of rows, roughly."""
        self._expected: Lengths | None = None
        """Of the last plan."""

    @property
    def stats(self) -> DraftStats:
        """Counts since the engine began."""
        return DraftStats(dict(self._drafted), dict(self._accepted), self._num_steps, self._num_tokens)

    def begin(
        self, request: GenerationRequest, num_matched: int, forced: Callable[[], Sequence[int]] = tuple
    ) -> Drafting:
        """Adds the prompt behind its first `num_matched` tokens, and texts to quote, to the history.

        Of a request that keeps nothing they are found from its own output only. `forced`: see `ForcedText`.
        """
        namespace, session_id, history = request.state_namespace, request.session_id, self._history
        is_kept = request.cache_prompt and not request.is_volatile and not request.is_idle_work
        own = history.begin(namespace, session_id)
        if is_kept:
            for text in (request.tokens[max(0, num_matched - NGRAM) :], *request.quotable):
                history.add(namespace, text, session_id)
        if not request.speculates:
            return Drafting((), own, None, is_kept=is_kept)
        hidden = () if is_kept else request.quotable
        for text in (*hidden, request.tokens[-NGRAM if is_kept else -MAX_OWN_TOKENS :]):
            for token in text.tolist():
                own.push(token)
        texts: list[FollowedText | ExpectedText] = []
        texts.append(FollowedText(DraftSource.HISTORY, history.follow(own), self._odds[DraftSource.HISTORY]))
        prediction = None
        if request.prediction is not None:
            prediction = PredictionFollower(request.prediction)
            texts.append(FollowedText(DraftSource.PREDICTION, prediction, self._odds[DraftSource.PREDICTION]))
        if request.grammar is not None or request.thinking is not None:
            texts.append(FollowedText(DraftSource.GRAMMAR, ForcedText(forced), self._odds[DraftSource.GRAMMAR]))
        if self._draft_seconds is not None:
            texts.append(ExpectedText(self._odds[DraftSource.MTP], self._token_cost))
        return Drafting(texts, own, prediction, is_kept=is_kept)

    def may_draft(self, rows: Sequence[Drafting]) -> bool:
        """Whether drafts are likely to pay after the step under way, its tokens taken for the followed ones."""
        following = [row for row in rows if row.promise]
        if not following or max(row.promise for row in following) < self._cost.floor(len(rows), len(following)):
            return False
        found = self._choose([row.chances(self._limit, 1) for row in rows])
        if found is None:
            return False
        drafted = [row.promise for row, num_tokens in zip(rows, found.tokens_of, strict=True) if num_tokens]
        chance, plain = sum(drafted) / len(drafted), self._cost.plain(len(rows))
        return chance * found.gain(plain) > (1 - chance) * self._cost.overlap / plain

    def _token_cost(self) -> float:
        return (self._draft_seconds or 0.0) / self._cost.plain(1)

    def plan(
        self,
        rows: Sequence[Drafting],
        limits: Sequence[int],
        predict: Callable[[list[int]], list[list[int]]] = lambda wanted: [[] for _ in wanted],
    ) -> list[list[int]]:
        """A draft for each row, of `limits` tokens at most; all are empty unless they pay together.

        `predict` has the MTP module draft so many tokens of each row.
        """
        found = self._choose([row.chances(min(limit, self._limit)) for row, limit in zip(rows, limits, strict=True)])
        if found is None:
            return [[] for _ in rows]
        self._expected = found
        drafts = [row.draft(num_tokens) for row, num_tokens in zip(rows, found.tokens_of, strict=True)]
        wanted = [length if row.is_expected else 0 for row, length in zip(rows, found.tokens_of, strict=True)]
        if not any(wanted):
            return drafts
        return [draft or guess for draft, guess in zip(drafts, predict(wanted), strict=True)]

    def observe_drafting(self, wanted: Sequence[int], seconds: float) -> None:
        """Takes the MTP module's seconds for `wanted` tokens of each row."""
        assert self._draft_seconds is not None
        num_rows = sum(number > 0 for number in wanted)
        found = seconds / max(wanted) * self._cost.plain(1) / self._cost.plain(num_rows)
        error = _bounded(found - self._draft_seconds, self._draft_seconds)
        self._draft_seconds += _DRAFT_SHARE * error

    def learn(
        self, rows: Sequence[Drafting], drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Takes a step with drafts, and how many tokens of each were accepted."""
        bounded_seconds = self._cost.learn([1 + num_tokens for num_tokens in drafted], seconds)
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            self._drafted[row.source] += num_drafted
            self._accepted[row.source] += num_accepted
            row.learn(num_drafted, num_accepted)
        if self._expected is not None:
            num_rows, plain = len(rows), self._cost.plain(len(rows))
            shared_seconds = plain - self._cost.plain(num_rows - 1)
            for num_drafted, num_accepted in zip(drafted, accepted, strict=True):
                if num_accepted < num_drafted:
                    bounded_seconds += self._cost.again(num_accepted, shared_seconds)
            expected = [num for row, num in zip(rows, drafted, strict=True) if row.source is DraftSource.MTP]
            gained = num_rows + sum(accepted) - self._token_cost() * sum(expected)
            gained = gained / num_rows - bounded_seconds / plain
            self._trust_of(num_rows).learn(self._expected.gain(plain), gained)
            self._expected = None
        self._num_steps += 1
        self._num_tokens += len(rows) + sum(accepted)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes a step without drafts and without a prompt's tokens."""
        self._cost.observe(num_rows, seconds)
        self._trust_of(num_rows).regain()
        self._odds[DraftSource.MTP].relax(PRIOR_ODDS[DraftSource.MTP], _FORGET)

    def _choose(self, chances: Sequence[Sequence[float]]) -> Lengths | None:
        if not any(chances):
            return None
        found = choose_together(chances, self._cost) if self._together else choose_apart(chances, self._cost)
        if found is None:
            return None
        num_rows, plain = len(chances), self._cost.plain(len(chances))
        # The longer a step, the more a wrong estimate costs.
        least = MIN_GAIN * (found.seconds / plain) ** 2
        return found if found.gain(plain) * self._trust_of(num_rows).value >= least else None

    def _trust_of(self, num_rows: int) -> Trust:
        return self._trust.setdefault(num_rows.bit_length(), Trust())
