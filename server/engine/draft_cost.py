"""What a step with drafts costs, and how much time drafts may still lose. Pure.

Costs of model calls are measured at load; plain steps, and what drafts add to a step, while serving, from every step
of the engine, measured whole. A *stall* is a step that waited for something else than its work. Each rule here is one
without which some line of the table in `docs/benchmarks.md` is slower.
"""

from collections.abc import Mapping

import numpy as np

MIN_GAIN = 0.03
"""Part of the tokens per second that drafts must add."""
MAX_STEP_TOKENS = 4096
"""Most tokens of all rows that a step's cost is learned for; more cost as much."""
CORRECTION = 0.2
"""By which part of its error an estimate is corrected."""
_STALL = 1.5
"""A step this much slower than expected is a stall, unless the step before was as slow."""
_PLAIN_CORRECTION = 0.15
_MIN_SLOPE = 0.005
"""What a token adds at least to a call, in calls of one token."""
_NUM_FIRST_STEPS = 3
"""Plain steps of which the quickest counts, before an average does."""
_DECAY = 0.9
_PLAIN_DECAY = 0.99
"""What a step with drafts, and a plain one, leave of the weight of earlier ones."""
_CALL_PRIOR = 0.3
_SCALE_PRIOR = 0.003
"""Weights of the belief that a call costs what was measured at load."""
_FIRST_BUDGET = 3.0
_MAX_BUDGET = 16.0
_FIRST_DEFICIT = 2.0
_MAX_DEFICIT = 16.0
"""In plain steps."""
_INCOME = 0.0075
"""The part of all time that drafts may lose."""
_LOOKUP_SHARE = 0.015
_MAX_LOOKUP = 0.1
"""What looking drafts up may take of each plain step, and what one look-up counts at most."""


class StallFilter:
    """Tells a stall from a step that costs more than was expected: only the latter comes twice."""

    def __init__(self) -> None:
        self._last = 1.0

    def filtered(self, seconds: float, expected: float) -> float:
        """Takes a step; returns its seconds, fewer after a stall."""
        limit, self._last = max(self._last, _STALL), seconds / expected
        return min(self._last, limit) * expected


class StepCost:
    """Seconds of model calls by tokens, measured at load, and of plain steps by rows, measured while serving."""

    def __init__(self, call_seconds: Mapping[int, float]) -> None:
        widths = sorted(call_seconds)
        seconds = np.maximum.accumulate([call_seconds[width] for width in widths])
        # Where calls of any length seem to take as long, a token still costs something.
        seconds += seconds[0] * _MIN_SLOPE * (np.array(widths) - 1)
        slope = max((seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2]), seconds[-1] / widths[-1] / 2)
        widths.append(MAX_STEP_TOKENS)
        seconds = np.append(seconds, seconds[-1] + slope * (MAX_STEP_TOKENS - widths[-2]))
        self.calls: list[float] = np.interp(range(MAX_STEP_TOKENS + 1), widths, seconds).tolist()
        """The cost of a model call, by its tokens."""
        self._plain: dict[int, tuple[float, int, StallFilter]] = {}

    def plain(self, num_rows: int) -> float:
        """Seconds of a step without drafts; 0 for no rows."""
        if num_rows in self._plain or not num_rows:
            return self._plain[num_rows][0] if num_rows else 0.0
        if not self._plain:
            return self.calls[num_rows]
        near = min(self._plain, key=lambda other: abs(other - num_rows))
        return self._plain[near][0] * self.calls[num_rows] / self.calls[near]

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Takes a plain step."""
        mean, num_steps, stalls = self._plain.get(num_rows, (seconds, 0, StallFilter()))
        is_first, change = num_steps < _NUM_FIRST_STEPS, stalls.filtered(seconds, mean) - mean
        mean += min(change, 0.0) if is_first else _PLAIN_CORRECTION * change
        self._plain[num_rows] = mean, num_steps + 1, stalls


class AddedCost:
    """What drafts add to steps: a regression over the last ones. In plain steps.

    A call with drafts takes `call` longer than at load, a drafted token `scale` times as long. The measurement at
    load counts little.
    """

    def __init__(self) -> None:
        self.call, self.scale = 0.0, 1.0
        self.resume = 0.0
        """How much longer the first plain step takes after one with drafts."""
        self._stalls = StallFilter()
        self._sums = [0.0] * 5

    def observe_plain(self) -> None:
        """Takes a plain step: earlier steps with drafts count less, so that they are tried again."""
        self._sums = [_PLAIN_DECAY * value for value in self._sums]

    def observe_resumed(self, lost: float) -> None:
        """Takes what the first plain step after one with drafts lost."""
        self.resume = max(0.0, self.resume + CORRECTION * (lost - self.resume))

    def learn(self, num_calls: int, added: float, base: float, took: float) -> float:
        """Takes a step, of which load-time costs explain `base` and `added`; returns `took`, less after a stall."""
        took = self._stalls.filtered(took, base + self.call * num_calls + self.scale * added)
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


class OverheadBudget:
    """How much time drafts may still lose. In plain steps.

    Whatever was expected, drafts pay what they lose from a budget, to which steps that gain, and plain steps, add. A
    drafter has a budget of its own: what it loses keeps no text from being followed. A deficit is limited, at first
    to little: a stall of several steps looks like drafts that cost too much, but only the latter lead into a deficit
    again and again.
    """

    def __init__(self) -> None:
        self._budgets = [_FIRST_BUDGET, _FIRST_BUDGET]
        """The budgets of followed texts and of the drafter."""
        self._max_deficits = [_FIRST_DEFICIT, _FIRST_DEFICIT]
        """Doubled by a step that leads beyond it, halved by each that gains."""
        self._lookup_overrun = 0.0

    def left(self, of_drafter: bool) -> float:
        """What the drafter, or else a followed text, may make the next step take longer than a plain one."""
        return self._budgets[of_drafter]

    @property
    def may_look_up(self) -> bool:
        """Whether to look drafts up beside a plain step: on a small model that takes a part of the step."""
        return self._lookup_overrun <= 0

    def observe_plain(self, lookup: float) -> None:
        """Takes a plain step, beside which drafts were looked up for so long."""
        self._lookup_overrun = max(0.0, self._lookup_overrun + min(lookup, _MAX_LOOKUP) - _LOOKUP_SHARE)
        self._budgets = [min(left + _INCOME, max(left, _FIRST_BUDGET)) for left in self._budgets]

    def lose(self, lost: float, *, of_drafter: bool) -> None:
        """Takes what leaving and resuming plain steps lost."""
        self._budgets[of_drafter] -= lost

    def settle(self, gained: float, took: float, *, of_drafter: bool) -> None:
        """Takes the tokens of a step with drafts, and how long it took, as if no others had drafted."""
        change, max_deficit = gained * (1 - MIN_GAIN) - took, self._max_deficits[of_drafter]
        left = self._budgets[of_drafter] + change
        self._budgets[of_drafter] = max(-max_deficit, min(left, _MAX_BUDGET))
        if left < -max_deficit:
            self._max_deficits[of_drafter] = min(2 * max_deficit, _MAX_DEFICIT)
        elif change > 0:
            self._max_deficits[of_drafter] = max(max_deficit / 2, _FIRST_DEFICIT)
