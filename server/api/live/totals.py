"""What all requests cost since the start, in sums: of each namespace, and of all."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.api.answer_figures import AnswerFigures
from server.engine.diagnosis import Miss

MAX_NAMESPACES = 1024
"""Beyond that, the sums of the namespace that has asked least lately are forgotten."""


@dataclass
class LostTokens:
    """Times that tokens were evaluated again for one reason, and how many."""

    count: int = 0
    tokens: int = 0


@dataclass
class Sums:
    """Sums of requests that have ended."""

    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    saved_seconds: float = 0.0
    restored: dict[str, int] = field(default_factory=lambda: {"live": 0, "memory": 0, "disk": 0})
    """Tokens by the tier in which their state was."""
    lost: dict[str, LostTokens] = field(default_factory=dict)
    """By reason."""

    def add(self, figures: AnswerFigures, misses: Iterable[Miss], saved_seconds: float) -> None:
        """Adds a request with all of its choices."""
        counts = figures.counts
        self.requests += 1
        self.succeeded += figures.has_ended
        self.failed += figures.error is not None
        self.cancelled += not figures.has_ended and figures.error is None
        self.completion_tokens += counts.predicted
        if figures.started is None:
            return
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.evaluated_tokens += counts.evaluated
        self.saved_seconds += saved_seconds
        if figures.started.tier is not None:
            tier = str(figures.started.tier)
            self.restored[tier] = self.restored.get(tier, 0) + counts.cached
        for miss in misses:
            lost = self.lost.setdefault(miss.reason.value, LostTokens())
            lost.count += 1
            lost.tokens += miss.lost_tokens


class Totals:
    """The sums of one server. Event loop only."""

    def __init__(self) -> None:
        self.all = Sums()
        self._by_namespace: OrderedDict[str, Sums] = OrderedDict()

    def of(self, namespace: str | None) -> Sums:
        """Returns the sums of one namespace; of all for None."""
        return self.all if namespace is None else self._by_namespace.get(namespace, Sums())

    def add(self, namespace: str, figures: AnswerFigures, misses: Iterable[Miss], saved_seconds: float) -> None:
        """Adds a request of a namespace."""
        known = list(misses)
        own = self._by_namespace.pop(namespace, None) or Sums()
        self._by_namespace[namespace] = own
        while len(self._by_namespace) > MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        for sums in (self.all, own):
            sums.add(figures, known, saved_seconds)
