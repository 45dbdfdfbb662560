"""The whole engine with drafts of a model's MTP module: fewer steps, the same tokens."""

import functools
from pathlib import Path

import mlx.core as mx
import pytest

from models.inference.drafters import MtpDrafter
from models.inference.runner import Runner
from models.weights import MTP_FILE
from server.app.config import ServerConfig
from server.app.service import open_service
from tests.support import fake_runner, tiny_models
from tests.support.drafting import GREEDY, Predicting, answers, answers_without
from tests.support.engine_driver import Harness
from tests.support.tiny_mtp import (
    CONFIGS,
    learned_texts,
    model_of,
    module_of,
    tensors_of,
    trained_module_of,
)

NAMES = ("qwen3", "qwen3_5", "deepseek_v3")


@functools.cache
def runner_for(name: str) -> Runner:
    drafter = MtpDrafter(model_of(name), trained_module_of(name))
    return Runner(model_of(name), vocab_size=tiny_models.VOCAB, drafter=drafter, max_probe_seconds=float("inf"))


def harness_for(name: str, speculation: Predicting, **sizes: int) -> Harness:
    runner = runner_for(name)
    runner.overlaps = fake_runner.OVERLAPS
    return Harness(runner=runner, speculation=speculation, **sizes)  # type: ignore[arg-type]


@pytest.mark.usual("overlap-qwen3", "overlap-deepseek_v3", "in turns-qwen3_5")
@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_a_module_change_no_token(name: str) -> None:
    assert answers(harness_for(name, Predicting(1, 3), num_slots=2)) == answers_without(name)


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
    harness, num_asked = harness_for(name, Predicting(2)), 0

    def fail(*_: object) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MtpDrafter, "_predict", fail)
    assert answers(harness) == answers_without(name)
    assert 0 < num_asked <= len(answers_without(name))


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
