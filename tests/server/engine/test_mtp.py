"""The whole engine with drafts of a model's MTP module: fewer steps, the same tokens."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from models.inference.drafters import MtpModel
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.weights import MTP_FILE
from server.app.config import ServerConfig
from server.app.service import open_service
from tests.support import fake_runner, tiny_models
from tests.support.engine_driver import Harness
from tests.support.tiny_mtp import (
    CONFIGS,
    learned_texts,
    model_of,
    module_of,
    prompt,
    tensors_of,
    trained_module_of,
)

NAMES = ("qwen3", "qwen3_5", "deepseek_v3")
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=11, top_p=0.95),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, top_logprobs=2),
)


class Predicting:
    """In place of what plans drafts: each row gets some of the module's, whatever that costs."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.num_steps = self.num_accepted = 0

    def begin(self, *_: object) -> SimpleNamespace:
        nothing = lambda *_: None  # noqa: E731
        return SimpleNamespace(push=nothing, end=nothing, accepted_prediction=0, rejected_prediction=0)

    def may_draft(self, rows: Sequence[object]) -> bool:
        return True

    def plan(
        self, rows: Sequence[object], limits: list[int], predict: Callable[[list[int]], list[list[int]]]
    ) -> list[list[int]]:
        return predict([min(limit, self._length) for limit in limits])

    def learn(
        self, rows: object, fed: object, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        self.num_steps += any(drafted)
        self.num_accepted += sum(accepted)

    def observe(self, *_: object) -> None:
        pass

    observe_restart = observe

    def observe_drafting(self, wanted: list[int], seconds: float) -> None:
        pass


@functools.cache
def runner_for(name: str, has_module: bool) -> Runner:
    module = trained_module_of(name) if has_module else None
    return Runner(model_of(name), vocab_size=tiny_models.VOCAB, mtp=module, max_probe_seconds=float("inf"))


def harness_for(name: str, speculation: Predicting | None, **sizes: int) -> Harness:
    runner = runner_for(name, speculation is not None)
    runner.overlaps = fake_runner.OVERLAPS
    return Harness(runner=runner, speculation=speculation, **sizes)  # type: ignore[arg-type]


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


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_a_module_change_no_token(name: str) -> None:
    plain = answers(harness_for(name, None, num_slots=2))
    for length in (1, 3):
        assert answers(harness_for(name, Predicting(length), num_slots=2)) == plain


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_a_module_expects_takes_half_the_steps(name: str) -> None:
    text, speculation = learned_texts(name)[0], Predicting(1)
    harness = harness_for(name, speculation)
    sink = harness.submit(text[:12], max_tokens=24, sampling=GREEDY, ignore_eos=True)
    harness.run()
    assert sink.tokens == text[12:36]
    assert speculation.num_accepted >= 10
    assert speculation.num_steps <= 13


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_module_that_fails_costs_each_answer_a_replay_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, harness, num_asked = answers(harness_for(name, None)), harness_for(name, Predicting(2)), 0

    def fail(*_: object) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MtpModel, "_chain", fail)
    assert answers(harness) == plain
    assert 0 < num_asked <= len(plain)


@pytest.mark.parametrize(("speculate", "has_module"), [("auto", True), ("history", False), ("off", False)])
def test_a_service_reads_the_module_of_a_folder(speculate: str, has_module: bool, tmp_path: Path) -> None:
    folder = tiny_models.write_model(model_of("qwen3_5"), CONFIGS["qwen3_5"], tmp_path / "model")
    mx.save_safetensors(str(folder / MTP_FILE), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    service = open_service(ServerConfig(models=(str(folder),), speculate=speculate, slots=1, context_tokens=512))
    service.start()
    try:
        assert ("MTP" in service.engine.stats().drafts_form) == has_module
        assert (service.loaded.mtp is not None) == has_module
    finally:
        service.engine.stop()
