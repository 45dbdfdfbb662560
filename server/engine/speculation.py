"""Draft lengths: which rows draft, from what, and how many tokens, for the most tokens per second. Pure.

The lengths of a step are chosen together, by the acceptance rate of each token (`acceptance.py`), what it costs, and
how much time drafts may still lose (`draft_cost.py`). All are learned while serving.

Knows neither model nor clock: seconds are handed in. Worker thread only.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cache.history import SHORTEST_MATCH, Follower, ForcedText, History, HistoryFollower, LiveText, PredictionFollower
from models.prompt.pictures import words_at_end
from server.engine.acceptance import PRIOR_RATES, REVERSION, AcceptanceRates, DrafterRow, FollowedText, ForcedTokens
from server.engine.draft_cost import CORRECTION, MAX_STEP_TOKENS, MIN_GAIN, AddedCost, OverheadBudget, StepCost
from server.engine.request import DraftSource, DraftStats, GenerationRequest

if TYPE_CHECKING:
    from models.inference.abilities import Feeds

MAX_OWN_TOKENS = 8192
"""Most tokens that are searched of a prompt that must not join the history."""


class Choice(NamedTuple):
    """How many tokens each call drafts, and what is expected of the step."""

    lengths: list[int]
    tokens: float
    """Expected tokens of all rows."""
    cost: float
    """Expected cost, in plain steps."""


DraftOptions: TypeAlias = Sequence[Sequence[tuple[float, float]]]
"""For each call, by length of its draft: the drafted tokens expected to be accepted, and the expected cost."""


def choose(options: DraftOptions, rest: Sequence[float], num_rows: int) -> Choice | None:
    """The lengths with the most tokens per second; None if no drafts are faster.

    `rest` holds, by number, the cost of that many calls without drafts. Of several calls, the lengths with the most
    tokens beyond those that plain steps would give in the time.
    """
    price = num_rows / rest[-1]
    if len(options) == 1:
        speeds = [(num_rows + tokens) / (rest[0] + cost) for tokens, cost in options[0]]
        if (speed := max(speeds, default=0.0)) <= price * (1 + 1e-9):
            return None
        index = speeds.index(speed)
        return Choice([index + 1], num_rows + options[0][index][0], rest[0] + options[0][index][1])
    values = [[tokens - price * cost for tokens, cost in call] for call in options]
    ranked = sorted(((max(call), place) for place, call in enumerate(values) if call), reverse=True)
    total, num_best, best_value = 0.0, 0, -price * rest[-1]
    for number, (value, _) in enumerate(ranked, 1):
        total += value
        if total - price * rest[-1 - number] > best_value:
            num_best, best_value = number, total - price * rest[-1 - number]
    if not num_best or best_value <= num_rows * 1e-9 - price * rest[-1]:
        return None
    lengths, tokens, cost = [0] * len(options), float(num_rows), rest[-1 - num_best]
    for value, place in ranked[:num_best]:
        index = values[place].index(value)
        lengths[place] = index + 1
        tokens += options[place][index][0]
        cost += options[place][index][1]
    return Choice(lengths, tokens, cost)


_Call: TypeAlias = list[tuple[int, list[tuple[float, int]]]]
"""By tokens of a call: the net acceptance rates, and rows, of the drafted tokens that make it so long."""


@dataclass(eq=False)
class Drafting:
    """What is drafted for one sequence. It survives replays."""

    texts: Sequence[FollowedText]
    drafter: DrafterRow | None
    """None without a drafter, or once it has failed."""
    own: LiveText
    prediction: PredictionFollower | None
    is_kept: bool
    """The output may join the history."""
    chosen: FollowedText | DrafterRow | None = None
    """The text or drafter that the next draft is from."""
    net_rate: float = 0.0
    """The net rate of the next draft's first token."""
    source: DraftSource = DraftSource.HISTORY
    """The source of the last draft."""

    @property
    def uses_drafter(self) -> bool:
        return self.chosen is not None and self.chosen is self.drafter

    def push(self, token: int) -> None:
        """Takes the output's next token."""
        self.own.push(token)
        for text in self.texts:
            text.push(token)
        if self.drafter is not None:
            self.drafter.push(token)

    def end(self) -> None:
        """Ends the output, which joins the history where it may."""
        self.own.end(self.is_kept)

    def choose(self, *, texts: bool, drafter: bool) -> None:
        """Chooses the source of the next draft, of those that may be used, by its first token's net rate."""
        self.chosen, self.net_rate = None, 0.0
        for text in self.texts if texts else ():
            if (net_rate := text.net_rate) > self.net_rate:
                self.chosen, self.net_rate = text, net_rate
        if drafter and self.drafter is not None and (net_rate := self.drafter.net_rate) > self.net_rate:
            self.chosen, self.net_rate = self.drafter, net_rate

    def net_rates(self, limit: int, num_ahead: int = 0) -> list[float]:
        """Net rates of the chosen source."""
        return [] if self.chosen is None or limit <= 0 else self.chosen.net_rates(limit, num_ahead=num_ahead)

    def draft(self, num_tokens: int) -> list[int]:
        """Next tokens of the followed text; none where the drafter drafts."""
        if self.chosen is None or not num_tokens:
            return []
        self.source = self.chosen.source
        return self.chosen.draft(num_tokens)

    def learn(self, num_drafted: int, num_accepted: int, first: int = 0) -> None:
        """Takes what became of the last draft, from place `first` on."""
        if self.drafter is not None and self.source is self.drafter.source:
            self.drafter.learn(num_drafted, num_accepted, first)


Predict: TypeAlias = Callable[[list[int]], list[list[int]]]
"""Has the drafter draft so many tokens of each row."""


class Speculation:
    """The drafts of one engine."""

    def __init__(
        self,
        history: History,
        feeds: "Feeds",
        *,
        feeds_again: bool = False,
        drafter: DraftSource = DraftSource.MTP,
    ) -> None:
        """`feeds_again`: after a rejection the accepted tokens are evaluated again with the next step."""
        self._history = history
        self._together, self._again = feeds.together, feeds_again
        self._drafter = drafter
        self._limit = feeds.max_tokens - 1
        self._cost = StepCost(feeds.step_seconds)
        self._has_drafter = feeds.draft_seconds is not None
        self._drafter_seconds = 0.0
        """Spent by the drafter in the step under way."""
        self._rates = {
            source: AcceptanceRates(prior, weight=16, decay=0.998) for source, prior in PRIOR_RATES.items()
        }
        self._rates[drafter].cost = (feeds.draft_seconds or 0.0) / self._cost.calls[1]
        self._drafted = dict.fromkeys(DraftSource, 0)
        self._accepted = dict.fromkeys(DraftSource, 0)
        self._num_steps = self._num_tokens = 0
        self._added, self._budget = AddedCost(), OverheadBudget()
        self._used_drafter = False
        """Whether the drafter drafted in the latest step with drafts, or was to."""

    @property
    def stats(self) -> DraftStats:
        return DraftStats(dict(self._drafted), dict(self._accepted), self._num_steps, self._num_tokens)

    def begin(
        self, request: GenerationRequest, num_matched: int, forced: Callable[[], Sequence[int]] = tuple
    ) -> Drafting:
        """Adds the prompt after its first `num_matched` tokens, and texts to quote, to the history.

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
        for text in (*hidden, words_at_end(request.tokens[-SHORTEST_MATCH if is_kept else -MAX_OWN_TOKENS :])):
            for token in text.tolist():
                own.push(token)
        followers: dict[DraftSource, Follower] = {DraftSource.HISTORY: HistoryFollower(history, own)}
        prediction = None if request.prediction is None else PredictionFollower(request.prediction)
        if prediction is not None:
            followers[DraftSource.PREDICTION] = prediction
        texts = [FollowedText(source, self._rates[source], follower) for source, follower in followers.items()]
        if request.grammar is not None or request.thinking is not None:
            texts.append(ForcedTokens(self._rates[DraftSource.GRAMMAR], ForcedText(forced), texts[0]))
        drafter = DrafterRow(self._drafter, self._rates[self._drafter]) if self._has_drafter else None
        return Drafting(texts, drafter, own, prediction, is_kept)

    # -- before a step

    def may_draft(self, rows: Sequence[Drafting]) -> bool:
        """Whether drafts are likely to pay after the step under way, if its tokens are as the texts have them."""
        if not self._budget.may_look_up:
            return False
        for budget in self._budgets_of_sources(rows):
            net_rates = [row.net_rates(self._limit, num_ahead=1) for row in rows]
            choice = self._choose(net_rates, [1] * len(rows), budget)
            if choice is not None:
                # Nothing is drafted unless the tokens under way come as the texts have them.
                first = [row.net_rate for row, length in zip(rows, choice.lengths, strict=True) if length]
                gain = choice.tokens / len(rows) - choice.cost
                if gain * sum(first) / len(first) > self._added.resume:
                    self._used_drafter = any(row.uses_drafter for row in rows)
                    return True
        return False

    def plan(
        self, rows: Sequence[Drafting], limits: Sequence[int], predict: Predict, known: Sequence[int]
    ) -> list[list[int]]:
        """A draft for each row, of `limits` tokens after its `known` ones; empty unless all pay together."""
        self._drafter_seconds = 0.0  # the last draft may have come to nothing
        for budget in self._budgets_of_sources(rows):
            pairs = zip(rows, limits, strict=True)
            net_rates = [row.net_rates(min(limit, self._limit)) for row, limit in pairs]
            if choice := self._choose(net_rates, known, budget):
                drafts = [row.draft(length) for row, length in zip(rows, choice.lengths, strict=True)]
                wanted = [length * row.uses_drafter for row, length in zip(rows, choice.lengths, strict=True)]
                predicted = predict(wanted) if any(wanted) else drafts
                return [draft or other for draft, other in zip(drafts, predicted, strict=True)]
        return [[] for _ in rows]

    def _budgets_of_sources(self, rows: Sequence[Drafting]) -> Iterator[float]:
        """What the next step may lose, once rows chose their sources: with the drafter first, then texts alone."""
        of_texts, of_drafter = map(self._budget.left, (False, True))
        for with_drafter in [True] * (self._has_drafter and of_drafter > 0) + [False] * (of_texts > 0):
            for row in rows:
                row.choose(texts=of_texts > 0, drafter=with_drafter)
            if with_drafter == any(row.uses_drafter for row in rows):
                has_texts = any(row.net_rate and not row.uses_drafter for row in rows)
                yield of_drafter * with_drafter + of_texts * has_texts

    # -- after a step

    def observe_drafter(self, wanted: Sequence[int], seconds: float) -> None:
        """Takes the drafter's seconds for `wanted` tokens of each row."""
        self._drafter_seconds, rates = seconds, self._rates[self._drafter]
        cost = seconds / max(wanted) / self._cost.plain(sum(number > 0 for number in wanted))
        rates.cost += CORRECTION * (cost - rates.cost)

    def learn(
        self, rows: Sequence[Drafting], fed: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """Takes a step that fed each row so many tokens, `drafted` the last of them, with all that went with it."""
        num_rows, plain = len(rows), self._cost.plain(len(rows))
        of_drafter, self._drafter_seconds = self._drafter_seconds / plain, 0.0
        cost = self._added.learn(*self._cost_at_load(fed), seconds / plain - of_drafter)
        self._settle_budgets(rows, fed, accepted, cost - 1, of_drafter)
        if not any(drafted):
            return
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            self._drafted[row.source] += num_drafted
            self._accepted[row.source] += num_accepted
            row.learn(num_drafted, num_accepted)
        self._num_steps += 1
        self._num_tokens += num_rows + sum(accepted)

    def _settle_budgets(
        self, rows: Sequence[Drafting], fed: list[int], accepted: list[int], added: float, of_drafter: float
    ) -> None:
        """Charges what a step took beyond a plain one to those whose drafts it evaluated. All in plain steps."""
        # A row may evaluate again what stayed of a draft.
        longer = [place for place, number in enumerate(fed) if number > 1]
        for is_drafter in (False, True):
            if own := [place for place in longer if (rows[place].source is self._drafter) == is_drafter]:
                self._used_drafter = is_drafter
                gained = 1 + sum(accepted[place] for place in own) / len(rows) - of_drafter * is_drafter
                self._budget.settle(gained, 1 + added, of_drafter=is_drafter)

    def observe_plain(self, num_rows: int, seconds: float, lookup_seconds: float) -> None:
        """Takes a plain step after a plain one, and the seconds of looking drafts up before it."""
        self._cost.observe_plain(num_rows, seconds)
        self._added.observe_plain()
        self._budget.observe_plain(lookup_seconds / self._cost.plain(num_rows))
        if self._has_drafter:
            self._rates[self._drafter].revert(PRIOR_RATES[self._drafter], REVERSION / 10)

    def observe_resumed(self, num_rows: int, seconds: float) -> None:
        """Takes the seconds of leaving plain steps and resuming them."""
        lost = min(seconds / self._cost.plain(num_rows) - 1, 1.0)
        self._added.observe_resumed(lost)
        self._budget.lose(lost, of_drafter=self._used_drafter)

    # -- cost of a step, and the best lengths

    def _cost_at_load(self, fed: Sequence[int]) -> tuple[int, float, float]:
        """Calls with several tokens of a row; the cost of their further tokens, as at load; that of all else."""
        num_rows, plain, calls = len(fed), self._cost.plain(len(fed)), self._cost.calls
        if self._together:
            num_tokens = num_rows * max(fed) if self._again else sum(fed)
            return 1, (calls[min(num_tokens, MAX_STEP_TOKENS)] - calls[num_rows]) / plain, 1.0
        longer = [number for number in fed if number > 1]
        added = sum(calls[number] - calls[1] for number in longer) / plain
        base = self._cost.plain(num_rows - len(longer)) + len(longer) * self._cost.plain(1)
        return len(longer), added, base / plain

    def _choose(self, net_rates: Sequence[Sequence[float]], known: Sequence[int], budget: float) -> Choice | None:
        """The best draft length for each row; None if no drafts pay."""
        num_rows = len(net_rates)
        if not any(net_rates):
            return None
        calls, num_undrafted = self._calls(net_rates, known)
        plain = self._cost.plain(num_rows)
        # The cost of calls without drafts, by their number.
        rest = [0.0, 1.0] if self._together else [self._cost.plain(number) / plain for number in range(num_rows + 1)]
        options = [self._options(call, num_undrafted, num_rows, rest, budget) for call in calls]
        choice = choose(options, rest, num_rows)
        if choice is None or choice.tokens / num_rows < choice.cost * (1 + MIN_GAIN):
            return None
        lengths = [0] * num_rows
        for call, length in zip(calls, choice.lengths, strict=True):
            for _, row in chain.from_iterable(column for _, column in call[:length]):
                lengths[row] += 1
        return Choice(lengths, choice.tokens, choice.cost)

    def _calls(self, net_rates: Sequence[Sequence[float]], known: Sequence[int]) -> tuple[list[_Call], int]:
        """The calls, and the tokens of each without drafts."""
        num_rows, longest = len(net_rates), max(known)
        tokens = [[(net_rate, row) for net_rate in own] for row, own in enumerate(net_rates)]
        if not self._together:
            return [[(number, [token]) for number, token in enumerate(row, 2)] for row in tokens], 1
        if not self._again:
            # A token costs the same in each row: the likeliest of all come first.
            ranked = sorted(chain.from_iterable(tokens), key=itemgetter(0), reverse=True)
            return [[(number, [token]) for number, token in enumerate(ranked, num_rows + 1)]], num_rows
        columns = defaultdict[int, list[tuple[float, int]]](list)
        for row, number in zip(tokens, known, strict=True):
            for length, token in enumerate(row, number + 1):
                columns[num_rows * max(length, longest)].append(token)
        return [sorted(columns.items())], num_rows * longest

    def _options(
        self, call: _Call, num_undrafted: int, num_rows: int, rest: Sequence[float], budget: float
    ) -> list[tuple[float, float]]:
        """For each length of a call's draft, the tokens expected to be accepted and the cost, within the budget."""
        added, calls, plain = self._added, self._cost.calls, self._cost.plain(num_rows)
        num_known = num_rows if self._together else 1
        alone, saved = self._cost.plain(num_known) / plain + added.call, rest[-1] - rest[-2]
        scale, tokens, options = added.scale / plain, 0.0, list[tuple[float, float]]()
        again = max(0.0, alone + scale * (calls[2 * num_known] - calls[num_known]) - saved) if self._again else 0.0
        last_rates, undrafted = dict[int, float](), calls[min(num_undrafted, MAX_STEP_TOKENS)]
        for num_tokens, column in call:
            for net_rate, row in column:
                tokens += net_rate
                last_rates[row] = net_rate
            cost = alone + scale * (calls[min(num_tokens, MAX_STEP_TOKENS)] - undrafted)
            if again:
                cost += again * (1 - math.prod(last_rates.values()))
            if cost - saved > budget:
                break
            options.append((tokens, cost))
        return options
