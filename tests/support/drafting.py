"""Rows that a runner decodes with drafts, step by step; and an engine whose every step drafts."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np

from cache.layers.kinds import leaves_of
from cache.types import LayerCache
from models.inference.row import DecodeRow
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.mlx_lm_import import ArraysCache
from tests.support import tiny_models
from tests.support.engine_driver import Harness
from tests.support.greedy import assert_greedy
from tests.support.tiny_mtp import learned_texts, prompt

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=11, top_p=0.95),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, top_logprobs=2),
)


class Predicting:
    """Stands for `Speculation`: each row gets drafts of the drafter, whatever they cost, of these lengths in turn."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = itertools.cycle(lengths)
        self.num_steps = self.num_accepted = 0
        self.stats = None

    def begin(self, *_: object) -> SimpleNamespace:
        nothing = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(push=nothing, learn=nothing, end=nothing, prediction=None, drafter=object())

    def may_draft(self, rows: Sequence[object]) -> bool:
        return True

    def plan(
        self,
        rows: Sequence[Any],
        limits: list[int],
        predict: Callable[[list[int]], list[list[int]]],
        known: list[int],
    ) -> list[list[int]]:
        length = next(self._lengths)
        wanted = [length * (row.drafter is not None) for row in rows]
        return predict([*map(min, limits, wanted)]) if any(wanted) else [[] for _ in rows]

    def learn(
        self, rows: object, fed: object, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        self.num_steps += any(drafted)
        self.num_accepted += sum(accepted)

    def observe_plain(self, *_: object) -> None:
        pass

    observe_resumed = observe_plain

    def observe_drafter(self, wanted: list[int], seconds: float) -> None:
        pass


class Decoding:
    """Rows of a runner with a drafter, greedily."""

    def __init__(self, runner: Runner, texts: Sequence[list[int]]) -> None:
        self.runner = runner
        self.rows, self.outputs, self.num_steps = list[DecodeRow](), [list[int]() for _ in texts], 0
        for text in texts:
            caches = self.runner.make_caches()
            self.runner.prefill(caches, np.array(text[:-3], np.int32))
            self.runner.prefill(caches, np.array(text[-3:-1], np.int32))
            self.rows.append(self.runner.make_row(caches, SamplingParams(temperature=0), text[-1]))
        self.known = [[text[-1]] for text in texts]

    def plain_steps(self, count: int) -> None:
        """Double-buffered, as without drafts."""
        while any(len(known) > 1 for known in self.known):
            self.step([0] * len(self.rows))
        for row, known in zip(self.rows, self.known, strict=True):
            row.known = list(known)
        step = None
        for _ in range(count):
            following = self.runner.prepare(self.rows, step)
            self.runner.start(following)
            self._take(following.tokens())
            step = following

    def step(self, limits: list[int]) -> list[list[int]]:
        for row, known in zip(self.rows, self.known, strict=True):
            row.known = list(known)
        drafts = self.runner.draft(self.rows, limits)
        if not any(drafts) and all(len(known) == 1 for known in self.known):
            step = self.runner.prepare(self.rows, None)
            self.runner.start(step)
            self._take(step.tokens())
            return drafts
        for row, draft in zip(self.rows, drafts, strict=True):
            row.draft = draft
        step = self.runner.prepare(self.rows, None)
        self.runner.start(step)
        samples = step.tokens()
        accepted = [
            sum(accumulate((a == b for a, b in zip(draft, found, strict=False)), min))
            for draft, found in zip(drafts, samples, strict=True)
        ]
        held = self.runner.settle(step, accepted)
        for place, (found, count, num_held) in enumerate(zip(samples, accepted, held, strict=True)):
            fed = [] if num_held else [*self.known[place], *found[:count]]
            self.outputs[place] += found[: count + 1]
            self.known[place] = [*fed, found[count]]
        self.num_steps += 1
        return drafts

    def _take(self, samples: list[list[int]]) -> None:
        for place, (token,) in enumerate(samples):
            self.outputs[place].append(token)
            self.known[place] = [token]
        self.num_steps += 1

    def assert_as_without(self, model: Any, texts: Sequence[list[int]]) -> None:
        for text, output, known, row in zip(texts, self.outputs, self.known, self.rows, strict=True):
            assert_greedy(model, text, output)
            self.runner.detach(row)
            assert set(lengths(row.caches)) == {len(text) + len(output) - len(known)}


def lengths(caches: Sequence[LayerCache]) -> Iterator[int]:
    """Of the layers that are used and have one."""
    for cache in leaves_of(caches):
        if not isinstance(cache, ArraysCache) and cache.offset:
            yield cache.offset


@functools.cache
def runner_of(name: str) -> Runner:
    """Of a tiny model without a drafter; one for all tests, as a new one would probe its model again."""
    return Runner(tiny_models.build(name), vocab_size=tiny_models.VOCAB, max_probe_seconds=float("inf"))


@functools.cache
def answers_without(name: str) -> list[list[int]]:
    """What a model without a drafter answers."""
    return answers(Harness(runner=runner_of(name), num_slots=2))


def answers(harness: Harness) -> list[list[int]]:
    """Two turns of conversations of several lengths, in two slots, and a repeat."""

    def ask(texts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> list[Any]:
        asked = zip(texts, samplings, strict=True)
        sinks = [harness.submit(each, max_tokens=20, sampling=how, ignore_eos=True) for each, how in asked]
        harness.run()
        return sinks

    texts = [learned_texts("qwen3")[0][:10], prompt(33, seed=78), prompt(19, seed=79)]
    first = ask(texts, SAMPLINGS)
    turns = [[*text, *sink.tokens, 5, 6] for text, sink in zip(texts, first, strict=True)]
    second = ask([*turns, texts[1]], [GREEDY] * 4)
    for turn, sink in zip(turns, second, strict=False):
        assert sink.started.hit_tokens >= len(turn) - 3, "a turn's history was evaluated again"
    return [sink.tokens for sink in (*first, *second)]
