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

from cache.prefix_cache import PrefixCache
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

    def for_runner(self) -> Draft:
        """The draft, with what comes before it."""
        return Draft(self.draft, self.sequence.request.tokens, self.sequence.output.tokens)

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


class FeedSteps:
    """Plans and runs steps with drafts. Worker thread only."""

    def __init__(
        self,
        runner: "Runner",
        prefix_cache: PrefixCache,
        table: SequenceTable,
        speculation: Speculation,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._table = table
        self._speculation = speculation
        self._clock = clock
        self._left_seconds: float | None = None
        """What the last plain step's end took, if a step with drafts was to follow it at once."""

    def may_pay(self, sequences: list[Sequence]) -> bool:
        """Whether the next step may have drafts, or must evaluate several known tokens of a row."""
        if any(len(sequence.decode.known) > 1 for sequence in sequences):
            return True
        if not any(_is_drafted_for(sequence) for sequence in sequences):
            return False
        return self._speculation.may_draft([_drafting(sequence) for sequence in sequences])

    # -- time: every step is a plain one, the end or the beginning of several, or one with feeds

    def observe(self, num_rows: int, begun: float, looked: float) -> None:
        """Notes a plain step for which `may_pay` looked from `begun` until `looked`."""
        if num_rows:
            self._speculation.observe(num_rows, self._clock() - looked, looked - begun)

    def has_left(self, begun: float) -> float:
        """Notes that the last plain step is read; returns the time."""
        now = self._clock()
        self._left_seconds = now - begun
        return now

    def observe_restart(self, num_rows: int, begun: float) -> None:
        """Notes that plain steps begin again. Where drafts ended them, end and beginning together outlast a step."""
        if self._left_seconds is not None and num_rows:
            self._speculation.observe_restart(num_rows, self._left_seconds + self._clock() - begun)
        self._left_seconds = None

    def learn(self, feeds: list[Feed], begun: float) -> None:
        """Notes a step with feeds that is over."""
        rows, fed = [_drafting(feed.sequence) for feed in feeds], [feed.num_fed for feed in feeds]
        drafted, accepted = [len(feed.draft) for feed in feeds], [feed.num_accepted for feed in feeds]
        self._speculation.learn(rows, fed, drafted, accepted, self._clock() - begun)

    # -- before a step

    def plan(self, sequences: list[Sequence]) -> list[Feed]:
        """The feeds of the next step, all earlier tokens known; none if each has one token.

        A sequence whose grammar fails ends.
        """
        limits = [self._limit(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(limits):
            drafting = [_drafting(sequence) for sequence in sequences]
            known = [len(sequence.decode.known) for sequence in sequences]
            drafts = self._speculation.plan(drafting, limits, partial(self._predict, sequences), known)
        if not any(drafts) and not any(len(sequence.decode.known) > 1 for sequence in sequences):
            return []
        pairs = zip(sequences, drafts, strict=True)
        feeds = [feed for one, draft in pairs if (feed := self._feed_of(one, draft)) is not None]
        return feeds if any(feed.num_fed > 1 for feed in feeds) else []

    def _predict(self, sequences: list[Sequence], wanted: list[int]) -> list[list[int]]:
        """What the drafter drafts; nothing if it fails: the step then shows whose state has survived."""
        for sequence in sequences:
            sequence.decode.row.known = [*sequence.decode.known]
        begun = self._clock()
        try:
            drafts = self._runner.draft([sequence.decode.row for sequence in sequences], wanted)
        except Exception as error:  # of the device
            logger.warning("drafting failed: %s", error)
            for sequence in sequences:
                _drafting(sequence).forgo_drafter()
            return [[] for _ in sequences]
        self._speculation.observe_drafting(wanted, self._clock() - begun)
        return drafts

    def _limit(self, sequence: Sequence) -> int:
        """The longest draft, in tokens: the sample behind the last one still fits."""
        num_known, lease = len(sequence.decode.known), sequence.lease
        if not _is_drafted_for(sequence) or num_known > MAX_KNOWN_TOKENS or lease is None:
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
        num_fed = len(sequence.decode.known) + len(draft)
        return Feed(sequence, draft, masks, num_fed, sequence.output.reason is not None)

    # -- a step

    def evaluate(self, feeds: list[Feed]) -> Exception | None:
        """Evaluates and settles a step. Returns an error of the model: the live state of all rows is then lost."""
        try:
            step = self._prepared(feeds)
            self._runner.start(step)
            samples = step.tokens()
        except Exception as error:  # replaying the rows shows which one is at fault
            return error
        now = self._clock()
        for index, (feed, found) in enumerate(zip(feeds, samples, strict=True)):
            if not feed.has_ended:
                feed.accept(found, now, partial(step.logprob, index))
        fault = self._settling_fault(step, feeds)
        self._tell(feeds, now)
        if fault is None:
            for feed in feeds:
                self._close_if_ended(feed.sequence)
        return fault

    def _prepared(self, feeds: list[Feed]) -> "DecodeStep":
        is_bound = any(feed.sequence.output.is_bound for feed in feeds)
        for feed in feeds:
            feed.sequence.decode.row.known = [*feed.sequence.decode.known]
        step = self._runner.prepare(
            [feed.sequence.decode.row for feed in feeds],
            None,
            drafts=[feed.for_runner() for feed in feeds],
            samples=not is_bound,
            spare_bytes=self._prefix_cache.reclaimer.spare_bytes,
        )
        if self._runner.take_change():
            self._prefix_cache.pager.measure_running()
        if is_bound:
            self._runner.sample(step, [mask for feed in feeds for mask in feed.masks])
        return step

    # -- after it

    def _settling_fault(self, step: "DecodeStep", feeds: list[Feed]) -> Exception | None:
        """What was accepted is told first: it is right, whatever becomes of the state."""
        try:
            self._settle(step, feeds)
        except Exception as error:
            return error
        return None

    def _settle(self, step: "DecodeStep", feeds: list[Feed]) -> None:
        held = self._runner.settle(step, [feed.num_accepted for feed in feeds])
        for feed, num_held in zip(feeds, held, strict=True):
            sequence = feed.sequence
            sequence.decode.num_launched = len(sequence.output.tokens)
            sequence.decode.known += feed.draft[: feed.num_accepted]
            assert num_held in (0, len(sequence.decode.known)), "a feed stays up to what was accepted, or not at all"
            if num_held:
                sequence.record()
            sequence.decode.known += feed.rest
            if feed.is_forced and feed.rest:
                self._runner.force(
                    sequence.decode.row,
                    feed.rest[0],
                    prompt=sequence.request.tokens,
                    generated=sequence.output.tokens,
                )

    def _tell(self, feeds: list[Feed], now: float) -> None:
        for feed in feeds:
            feed.sequence.drafted_tokens += len(feed.draft)
            feed.sequence.accepted_tokens += feed.num_accepted
            if not feed.has_ended:
                feed.sequence.post([*feed.events, *feed.sequence.finished(now)])

    def _close_if_ended(self, sequence: Sequence) -> None:
        if sequence.output.reason is not None and not (sequence.decode.known and sequence.request.cache_prompt):
            self._table.close(sequence)


def _is_drafted_for(sequence: Sequence) -> bool:
    return sequence.may_draft and not sequence.decode.is_suspect and sequence.output.reason is None


def _drafting(sequence: Sequence) -> Drafting:
    assert sequence.drafting is not None, "a sequence decodes that was never admitted"
    return sequence.drafting
