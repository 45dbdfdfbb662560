"""A runner over the token-carrying fake model: the next token is a hash of what the caches really hold.

A wrong cache state therefore changes every later token, and `reference` says what a right one gives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache.types import LayerCache, TokenArray
from models.inference.sampling_params import SamplingParams
from models.inference.sampling_state import Draft
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from tests.support import fake_model

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

    def sample_after(self, tokens: Sequence[int]) -> int:
        """Returns the next token after `tokens`: the one after it for an end that would come too early."""
        token = next_token(tokens)
        while self.position < self.sampling.min_tokens and token in self.sampling.end_token_ids:
            token = (token + 1) % VOCABULARY
        self.position += 1
        return token


@dataclass(eq=False)
class FakeStep:
    """One step. `start_error` comes out when it is started, `error` when it is read, as a device's would."""

    rows: list[FakeRow]
    sampled: list[int]
    start_error: Exception | None = None
    error: Exception | None = None
    is_started: bool = False
    has_sampled: bool = True

    def tokens(self) -> list[list[int]]:
        """Returns the sampled tokens, or raises."""
        assert self.is_started and self.has_sampled, "a step was read that nobody started"
        if self.error is not None:
            raise self.error
        return [[token] for token in self.sampled]

    def logprob(self, index: int, token: int, place: int = 0) -> TokenLogprob | None:
        """Returns numbers that say of which token they are, for rows that ask."""
        count = self.rows[index].sampling.top_logprobs
        return None if count is None else logprob_of(token, count)


class SharesNothing:
    """A runner whose rows are evaluated each over its own caches, one token at a time."""

    padding_bytes = 0
    max_feed_tokens = 1
    step_seconds: Mapping[int, float] = {}
    feeds_together = False
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
    rows_form: str = "together"
    overlaps: bool = field(default_factory=lambda: OVERLAPS)
    fault: Callable[[str, list[list[int]]], str | None] = lambda kind, rows: None
    """Called with "prefill" or "decode" and the tokens of each row; "prepare", "start" or "read" makes that part
    fail."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    samplings: list[SamplingParams] = field(default_factory=list)
    before: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What each row was said to come after: its prompt, and its output so far."""

    def make_caches(self) -> list[LayerCache]:
        """Returns fresh caches."""
        return fake_model.make_caches(self.layout)

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int = 0) -> None:
        """Evaluates a chunk."""
        self.log.append(("prefill", len(tokens)))
        before = tokens_in(caches)
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
    ) -> FakeRow:
        """Returns a row; of how tokens are to be sampled, only what keeps ends away has an effect."""
        self.samplings.append(sampling)
        self.before.append((prompt.tolist(), list(generated)))
        return FakeRow(caches, [next_token], sampling, len(generated))

    def force(self, row: FakeRow, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """The next step feeds `token`, whatever the step before gave."""
        assert generated[-1] == token
        row.known = [token]

    def prepare(
        self,
        rows: Sequence[FakeRow],
        previous: FakeStep | None,
        *,
        drafts: Sequence[Draft] = (),
        samples: bool = True,
        spare_bytes: float = 0,
    ) -> FakeStep:
        """Evaluates one token for each row; what it gives is to be read once the step was started."""
        fed = [self._input(row, previous) for row in rows]
        held = [[*tokens_in(row.caches), token] for row, token in zip(rows, fed, strict=True)]
        failing = self.fault("decode", held)
        for row, token in zip(rows, fed, strict=True):
            fake_model.evaluate(row.caches[:1] if failing else row.caches, np.array([token], np.int32))
        if not failing:
            for row, tokens in zip(rows, held, strict=True):
                fake_model.assert_holds(row.caches, tokens)
        errors = {failing: RuntimeError(f"the fake model failed at {failing}")} if failing else {}
        if "prepare" in errors:
            raise errors["prepare"]
        sampled = [row.sample_after(tokens) for row, tokens in zip(rows, held, strict=True)]
        return FakeStep(list(rows), sampled, errors.get("start"), errors.get("read"), has_sampled=samples)

    def sample(self, step: FakeStep, masks: Sequence[MaskWords | None]) -> None:
        """Gives each row the next token that its mask allows, counted from the one that it would have had."""
        assert not step.has_sampled, "a step samples once"
        step.has_sampled, step.is_started = True, False
        step.sampled = [
            token if words is None else _allowed(token, words)
            for token, words in zip(step.sampled, masks, strict=True)
        ]

    def start(self, step: FakeStep) -> None:
        """Makes a step readable."""
        if step.has_sampled:
            self.log.append(("decode", len(step.rows)))
        if step.start_error is not None:
            raise step.start_error
        step.is_started = True

    def drain(self) -> None:
        """Nothing is under way here."""

    def detach(self, row: FakeRow) -> None:
        """A row's caches always hold all of its state here."""

    def close(self) -> None:
        """There is no device to let go of."""
        self.log.append(("close",))

    def _input(self, row: FakeRow, previous: FakeStep | None) -> int:
        known, row.known = row.known, []
        if known:
            return known[0]
        assert previous is not None and row in previous.rows, "a row was fed from a step it was not in"
        return previous.sampled[previous.rows.index(row)]


def _allowed(token: int, words: MaskWords) -> int:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return next(each % VOCABULARY for each in range(token, token + VOCABULARY) if bits[each % VOCABULARY])


def tokens_in(caches: Sequence[LayerCache]) -> list[int]:
    """Returns the tokens that the first layer holds."""
    first = caches[0]
    return fake_model.contents([first], first.offset)[0] if first.offset else []
