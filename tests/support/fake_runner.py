"""A runner over the token-carrying fake model: the next token is a hash of what the caches really hold.

A wrong cache state therefore changes every later token, and `reference` says what a right one gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache.layers.kinds import leaves_of, tail_of
from cache.types import LayerCache, TokenArray
from models.inference.abilities import Abilities, Feeds
from models.inference.probe import Form
from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from models.prompt.pictures import SeenChunk
from models.vision.features import Encoder
from tests.support import fake_model, fake_vision

# isort: split
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

OVERLAPS = True
"""Whether runners overlap where a test does not say; `tests/server/engine/conftest.py` runs tests with both."""
VOCABULARY = 50
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """Returns the token the fake model gives after `tokens`; now and then it is the end of a turn."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 10_007
    return value % VOCABULARY


def reference(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """Returns what the fake model answers, its end of turn included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def logprob_of(token: int, count: int) -> TokenLogprob:
    """Returns what the fake model tells of a token: it is the likeliest, and those after it follow."""
    return TokenLogprob(token, -token / 8, tuple((token + step, -(token + step) / 8) for step in range(count)))


@dataclass(eq=False)
class FakeRow:
    """One decoding sequence."""

    caches: list[LayerCache]
    known: list[int]
    """What the next step feeds; the sample of the step before, if empty."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    position: int = 0
    """Tokens sampled so far."""
    emitted: list[int] = field(default_factory=list)
    """The output that penalties know of; empty where nobody has said."""
    draft: list[int] = field(default_factory=list)
    masks: list[MaskWords | None] = field(default_factory=list)
    is_forced: bool = False

    @property
    def num_fed(self) -> int:
        """Tokens that the next step evaluates."""
        return max(1, len(self.known)) + len(self.draft)

    def sample_after(self, tokens: Sequence[int], place: int = 0) -> int:
        """Returns the next token after `tokens`: the one after it for an end that would come too early."""
        token = next_token(tokens)
        while self.position + place < self.sampling.min_tokens and token in self.sampling.end_token_ids:
            token = (token + 1) % VOCABULARY
        return token


@dataclass(eq=False)
class FakeFeed:
    """What a step evaluates of one row, and what its caches held before."""

    num_known: int
    tokens: list[int]
    before: list[int]
    recurrent: list[tuple[Any, Any]]

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - self.num_known


@dataclass(eq=False)
class FakeStep:
    """One step. `start_error` comes out when it is started, `error` when it is read, as a device's would."""

    rows: list[FakeRow]
    feeds: list[FakeFeed]
    sampled: list[list[int]]
    start_error: Exception | None = None
    error: Exception | None = None
    settle_error: Exception | None = None
    is_started: bool = False
    has_sampled: bool = True
    is_read: bool = False

    @property
    def is_long(self) -> bool:
        return any(len(feed.tokens) > 1 for feed in self.feeds)

    def tokens(self) -> list[list[int]]:
        """Returns the sampled tokens, or raises."""
        assert self.is_started and self.has_sampled, "a step was read that nobody started"
        if self.error is not None:
            raise self.error
        self.is_read = True
        return [[*sampled] for sampled in self.sampled]

    def logprob(self, index: int, token: int, place: int = 0) -> TokenLogprob | None:
        """Returns numbers that say of which token they are, for rows that ask."""
        assert place < len(self.sampled[index]), "no token was sampled there"
        count = self.rows[index].sampling.top_logprobs
        if count is None:
            return None
        return TokenLogprob(token, -token / 8, logprob_of(self.sampled[index][place], count).top)


class SharesNothing:
    """A runner whose rows are evaluated each over its own caches, one token at a time."""

    is_divided = False
    padding_bytes = 0
    head_tokens: float | None = None

    def own_bytes(self, caches: Sequence[LayerCache]) -> int:
        """Nothing is shared."""
        return 0

    def separate(self, caches: Sequence[LayerCache]) -> None:
        """Nothing is shared."""

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """Nothing is shared."""

    def separate_all(self) -> None:
        """Nothing is shared."""

    def draft(self, rows: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        """There is no MTP module."""
        raise AssertionError("a model without an MTP module drafts nothing")

    def settle(self, step: Any, accepted: Sequence[int]) -> list[int]:
        """No step takes several tokens."""
        raise AssertionError("a step of one token per row is settled by itself")

    def take_change(self) -> bool:
        """Nothing is shared."""
        return False


@dataclass
class FakeRunner(SharesNothing):
    """Records what it was asked to do in `log`, and fails where `fault` says so."""

    layout: str = "T"
    abilities: Abilities = field(
        default_factory=lambda: Abilities(Form.HEADS, "together", "on", feeds=Feeds({}, together=True))
    )
    overlaps: bool = field(default_factory=lambda: OVERLAPS)
    fault: Callable[[str, list[list[int]]], str | None] = lambda kind, rows: None
    """Called with "prefill" or "decode" and the tokens of each row; "prepare", "start", "read" or "settle" makes that
    part fail."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    feeds: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each step with a feed of several tokens, the known and the drafted tokens of each row."""
    unsettled: FakeStep | None = None
    samplings: list[SamplingParams] = field(default_factory=list)
    before: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What each row was said to come after: its prompt, and its output so far."""
    shifts: list[int] = field(default_factory=list)
    """What each row was said to add to its offsets."""
    encoder: Encoder = field(default_factory=fake_vision.encoder)

    def make_caches(self) -> list[LayerCache]:
        """Returns fresh caches."""
        return fake_model.make_caches(self.layout)

    def prefill(
        self, caches: list[LayerCache], tokens: TokenArray, adapter: int = 0, seen: SeenChunk | None = None
    ) -> None:
        """Evaluates a chunk; in a picture its features, which are to be the ids of its places."""
        self.log.append(("prefill", len(tokens)))
        before = tokens_in(caches)
        if seen is not None:
            assert seen.start == len(before)
            tokens = fake_vision.tokens_of(seen, tokens)
        if self.fault("prefill", [[*before, *tokens.tolist()]]):
            fake_model.evaluate(caches[:1], tokens)
            raise RuntimeError("the fake model failed in prefill")
        fake_model.evaluate(caches, tokens)
        fake_model.assert_holds(caches, [*before, *tokens.tolist()])

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: SamplingParams,
        next_token: int,
        *,
        prompt: TokenArray,
        generated: Sequence[int],
        adapter: int = 0,
        shift: int = 0,
    ) -> FakeRow:
        """Returns a row; of how tokens are to be sampled, only what keeps ends away has an effect."""
        self.samplings.append(sampling)
        self.before.append((prompt.tolist(), list(generated)))
        self.shifts.append(shift)
        return FakeRow(caches, [next_token], sampling, len(generated), list(generated))

    def force(self, row: FakeRow, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """The row goes on after `generated`, whatever the step before gave."""
        if row.known:
            assert row.known[-1] == generated[-1]
        else:
            assert len(prompt) + len(generated) == len(tokens_in(row.caches)), "penalties know of another output"
        row.emitted = list(generated)

    def prepare(
        self, rows: Sequence[FakeRow], previous: FakeStep | None, *, samples: bool = True, spare_bytes: float = 0
    ) -> FakeStep:
        """Evaluates each row's feed; what it gives is to be read once the step was started."""
        assert self.unsettled is None, "a step was prepared before the last one was settled"
        feeds = self._take_feeds(rows, previous)
        texts = [[*feed.before, *feed.tokens] for feed in feeds]
        failing = self.fault("decode", texts)
        for row, feed in zip(rows, feeds, strict=True):
            fake_model.evaluate(row.caches[:1] if failing else row.caches, np.array(feed.tokens, np.int32))
        if not failing:
            for row, tokens in zip(rows, texts, strict=True):
                fake_model.assert_holds(row.caches, tokens)
        errors = {failing: RuntimeError(f"the fake model failed at {failing}")} if failing else {}
        if "prepare" in errors:
            raise errors["prepare"]
        sampled = [_samples(row, feed) for row, feed in zip(rows, feeds, strict=True)]
        start, read, settle = (errors.get(part) for part in ("start", "read", "settle"))
        step = FakeStep(list(rows), feeds, sampled, start, read, settle, has_sampled=samples)
        if step.is_long:
            self.unsettled = step
            self.feeds.append([(feed.num_known, feed.num_drafted) for feed in feeds])
        else:
            for row in rows:
                row.position += 1
                row.known, row.emitted = [], []
        return step

    def sample(self, step: FakeStep, masks: Sequence[MaskWords | None]) -> None:
        """Gives each row the next token that its mask allows, counted from the one that it would have had."""
        assert not step.has_sampled, "a step samples once"
        step.has_sampled, step.is_started = True, False
        pairs = zip([token for sampled in step.sampled for token in sampled], masks, strict=True)
        bound = iter([token if words is None else _allowed(token, words) for token, words in pairs])
        step.sampled = [[next(bound) for _ in sampled] for sampled in step.sampled]

    def sample_again(self, step: FakeStep, row: FakeRow, mask: MaskWords | None) -> None:
        """Gives a row of a step that has sampled the next token that its mask allows."""
        assert step.has_sampled and not step.is_long and not step.is_read
        place = step.rows.index(row)
        row.position, row.emitted = len(row.emitted) + 1, []
        free = _samples(row, step.feeds[place])[0]
        step.sampled[place], step.is_started = [free if mask is None else _allowed(free, mask)], False

    def start(self, step: FakeStep) -> None:
        """Makes a step readable."""
        if step.has_sampled:
            self.log.append(("decode", len(step.rows)))
        if step.start_error is not None:
            raise step.start_error
        step.is_started = True

    def settle(self, step: FakeStep, accepted: Sequence[int]) -> list[int]:
        """Takes back what was drafted in vain. Rows with recurrent state can only go back to before the step."""
        assert step is self.unsettled and step.is_read, "a step with drafts is settled once, after it was read"
        self.unsettled = None
        if step.settle_error is not None:
            raise step.settle_error
        return [_settle(*each) for each in zip(step.rows, step.feeds, accepted, step.sampled, strict=True)]

    def drain(self, lost: Sequence[FakeRow] = ()) -> None:
        """Nothing is under way here; a step that failed is never settled."""
        self.unsettled = None

    def detach(self, row: FakeRow) -> None:
        """A row's caches always hold all of its state here."""

    def close(self) -> None:
        """There is no device to let go of."""
        self.log.append(("close",))

    def _take_feeds(self, rows: Sequence[FakeRow], previous: FakeStep | None) -> list[FakeFeed]:
        drafts, known = [[*row.draft] for row in rows], [[*row.known] for row in rows]
        assert not any(drafts) or all(known), "a draft lies after a token that nobody knows yet"
        for row, tokens in zip(rows, known, strict=True):
            if not tokens:
                assert previous is not None and row in previous.rows, "a row was fed from a step it was not in"
                (sampled,) = previous.sampled[previous.rows.index(row)]
                tokens.append(sampled)
        feeds = [
            FakeFeed(len(tokens), tokens + draft, tokens_in(row.caches), _recurrent(row.caches))
            for row, tokens, draft in zip(rows, known, drafts, strict=True)
        ]
        assert all(len(feed.tokens) <= self.abilities.max_feed_tokens for feed in feeds)
        for row, feed, draft in zip(rows, feeds, drafts, strict=True):
            if draft and row.emitted:
                assert row.emitted[-1] == feed.tokens[feed.num_known - 1], "penalties know of another token"
        return feeds


def _samples(row: FakeRow, feed: FakeFeed) -> list[int]:
    """What comes after the last known token and after each token of the draft."""
    first = len(feed.before) + feed.num_known
    text = [*feed.before, *feed.tokens]
    return [row.sample_after(text[: first + place], place) for place in range(feed.num_drafted + 1)]


def _settle(row: FakeRow, feed: FakeFeed, num_accepted: int, sampled: Sequence[int]) -> int:
    assert 0 <= num_accepted <= feed.num_drafted, "more was accepted than drafted"
    row.position += num_accepted + 1
    row.draft = []
    row.emitted = [*feed.tokens[feed.num_known :][:num_accepted], sampled[num_accepted]]
    num_kept = feed.num_known + num_accepted
    if feed.recurrent and num_accepted < feed.num_drafted:
        num_kept = 0
    kept = [*feed.before, *feed.tokens[:num_kept]]
    if num_kept < len(feed.tokens):
        for leaf, state in feed.recurrent:
            leaf.cache = state
        for leaf in leaves_of(row.caches):
            if not isinstance(leaf, ArraysCache):
                _cut(leaf, len(feed.tokens) - num_kept)
    fake_model.assert_holds(row.caches, kept, fake_model.WINDOW - 1)
    return num_kept


def _recurrent(caches: Sequence[LayerCache]) -> list[tuple[LayerCache, Any]]:
    """Layer caches with recurrent state, and the state."""
    return [(leaf, [*leaf.cache]) for leaf in leaves_of(caches) if isinstance(leaf, ArraysCache)]


def _cut(leaf: LayerCache, num_tokens: int) -> None:
    """Takes the last tokens out."""
    if isinstance(leaf, RotatingKVCache):
        # After several tokens at once the rows are in order, and at least a window of them is left.
        leaf.keys, leaf.values = leaf.keys[..., :-num_tokens, :], leaf.values[..., :-num_tokens, :]
        leaf._idx -= num_tokens
        leaf.offset -= num_tokens
    else:
        tail_of(leaf).trim(num_tokens)


def _allowed(token: int, words: MaskWords) -> int:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return next(each % VOCABULARY for each in range(token, token + VOCABULARY) if bits[each % VOCABULARY])


def tokens_in(caches: Sequence[LayerCache]) -> list[int]:
    """Returns the tokens that the first layer holds."""
    first = caches[0]
    return fake_model.contents([first], first.offset)[0] if first.offset else []


@dataclass(eq=False)
class ScriptedRow(FakeRow):
    """Says a script after its prompt, over and over."""

    script: Sequence[int] = ()
    num_prompt: int = 0

    def sample_after(self, tokens: Sequence[int], place: int = 0) -> int:
        """Returns the script's next token, whatever was sampled before."""
        return self.script[(len(tokens) - self.num_prompt) % len(self.script)]


@dataclass
class ScriptedRunner(FakeRunner):
    """A model that would say a script; what is bound or forced it says otherwise."""

    script: Sequence[int] = ()

    def make_row(self, caches: list[LayerCache], sampling: SamplingParams, next_token: int, **rest: Any) -> FakeRow:
        """Returns a row that says the script."""
        made = super().make_row(caches, sampling, next_token, **rest)
        return ScriptedRow(**vars(made), script=self.script, num_prompt=len(rest["prompt"]))
