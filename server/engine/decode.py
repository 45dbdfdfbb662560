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

from cache.prefix_cache import PrefixCache
from models.errors import RowLost
from models.output.grammar import MaskWords
from server.engine.feeds import Feed, FeedSteps
from server.engine.request import is_out_of_memory
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Speculation

if TYPE_CHECKING:
    from models.inference.runner import DecodeStep, Runner

logger = logging.getLogger(__name__)


@dataclass
class InFlightStep:
    """A launched decode step and its sequences."""

    step: "DecodeStep"
    sequences: list[Sequence]
    is_read: bool = False
    waits: bool = False


class DecodePipeline:
    """Decodes all sequences, one step after another. Worker thread only."""

    def __init__(
        self,
        runner: "Runner",
        prefix_cache: PrefixCache,
        table: SequenceTable,
        clock: Callable[[], float],
        speculation: Speculation | None,
    ) -> None:
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._table = table
        self._clock = clock
        self._in_flight: InFlightStep | None = None
        self._feeds: FeedSteps | None = None
        if speculation is not None:
            self._feeds = FeedSteps(runner, prefix_cache, table, speculation, clock)

    def next_sequences(self) -> list[Sequence]:
        """All sequences that decode, or the first suspect alone."""
        ready = [one for one in self._table.decoding() if one.may_launch or one.output.reason is not None]
        suspects = [sequence for sequence in ready if sequence.decode.is_suspect]
        return suspects[:1] or ready

    def step(self) -> None:
        """Launches the next step and reads the one before; a step with drafts is read too."""
        begun = self._clock()
        if self._feeds is None:
            self._step_plain(self.next_sequences())
        elif not self._is_under_way:
            self._step_known(self._feeds, begun)
        elif self._feeds.may_pay(sequences := self.next_sequences()):
            self.read()
            self._step_known(self._feeds, self._feeds.has_left(begun))
        else:
            looked = self._clock()
            self._step_plain(sequences)
            self._feeds.observe(len(sequences), begun, looked)

    @property
    def _is_under_way(self) -> bool:
        return self._in_flight is not None and not self._in_flight.is_read

    def _step_known(self, steps: FeedSteps, begun: float) -> None:
        """A step before which all tokens are known."""
        sequences = self._with_room()
        feeds = steps.plan(sequences) if sequences else []
        if feeds:
            self._step_feeds(steps, feeds, begun)
        else:
            self._step_plain(self._with_room())
            steps.observe_restart(len(sequences), begun)

    def _with_room(self) -> list[Sequence]:
        """The next sequences for which memory is reserved: what has just ended waits for a step."""
        return [
            one for one in self.next_sequences() if one.lease is not None and one.lease.spare_tokens >= one.needed
        ]

    def _step_feeds(self, steps: FeedSteps, feeds: list[Feed], begun: float) -> None:
        self._in_flight = None
        error = steps.evaluate(feeds)
        if error is None:
            steps.learn(feeds, begun)
            return
        sequences = [feed.sequence for feed in feeds]
        for sequence in sequences:
            # The drafts may be at fault, and must not cost a replay again and again.
            sequence.may_draft &= isinstance(error, RowLost)
        self._recover(sequences, error, may_be_at_fault=False)

    def _step_plain(self, sequences: list[Sequence]) -> None:
        previous, self._in_flight = self._in_flight, None
        error = _error_of(partial(self._prepare, sequences, previous))
        if self._runner.overlaps:
            error = error or _error_of(self._start)
        if previous is not None and not previous.is_read:
            self._read(previous)
        error = error or _error_of(self._sample)
        if not self._runner.overlaps:
            error = error or _error_of(self._start)
        if error is not None:
            self._recover(sequences, error)
        else:
            self._table.close_finished(sequences)

    def read(self) -> None:
        """Waits for the launched step."""
        if self._in_flight is not None and not self._in_flight.is_read:
            self._read(self._in_flight)

    # -- launch

    def _prepare(self, sequences: list[Sequence], previous: InFlightStep | None) -> None:
        if not sequences:
            return
        for sequence in sequences:
            self._feed(sequence, previous)
        rows = [sequence.decode.row for sequence in sequences]
        waits = any(sequence.output.is_bound for sequence in sequences)
        spare_bytes = self._prefix_cache.reclaimer.spare_bytes
        step = self._runner.prepare(
            rows, previous.step if previous else None, samples=not waits, spare_bytes=spare_bytes
        )
        if self._runner.take_change():
            self._prefix_cache.pager.measure_running()
        for sequence in sequences:
            sequence.decode.num_launched += 1
            sequence.record()
        self._in_flight = InFlightStep(step, sequences, waits=waits)

    def _feed(self, sequence: Sequence, previous: InFlightStep | None) -> None:
        if previous is None or previous.is_read or sequence not in previous.sequences:
            assert len(sequence.decode.known) == 1, "a step without drafts feeds one token"
            sequence.decode.row.known = [*sequence.decode.known]
            return
        forced = sequence.output.forced_token()
        if forced is not None:
            self._force(sequence, forced)

    def _force(self, sequence: Sequence, token: int) -> None:
        generated = [*sequence.output.tokens, token]
        self._runner.force(sequence.decode.row, token, prompt=sequence.request.tokens, generated=generated)

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
        waiting.waits = False
        self._runner.sample(waiting.step, [self._mask_of(sequence) for sequence in waiting.sequences])
        self._in_flight = waiting
        if self._runner.overlaps:
            self._start()

    def _mask_of(self, sequence: Sequence) -> MaskWords | None:
        if sequence not in self._table:
            return None
        try:
            return sequence.output.mask()
        except Exception as error:  # an error of the grammar concerns this row only
            self._table.fail_bound(sequence, error)
            return None

    # -- read

    def _read(self, launched: InFlightStep) -> None:
        launched.is_read = True
        try:
            tokens = launched.step.tokens()
        except Exception as error:  # an error of the device is raised only when the step is waited for
            newer = self._newer_than(launched)
            self._in_flight = None
            self._recover(list(dict.fromkeys([*launched.sequences, *newer])), error)
            return
        for index, (sequence, (token,)) in enumerate(zip(launched.sequences, tokens, strict=True)):
            if sequence.output.reason is None and sequence in self._table:
                forced = sequence.output.forced_token()
                if forced is not None and sequence not in self._newer_than(launched):
                    try:
                        self._force(sequence, forced)
                    except Exception as error:  # of the device, while the row's penalties are made anew
                        self._table.fail_step(sequence, error)
                        continue
                self._accept(sequence, index, token if forced is None else forced, launched)

    def _accept(self, sequence: Sequence, index: int, token: int, launched: InFlightStep) -> None:
        sequence.decode.is_suspect = False
        sequence.decode.known = [token]
        if sequence in self._newer_than(launched):
            sequence.record()
        logprob = launched.step.logprob(index, token)
        now = self._clock()
        sequence.post([*sequence.accept(token, now, logprob), *sequence.finished(now)])
        if sequence.output.reason is None:
            return
        if not sequence.decode.known or not sequence.request.cache_prompt:
            self._table.close(sequence)

    def _newer_than(self, launched: InFlightStep) -> list[Sequence]:
        newer = self._in_flight
        return newer.sequences if newer is not None and newer is not launched else []

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
            self._prefix_cache.reclaimer.relieve()


def _error_of(act: Callable[[], None]) -> Exception | None:
    """An error for later: the step before is read first."""
    try:
        act()
    except Exception as error:  # an error of the model: replaying the rows shows which one is at fault
        return error
    return None
