"""Decode steps, double-buffered: a step is prepared before the tokens of the step before it are read.

* *plan*: where drafts may pay, the step before is read first, and rows get drafts;
* *launch*: the step is prepared; where the runner overlaps, it starts before the previous one is read;
* *sample*: a row bound to a grammar is sampled once the previous tokens are read, while the model is evaluated. A row
  that they bind first, as the opener of a call does, is sampled a second time;
* *read*: a long step, which feeds several tokens of a row (`models/inference/row.py`), at once; others a step later;
* *settle*: a token joins the lease's log once it is known, and before it is evaluated a second time. In a long step
  rejected tokens leave the layer caches: between steps these and the log hold the same, and nothing after an end;
* *recover*: every row of a failed step loses its live state and is replayed from the trie, alone until a step
  succeeds. A row that fails alone is at fault and ends.

A forced token (`output.py`) replaces the sampled one. A sequence whose last token is not yet evaluated stays for one
more step, so that the next turn can restore that token.
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from models.errors import GrammarFailed, RowLost
from models.output.grammar import MaskWords, allows
from server.engine.request import AnswerUnbound, StepFailed, is_out_of_memory
from server.engine.scheduler import Phase
from server.engine.sequence import Sequence, SequenceTable
from server.engine.speculation import Drafting, Speculation

if TYPE_CHECKING:
    from models.inference.runner import DecodeStep

logger = logging.getLogger(__name__)

Seconds: TypeAlias = Listed[Listed[float]]

MAX_KNOWN_TOKENS = 8
"""A row with more evaluates them first: a rejected draft may add to them."""


class _StepLost(Exception):
    """A step has failed, and its rows are to be replayed."""


class DecodePipeline:
    """Decodes all sequences. Worker thread only."""

    def __init__(self, table: SequenceTable, speculation: Speculation | None = None) -> None:
        """Makes a pipeline; without `speculation` nothing is drafted."""
        self._table, self._runner, self._clock, self._speculation = table, table.runner, table.clock, speculation
        self._in_flight: DecodeStep | None = None
        """Prepared or launched, and not read."""
        self._sequences: list[Sequence] = []
        """The sequences of that step."""
        self._notes: list[tuple[Callable[..., None], tuple[float, ...]]] = []
        """What the planner of drafts has to learn before the next step, and the seconds of it."""
        self._left_seconds: float | None = None
        """What the last plain step's end took, if a step with drafts was to follow it at once."""

    def next_sequences(self) -> list[Sequence]:
        """All sequences that decode, the best rank first, or the first suspect alone."""
        decoding = self._table.in_phase(Phase.DECODING)
        ready = [one for one in decoding if one.may_launch or one.output.reason is not None]
        return [one for one in ready if one.is_suspect][:1] or ready

    def step(self) -> None:
        """Plans and launches the next step, and reads the one before; a long one is read too."""
        begun = self._clock()
        if any(one.is_suspect for one in self._sequences):
            self.read()  # a step of another suspect, which fails, must not take this one with it again and again
        with suppress(_StepLost):
            if self._in_flight is None:
                self._step_known(begun)
            elif self._may_pay(sequences := self.next_sequences()):
                self.read()
                now = self._clock()
                self._left_seconds = now - begun
                self._step_known(now)
            else:
                looked = self._clock()
                self._step(sequences)
                if sequences and self._speculation is not None:
                    took = self._clock() - looked, looked - begun
                    self._note(self._speculation.observe_plain, len(sequences), took=took)

    def _step_known(self, begun: float) -> None:
        """A step before which all tokens are known."""
        # What has just ended waits for memory.
        sequences = self._planned([one for one in self.next_sequences() if one.has_memory])
        fed, drafted = [one.row.num_fed for one in sequences], [len(one.row.draft) for one in sequences]
        accepted, left_seconds = self._step(sequences), self._left_seconds
        if not sequences or self._speculation is None:
            return
        took = self._clock() - begun
        if max(fed) > 1:
            self._note(self._speculation.learn, list(map(_drafting, sequences)), fed, drafted, accepted, took=(took,))
            return
        if left_seconds is not None:
            # Where drafts ended plain steps, end and beginning together outlast a step.
            self._note(self._speculation.observe_resumed, len(sequences), took=(left_seconds + took,))
        self._left_seconds = None

    def _step(self, sequences: list[Sequence]) -> list[int]:
        """Launches a step and reads the one before. A long one is read too: returns how much of drafts it accepts."""
        previous, before, accepted = self._in_flight, self._sequences, list[int]()
        self.forget()
        if sequences:
            # The error may be of the step before, which then would read as garbage.
            with self._recovering([*before, *sequences]):
                self._launch(sequences, previous)
        if previous is not None:
            self._read(previous, before)
        with self._recovering(sequences):
            self._complete()
        if (launched := self._in_flight) is not None and launched.is_long:
            self.forget()
            accepted = self._read(launched, sequences)
        if over := _over([*before, *sequences]):
            self.read()  # closing evaluates state, which nothing may do beside a step
            self._table.close_finished(over)
        return accepted

    def read(self) -> None:
        """Waits for the launched step."""
        launched, sequences = self._in_flight, self._sequences
        self.forget()
        if launched is not None:
            with suppress(_StepLost):
                self._read(launched, sequences)
            self._table.close_finished(_over(sequences))

    def forget(self) -> None:
        """Takes back the launched step, which may have failed."""
        self._in_flight, self._sequences = None, []

    # -- what drafts cost

    def _note(self, learn: Callable[..., None], *what: object, took: tuple[float, ...]) -> None:
        self._notes.append((partial(learn, *what), took))

    @property
    def seconds(self) -> list[tuple[float, ...]]:
        """What the step before took, by each note of it."""
        return [took for _, took in self._notes]

    def learn(self, seconds: Seconds) -> None:
        """Has the planner of drafts learn what the step before was, and that it took so long."""
        notes, self._notes = self._notes, []
        for (learn, _), took in zip(notes, seconds, strict=True):
            learn(*took)

    # -- plan

    def _may_pay(self, sequences: list[Sequence]) -> bool:
        """Whether the next step may have drafts, or must evaluate several known tokens of a row."""
        if self._speculation is None:
            return False
        if any(one.needed > 1 for one in sequences):
            return True
        is_any_drafted_for = any(one.is_drafted_for for one in sequences)
        return is_any_drafted_for and self._speculation.may_draft([_drafting(one) for one in sequences])

    def _planned(self, sequences: list[Sequence]) -> list[Sequence]:
        """Gives rows their drafts, all earlier tokens known. Returns the sequences but those whose grammar fails."""
        limits = [self._limit(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(limits) and self._speculation is not None:
            drafting, known = [_drafting(one) for one in sequences], [one.needed for one in sequences]
            drafts = self._speculation.plan(drafting, limits, partial(self._predict, sequences), known)
        return [one for one, draft in zip(sequences, drafts, strict=True) if self._is_given(one, draft)]

    def _limit(self, sequence: Sequence) -> int:
        """The longest draft, in tokens: the sample after the last one still fits."""
        num_known, lease = sequence.needed, sequence.lease
        if not sequence.is_drafted_for or num_known > MAX_KNOWN_TOKENS or lease is None:
            return 0
        left_tokens = sequence.request.max_tokens - len(sequence.output.tokens)
        most = min(lease.spare_tokens, self._runner.abilities.max_feed_tokens) - num_known
        return max(0, min(left_tokens - 1, most))

    def _predict(self, sequences: list[Sequence], wanted: list[int]) -> list[list[int]]:
        """What the drafter drafts; nothing if it fails: the step then shows whose state has survived."""
        assert self._speculation is not None
        rows, begun = [sequence.row for sequence in sequences], self._clock()
        try:
            drafts = self._runner.draft(rows, wanted)
        except Exception as error:  # of the device
            logger.warning("drafting failed: %s", error)
            self._runner.drain(rows)
            for sequence in sequences:
                _drafting(sequence).drafter = None
            return [[] for _ in sequences]
        self._note(self._speculation.observe_drafter, wanted, took=(self._clock() - begun,))
        return drafts

    def _is_given(self, sequence: Sequence, draft: list[int]) -> bool:
        """Gives a row its draft, as far as the grammar allows; False if that cannot be followed."""
        masks = self._masks_along(sequence, draft)
        if masks is None:
            return False
        cut, row = len(masks) - 1, sequence.row
        if draft[cut:] and (mask := masks[cut]) is not None and not allows(mask, draft[cut]):
            _drafting(sequence).learn(cut + 1, cut, first=cut)
        row.draft, row.masks = draft[:cut], masks if sequence.output.is_bound else []
        return True

    # -- launch

    def _launch(self, sequences: list[Sequence], previous: "DecodeStep | None") -> None:
        rows, known, is_bound = list[Any](), list[tuple[Sequence, list[int]]](), False
        for sequence in sequences:
            row, generated = sequence.row, sequence.output.tokens
            rows.append(row)
            is_bound |= sequence.output.is_bound
            if row.known:
                known.append((sequence, row.known))
            # Else its token is sampled by `previous`, which is not read.
            elif (forced := sequence.output.forced_token()) is not None:
                row.known, row.is_forced, generated = [forced], True, [*generated, forced]
            if row.known and row.is_forced:
                self._runner.force(row, prompt=sequence.request.tokens, generated=generated)
        spare_bytes = self._table.prefix_cache.reclaimer.spare_bytes
        step = self._runner.prepare(rows, previous, samples=not is_bound, spare_bytes=spare_bytes)
        if self._runner.take_change():
            self._table.prefix_cache.pager.measure_running()
        for sequence, tokens in known if not step.is_long else ():
            assert sequence.lease is not None
            sequence.lease.append(*tokens)
        self._in_flight, self._sequences = step, sequences
        if self._runner.overlaps:
            self._runner.start(step)

    # -- sample

    def _complete(self) -> None:
        """Samples a step that waits, and starts one that has not started."""
        if (step := self._in_flight) is None:
            return
        newly_bound = [one for one in self._sequences if one.output.is_bound and one in self._table]
        waits = not step.has_sampled
        if waits:
            self._runner.sample(step, [mask for one in self._sequences for mask in self._masks(one)])
        else:
            for sequence in newly_bound:  # the sample that it drew before does not count
                if masks := self._masks_along(sequence, []):
                    prompt, generated = sequence.request.tokens, sequence.output.tokens
                    self._runner.force(sequence.row, prompt=prompt, generated=generated)
                    self._runner.sample_again(step, sequence.row, masks[0])
        if waits or newly_bound or not self._runner.overlaps:
            self._runner.start(step)

    def _masks(self, sequence: Sequence) -> list[MaskWords | None]:
        """A mask for each sample of the step; all None for a row without a grammar."""
        masks, sequence.row.masks = sequence.row.masks, []
        if not masks and sequence.output.is_bound and sequence in self._table:
            return self._masks_along(sequence, []) or [None]
        return masks or [None] * (len(sequence.row.draft) + 1)

    def _masks_along(self, sequence: Sequence, draft: list[int]) -> list[MaskWords | None] | None:
        """As of the output; None where a grammar cannot be followed, which ends the sequence."""
        try:
            return sequence.output.masks_along(draft)
        except Exception as error:  # an error of the grammar concerns this row only
            logger.warning("request %s failed: %s", sequence.request.request_id, error)
            kind = AnswerUnbound if isinstance(error, GrammarFailed) else StepFailed
            self._table.fail(sequence, kind(str(error)))
            return None

    # -- read, settle

    def _read(self, step: "DecodeStep", sequences: list[Sequence]) -> list[int]:
        """Takes a step's samples; returns how much of each draft is accepted."""
        with self._recovering([*sequences, *self._sequences]):
            samples = step.tokens()
        accepted, now = [0] * len(sequences), self._clock()
        for index, sequence in enumerate(sequences):
            if sequence.output.reason is None and sequence in self._table:  # else the last token was evaluated
                # Before the step is settled: what was accepted is right, whatever becomes of the state.
                accepted[index] = sequence.accept(samples[index], now, partial(step.logprob, index))
        # The sample of a plain step is in the layer caches if a newer step, launched already, was fed it.
        stays: list[int] = [one in self._sequences for one in sequences]
        if step.is_long:
            with self._recovering(sequences):
                stays = self._runner.settle(step, accepted)
        for sequence, num_held in zip(sequences, stays, strict=True):
            sequence.log(num_held)
        return accepted

    # -- recover

    @contextmanager
    def _recovering(self, sequences: list[Sequence]) -> Iterator[None]:
        """Around evaluation: an error of the device comes out at whatever is evaluated next. Raises _StepLost."""
        try:
            yield
        except Exception as error:  # replaying the rows shows which one is at fault
            self._recover(sequences, error)
            raise _StepLost from error

    def _recover(self, sequences: list[Sequence], error: Exception) -> None:
        """Replays every row without its live state, unless it alone can be at fault. Raises DeviceLost."""
        self._table.check(error)
        self.forget()
        is_long = any(one.row.num_fed > 1 for one in sequences)
        for sequence in sequences if is_long else ():
            # The drafts may be at fault, and must not cost a replay again and again.
            sequence.may_draft &= isinstance(error, RowLost)
        alive = [one for one in dict.fromkeys(sequences) if one in self._table and one.lease is not None]
        self._runner.drain([one.row for one in alive])
        alive += [one for one in self._table if one.has_lost_state and one not in alive]
        if len(alive) == 1 and not is_long and not isinstance(error, RowLost):
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


def _over(sequences: list[Sequence]) -> list[Sequence]:
    return [one for one in sequences if one.output.reason is not None and one.needs_no_step]


def _drafting(sequence: Sequence) -> Drafting:
    assert sequence.drafting is not None, "a sequence decodes that was never admitted"
    return sequence.drafting
