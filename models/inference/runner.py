"""Evaluates tokens: prefill of one sequence, decode of many rows together, sampling. Worker thread only.

The engine's loop is double-buffered, so that the device never waits for Python:

    following = runner.prepare(rows, current)   # feeds each row the token that `current` samples for it, unread
    runner.start(following)                     # before or after the next line: see `overlaps`
    tokens = current.tokens()                   # blocks until `current` is done

Where `current`'s tokens decide what `following` may sample, `following` is prepared without sampling and started;
`sample` then takes the masks, and a second `start` computes the rest. A *long* step, in which some row feeds several
tokens (`row.py`), is prepared once all tokens before it are read, and settled before the next. Invariants:

- `prepare` adds the tokens that it feeds to the rows' caches, which lack the token that the latest step samples.
- Rows join and leave at any step. Their state may be in shared buffers (`batch.py`); `detach` writes it back.
- Nothing here keeps a slice of a growing cache: MLX would copy the whole cache at its next update.

When `draft`, `prepare`, `sample`, `start`, `settle` or `DecodeStep.tokens` raises, the live state of every row in
that step may be damaged: the caller drops it with `drain`. MLX raises an error of the device once, at whatever is
evaluated or read next, and then gives garbage for all that was under way: beside a step nothing else is to be
evaluated. Knows no requests, no text, no stored state.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx

from cache.layers.kinds import kind_of, leaves_of, make_caches
from cache.layers.state import owned
from cache.types import LayerCache, TokenArray
from models.adapter import NO_ADAPTER
from models.errors import RowLost
from models.inference import grouping
from models.inference.abilities import Trials
from models.inference.batch import DecodeBatch
from models.inference.drafters import Drafter
from models.inference.probe import MAX_SECONDS, Form
from models.inference.ragged import inputs_of, own_recurrent_state, ragged_attention
from models.inference.row import DecodeRow
from models.inference.sampling import BatchSampler, RowSampling, StepLogprobs, TokenIds
from models.inference.sampling_params import SamplingParams
from models.lora import AdapterSet, selecting
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from models.prompt.pictures import SeenChunk
from models.ranks import ONE_RANK, Ranks
from models.vision.features import Encoder
from models.vision.layers import VisionInputs

_CLEAR_CACHE_PREFILL_TOKENS = 2048
_CLEAR_CACHE_STEPS = 256
"""Steps between emptyings of MLX's buffer pool: prefill leaves sizes that decode never uses."""
_MAX_UNREAD_ERRORS = 16
"""More than steps are ever under way: beyond it the device raises at everything."""


@dataclass(eq=False)
class DecodeStep:
    """Samples of each row, to be computed, being computed, or known."""

    rows: tuple[DecodeRow, ...]
    num_fed: Mapping[DecodeRow, int]
    """Tokens that the step evaluates of each row."""
    is_long: bool
    """Some row feeds several tokens."""
    logits: mx.array | None = None
    """`[num_samples, vocab_size]`; in a long step until sampled from."""
    sampled: mx.array | None = None
    logprobs: StepLogprobs | None = None

    @property
    def has_sampled(self) -> bool:
        return self.sampled is not None

    def tokens(self) -> list[list[int]]:
        """Waits for the step; returns each row's samples."""
        assert self.sampled is not None, "a step was read that has sampled nothing"
        samples = iter(cast(list[int], self.sampled.tolist()))
        return [list(islice(samples, len(row.draft) + 1)) for row in self.rows]

    def logprob(self, index: int, token: int, place: int = 0) -> TokenLogprob | None:
        """The log-probability of `token` as a row's sample `place`; None if not requested. `tokens` comes first."""
        if self.logprobs is None:
            return None
        row = sum([len(row.draft) + 1 for row in self.rows[:index]]) + place
        return self.logprobs.read(row, token) if row in self.logprobs.num_top else None


class Runner:
    """Runs one model. Worker thread only, construction included."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        adapters: AdapterSet | None = None,
        drafter: Drafter | None = None,
        encoder: Encoder | None = None,
        vision_inputs: VisionInputs | None = None,
        shares_heads: bool = True,
        rounds_stored: bool = False,
        drafts: bool = True,
        max_probe_seconds: float = MAX_SECONDS,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """`vocab_size` is the logits' width; `adapters` are attached. Tries the model with short calls."""
        self._model, self._adapters, self._vocab_size = model, adapters, vocab_size
        self.encoder, self._vision_inputs = encoder, vision_inputs
        """Both None for a model that sees nothing."""
        self._drafter = drafter
        self._whole = drafter or model
        self._behind = WeakKeyDictionary[LayerCache, tuple[int, mx.array]]()
        """By a row's last cache: its offset, and the hidden state after what `prefill` evaluated."""
        self._sampler = BatchSampler(vocab_size)
        self._batches = defaultdict[int, DecodeBatch](self._make_batch)
        """Batches by adapter, where adapters do not mix."""
        self._prefilled_tokens = self._num_steps = 0
        self.is_divided = ranks.size > 1
        """Other machines hold parts of the model: an error cannot be mended here alone."""
        trials = Trials(model, vocab_size, drafter, adapters, ranks, max_probe_seconds)
        self.abilities = trials.find(shares_heads=shares_heads, rounds_stored=rounds_stored, drafts=drafts)
        self.overlaps = mx.default_device() != mx.Device(mx.cpu)
        """`start` returns with most of the step to be computed, as on a GPU. Else read tokens before `start`."""

    @property
    def head_tokens(self) -> float | None:
        """See `SharedBuffers`."""
        return self.abilities.head_tokens

    def make_caches(self) -> list[LayerCache]:
        """Empty layer caches for one sequence."""
        return make_caches(self._whole)

    def prefill(
        self,
        caches: list[LayerCache],
        tokens: TokenArray,
        adapter: int = NO_ADAPTER,
        seen: SeenChunk | None = None,
    ) -> None:
        """Evaluates `[num_tokens]` tokens of one sequence, without logits; blocks until `caches` are evaluated.

        A prompt with pictures says what of them is `seen`.
        """
        inputs = self._vision_inputs
        sees = nullcontext() if seen is None or inputs is None else inputs.chunk(seen, len(tokens))
        with sees:
            self._evaluate_prompt(caches, tokens, adapter)
        self._finish_prefill(caches, len(tokens))

    def score(
        self, caches: list[LayerCache], tokens: TokenArray, following: TokenArray, num_top: int, adapter: int
    ) -> list[TokenLogprob]:
        """Evaluates like `prefill`; returns the log-probability of each of `following` that is not negative."""
        logits = self._evaluate_prompt(caches, tokens, adapter)
        logprobs = StepLogprobs.of(logits, [num_top] * len(tokens))
        assert logprobs is not None, "there is a token at least"
        mx.eval(logprobs.all, logprobs.top_ids)
        self._finish_prefill(caches, len(tokens))
        return [logprobs.read(row, int(token)) for row, token in enumerate(following) if token >= 0]

    def _evaluate_prompt(self, caches: list[LayerCache], tokens: TokenArray, adapter: int) -> mx.array:
        """Logits `[num_tokens, vocab_size]`."""
        inputs = mx.array(tokens)[None]
        with selecting(self._adapters, adapter):
            if self._drafter is None:
                return cast(mx.array, self._model(inputs, cache=caches)[0])
            logits, (states,) = self._drafter.evaluate(inputs, caches, [len(tokens)], [self._state_behind(caches)])
        mx.eval(state := owned(states[-1:]))
        self._behind[caches[-1]] = _offset(caches), state
        return logits

    def _state_behind(self, caches: Sequence[LayerCache]) -> mx.array | None:
        """`[1, width]`; None if it is not known, or the caches have changed since."""
        offset, state = self._behind.get(caches[-1], (-1, None))
        return state if offset == _offset(caches) else None

    def _finish_prefill(self, caches: list[LayerCache], num_tokens: int) -> None:
        mx.eval([cache.state for cache in caches])
        self._prefilled_tokens += num_tokens
        if self._prefilled_tokens >= _CLEAR_CACHE_PREFILL_TOKENS:
            self._prefilled_tokens = 0
            mx.clear_cache()

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: SamplingParams,
        next_token: int,
        *,
        prompt: TokenIds = (),
        generated: TokenIds = (),
        adapter: int = NO_ADAPTER,
        shift: int = 0,
    ) -> DecodeRow:
        """A row over `caches` that decodes from `next_token` on; `generated` is the output before a replay."""
        state = RowSampling(sampling, self._vocab_size, prompt=prompt, emitted=generated)
        return DecodeRow(caches, state, [next_token], adapter, shift, self._state_behind(caches))

    def force(self, row: DecodeRow, *, prompt: TokenIds, generated: TokenIds) -> None:
        """Has `row` go on after `generated`, whatever was sampled. The caller sets `row.known` or samples anew."""
        row.sampling = row.sampling.after(prompt, generated)

    def prepare(
        self,
        rows: Sequence[DecodeRow],
        previous: DecodeStep | None,
        *,
        samples: bool = True,
        spare_bytes: float = float("inf"),
    ) -> DecodeStep:
        """Returns a step that evaluates each row's feed and samples after it; computes nothing yet.

        A row is fed its known tokens, else `previous`'s sample, then its draft; several tokens only where all rows
        have known ones. Without `samples` it waits for `sample`. Shared buffers may take `spare_bytes` more than the
        rows' own would. Known tokens are the caches' now; in a long step they and drafts stay until it is settled.
        """
        _assert_have_state(rows)
        num_fed = {row: (len(row.known) or 1) + len(row.draft) for row in rows}  # a property takes a call more each
        longest = max(num_fed.values())
        step = DecodeStep(tuple(rows), num_fed, is_long=longest > 1)
        assert longest == 1 or longest <= self.abilities.max_feed_tokens, "a feed is longer than was proven"
        step.logits = self._evaluate(step, previous, spare_bytes)
        if samples:
            self.sample(step, ())
        for row in rows if not step.is_long else ():
            row.known = []
        return step

    def sample(self, step: DecodeStep, masks: Sequence[MaskWords | None]) -> None:
        """Samples a step's tokens, which `start` then computes; `masks` as in `BatchSampler.sample`."""
        assert step.logits is not None and step.sampled is None, "a step samples once"
        states = [row.sampling for row in step.rows]
        if step.is_long:
            self._sampler.release()
            for row in step.rows:
                row.ahead = row.sampling.ahead(row.draft)
            states = [state for row in step.rows for state in row.ahead]
        step.logprobs = StepLogprobs.of(step.logits, [state.params.top_logprobs for state in states])
        step.sampled = self._sampler.sample(step.logits, states, masks)
        if step.is_long:
            self._sampler.release()
            step.logits = None

    def sample_again(self, step: DecodeStep, row: DecodeRow, mask: MaskWords | None) -> None:
        """Draws anew for a row of a step that is not long, after `force`; `start` then computes the sample."""
        assert step.logits is not None and step.sampled is not None
        place, sampler = step.rows.index(row), BatchSampler(self._vocab_size)
        sampled = sampler.sample(step.logits[place : place + 1], [row.sampling], [mask])
        step.sampled = mx.concatenate([step.sampled[:place], sampled, step.sampled[place + 1 :]])
        sampler.release()

    def start(self, step: DecodeStep) -> None:
        """Makes the device compute a step's prepared part; does not wait."""
        wanted = [step.logits if step.sampled is None else step.sampled]
        if step.logprobs is not None:
            wanted += [step.logprobs.all, step.logprobs.top_ids]
        mx.async_eval(wanted)  # type: ignore[no-untyped-call]
        self._num_steps += step.sampled is not None
        if self._num_steps % _CLEAR_CACHE_STEPS == 0:
            mx.clear_cache()

    def settle(self, step: DecodeStep, accepted: Sequence[int]) -> list[int]:
        """Ends a long step, once it is read: the first `accepted` tokens of each row's draft stay.

        Returns how many tokens of each feed the caches now hold: those that stay, or 0 where all must be fed again.
        """
        assert step.is_long, "a step of one token per row is settled by itself"
        pairs = zip(step.rows, accepted, strict=True)
        stay = {row: step.num_fed[row] - len(row.draft) + num_accepted for row, num_accepted in pairs}
        kept = dict(stay)
        for name in self._names(step.rows):
            self._batches[name].settle(kept)
        for row, num_accepted in zip(step.rows, accepted, strict=True):
            row.sampling = row.ahead[num_accepted]
            if row.before is not None:
                row.before = row.before[kept[row] : stay[row] + 1]
            row.draft, row.ahead = [], []
        return [kept[row] for row in step.rows]

    def draft(self, rows: Sequence[DecodeRow], limits: Sequence[int]) -> list[list[int]]:
        """What the drafter expects each row to say after its known tokens, up to `limits` tokens; blocks.

        Nothing for a row whose hidden states are unknown, or that shares buffers with such a row or one that left.
        """
        drafter = self._drafter
        assert drafter is not None, "nothing drafts for this model"
        _assert_have_state(rows)
        wanted, drawn = dict(zip(rows, limits, strict=True)), dict[DecodeRow, mx.array]()
        for batch in self._batches.values():
            drawn |= self._draft_together(drafter, batch, wanted)
        for row, limit in wanted.items():
            if limit and row not in drawn and row.before is not None and _can_draft_alone(row, drafter):
                with selecting(self._adapters, row.adapter):
                    drawn[row] = drafter.draft_alone(row.caches, row.known, row.before, limit)
        mx.eval(list(drawn.values()))
        return [cast(list[int], drawn[row].tolist())[:limit] if row in drawn else [] for row, limit in wanted.items()]

    def _draft_together(
        self, drafter: Drafter, batch: DecodeBatch, wanted: Mapping[DecodeRow, int]
    ) -> dict[DecodeRow, mx.array]:
        """Drafts for all rows of a batch, if each can be drafted for."""
        rows = batch.rows
        num_tokens = max((wanted.get(row, 0) for row in rows), default=0)
        if not num_tokens or not all(row is not None and _knows_before(row) for row in rows):
            return {}
        known, before = [row.known for row in rows], mx.concatenate([row.before for row in rows])
        adapters, trial = [row.adapter for row in rows], batch.trial(drafter.num_layers, [*map(len, known)])
        with selecting(self._adapters, *adapters), ragged_attention(), trial as (layers, first, count):
            drafted = drafter.draft(layers, first, known, before, num_tokens, count)
        return dict(zip(rows, drafted, strict=True))

    def drain(self, lost: Sequence[DecodeRow] = ()) -> None:
        """Waits for all that was started, and takes its errors: MLX raises an unread one at the next use.

        Drops the state of `lost`, rows of a step that failed, and of rows that share buffers with one.
        """
        for name in self._batches.keys() & self._names(lost):
            self._batches[name].forget()
        for row in lost:
            row.caches.clear()
        for _ in range(_MAX_UNREAD_ERRORS):
            with suppress(Exception):
                mx.synchronize()
                return

    def detach(self, row: DecodeRow) -> None:
        """Takes a row out of the batch: `row.caches` hold all its state, evaluated, in own arrays. Raises RowLost."""
        _assert_have_state([row])
        self.separate(row.caches)
        mx.eval([cache.state for cache in row.caches])
        own_recurrent_state(row.caches)

    # -- buffers that rows share: see `cache.types.SharedBuffers`

    def separate(self, caches: Sequence[LayerCache]) -> None:
        """See `SharedBuffers`."""
        for batch in self._batches.values():
            batch.remove(caches)

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """See `SharedBuffers`."""
        for batch in self._batches.values():
            batch.remove(caches, keeps_state=False)

    def separate_all(self) -> None:
        """See `SharedBuffers`."""
        for batch in self._batches.values():
            batch.dissolve_groups()

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """See `SharedBuffers`."""
        return sum(batch.own_bytes(caches) for batch in self._batches.values())

    @property
    def padding_bytes(self) -> int:
        return sum(batch.padding_bytes for batch in self._batches.values())

    def take_change(self) -> bool:
        """Whether shared buffers have changed since this was asked last."""
        changed = [batch for batch in self._batches.values() if batch.has_changed]
        for batch in changed:
            batch.has_changed = False
        return bool(changed)

    def close(self) -> None:
        """Ends this thread's streams: ending with live ones can abort the process at exit."""
        if self.encoder is not None:
            self.encoder.close()
        mx.synchronize()
        mx.clear_streams()

    def _evaluate(self, step: DecodeStep, previous: DecodeStep | None, spare_bytes: float) -> mx.array:
        """Logits `[num_samples, vocab_size]`."""
        logits, order = list[mx.array](), list[DecodeRow]()
        for name in self._names(step.rows):
            batch = self._batches[name]
            members = [row for row in step.rows if self.abilities.mixes or row.adapter == name]
            for caches, rows in self._calls(step, batch, members, spare_bytes):
                if caches is rows[0].caches and rows[0].draft:
                    batch.hold(rows[0], step.num_fed[rows[0]])
                logits.append(self._logits(step, _inputs(rows, previous), caches, rows))
                order += rows
            batch.advance()
        stops = dict(zip(order, accumulate([step.num_fed[row] for row in order]), strict=True))
        sampled = [stops[row] - 1 for row in step.rows]
        if step.is_long:
            sampled = [place for row in step.rows for place in range(stops[row] - len(row.draft) - 1, stops[row])]
        joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        return joined if sampled == list(range(len(joined))) else joined[mx.array(sampled)]

    def _names(self, rows: Sequence[DecodeRow]) -> list[int]:
        return list(dict.fromkeys([NO_ADAPTER if self.abilities.mixes else row.adapter for row in rows]))

    def _calls(
        self, step: DecodeStep, batch: DecodeBatch, rows: Sequence[DecodeRow], spare_bytes: float
    ) -> list[tuple[list[LayerCache], list[DecodeRow]]]:
        """Layer caches and rows of each model call."""
        are_apart = step.is_long and not self.abilities.feeds_together
        apart = [row for row in rows if are_apart and step.num_fed[row] > 1]
        joining = [row for row in rows if row not in apart]
        if self.abilities.form is Form.ALONE or not joining or (len(joining) == 1 and joining[0].head is None):
            batch.dissolve()
            return [(row.caches, [row]) for row in rows]
        # Arranging gives the others their state back.
        layers = batch.arrange(joining, spare_bytes, [step.num_fed[row] for row in joining] if step.is_long else None)
        return [(layers, batch.rows), *((row.caches, [row]) for row in apart)]

    def _make_batch(self) -> DecodeBatch:
        has_several = self.abilities.feeds_together or self._drafter is not None
        choose = self._choose if self.abilities.costs is not None else None
        return DecodeBatch(choose, self.abilities.max_feed_tokens if has_several else 1)

    def _choose(self, *rows_and_groups: Any, spare_tokens: float) -> list[grouping.Wanted]:
        assert self.abilities.costs is not None
        return grouping.plan(*rows_and_groups, costs=self.abilities.costs, spare_tokens=spare_tokens)

    def _logits(
        self, step: DecodeStep, tokens: mx.array, caches: list[LayerCache], rows: list[DecodeRow]
    ) -> mx.array:
        """`[num_tokens, vocab_size]`, of one row's tokens over its own caches, or of a batch's."""
        is_own, lengths = caches is rows[0].caches, [step.num_fed[row] for row in rows]
        inputs, seen = (tokens[None], None) if is_own else inputs_of(tokens, lengths, caches)
        if seen is not None:
            lengths = [inputs.shape[1]] * len(rows)
        in_batch = rows if len(inputs) == len(rows) else [row for row in rows for _ in range(step.num_fed[row])]
        vision = self._vision_inputs
        shifted = nullcontext() if vision is None else vision.shifted([row.shift for row in in_batch])
        with selecting(self._adapters, *[row.adapter for row in in_batch]), shifted, ragged_attention():
            if self._drafter is None:
                logits: mx.array = self._model(inputs, cache=caches).flatten(0, 1)
            else:
                before = [None if row.before is None else row.before[:1] for row in rows]
                logits, states = self._drafter.evaluate(inputs, caches, lengths, before)
                for row, around in zip(rows, states, strict=True):
                    row.before = around if step.is_long else around[1:]
        return logits if seen is None else logits[seen]


def _assert_have_state(rows: Sequence[DecodeRow]) -> None:
    if [row for row in rows if row.is_lost]:
        raise RowLost("the state of a row was lost by an earlier error")


def _offset(caches: Sequence[LayerCache]) -> int:
    return int(getattr(leaves_of(caches)[-1], "offset", 0))


def _can_draft_alone(row: DecodeRow, drafter: Drafter) -> bool:
    """Whether the row's own caches hold all of its state, no group and no head."""
    layers = leaves_of(row.caches[-drafter.num_layers :])
    is_empty = any(kind_of(leaf).is_merged and leaf.empty() for leaf in layers)
    return row.group is None and row.head is None and not is_empty and _knows_before(row)


def _knows_before(row: DecodeRow) -> bool:
    return row.before is not None and len(row.before) == len(row.known)


def _inputs(rows: Sequence[DecodeRow], previous: DecodeStep | None) -> mx.array:
    """All rows' tokens in one line, uint32, without waiting for `previous`."""
    tokens = [token for row in rows for token in (*row.known, *row.draft)]
    knowing = [row for row in rows if row.known]
    if len(knowing) == len(rows):
        return mx.array(tokens, dtype=mx.uint32)
    assert previous is not None, "a row without a known token needs the step that sampled its token"
    assert previous.sampled is not None, "a step is followed once it has sampled"
    assert len(tokens) == len(knowing), "a row without a known token cannot be fed beside several of another row"
    if tuple(rows) == previous.rows and not tokens:
        return previous.sampled
    places = {row: place for place, row in enumerate([*previous.rows, *knowing])}
    choices = mx.concatenate([previous.sampled, mx.array(tokens, dtype=mx.uint32)]) if tokens else previous.sampled
    return choices[mx.array([places[row] for row in rows])]
