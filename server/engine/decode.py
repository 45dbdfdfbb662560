"""Decode steps, double-buffered: a step is prepared before the tokens of the step before it are read.

* *launch*: where the runner overlaps, a step starts before the previous one is read;
* *sample*: a row bound to a grammar is sampled once the previous tokens are read, while the model is evaluated. A row
  that they bind first, as the opener of a call does, is sampled a second time;
* *record*: a token joins the lease's log once it is known, and before it is evaluated a second time;
* *recover*: every row of a failed step loses its live state and is replayed from the trie, alone until a step
  succeeds. A row that fails alone is at fault and ends.

A step with drafts evaluates a row's *feed*, its known tokens and then its draft (`models/inference/feeds.py`). It is
prepared with the step before it read, and is read and settled at once: between steps a sequence's log and its layer
caches hold the same tokens, and none behind its end.

A forced token (`output.py`) replaces the sampled one. A sequence whose last token is not yet evaluated stays for one
more step, so that the next turn can restore that token.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from models.errors import GrammarFailed, RowLost
from models.output.grammar import MaskWords, allows
from models.output.pieces import TokenLogprob
from server.engine.request import AnswerUnbound, Event, StepFailed, is_out_of_memory
from server.engine.scheduler import Phase
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Drafting, Speculation

if TYPE_CHECKING:
    from models.inference.runner import DecodeStep

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
    num_accepted: int = 0
    rest: list[int] = field(default_factory=list)
    """The output's last token, unless it is of the draft."""
    is_forced: bool = False
    """`rest` was not sampled."""

    def accept(self, samples: list[int], now: float, logprob: Callable[[int, int], TokenLogprob | None]) -> None:
        """Takes samples while the draft agrees with them, up to the output's end; tells the client."""
        sequence, output, events = self.sequence, self.sequence.output, list[Event]()
        follows_grammar = output.follows_grammar
        for place, (sample, drafted) in enumerate(zip_longest(samples, self.draft)):
            forced = output.forced_token()
            token = sample if forced is None else forced
            self.is_forced, self.rest = token != sample, [token]
            events += sequence.accept(token, now, logprob(token, place))
            # Behind a change of what binds the output, samples were drawn within a wrong mask.
            is_last = output.reason is None and output.follows_grammar != follows_grammar
            if token != drafted or is_last:
                break
            self.num_accepted, self.rest = place + 1, []
            if output.reason is not None:
                break
        sequence.drafted_tokens += len(self.draft)
        sequence.accepted_tokens += self.num_accepted
        sequence.post([*events, *sequence.finished(now)])


@dataclass
class InFlightStep:
    """A prepared or launched step and its sequences, until it is read."""

    step: "DecodeStep"
    sequences: list[Sequence]
    waits: bool
    """The step is to be sampled once the tokens before it are read: a row is bound to a grammar."""


class DecodePipeline:
    """Decodes all sequences, one token of each in a step. Worker thread only."""

    def __init__(self, table: SequenceTable) -> None:
        self._table, self._runner, self._clock = table, table.runner, table.clock
        self._in_flight: InFlightStep | None = None

    def next_sequences(self) -> list[Sequence]:
        """All sequences that decode, the best rank first, or the first suspect alone."""
        decoding = self._table.in_phase(Phase.DECODING)
        ready = [one for one in decoding if one.may_launch or one.output.reason is not None]
        return [one for one in ready if one.is_suspect][:1] or ready

    def step(self) -> None:
        """Launches the next step and reads the one before."""
        self._step_plain(self.next_sequences())

    def _step_plain(self, sequences: list[Sequence]) -> None:
        previous, self._in_flight = self._in_flight, None
        error = self._error_of(partial(self._launch, sequences, previous)) if sequences else None
        if error is not None:
            # The error may be of the step before, which then would read as garbage.
            self._recover([*(previous.sequences if previous is not None else []), *sequences], error)
            return
        if previous is not None:
            self._read(previous)
        if (error := self._error_of(self._complete)) is not None:
            self._recover(sequences, error)
            return
        told = sequences if previous is None else [*previous.sequences, *sequences]
        if ended := [one for one in told if one.output.reason is not None and one.needs_no_step]:
            self.read()  # closing evaluates state, which nothing may do beside a step
            self._table.close_finished(ended)

    def read(self) -> None:
        """Waits for the launched step."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._read(launched)
            self._table.close_finished(one for one in launched.sequences if one.needs_no_step)

    def forget(self) -> None:
        """Takes back the launched step, which may have failed."""
        self._in_flight = None

    def _error_of(self, act: Callable[[], None]) -> Exception | None:
        """An error of the model. The prepared step is then lost."""
        try:
            act()
        except Exception as error:  # replaying the rows shows which one is at fault
            self._in_flight = None
            return error
        return None

    # -- launch

    def _launch(self, sequences: list[Sequence], previous: InFlightStep | None) -> None:
        prepared = self._prepare(sequences, previous)
        for sequence in sequences:
            sequence.num_launched += 1
            sequence.record()
        self._in_flight = prepared
        if self._runner.overlaps:
            self._runner.start(prepared.step)

    def _prepare(
        self, sequences: list[Sequence], previous: InFlightStep | None, drafts: tuple[list[int], ...] = ()
    ) -> InFlightStep:
        """A step behind `previous`, if that is not read yet."""
        for sequence in sequences:
            if previous is None or sequence not in previous.sequences:
                assert drafts or len(sequence.known) == 1, "a step without drafts feeds one token"
                sequence.row.known = [*sequence.known]
            elif (forced := sequence.output.forced_token()) is not None:
                self._force(sequence, [*sequence.output.tokens, forced])
        step = self._runner.prepare(
            [sequence.row for sequence in sequences],
            None if previous is None else previous.step,
            drafts=drafts,
            samples=not (waits := any(sequence.output.is_bound for sequence in sequences)),
            spare_bytes=self._table.prefix_cache.reclaimer.spare_bytes,
        )
        if self._runner.take_change():
            self._table.prefix_cache.pager.measure_running()
        return InFlightStep(step, sequences, waits)

    def _force(self, sequence: Sequence, generated: list[int]) -> None:
        """Has the next step feed the last of `generated`, whatever was sampled."""
        self._runner.force(sequence.row, generated[-1], prompt=sequence.request.tokens, generated=generated)

    # -- sample

    def _complete(self) -> None:
        """Samples a step that waits, and starts one that has not started."""
        launched = self._in_flight
        if launched is None:
            return
        newly_bound = [one for one in launched.sequences if one.output.is_bound and one in self._table]
        if launched.waits:
            masks = [self._masks_along(one, []) if one in self._table else None for one in launched.sequences]
            self._runner.sample(launched.step, [found[0] if found is not None else None for found in masks])
        else:
            for sequence in newly_bound:
                self._sample_again(sequence, launched.step)
        if launched.waits or newly_bound or not self._runner.overlaps:
            self._runner.start(launched.step)

    def _sample_again(self, sequence: Sequence, step: "DecodeStep") -> None:
        """The sample that a row drew before it was bound does not count."""
        if masks := self._masks_along(sequence, []):
            prompt, generated = sequence.request.tokens, sequence.output.tokens
            self._runner.sample_again(step, sequence.row, masks[0], prompt=prompt, generated=generated)

    def _masks_along(self, sequence: Sequence, draft: list[int]) -> list[MaskWords | None] | None:
        """As of the output; None where a grammar cannot be followed, which ends the sequence."""
        try:
            return sequence.output.masks_along(draft)
        except Exception as error:  # an error of the grammar concerns this row only
            logger.warning("request %s failed: %s", sequence.request.request_id, error)
            kind = AnswerUnbound if isinstance(error, GrammarFailed) else StepFailed
            self._table.fail(sequence, kind(str(error)))
            return None

    # -- read

    def _read(self, launched: InFlightStep) -> None:
        newer = self._in_flight.sequences if self._in_flight is not None else []
        try:
            tokens = launched.step.tokens()
        except Exception as error:  # an error of the device is raised only when the step is waited for
            self._in_flight = None
            self._recover([*launched.sequences, *newer], error)
            return
        for index, (sequence, (token,)) in enumerate(zip(launched.sequences, tokens, strict=True)):
            if sequence.output.reason is None and sequence in self._table:
                self._accept(sequence, token, partial(launched.step.logprob, index), is_fed=sequence in newer)

    def _accept(
        self, sequence: Sequence, sampled: int, logprob: Callable[[int], TokenLogprob | None], *, is_fed: bool
    ) -> None:
        """`is_fed`: the next step, launched already, has the token."""
        forced = sequence.output.forced_token()
        if forced is not None and not is_fed:
            try:
                self._force(sequence, [*sequence.output.tokens, forced])
            except Exception as error:  # of the device, while the row's penalties are made anew
                self._table.fail_step(sequence, error)
                return
        token, now = sampled if forced is None else forced, self._clock()
        sequence.is_suspect = False
        sequence.known = [token]
        if is_fed:
            sequence.record()
        sequence.post([*sequence.accept(token, now, logprob(token)), *sequence.finished(now)])

    # -- recover

    def _recover(self, sequences: list[Sequence], error: Exception, *, may_be_at_fault: bool = True) -> None:
        """Replays every row without its live state, unless it alone can be at fault. Raises DeviceLost."""
        self._runner.drain()
        alive = [one for one in dict.fromkeys(sequences) if one in self._table and one.lease is not None]
        alive += [one for one in self._table if one.has_lost_state and one not in alive]
        if len(alive) == 1 and may_be_at_fault and not isinstance(error, RowLost):
            self._table.fail_step(alive[0], error)
            return
        logger.warning("a decode step of %d rows failed; replaying each: %s", len(alive), error)
        for sequence in alive:
            if sequence.output.reason is not None:
                self._table.fail_step(sequence, error)
            else:
                self._table.replay(sequence)
        if is_out_of_memory(error):
            self._table.defer_youngest(alive)
            self._table.lacks_memory = True


class DraftingPipeline(DecodePipeline):
    """Decodes with drafts where drafts pay; a step with drafts is read at once."""

    def __init__(self, table: SequenceTable, speculation: Speculation) -> None:
        super().__init__(table)
        self._speculation = speculation
        self._left_seconds: float | None = None
        """What the last plain step's end took, if a step with drafts was to follow it at once."""

    def step(self) -> None:
        """Launches a step and reads the one before; a step with drafts is read too."""
        begun = self._clock()
        if self._in_flight is None:
            self._step_known(begun)
        elif self._may_pay(sequences := self.next_sequences()):
            self.read()
            now = self._clock()
            self._left_seconds = now - begun
            self._step_known(now)
        else:
            looked = self._clock()
            self._step_plain(sequences)
            if sequences:
                self._speculation.observe_plain(len(sequences), self._clock() - looked, looked - begun)

    def _may_pay(self, sequences: list[Sequence]) -> bool:
        """Whether the next step may have drafts, or must evaluate several known tokens of a row."""
        if any(len(sequence.known) > 1 for sequence in sequences):
            return True
        if not any(sequence.is_drafted_for for sequence in sequences):
            return False
        return self._speculation.may_draft([_drafting(sequence) for sequence in sequences])

    def _step_known(self, begun: float) -> None:
        """A step before which all tokens are known."""
        sequences = self._with_memory()
        if feeds := self._plan(sequences):
            self._step_feeds(feeds, begun)
            return
        self._step_plain(self._with_memory())
        if self._left_seconds is not None and sequences:
            # Where drafts ended plain steps, end and beginning together outlast a step.
            self._speculation.observe_resumed(len(sequences), self._left_seconds + self._clock() - begun)
        self._left_seconds = None

    def _with_memory(self) -> list[Sequence]:
        """The next sequences for which memory is reserved: what has just ended waits for a step."""
        return [one for one in self.next_sequences() if one.has_memory]

    # -- before a step

    def _plan(self, sequences: list[Sequence]) -> list[Feed]:
        """The feeds of the next step, all earlier tokens known; none if each has one token.

        A sequence whose grammar fails ends.
        """
        limits = [self._limit(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(limits):
            drafting = [_drafting(sequence) for sequence in sequences]
            known = [len(sequence.known) for sequence in sequences]
            drafts = self._speculation.plan(drafting, limits, partial(self._predict, sequences), known)
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
                _drafting(sequence).drafter = None
            return [[] for _ in sequences]
        self._speculation.observe_drafter(wanted, self._clock() - begun)
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
        masks = self._masks_along(sequence, draft)
        if masks is None:
            return None
        cut = len(masks) - 1
        if draft[cut:] and (mask := masks[cut]) is not None and not allows(mask, draft[cut]):
            _drafting(sequence).learn(cut + 1, cut, first=cut)
        draft = draft[:cut]
        return Feed(sequence, draft, masks, len(sequence.known) + len(draft))

    # -- a step

    def _step_feeds(self, feeds: list[Feed], begun: float) -> None:
        sequences = [feed.sequence for feed in feeds]
        error = self._run(feeds)
        if error is not None:
            for sequence in sequences:
                # The drafts may be at fault, and must not cost a replay again and again.
                sequence.may_draft &= isinstance(error, RowLost)
            self._recover(sequences, error, may_be_at_fault=False)
            return
        fed, drafted = [feed.num_fed for feed in feeds], [len(feed.draft) for feed in feeds]
        accepted = [feed.num_accepted for feed in feeds]
        self._speculation.learn(list(map(_drafting, sequences)), fed, drafted, accepted, self._clock() - begun)

    def _run(self, feeds: list[Feed]) -> Exception | None:
        """Evaluates and settles a step. Returns an error of the model: the live state of all rows is then lost."""
        try:
            step = self._started(feeds)
            samples = step.tokens()
        except Exception as error:  # replaying the rows shows which one is at fault
            return error
        now = self._clock()
        for index, (feed, found) in enumerate(zip(feeds, samples, strict=True)):
            if feed.sequence.output.reason is None:  # else the last token was evaluated
                # Before the step is settled: what was accepted is right, whatever becomes of the state.
                feed.accept(found, now, partial(step.logprob, index))
        fault = self._error_of(partial(self._settle, step, feeds))
        if fault is None:
            self._table.close_finished(feed.sequence for feed in feeds if feed.sequence.needs_no_step)
        return fault

    def _started(self, feeds: list[Feed]) -> "DecodeStep":
        drafts = tuple(feed.draft for feed in feeds)
        prepared = self._prepare([feed.sequence for feed in feeds], None, drafts)
        if prepared.waits:
            self._runner.sample(prepared.step, [mask for feed in feeds for mask in feed.masks])
        self._runner.start(prepared.step)
        return prepared.step

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
                self._force(sequence, sequence.output.tokens)


def _drafting(sequence: Sequence) -> Drafting:
    assert sequence.drafting is not None, "a sequence decodes that was never admitted"
    return sequence.drafting
