"""Drafts of what a grammar, or a limit on reasoning, forces: fewer steps, the same tokens."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.history import ForcedText, History, PredictionFollower
from models.inference.abilities import Feeds
from models.inference.grammar import GrammarCompiler, _LlguidanceMatcher
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import load
from models.output.grammar import CallOpener, Grammar, GrammarKind, OutputGrammar, allows
from models.output.pieces import ReasoningFormat, Thinking
from server.engine.acceptance import AcceptanceRates, FollowedText, ForcedTokens
from server.engine.request import DraftSource, Finished
from server.engine.speculation import Drafting, Speculation
from tests.server.engine.test_drafts import CLOSED, prompt_of
from tests.support import fake_runner, tiny_models
from tests.support.engine_driver import Collected, Harness

pytestmark = pytest.mark.usefixtures("overlaps")

DEMO = Path(__file__).parents[3] / "models" / "demo"
START = 11
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=11, top_p=0.95),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, top_logprobs=2),
    SamplingParams(temperature=1.0, seed=7, logit_bias=((START, 50.0),)),
)


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMA = object_of(
    is_ready_for_delivery={"type": "boolean"},
    temperature_of_the_room={"enum": ["comfortably warm", "cold"]},
    place=object_of(number_of_the_house={"enum": [1, 20]}),
)
CALL = rf"""start: OPEN "\n{{\"name\": \"" ("get_weather" | "get_place") "\", \"arguments\": " city "}}\n" CLOSE
city: %json {json.dumps(object_of(city={"enum": ["Rome", "Reims"]}))}"""
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "call": Grammar(GrammarKind.LARK, CALL),
    "regex": Grammar(GrammarKind.REGEX, r"(no answer|yes, of course), [0-9]{2} of a hundred"),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(["accepted as it is", "accepted with changes", "rejected"])),
}
CASES = [*((name, kind) for name in ("llama", "demo") for kind in GRAMMARS), ("qwen3_5", "schema")]
THOUGHTS = (CLOSED, Thinking(ReasoningFormat(f"{START} ", "12 ", (14, 12, 13)), max_tokens=4))


class Priced(Speculation):
    """Drafts where a step lasts 1 s and a hundredth for each token."""

    def __init__(self) -> None:
        seconds = {knot: 1 + knot / 100 for knot in (1, 2, 64)}
        super().__init__(History(), Feeds(seconds, together=True, max_tokens=64))
        for num_rows in (1, 2, 3, 4) * 3:  # steps without drafts are measured before some have any
            self.observe_plain(num_rows, 0.0, 0.0)

    def learn(
        self, rows: Sequence[Drafting], fed: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """Takes no time of the clock."""
        super().learn(rows, fed, drafted, accepted, 1 + sum(fed) / 100)

    def observe_plain(self, num_rows: int, seconds: float, looking_seconds: float) -> None:
        """Takes no time of the clock."""
        super().observe_plain(num_rows, 1 + num_rows / 100, 0.0)

    def observe_resumed(self, num_rows: int, seconds: float) -> None:
        """Takes no time of the clock."""

    @property
    def forced(self) -> tuple[int, int]:
        """Forced tokens that were drafted, and those of them that were accepted."""
        return self.stats.drafted[DraftSource.GRAMMAR], self.stats.accepted[DraftSource.GRAMMAR]


@dataclass
class Bindable:
    """A model, and what compiles grammars for its tokens."""

    runner: Runner
    compiler: GrammarCompiler
    tokenizer: Any

    def grammar(self, kind: str) -> OutputGrammar:
        text = GRAMMARS[kind].text
        for name, marker in (("OPEN", "<tool_call>"), ("CLOSE", "</tool_call>")):
            text = text.replace(name, f"<[{self.tokenizer.convert_tokens_to_ids(marker)}]>")
        return OutputGrammar(self.compiler.compile(Grammar(GRAMMARS[kind].kind, text)))


@functools.cache
def bindable(name: str) -> Bindable:
    """One for all tests: a new runner would probe its model again."""
    loaded: Any = load(DEMO, name) if name == "demo" else None
    tokenizer: Any = loaded.tokenizer if loaded else tiny_models.tokenizer()
    model, vocab_size = (loaded.model, loaded.vocab_size) if loaded else (tiny_models.build(name), tiny_models.VOCAB)
    compiler = GrammarCompiler(tokenizer.backend_tokenizer.to_str, [tokenizer.eos_token_id])
    return Bindable(Runner(model, vocab_size=vocab_size, max_probe_seconds=float("inf")), compiler, tokenizer)


def answers(name: str, speculation: Speculation | None, num_rows: int, **fields: Any) -> tuple[list[list[int]], int]:
    """The tokens that rows say, and the number of steps until all have ended."""
    runner, num_steps = bindable(name).runner, 0
    runner.overlaps = fake_runner.OVERLAPS
    harness = Harness(runner=runner, speculation=speculation)
    wanted = [{"max_tokens": 90, "sampling": sampling, **fields} for sampling in SAMPLINGS[:num_rows]]
    sinks = [harness.submit([5, 6, 7 + row], **each) for row, each in enumerate(wanted)]
    while harness.worker.has_work:
        harness.step()
        num_steps += 1
    assert all(isinstance(sink.last, Finished) for sink in sinks)
    return [sink.tokens for sink in sinks], num_steps


@functools.cache
def plain_answers(
    name: str, kind: str, num_rows: int, thinking: Thinking | None = None
) -> tuple[list[list[int]], int]:
    """Without drafts; with `thinking`, a thought may come first."""
    return answers(name, None, num_rows, thinking=thinking, grammar=bound(name, kind, thinking))


def bound(name: str, kind: str, thinking: Thinking | None) -> OutputGrammar:
    grammar = bindable(name).grammar(kind)
    return grammar if thinking is None else replace(grammar, reasoning_start=None if thinking.is_open else START)


@pytest.mark.usual("overlap-llama-*", "in turns-qwen3_5-*", "in turns-demo-*")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_a_grammar_forces_takes_fewer_steps_and_changes_no_token(name: str, kind: str) -> None:
    for num_rows in (1, 4):
        speculation = Priced()
        plain, num_plain = plain_answers(name, kind, num_rows)
        found, num_steps = answers(name, speculation, num_rows, grammar=bound(name, kind, None))
        assert found == plain
        assert speculation.forced[0] == speculation.forced[1] > 0
        assert num_steps < (0.5 if kind == "schema" else 0.8) * num_plain


@pytest.mark.usual("*-llama", "*-qwen3_5")
@pytest.mark.parametrize("name", ["llama", "demo"])
@pytest.mark.parametrize("thinking", THOUGHTS)
def test_thoughts_at_their_limit_are_closed_in_fewer_steps_and_change_no_token(name: str, thinking: Thinking) -> None:
    for num_rows in (1, 4):
        speculation = Priced()
        plain, num_plain = plain_answers(name, "schema", num_rows, thinking)
        found, num_steps = answers(
            name, speculation, num_rows, thinking=thinking, grammar=bound(name, "schema", thinking)
        )
        assert found == plain
        assert speculation.forced[1] >= 0.9 * speculation.forced[0] > 0
        assert any(START in output[:1] for output in plain) or thinking.is_open or num_rows == 1
        assert num_steps < 0.8 * num_plain


@pytest.mark.usual("*-llama", "*-qwen3_5")
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_calls_are_bound_alike_whether_steps_overlap_and_with_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample drawn before a row was bound is drawn again: of its own key, behind its own penalties."""
    opener = CallOpener(re.compile(r"\b\d*[015] ()"))
    grammar, speculation, found = replace(bound(name, "regex", None), opener=opener), Priced(), list[Any]()
    for overlaps in (True, False):
        monkeypatch.setattr(fake_runner, "OVERLAPS", overlaps)
        found += [answers(name, drafts, 4, grammar=grammar, ignore_eos=True) for drafts in (None, speculation)]
    assert all(tokens == found[0][0] for tokens, _ in found)
    assert found[1][1] < found[0][1] and speculation.forced[0] == speculation.forced[1] > 0
    compiled = grammar.compiled
    for tokens in found[0][0]:
        matcher = compiled.begin()
        for token in tokens[next((at + 1 for at, token in enumerate(tokens) if token % 10 in (0, 1, 5)), 90) :]:
            assert allows(matcher.mask(), token)
            matcher.accept(token)
            if matcher.is_complete:
                break


def test_wrong_forced_tokens_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, right, speculation = bindable("llama").grammar("schema"), _LlguidanceMatcher.forced, Priced()
    plain, _ = answers("llama", None, 4, grammar=grammar)

    def wrong(matcher: _LlguidanceMatcher) -> list[int]:
        """The forced tokens, one of several that are allowed, and one that may not be."""
        forced, ahead = right(matcher), matcher.copy()
        for token in forced:
            ahead.accept(token)
        allowed = np.flatnonzero(np.unpackbits(ahead.mask().view(np.uint8), bitorder="little"))
        return [*forced, int(allowed[-1]), 40]

    monkeypatch.setattr(_LlguidanceMatcher, "forced", wrong)
    assert answers("llama", speculation, 4, grammar=grammar)[0] == plain
    assert speculation.forced[0] > speculation.forced[1] > 0


@pytest.mark.parametrize(
    ("forced", "draft", "source"),
    [
        ([1, 2], [1, 2, 3, 4, 5], DraftSource.PREDICTION),
        ([1, 9], [1, 9], DraftSource.GRAMMAR),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], DraftSource.GRAMMAR),
    ],
)
def test_a_draft_goes_on_behind_forced_tokens_where_a_text_has_the_same(
    forced: list[int], draft: list[int], source: DraftSource
) -> None:
    rates = AcceptanceRates((0.9,) * 6, weight=16, decay=1.0)
    text = FollowedText(DraftSource.PREDICTION, rates, PredictionFollower(np.array([1, 2, 3, 4, 5], np.int32)))
    tokens = ForcedTokens(AcceptanceRates((1.0,) * 6, weight=16, decay=1.0), ForcedText(lambda: forced), text)
    assert (tokens.draft(9), tokens.source) == (draft, source)
    assert tokens.draft(3) == draft[:3]
    behind = [0.9 ** (place + 1) for place in range(len(draft) - len(forced))]
    assert tokens.net_rates(9, 0.02) == pytest.approx([1.0] * len(forced) + behind)
    assert len(tokens.net_rates(9, 0.85)) == min(len(draft), len(forced) + 1)
    assert tokens.net_rates(9, 0.02, 1) == pytest.approx(([1.0] * len(forced) + behind)[1:])


@pytest.mark.parametrize("message", ["out of memory", "the device is at fault"])
def test_a_forced_token_that_the_runner_cannot_take_concerns_its_own_row(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the token before it is read with a step under way, or before a newcomer's prompt is evaluated."""
    prompts = [prompt_of(seed, 20) for seed in (1, 2, 3)]

    def run(num_steps: int) -> list[Collected]:
        harness = Harness()
        sinks = [harness.submit(prompts[0], max_tokens=20, ignore_eos=True, thinking=CLOSED)]
        sinks.append(harness.submit(prompts[1], max_tokens=20, ignore_eos=True))
        harness.step(num_steps)
        sinks.append(harness.submit(prompts[2], max_tokens=20, ignore_eos=True))
        harness.run()
        return sinks

    def fail(*_: object, **__: object) -> None:
        patch.undo()
        raise RuntimeError(message)

    plain = [sink.tokens for sink in run(1)]
    for num_steps in range(1, 12):
        with monkeypatch.context() as patch:
            patch.setattr(fake_runner.FakeRunner, "force", fail)
            assert [sink.tokens for sink in run(num_steps)] == plain
