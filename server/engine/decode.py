"""Decode steps, double-buffered: a step is prepared before the tokens of the step before it are read.

A step with drafts is not: `feeds.py` evaluates it at once, with the step before it read. Else:

* *launch*: where the runner overlaps, a step starts before the previous one is read;
* *sample*: a row bound to a grammar is sampled once the previous tokens are read, while the model is evaluated;
* *record*: a token joins the lease's log once it is known, and before it is evaluated a second time;
* *recover*: every row of a failed step loses its live state and is replayed from the trie, alone until a step
  succeeds. A row that fails alone is at fault and ends.

A forced token (`output.py`) replaces the sampled one. A sequence whose last token is not yet evaluated stays for one
more step, so that the next turn can restore that token.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from models.errors import RowLost
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from server.engine.feeds import Feed, FeedSteps, error_of, force, prepare
from server.engine.request import is_out_of_memory
from server.engine.scheduler import Phase
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Speculation

if TYPE_CHECKING:
    from models.inference.runner import DecodeStep

logger = logging.getLogger(__name__)


@dataclass
class InFlightStep:
    """A launched decode step and its sequences, until it is read."""

    step: "DecodeStep"
    sequences: list[Sequence]
    waits: bool
    """The step is sampled once the tokens before it are read."""


class DecodePipeline:
    """Decodes all sequences, one step after another. Worker thread only."""

    def __init__(self, table: SequenceTable, speculation: Speculation | None) -> None:
        self._table, self._runner, self._clock = table, table.runner, table.clock
        self._feeds = FeedSteps(table, speculation) if speculation is not None else None
        self._in_flight: InFlightStep | None = None
        self._left_seconds: float | None = None
        """What the last plain step's end took, if a step with drafts was to follow it at once."""

    def next_sequences(self) -> list[Sequence]:
        """All sequences that decode, the best rank first, or the first suspect alone."""
        decoding = self._table.scheduler.in_phase(Phase.DECODING)
        ready = [one for one in decoding if one.may_launch or one.output.reason is not None]
        return [one for one in ready if one.is_suspect][:1] or ready

    def step(self) -> None:
        """Launches the next step and reads the one before; a step with drafts is read too."""
        begun = self._clock()
        if self._feeds is None:
            self._step_plain(self.next_sequences())
        elif self._in_flight is None:
            self._step_known(self._feeds, begun)
        elif self._feeds.may_pay(sequences := self.next_sequences()):
            self.read()
            now = self._clock()
            self._left_seconds = now - begun
            self._step_known(self._feeds, now)
        else:
            looked = self._clock()
            self._step_plain(sequences)
            if sequences:
                self._feeds.speculation.observe(len(sequences), self._clock() - looked, looked - begun)

    def _step_known(self, steps: FeedSteps, begun: float) -> None:
        """A step before which all tokens are known."""
        sequences = self._with_memory()
        if feeds := steps.plan(sequences):
            self._step_feeds(steps, feeds, begun)
            return
        self._step_plain(self._with_memory())
        if self._left_seconds is not None and sequences:
            # Where drafts ended plain steps, end and beginning together outlast a step.
            steps.speculation.observe_restart(len(sequences), self._left_seconds + self._clock() - begun)
        self._left_seconds = None

    def _with_memory(self) -> list[Sequence]:
        """The next sequences for which memory is reserved: what has just ended waits for a step."""
        return [one for one in self.next_sequences() if one.has_memory]

    def _step_feeds(self, steps: FeedSteps, feeds: list[Feed], begun: float) -> None:
        error = steps.evaluate(feeds)
        if error is None:
            steps.learn(feeds, self._clock() - begun)
            return
        sequences = [feed.sequence for feed in feeds]
        for sequence in sequences:
            # The drafts may be at fault, and must not cost a replay again and again.
            sequence.may_draft &= isinstance(error, RowLost)
        self._recover(sequences, error, may_be_at_fault=False)

    def _step_plain(self, sequences: list[Sequence]) -> None:
        previous, self._in_flight = self._in_flight, None
        error = error_of(partial(self._prepare, sequences, previous))
        if self._runner.overlaps:
            error = error or error_of(self._start)
        if previous is not None:
            self._read(previous)
        error = error or error_of(self._sample)
        if not self._runner.overlaps:
            error = error or error_of(self._start)
        if error is not None:
            self._recover(sequences, error)
        else:
            self._table.close_finished(sequences)

    def read(self) -> None:
        """Waits for the launched step."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._read(launched)

    # -- launch

    def _prepare(self, sequences: list[Sequence], previous: InFlightStep | None) -> None:
        if not sequences:
            return
        for sequence in sequences:
            if previous is None or sequence not in previous.sequences:
                assert len(sequence.known) == 1, "a step without drafts feeds one token"
                sequence.row.known = [*sequence.known]
            elif (forced := sequence.output.forced_token()) is not None:
                self._force(sequence, forced)
        step, waits = prepare(self._table, sequences, previous.step if previous else None)
        for sequence in sequences:
            sequence.num_launched += 1
            sequence.record()
        self._in_flight = InFlightStep(step, sequences, waits)

    def _force(self, sequence: Sequence, token: int) -> None:
        force(self._runner, sequence, [*sequence.output.tokens, token])

    def _start(self) -> None:
        prepared, self._in_flight = self._in_flight, None
        if prepared is not None:
            self._runner.start(prepared.step)
            self._in_flight = prepared

    # -- sample

    def _sample(self) -> None:
        waiting = self._in_flight
        if waiting is None or not waiting.waits:
            return
        self._in_flight = None
        masks = [self._mask_of(sequence) for sequence in waiting.sequences]
        self._runner.sample(waiting.step, masks)
        self._in_flight = waiting
        if self._runner.overlaps:
            self._start()

    def _mask_of(self, sequence: Sequence) -> MaskWords | None:
        if sequence not in self._table:
            return None
        try:
            return sequence.output.masks_along(())[0]
        except Exception as error:  # an error of the grammar concerns this row only
            self._table.fail_bound(sequence, error)
            return None

    # -- read

    def _read(self, launched: InFlightStep) -> None:
        newer = self._in_flight.sequences if self._in_flight is not None else []
        try:
            tokens = launched.step.tokens()
        except Exception as error:  # an error of the device is raised only when the step is waited for
            self._in_flight = None
            self._recover(list(dict.fromkeys([*launched.sequences, *newer])), error)
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
                self._force(sequence, forced)
            except Exception as error:  # of the device, while the row's penalties are made anew
                self._table.fail_step(sequence, error)
                return
        token, now = sampled if forced is None else forced, self._clock()
        sequence.is_suspect = False
        sequence.known = [token]
        if is_fed:
            sequence.record()
        sequence.post([*sequence.accept(token, now, logprob(token)), *sequence.finished(now)])
        self._table.close_evaluated(sequence)

    # -- recover

    def _recover(self, sequences: list[Sequence], error: Exception, *, may_be_at_fault: bool = True) -> None:
        """Replays every row without its live state, unless it alone can be at fault. Raises DeviceLost."""
        self._runner.drain()
        alive = [sequence for sequence in sequences if sequence in self._table and sequence.lease is not None]
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
            self._table.prefix_cache.reclaimer.relieve()
