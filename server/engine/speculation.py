"""Drafts from texts that rows follow, as long as drafts pay. Pure.

A row *follows* a text while its output agrees with it: a text of the history, or the client's prediction. The text's
next tokens are the row's draft. A step's draft lengths are chosen together, for the most tokens per second, by the
odds of each token (`_Odds`) and by what it costs (`_StepCost`, `Excess`). Both are learned while serving: odds from
every token, drafted or not; costs from every step of the engine, measured whole.

Knows neither model nor clock: seconds are handed in. Worker thread only.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from cache.history import SHORTEST_MATCH, Follower, ForcedText, History, HistoryFollower, LiveText, PredictionFollower
from server.engine.request import DraftSource, DraftStats, GenerationRequest

MIN_GAIN = 0.03
"""Part of the tokens per second that drafts must add."""
MIN_CHANCE = 0.02
"""A draft ends before a token that is less likely to be reached and accepted."""
MAX_OWN_TOKENS = 8192
"""Of a prompt that must not join the history."""
_RELAX = 0.01
"""Part by which odds return to others, each token."""

_EDGES = (3, 4, 8, 16, 32)
"""The last match length of each class of odds but the last."""
_LONGEST = _EDGES[-1] + 1
_MAX_DRAFT = 64
_CLASSES = [bisect_left(_EDGES, length) for length in range(_LONGEST + _MAX_DRAFT)]
"""Classes of odds by match length; all matches from `_LONGEST` on have one."""
_PLACES = [min(place, 3) for place in range(_MAX_DRAFT)]
"""Classes of the drafter's odds, by place in a draft."""

PRIOR_ODDS = {
    DraftSource.HISTORY: (0.45, 0.55, 0.65, 0.75, 0.85, 0.95),
    DraftSource.PREDICTION: (0.6, 0.65, 0.75, 0.85, 0.9, 0.95),
    DraftSource.MTP: (0.8, 0.7, 0.65, 0.6),
    DraftSource.DRAFT: (0.7, 0.7, 0.7, 0.7),
    DraftSource.GRAMMAR: (0.99,) * 6,
}
"""By class of match length, of the drafter by place in a draft; before anything is known of a model."""


# ------------------------------------------------------------------------------------------------------------- odds


class _Odds:
    """How often the next token of a followed text came true, by class of match length. Older tries count less."""

    def __init__(self, prior: Sequence[float], *, weight: float, decay: float) -> None:
        """The prior counts as `weight` tries."""
        self.values = list(prior)
        self.cost = 0.0
        """Of drafting a token, in plain steps."""
        self._decay = decay
        self._tried = [weight] * len(prior)
        self._true = [weight * value for value in prior]

    def learn(self, kind: int, came_true: bool) -> None:
        self._tried[kind] = tried = self._tried[kind] * self._decay + 1
        self._true[kind] = true = self._true[kind] * self._decay + came_true
        self.values[kind] = true / tried

    def relax(self, values: Sequence[float], share: float) -> None:
        """Moves by `share` of the way to other odds."""
        for kind, (tried, value) in enumerate(zip(self._tried, values, strict=True)):
            self._true[kind] += share * (value * tried - self._true[kind])
            self.values[kind] = self._true[kind] / tried


class _Text:
    """What a row may say, and the odds of it: the row's own, and those of all rows."""

    def __init__(self, source: DraftSource, shared: _Odds) -> None:
        self.source, self.shared = source, shared
        self.odds = _Odds(shared.values, weight=4, decay=0.95)


class _FollowedText(_Text):
    """A text with which a row agrees so far."""

    def __init__(self, source: DraftSource, shared: _Odds, follower: Follower) -> None:
        super().__init__(source, shared)
        self._follower = follower

    @property
    def promise(self) -> float:
        """The odds of the next token; 0 if nothing is followed."""
        length = 0 if self._follower.expected is None else self._follower.match_length
        return self.odds.values[_CLASSES[min(length, _LONGEST)]] if length else 0.0

    def push(self, token: int) -> None:
        if (expected := self._follower.expected) is not None:
            kind = _CLASSES[min(self._follower.match_length, _LONGEST)]
            self.odds.learn(kind, token == expected)
            self.shared.learn(kind, token == expected)
        self._follower.push(token)

    def draft(self, limit: int) -> list[int]:
        return self._follower.next_tokens(limit)

    def kinds(self, limit: int, ahead: int) -> list[int]:
        """Classes of the odds of a draft's tokens, if `ahead` more tokens agree before them."""
        length = min(self._follower.match_length + ahead, _LONGEST)
        return _CLASSES[length : length + max(0, len(self._follower.next_tokens(limit + ahead)) - ahead)]


class _ExpectedText(_Text):
    """What the drafter, `source`, expects a row to say, drafted once its length is chosen."""

    @property
    def promise(self) -> float:
        """The odds of the next token, less its cost."""
        return max(self.odds.values[0] - self.shared.cost, 0.0)

    def push(self, token: int) -> None:
        """Odds that forbid drafts return slowly to those of all rows."""
        self.odds.relax(self.shared.values, _RELAX)

    def draft(self, limit: int) -> list[int]:
        return []

    def kinds(self, limit: int, ahead: int) -> list[int]:
        return _PLACES[:limit]

    def learn(self, num_drafted: int, num_accepted: int, first: int = 0) -> None:
        """Takes how many drafted tokens came true, from place `first` on."""
        for place in range(first, min(num_drafted, num_accepted + 1)):
            self.odds.learn(_PLACES[place], place < num_accepted)
            self.shared.learn(_PLACES[place], place < num_accepted)


# ------------------------------------------------------------------------------------------------------------- cost

_MAX_STEP_TOKENS = 4096
"""Of all rows; more cost as much."""
_LEAST_SLOPE = 0.005
"""What a token adds at least to a call, in calls of one token."""
_NUM_PLAIN = 3
"""Plain steps from which others are told: the quickest of the first ones counts."""
_STALL = 1.5
"""A step that took so many times what was expected waited for something else, unless the one before did as well."""
_PLAIN_SHARE = 0.15
_OTHER_SHARE = 0.2
"""By which part of its error an estimate is corrected."""
_DECAY = 0.9
_PLAIN_DECAY = 0.99
"""What a step with drafts, and one without, leave of the weight of earlier ones."""
_CALL_PRIOR = 0.3
_SCALE_PRIOR = 0.003
"""Weights of the belief that a call costs what was measured at load."""
_FIRST_ALLOWANCE = 3.0
_MAX_ALLOWANCE = 16.0
_FIRST_DEBT = 2.0
_MAX_DEBT = 16.0
_INCOME = 0.0075
"""In plain steps; the last is the part of all time that drafts may lose."""
_LOOKING = 0.015
_MAX_LOOKED = 0.1
"""What looking for drafts may take of each plain step, and what one look counts at most."""
_MAX_UNMEASURED = 64
"""Steps with drafts after which `_NUM_PLAIN` plain ones are measured again."""


class Overrun:
    """Tells a stall from a step that costs more than was expected: only the latter comes twice."""

    def __init__(self) -> None:
        self._last = 1.0

    def bounded(self, seconds: float, expected: float) -> float:
        """Takes a step; returns its seconds, fewer after a stall."""
        limit, self._last = max(self._last, _STALL), seconds / expected
        return min(self._last, limit) * expected


class _StepCost:
    """Seconds of model calls, by tokens, as measured at load, and of plain steps, by rows, as seen while serving."""

    def __init__(self, call_seconds: Mapping[int, float]) -> None:
        widths = sorted(call_seconds)
        seconds = np.maximum.accumulate([call_seconds[width] for width in widths])
        # Where calls of any length seem to take as long, a token still costs something.
        seconds += seconds[0] * _LEAST_SLOPE * (np.array(widths) - 1)
        slope = max((seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2]), seconds[-1] / widths[-1] / 2)
        widths.append(_MAX_STEP_TOKENS)
        seconds = np.append(seconds, seconds[-1] + slope * (_MAX_STEP_TOKENS - widths[-2]))
        self.calls: list[float] = np.interp(range(_MAX_STEP_TOKENS + 1), widths, seconds).tolist()
        """By tokens."""
        self.token = float(np.diff(self.calls[1:]).min())
        """The least that a token adds."""
        self._plain: dict[int, tuple[float, int, Overrun]] = {}

    def plain(self, num_rows: int) -> float:
        """Seconds of a step without drafts; 0 for no rows."""
        if num_rows in self._plain or not num_rows:
            return self._plain[num_rows][0] if num_rows else 0.0
        if not self._plain:
            return self.calls[num_rows]
        near = min(self._plain, key=lambda other: abs(other - num_rows))
        return self._plain[near][0] * self.calls[num_rows] / self.calls[near]

    def observe(self, num_rows: int, seconds: float) -> None:
        value, number, overrun = self._plain.get(num_rows, (seconds, 0, Overrun()))
        found = overrun.bounded(seconds, value)
        value = min(value, found) if number < _NUM_PLAIN else value + _PLAIN_SHARE * (found - value)
        self._plain[num_rows] = value, number + 1, overrun


class Excess:
    """What drafts add to steps of about so many rows, and what they may lose. All in plain steps.

    A call with drafts takes `call` longer than at load, a drafted token `scale` times as long: a regression over the
    last steps, in which the measurement at load counts little. Whatever was expected, drafts pay for what they lose
    out of an allowance, to which steps that gain, and plain steps, add. The drafter has an allowance of its own.
    A debt is limited, at first to little: a stall of several steps looks like drafts that cost too much, but only the
    latter lead into debt again and again.
    """

    def __init__(self) -> None:
        self.call, self.scale = 0.0, 1.0
        self.restart = 0.0
        """How much longer it takes to begin plain steps again."""
        self._allowances = [_FIRST_ALLOWANCE, _FIRST_ALLOWANCE]
        """Of followed texts, and of the drafter: what it loses keeps no text from being followed."""
        self._max_debts = [_FIRST_DEBT, _FIRST_DEBT]
        """Doubled by a step that leads beyond it, halved by each that gains."""
        self._looked = 0.0
        """What looking for drafts took beyond its part."""
        self._num_unmeasured = _MAX_UNMEASURED
        """Steps with drafts since enough plain ones came in a row."""
        self._num_plain = 0
        self._overrun = Overrun()
        self._sums = [0.0] * 5

    def may_lose(self, expected: bool) -> float:
        """What the drafter, or else a followed text, may make the next step take longer than a plain one."""
        return self._allowances[expected] if self._num_unmeasured < _MAX_UNMEASURED else 0.0

    @property
    def may_look(self) -> bool:
        """Whether to look for drafts beside a plain step: on a small model that takes a part of the step."""
        return self._looked <= 0

    def observe(self, lost: float) -> None:
        """Takes a plain step, beside which `lost` was spent on looking for drafts."""
        self._num_plain += 1
        if self._num_plain >= _NUM_PLAIN:
            self._num_unmeasured = 0
        self._looked = max(0.0, self._looked + min(lost, _MAX_LOOKED) - _LOOKING)
        self._allowances = [min(own + _INCOME, max(own, _FIRST_ALLOWANCE)) for own in self._allowances]
        self._sums = [_PLAIN_DECAY * value for value in self._sums]

    def observe_restart(self, lost: float, *, expected: bool) -> None:
        """Takes the first plain step behind one with drafts, or that was to have some."""
        self._allowances[expected] -= min(lost, 1.0)
        self.restart = max(0.0, self.restart + _OTHER_SHARE * (min(lost, 1.0) - self.restart))

    def pay(self, gained: float, took: float, *, expected: bool) -> None:
        """Takes the tokens of a step, and how long it took, as if no others had drafted."""
        change, max_debt = gained * (1 - MIN_GAIN) - took, self._max_debts[expected]
        allowance = self._allowances[expected] + change
        self._allowances[expected] = max(-max_debt, min(allowance, _MAX_ALLOWANCE))
        if allowance < -max_debt:
            self._max_debts[expected] = min(2 * max_debt, _MAX_DEBT)
        elif change > 0:
            self._max_debts[expected] = max(max_debt / 2, _FIRST_DEBT)

    def learn(self, num_calls: int, added: float, base: float, took: float) -> float:
        """Takes a step, of which load-time costs explain `base` and `added`; returns `took`, less after a stall."""
        self._num_plain, self._num_unmeasured = 0, self._num_unmeasured + 1
        took = self._overrun.bounded(took, base + self.call * num_calls + self.scale * added)
        weight, over = 1 / took**2, took - base
        parts = (num_calls * num_calls, num_calls * added, added * added, num_calls * over, added * over)
        self._sums = [_DECAY * old + weight * new for old, new in zip(self._sums, parts, strict=True)]
        self._fit()
        return took

    def _fit(self) -> None:
        calls, both, added, over_calls, over_added = self._sums
        calls, added, over_added = calls + _CALL_PRIOR, added + _SCALE_PRIOR, over_added + _SCALE_PRIOR
        self.call = max(0.0, (over_calls * added - over_added * both) / (calls * added - both * both))
        self.scale = max(0.0, (over_added - self.call * both) / added)
        if not self.scale:
            self.call = max(0.0, over_calls / calls)


# ---------------------------------------------------------------------------------------------- lengths of the drafts


class Choice(NamedTuple):
    """How many tokens each call drafts, and what is expected of the step."""

    lengths: list[int]
    tokens: float
    """Of all rows."""
    took: float
    """In plain steps."""


def choose(options: Sequence[Sequence[tuple[float, float]]], rest: Sequence[float], num_rows: int) -> Choice | None:
    """The lengths with the most tokens per second; None if no drafts are faster.

    `options` holds for each call, by length, the tokens accepted and what it takes; `rest`, by number, what those
    without drafts take together. At a given price of a plain step, in tokens, calls are independent but for that
    number. The price rises to the best speed that it allows (Dinkelbach 1967).
    """
    best, price = None, num_rows / rest[-1]
    if len(options) == 1:
        speeds = [(num_rows + tokens) / (rest[0] + took) for tokens, took in options[0]]
        if (speed := max(speeds, default=0.0)) <= price * (1 + 1e-9):
            return None
        index = speeds.index(speed)
        return Choice([index + 1], num_rows + options[0][index][0], rest[0] + options[0][index][1])
    while True:
        found = _at_price(price, options, rest, num_rows)
        if found is None or found.tokens <= price * found.took * (1 + 1e-9):
            return best
        best, price = found, found.tokens / found.took


def _at_price(
    price: float, options: Sequence[Sequence[tuple[float, float]]], rest: Sequence[float], num_rows: int
) -> Choice | None:
    """The lengths with the most tokens beyond the price of their time; None without drafts."""
    values = [[tokens - price * took for tokens, took in call] for call in options]
    ranked = sorted(((max(call), place) for place, call in enumerate(values) if call), reverse=True)
    total, best, best_value = 0.0, 0, -price * rest[-1]
    for number, (value, _) in enumerate(ranked, 1):
        total += value
        if total - price * rest[-1 - number] > best_value:
            best, best_value = number, total - price * rest[-1 - number]
    if not best:
        return None
    lengths, tokens, took = [0] * len(options), float(num_rows), rest[-1 - best]
    for value, place in ranked[:best]:
        index = values[place].index(value)
        lengths[place] = index + 1
        tokens += options[place][index][0]
        took += options[place][index][1]
    return Choice(lengths, tokens, took)


# ------------------------------------------------------------------------------------------------------- the planner


_Call: TypeAlias = list[tuple[int, list[tuple[float, int]]]]
"""By tokens of a call: the chances, and rows, of those that it then drafts too."""


@dataclass(eq=False)
class Drafting:
    """What is drafted for one sequence. It survives replays."""

    followed: Sequence[_FollowedText]
    expected: _ExpectedText | None
    """None without a drafter, or once it has failed."""
    own: LiveText
    prediction: PredictionFollower | None
    is_kept: bool
    """The output may join the history."""
    chosen: _FollowedText | _ExpectedText | None = None
    promise: float = 0.0
    is_expected: bool = False
    """Whether the drafter is to draft."""
    source: DraftSource = DraftSource.HISTORY
    """Of the last draft."""

    def push(self, token: int) -> None:
        """Takes the output's next token."""
        self.own.push(token)
        for text in self.followed:
            text.push(token)
        if self.expected is not None:
            self.expected.push(token)

    def end(self) -> None:
        """Ends the output, which joins the history where it may."""
        self.own.end(self.is_kept)

    def chances(self, limit: int, least: float, ahead: int = 0) -> list[float]:
        """For each token that is worth it, the chance that all up to it are accepted, if `ahead` more agree first."""
        chances, chance = list[float](), 1.0
        if self.chosen is None or limit <= 0:
            return chances
        odds, cost = self.chosen.odds.values, self.chosen.shared.cost
        for kind in self.chosen.kinds(limit, ahead):
            chance *= odds[kind]
            if chance - cost < least:
                break
            chances.append(chance - cost)
        return chances

    def draft(self, num_tokens: int) -> list[int]:
        """Next tokens of the followed text; none where the drafter drafts."""
        if self.chosen is None or not num_tokens:
            return []
        self.source = self.chosen.source
        return self.chosen.draft(num_tokens)

    def learn(self, num_drafted: int, num_accepted: int, first: int = 0) -> None:
        """Takes what became of the last draft, from place `first` on."""
        if self.expected is not None and self.source is self.expected.source:
            self.expected.learn(num_drafted, num_accepted, first)

    def choose(self, *, may_follow: bool, may_expect: bool) -> None:
        """Chooses what the next draft is from: a followed text, or the drafter, as far as either may be."""
        self.chosen, self.promise, self.is_expected = None, 0.0, False
        for text in self.followed if may_follow else ():
            if (promise := text.promise) > self.promise:
                self.chosen, self.promise = text, promise
        if may_expect and self.expected is not None and (promise := self.expected.promise) > self.promise:
            self.chosen, self.promise, self.is_expected = self.expected, promise, True


Predict: TypeAlias = Callable[[list[int]], list[list[int]]]
"""Has the drafter draft so many tokens of each row."""


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
        drafter: DraftSource = DraftSource.MTP,
    ) -> None:
        """Seconds are of a model call, by its tokens, and of a token that the drafter, if any, drafts.

        `feeds_again`: after a rejection the accepted tokens are evaluated again with the next step.
        """
        self._history = history
        self._together, self._again = feeds_together, feeds_again
        self._drafter = drafter
        self._limit = max_feed_tokens - 1
        self._cost = _StepCost(step_seconds)
        self._drafts_itself = draft_seconds is not None
        self._drafting_seconds = 0.0
        """Spent on drafting in the step under way."""
        self._odds = {source: _Odds(prior, weight=16, decay=0.998) for source, prior in PRIOR_ODDS.items()}
        self._odds[drafter].cost = (draft_seconds or 0.0) / self._cost.calls[1]
        self._drafted = dict.fromkeys(DraftSource, 0)
        self._accepted = dict.fromkeys(DraftSource, 0)
        self._num_steps = self._num_tokens = 0
        self._excess = defaultdict[int, Excess](Excess)
        """By the number of rows, roughly."""
        self._is_expected = False
        """Whether the drafter drafted in the latest step with drafts, or was to."""

    @property
    def stats(self) -> DraftStats:
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
            for text in (request.tokens[max(0, num_matched - SHORTEST_MATCH) :], *request.quotable):
                history.add(namespace, text, session_id)
        if not request.speculates:
            return Drafting((), None, own, None, is_kept)
        hidden = () if is_kept else request.quotable
        for text in (*hidden, request.tokens[-SHORTEST_MATCH if is_kept else -MAX_OWN_TOKENS :]):
            for token in text.tolist():
                own.push(token)
        followers: dict[DraftSource, Follower] = {DraftSource.HISTORY: HistoryFollower(history, own)}
        prediction = None if request.prediction is None else PredictionFollower(request.prediction)
        if prediction is not None:
            followers[DraftSource.PREDICTION] = prediction
        if request.grammar is not None or request.thinking is not None:
            followers[DraftSource.GRAMMAR] = ForcedText(forced)
        texts = [_FollowedText(source, self._odds[source], follower) for source, follower in followers.items()]
        expected = _ExpectedText(self._drafter, self._odds[self._drafter]) if self._drafts_itself else None
        return Drafting(texts, expected, own, prediction, is_kept)

    def may_draft(self, rows: Sequence[Drafting]) -> bool:
        """Whether drafts are likely to pay after the step under way, its tokens taken for the followed ones."""
        if not self._excess_of(len(rows)).may_look:
            return False
        for may_lose in self._alternatives(rows):
            if self._may_pay(rows, may_lose):
                self._is_expected = any(row.is_expected for row in rows)
                return True
        return False

    def _alternatives(self, rows: Sequence[Drafting]) -> Iterator[float]:
        """What the next step may lose, once rows choose what drafts: with the drafter first, then texts alone."""
        followed, expected = map(self._excess_of(len(rows)).may_lose, (False, True))
        for may_expect in [True] * (self._drafts_itself and expected > 0) + [False] * (followed > 0):
            for row in rows:
                row.choose(may_follow=followed > 0, may_expect=may_expect)
            if may_expect == any(row.is_expected for row in rows):
                others = any(row.promise and not row.is_expected for row in rows)
                yield expected * may_expect + followed * others

    def _may_pay(self, rows: Sequence[Drafting], may_lose: float) -> bool:
        least = self._least_chance(len(rows))
        if all(row.promise <= least for row in rows):
            return False
        found = self._choose([row.chances(self._limit, least, 1) for row in rows], [1] * len(rows), may_lose)
        if found is None:
            return False
        drafted = [row.promise for row, num_tokens in zip(rows, found.lengths, strict=True) if num_tokens]
        gain = found.tokens / len(rows) - found.took
        return gain * sum(drafted) / len(drafted) > self._excess_of(len(rows)).restart

    def plan(
        self, rows: Sequence[Drafting], limits: Sequence[int], predict: Predict, known: Sequence[int]
    ) -> list[list[int]]:
        """A draft for each row, of `limits` tokens behind its `known` ones; empty unless all pay together."""
        self._drafting_seconds = 0.0  # the last draft may have come to nothing
        # Beside a row with more, a token may cost nothing.
        least = self._least_chance(len(rows)) if max(known) == 1 else MIN_CHANCE
        for may_lose in self._alternatives(rows):
            pairs = zip(rows, limits, strict=True)
            chances = [row.chances(min(limit, self._limit), least) for row, limit in pairs]
            if found := self._choose(chances, known, may_lose):
                drafts = [row.draft(length) for row, length in zip(rows, found.lengths, strict=True)]
                wanted = [length if row.is_expected else 0 for row, length in zip(rows, found.lengths, strict=True)]
                guesses = predict(wanted) if any(wanted) else drafts
                return [draft or guess for draft, guess in zip(drafts, guesses, strict=True)]
        return [[] for _ in rows]

    def observe_drafting(self, wanted: Sequence[int], seconds: float) -> None:
        """Takes the drafter's seconds for `wanted` tokens of each row."""
        self._drafting_seconds, odds = seconds, self._odds[self._drafter]
        cost = seconds / max(wanted) / self._cost.plain(sum(number > 0 for number in wanted))
        odds.cost += _OTHER_SHARE * (min(cost, _STALL * odds.cost) - odds.cost)

    def learn(
        self, rows: Sequence[Drafting], fed: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """Takes a step that fed each row so many tokens, `drafted` the last of them, with all that went with it."""
        num_rows, plain = len(rows), self._cost.plain(len(rows))
        drafting, self._drafting_seconds = self._drafting_seconds / plain, 0.0
        excess = self._excess_of(num_rows)
        added = excess.learn(*self._known_cost(fed), seconds / plain - drafting) - 1
        # Behind a draft a row may evaluate again what stayed of it.
        longer = [place for place, number in enumerate(fed) if number > 1]
        for expected in (False, True):
            if own := [place for place in longer if (rows[place].source is self._drafter) == expected]:
                self._is_expected = expected
                gained = 1 + sum(accepted[place] for place in own) / num_rows - drafting * expected
                share = sum(fed[place] - 1 for place in own) / (sum(fed) - num_rows)
                excess.pay(gained, 1 + added * share, expected=expected)
        if not any(drafted):
            return
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            self._drafted[row.source] += num_drafted
            self._accepted[row.source] += num_accepted
            row.learn(num_drafted, num_accepted)
        self._num_steps += 1
        self._num_tokens += num_rows + sum(accepted)

    def observe(self, num_rows: int, seconds: float, looking_seconds: float) -> None:
        """Takes a plain step of which the one before was plain too, and what looking for drafts took before it."""
        self._cost.observe(num_rows, seconds)
        self._excess_of(num_rows).observe(looking_seconds / self._cost.plain(num_rows))
        if self._drafts_itself:
            self._odds[self._drafter].relax(PRIOR_ODDS[self._drafter], _RELAX / 10)

    def observe_restart(self, num_rows: int, seconds: float) -> None:
        """Takes what ending plain steps, and beginning them again later, took."""
        lost = seconds / self._cost.plain(num_rows) - 1
        self._excess_of(num_rows).observe_restart(lost, expected=self._is_expected)

    def _known_cost(self, fed: Sequence[int]) -> tuple[int, float, float]:
        """Calls with several tokens of a row; what their further tokens take, as at load; what all else takes."""
        num_rows, plain, calls = len(fed), self._cost.plain(len(fed)), self._cost.calls
        if self._together:
            num_tokens = num_rows * max(fed) if self._again else sum(fed)
            return 1, (calls[min(num_tokens, _MAX_STEP_TOKENS)] - calls[num_rows]) / plain, 1.0
        longer = [number for number in fed if number > 1]
        added = sum(calls[number] - calls[1] for number in longer) / plain
        base = self._cost.plain(num_rows - len(longer)) + len(longer) * self._cost.plain(1)
        return len(longer), added, base / plain

    def _choose(self, chances: Sequence[Sequence[float]], known: Sequence[int], may_lose: float) -> Choice | None:
        """The best draft length for each row; None if no drafts pay."""
        num_rows = len(chances)
        if not any(chances):
            return None
        calls, due = self._calls(chances, known)
        plain = self._cost.plain(num_rows)
        # What calls without drafts take together, by their number, in plain steps.
        rest = [0.0, 1.0] if self._together else [self._cost.plain(number) / plain for number in range(num_rows + 1)]
        options = [self._options(call, due, num_rows, rest, may_lose) for call in calls]
        found = choose(options, rest, num_rows)
        if found is None or found.tokens / num_rows < found.took * (1 + MIN_GAIN):
            return None
        lengths = [0] * num_rows
        for call, length in zip(calls, found.lengths, strict=True):
            for _, row in chain.from_iterable(column for _, column in call[:length]):
                lengths[row] += 1
        return Choice(lengths, found.tokens, found.took)

    def _calls(self, chances: Sequence[Sequence[float]], known: Sequence[int]) -> tuple[list[_Call], int]:
        """The calls, and the tokens of each without drafts."""
        num_rows, longest = len(chances), max(known)
        tokens = [[(chance, row) for chance in ahead] for row, ahead in enumerate(chances)]
        if not self._together:
            return [[(number, [one]) for number, one in enumerate(row, 2)] for row in tokens], 1
        if not self._again:
            # A token costs the same in each row: the likeliest of all come first.
            ranked = sorted(chain.from_iterable(tokens), key=itemgetter(0), reverse=True)
            return [[(number, [one]) for number, one in enumerate(ranked, num_rows + 1)]], num_rows
        columns = defaultdict[int, list[tuple[float, int]]](list)
        for row, number in zip(tokens, known, strict=True):
            for length, one in enumerate(row, number + 1):
                columns[num_rows * max(length, longest)].append(one)
        return [sorted(columns.items())], num_rows * longest

    def _options(
        self, call: _Call, due: int, num_rows: int, rest: Sequence[float], may_lose: float
    ) -> list[tuple[float, float]]:
        """For each length of a call's draft, the tokens expected and what it takes, as far as that may be lost."""
        excess, calls, plain = self._excess_of(num_rows), self._cost.calls, self._cost.plain(num_rows)
        num_known = num_rows if self._together else 1
        alone, saved = self._cost.plain(num_known) / plain + excess.call, rest[-1] - rest[-2]
        scale, tokens, options = excess.scale / plain, 0.0, list[tuple[float, float]]()
        again = max(0.0, alone + scale * (calls[2 * num_known] - calls[num_known]) - saved) if self._again else 0.0
        stays, without = dict[int, float](), calls[min(due, _MAX_STEP_TOKENS)]
        for num_tokens, column in call:
            for chance, row in column:
                tokens += chance
                stays[row] = chance
            took = alone + scale * (calls[min(num_tokens, _MAX_STEP_TOKENS)] - without)
            if again:
                took += again * (1 - math.prod(stays.values()))
            if took - saved > may_lose:
                break
            options.append((tokens, took))
        return options

    def _least_chance(self, num_rows: int) -> float:
        """The least with which a drafted token can pay."""
        excess, plain = self._excess_of(num_rows), self._cost.plain(num_rows)
        return max(MIN_CHANCE, excess.scale * self._cost.token * num_rows / plain)

    def _excess_of(self, num_rows: int) -> Excess:
        return self._excess[num_rows.bit_length()]
