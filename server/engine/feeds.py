"""Decode steps with drafts: a row's *feed*, its known tokens and then its draft, is evaluated in one step.

How drafts are checked: `models/inference/feeds.py`. A step with drafts is prepared, read and settled at once: between
steps a sequence's log and its layer caches hold the same tokens, and none behind its end.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from models.inference.sampling_state import Draft
from models.output.grammar import MaskWords, allows
from models.output.pieces import TokenLogprob
from server.engine.request import Event
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Drafting, Speculation

if TYPE_CHECKING:
    from models.inference.runner import DecodeStep, Runner

logger = logging.getLogger(__name__)

MAX_KNOWN_TOKENS = 8
"""A row with more evaluates them first: a rejected draft may add to them."""


@dataclass(eq=False)
class Feed:
    """What one row evaluates in a step, and the outcome."""

    sequence: Sequence
    draft: list[int]
    masks: list[MaskWords | None]
    """Of each sample; all None for a row without a grammar."""
    num_fed: int
    """Tokens, known and drafted."""
    has_ended: bool
    """The output had ended before: its last token is evaluated."""
    num_accepted: int = 0
    """Tokens of the draft that stay."""
    rest: list[int] = field(default_factory=list)
    """The output's last token, unless it is of the draft."""
    is_forced: bool = False
    """`rest` was not sampled."""
    events: list[Event] = field(default_factory=list)

    def accept(self, samples: list[int], now: float, logprob: Callable[[int, int], TokenLogprob | None]) -> None:
        """Takes samples while the draft agrees with them, up to the output's end."""
        output = self.sequence.output
        follows_grammar = output.follows_grammar
        for place, (sample, drafted) in enumerate(zip_longest(samples, self.draft)):
            forced = output.forced_token()
            token = sample if forced is None else forced
            self.is_forced, self.rest = token != sample, [token]
            self.events += self.sequence.accept(token, now, logprob(token, place))
            # Behind a change of what binds the output, samples were drawn within a wrong mask.
            is_last = output.reason is None and output.follows_grammar != follows_grammar
            if token != drafted or is_last:
                return
            self.num_accepted, self.rest = place + 1, []
            if output.reason is not None:
                return

    def tell(self, now: float) -> None:
        """Hands the outcome to the client."""
        self.sequence.drafted_tokens += len(self.draft)
        self.sequence.accepted_tokens += self.num_accepted
        if not self.has_ended:
            self.sequence.post([*self.events, *self.sequence.finished(now)])


def error_of(act: Callable[[], None]) -> Exception | None:
    """An error for later: what is right is told first."""
    try:
        act()
    except Exception as error:  # an error of the model: replaying the rows shows which one is at fault
        return error
    return None


def prepare(
    table: SequenceTable, sequences: list[Sequence], previous: "DecodeStep | None", drafts: list[Draft] | None = None
) -> tuple["DecodeStep", bool]:
    """A step, and whether it waits to be sampled: a row bound to a grammar needs all tokens before."""
    waits = any(sequence.output.is_bound for sequence in sequences)
    rows, spare_bytes = [sequence.row for sequence in sequences], table.prefix_cache.reclaimer.spare_bytes
    step = table.runner.prepare(rows, previous, drafts=drafts or (), samples=not waits, spare_bytes=spare_bytes)
    if table.runner.take_change():
        table.prefix_cache.pager.measure_running()
    return step, waits


def force(runner: "Runner", sequence: Sequence, generated: list[int]) -> None:
    """Has the next step feed the last of `generated`, whatever was sampled."""
    runner.force(sequence.row, generated[-1], prompt=sequence.request.tokens, generated=generated)


class FeedSteps:
    """Plans and runs steps with drafts. Worker thread only."""

    def __init__(self, table: SequenceTable, speculation: Speculation) -> None:
        self._table, self._runner, self._clock = table, table.runner, table.clock
        self.speculation = speculation

    def may_pay(self, sequences: list[Sequence]) -> bool:
        """Whether the next step may have drafts, or must evaluate several known tokens of a row."""
        if any(len(sequence.known) > 1 for sequence in sequences):
            return True
        if not any(sequence.is_drafted_for for sequence in sequences):
            return False
        return self.speculation.may_draft([_drafting(sequence) for sequence in sequences])

    # -- before a step

    def plan(self, sequences: list[Sequence]) -> list[Feed]:
        """The feeds of the next step, all earlier tokens known; none if each has one token.

        A sequence whose grammar fails ends.
        """
        limits = [self._limit(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(limits):
            drafting = [_drafting(sequence) for sequence in sequences]
            known = [len(sequence.known) for sequence in sequences]
            drafts = self.speculation.plan(drafting, limits, partial(self._predict, sequences), known)
        if not any(drafts) and not any(len(sequence.known) > 1 for sequence in sequences):
            return []
        pairs = zip(sequences, drafts, strict=True)
        feeds = [feed for one, draft in pairs if (feed := self._feed_of(one, draft)) is not None]
        return feeds if any(feed.num_fed > 1 for feed in feeds) else []

    def _predict(self, sequences: list[Sequence], wanted: list[int]) -> list[list[int]]:
        """What the drafter drafts; nothing if it fails: the step then shows whose state has survived."""
        for sequence in sequences:
            sequence.row.known = [*sequence.known]
        begun = self._clock()
        try:
            drafts = self._runner.draft([sequence.row for sequence in sequences], wanted)
        except Exception as error:  # of the device
            logger.warning("drafting failed: %s", error)
            for sequence in sequences:
                _drafting(sequence).forgo_drafter()
            return [[] for _ in sequences]
        self.speculation.observe_drafting(wanted, self._clock() - begun)
        return drafts

    def _limit(self, sequence: Sequence) -> int:
        """The longest draft, in tokens: the sample behind the last one still fits."""
        num_known, lease = len(sequence.known), sequence.lease
        if not sequence.is_drafted_for or num_known > MAX_KNOWN_TOKENS or lease is None:
            return 0
        left_tokens = sequence.request.max_tokens - len(sequence.output.tokens)
        return max(0, min(left_tokens - 1, lease.spare_tokens - num_known, self._runner.max_feed_tokens - num_known))

    def _feed_of(self, sequence: Sequence, draft: list[int]) -> Feed | None:
        """None if the grammar cannot be followed."""
        try:
            masks = sequence.output.masks_along(draft)
        except Exception as error:  # an error of the grammar concerns this row only
            self._table.fail_bound(sequence, error)
            return None
        cut = len(masks) - 1
        if draft[cut:] and (mask := masks[cut]) is not None and not allows(mask, draft[cut]):
            _drafting(sequence).learn(cut + 1, cut, first=cut)
        draft = draft[:cut]
        num_fed = len(sequence.known) + len(draft)
        return Feed(sequence, draft, masks, num_fed, sequence.output.reason is not None)

    # -- a step

    def evaluate(self, feeds: list[Feed]) -> Exception | None:
        """Evaluates and settles a step. Returns an error of the model: the live state of all rows is then lost."""
        try:
            step = self._started(feeds)
            samples = step.tokens()
        except Exception as error:  # replaying the rows shows which one is at fault
            return error
        now = self._clock()
        for index, (feed, found) in enumerate(zip(feeds, samples, strict=True)):
            if not feed.has_ended:
                feed.accept(found, now, partial(step.logprob, index))
        # What was accepted is told even so: it is right, whatever becomes of the state.
        fault = error_of(partial(self._settle, step, feeds))
        for feed in feeds:
            feed.tell(now)
        if fault is None:
            for feed in feeds:
                self._table.close_evaluated(feed.sequence)
        return fault

    def _started(self, feeds: list[Feed]) -> "DecodeStep":
        for feed in feeds:
            feed.sequence.row.known = [*feed.sequence.known]
        drafts = [Draft(feed.draft, feed.sequence.request.tokens, feed.sequence.output.tokens) for feed in feeds]
        step, waits = prepare(self._table, [feed.sequence for feed in feeds], None, drafts)
        if waits:
            self._runner.sample(step, [mask for feed in feeds for mask in feed.masks])
        self._runner.start(step)
        return step

    def _settle(self, step: "DecodeStep", feeds: list[Feed]) -> None:
        held = self._runner.settle(step, [feed.num_accepted for feed in feeds])
        for feed, num_held in zip(feeds, held, strict=True):
            sequence = feed.sequence
            sequence.num_launched = len(sequence.output.tokens)
            sequence.known += feed.draft[: feed.num_accepted]
            assert num_held in (0, len(sequence.known)), "a feed stays up to what was accepted, or not at all"
            if num_held:
                sequence.record()
            sequence.known += feed.rest
            if feed.is_forced and feed.rest:
                force(self._runner, sequence, sequence.output.tokens)

    def learn(self, feeds: list[Feed], seconds: float) -> None:
        """Notes a step that is over."""
        rows, fed = [_drafting(feed.sequence) for feed in feeds], [feed.num_fed for feed in feeds]
        drafted, accepted = [len(feed.draft) for feed in feeds], [feed.num_accepted for feed in feeds]
        self.speculation.learn(rows, fed, drafted, accepted, seconds)


def _drafting(sequence: Sequence) -> Drafting:
    assert sequence.drafting is not None, "a sequence decodes that was never admitted"
    return sequence.drafting
