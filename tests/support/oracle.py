"""Drafts for tests of the engine: the fake model's true continuation, with as many errors as a test wants."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.engine.request import GenerationRequest
from tests.support.fake_runner import VOCABULARY, next_token

Continue = Callable[[Sequence[int], Sequence[int]], int]
"""The token after a prompt and an output."""


def freely(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Returns what the fake model says if nothing binds it."""
    return next_token([*prompt, *output])


@dataclass(eq=False)
class OracleDrafting:
    """What the engine has told of one sequence."""

    request: GenerationRequest
    output: list[int] = field(default_factory=list)
    has_ended: bool = False
    drafted: int = 0
    accepted: int = 0
    prediction: None = None
    refused: list[int] = field(default_factory=list)
    """Places of tokens in drafts that a grammar forbade."""

    def push(self, token: int) -> None:
        """Takes the next token."""
        assert not self.has_ended, "a token after the end"
        self.output.append(token)

    def learn(self, num_drafted: int, num_accepted: int, first: int) -> None:
        """Takes a token that cannot come true, before any of its draft is evaluated."""
        assert num_drafted - 1 == num_accepted == first
        self.refused.append(first)

    def end(self) -> None:
        """Takes the end."""
        assert not self.has_ended, "a sequence ended twice"
        self.has_ended = True


class Oracle:
    """Drafts up to `length` tokens for each row; each of them is wrong with the chance `error_rate`."""

    stats = None

    def __init__(
        self, error_rate: float = 0.0, *, length: int = 6, seed: int = 0, after: Continue = freely, idles: float = 0.0
    ) -> None:
        """`idles` is the chance that a step has no drafts at all; `after` tells the true continuation."""
        self.error_rate = error_rate
        self.length = length
        self.after = after
        self.idles = idles
        self.begun: list[OracleDrafting] = []
        self.learned: list[tuple[list[int], list[int]]] = []
        """Of each step with drafts, the drafted and the accepted tokens of each row."""
        self.observed: list[int] = []
        self.asked = 0
        """How often drafts were planned."""
        self._rng = random.Random(seed)

    def begin(self, request: GenerationRequest, num_matched: int, forced: object) -> OracleDrafting:
        """Takes an admitted request."""
        assert 0 <= num_matched <= len(request.tokens)
        self.begun.append(OracleDrafting(request))
        return self.begun[-1]

    def may_draft(self, rows: Sequence[OracleDrafting]) -> bool:
        """Always, but for idle steps."""
        return bool(rows) and self._rng.random() >= self.idles

    def plan(
        self, rows: Sequence[OracleDrafting], limits: Sequence[int], predict: object, known: Sequence[int]
    ) -> list[list[int]]:
        """Drafts within the limits, but for idle steps."""
        assert len(known) == len(rows) and min(known) > 0
        if not self.may_draft(rows):
            return [[] for _ in rows]
        self.asked += 1
        assert not any(row.has_ended for row in rows)
        return [self._draft(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def learn(
        self,
        rows: Sequence[OracleDrafting],
        fed: Sequence[int],
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
    ) -> None:
        """Notes what came of a step."""
        assert len(rows) == len(fed) == len(drafted) == len(accepted) and seconds >= 0
        assert all(number > length for number, length in zip(fed, drafted, strict=True))
        if not any(drafted):
            return
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            row.drafted += num_drafted
            row.accepted += num_accepted
        self.learned.append(([*drafted], [*accepted]))

    def observe_plain(self, num_rows: int, seconds: float, looking_seconds: float) -> None:
        """Notes a step without drafts."""
        assert seconds >= 0 and looking_seconds >= 0
        self.observed.append(num_rows)

    def observe_resumed(self, num_rows: int, seconds: float) -> None:
        """Notes the first step without drafts after one with some."""
        assert num_rows and seconds >= 0

    def _draft(self, row: OracleDrafting, limit: int) -> list[int]:
        prompt, output, draft = row.request.tokens.tolist(), [*row.output], list[int]()
        while len(draft) < min(limit, self.length):
            output.append(self.after(prompt, output))
            is_wrong = self._rng.random() < self.error_rate
            draft.append((output[-1] + 1) % VOCABULARY if is_wrong else output[-1])
        return draft

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted, of all rows."""
        return sum(sum(accepted) for _, accepted in self.learned)
