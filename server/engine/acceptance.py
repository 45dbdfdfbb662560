"""What a row may be drafted from, and how likely each drafted token is accepted. Pure.

A row *follows* a text while its output agrees with it: a text of the history, the client's prediction, or what a
grammar forces. The text's next tokens are a draft. A drafter, an MTP module or a smaller model, drafts once its
number of tokens is chosen. Acceptance rates are learned from every token of the output, drafted or not.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from cache.history import Follower
from server.engine.request import DraftSource

MAX_DRAFT_TOKENS = 64

_LENGTH_EDGES = (3, 4, 8, 16, 32)
"""The last match length of each class but the last."""
_LONGEST_MATCH = _LENGTH_EDGES[-1] + 1
_CLASS_OF_LENGTH = [bisect_left(_LENGTH_EDGES, length) for length in range(_LONGEST_MATCH + MAX_DRAFT_TOKENS)]
"""Longer matches have the last class."""
_CLASS_OF_PLACE = [min(place, 3) for place in range(MAX_DRAFT_TOKENS)]
"""Classes of a drafter's tokens, by place in the draft."""

PRIOR_RATES = {
    DraftSource.HISTORY: (0.45, 0.55, 0.65, 0.75, 0.85, 0.95),
    DraftSource.PREDICTION: (0.6, 0.65, 0.75, 0.85, 0.9, 0.95),
    DraftSource.MTP: (0.8, 0.7, 0.65, 0.6),
    DraftSource.DRAFT: (0.7, 0.7, 0.7, 0.7),
    DraftSource.GRAMMAR: (0.99,) * 6,
}
"""By class of match length, of a drafter by place in the draft, before anything is known of a model."""

REVERSION = 0.01
"""How far a row's rates of a drafter return to those of all rows, each token."""
MIN_RATE = 0.02
"""A draft ends before a token that is less likely to be reached and accepted."""


class AcceptanceRates:
    """By class of token, the share of drafted tokens that equal the sample. Older tokens count less."""

    def __init__(self, prior: Sequence[float], *, weight: float, decay: float) -> None:
        """The prior counts as `weight` tokens."""
        self.values = list(prior)
        self.cost = 0.0
        """The cost of drafting a token, in plain steps."""
        self._decay = decay
        self._num_drafted = [weight] * len(prior)
        self._num_accepted = [weight * value for value in prior]

    def learn(self, kind: int, is_accepted: bool) -> None:
        """Takes a token of a class."""
        self._num_drafted[kind] = drafted = self._num_drafted[kind] * self._decay + 1
        self._num_accepted[kind] = accepted = self._num_accepted[kind] * self._decay + is_accepted
        self.values[kind] = accepted / drafted

    def revert(self, values: Sequence[float], share: float) -> None:
        """Moves by `share` of the way to other rates."""
        for kind, (drafted, value) in enumerate(zip(self._num_drafted, values, strict=True)):
            self._num_accepted[kind] += share * (value * drafted - self._num_accepted[kind])
            self.values[kind] = self._num_accepted[kind] / drafted


class Proposer(ABC):
    """A source of drafts for one row, with the row's own acceptance rates and those of all rows."""

    def __init__(self, source: DraftSource, shared: AcceptanceRates) -> None:
        self.source, self.shared = source, shared
        self.rates = AcceptanceRates(shared.values, weight=4, decay=0.95)

    @property
    @abstractmethod
    def net_rate(self) -> float:
        """The acceptance rate of the next token, less the cost of drafting it; 0 if there is no draft."""

    @abstractmethod
    def push(self, token: int) -> None:
        """Takes the output's next token."""

    def draft(self, limit: int) -> list[int]:
        """The next tokens, if they are known already."""
        return []

    @abstractmethod
    def classes(self, limit: int, num_ahead: int) -> Sequence[int]:
        """Classes of a draft's tokens, if `num_ahead` more tokens agree before them."""

    def net_rates(self, limit: int, minimum: float = MIN_RATE, num_ahead: int = 0) -> list[float]:
        """For each token of a draft, the rate at which all up to it are accepted, less the cost of drafting it.

        Ends before a rate below `minimum`.
        """
        net_rates, rate, values, cost = list[float](), 1.0, self.rates.values, self.shared.cost
        for kind in self.classes(limit, num_ahead):
            rate *= values[kind]
            if rate - cost < minimum:
                break
            net_rates.append(rate - cost)
        return net_rates


class FollowedText(Proposer):
    """A text with which a row agrees so far."""

    def __init__(self, source: DraftSource, shared: AcceptanceRates, follower: Follower) -> None:
        super().__init__(source, shared)
        self._follower = follower

    @property
    def net_rate(self) -> float:
        length = 0 if self._follower.expected is None else self._follower.match_length
        return self.rates.values[_CLASS_OF_LENGTH[min(length, _LONGEST_MATCH)]] if length else 0.0

    def push(self, token: int) -> None:
        """As of any proposer; learns whether the text was right."""
        if (expected := self._follower.expected) is not None:
            kind = _CLASS_OF_LENGTH[min(self._follower.match_length, _LONGEST_MATCH)]
            self.rates.learn(kind, token == expected)
            self.shared.learn(kind, token == expected)
        self._follower.push(token)

    def draft(self, limit: int) -> list[int]:
        """The text's next tokens."""
        return self._follower.next_tokens(limit)

    def classes(self, limit: int, num_ahead: int) -> Sequence[int]:
        """Classes by match length, which grows with each token that agrees."""
        length = min(self._follower.match_length + num_ahead, _LONGEST_MATCH)
        num_tokens = len(self._follower.next_tokens(limit + num_ahead)) - num_ahead
        return _CLASS_OF_LENGTH[length : length + max(0, num_tokens)]


class ForcedTokens(FollowedText):
    """What an output must say next, and behind that what another text has there, if it has the same before."""

    def __init__(self, shared: AcceptanceRates, follower: Follower, text: FollowedText) -> None:
        super().__init__(DraftSource.GRAMMAR, shared, follower)
        self._text = text

    def draft(self, limit: int) -> list[int]:
        """As of any proposer; a draft that goes on behind forced tokens counts as the other text's."""
        forced, others = super().draft(limit), self._text.draft(limit)
        goes_on = len(others) > len(forced) and others[: len(forced)] == forced
        self.source = self._text.source if goes_on else DraftSource.GRAMMAR
        return others if goes_on else forced

    def net_rates(self, limit: int, minimum: float = MIN_RATE, num_ahead: int = 0) -> list[float]:
        """Net rates as any proposer gives them."""
        rates = super().net_rates(limit, minimum, num_ahead)
        num_tokens = num_ahead + len(rates)
        if not rates or len(self.draft(limit + num_ahead)) <= num_tokens:
            return rates
        behind = self._text.net_rates(limit - len(rates), minimum / rates[-1], num_tokens)
        return rates + [rates[-1] * rate for rate in behind]


class DrafterRow(Proposer):
    """A drafter's drafts of one row."""

    @property
    def net_rate(self) -> float:
        return max(self.rates.values[0] - self.shared.cost, 0.0)

    def push(self, token: int) -> None:
        """Rates that forbid drafts return slowly to those of all rows."""
        self.rates.revert(self.shared.values, REVERSION)

    def classes(self, limit: int, num_ahead: int) -> Sequence[int]:
        """Classes by place in the draft."""
        return _CLASS_OF_PLACE[:limit]

    def learn(self, num_drafted: int, num_accepted: int, first: int = 0) -> None:
        """Takes how many drafted tokens were accepted, from place `first` on."""
        for place in range(first, min(num_drafted, num_accepted + 1)):
            self.rates.learn(_CLASS_OF_PLACE[place], place < num_accepted)
            self.shared.learn(_CLASS_OF_PLACE[place], place < num_accepted)
