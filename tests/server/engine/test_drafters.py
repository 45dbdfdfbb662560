"""The whole engine with a draft model or an MTP module: fewer steps, same tokens, state that both go on from."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache.budget import PADDING
from models.errors import ModelBroken, ModelNotFound
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.runner import Runner
from models.loader import DraftModel
from models.weights import MTP_FILE
from server.app.config import ServerConfig
from server.app.memory_budget import Machine
from server.app.service import Service, ServiceOpener, open_service, pool_memory, source_of
from server.engine.request import DraftSource, FinishReason
from server.pool.members import Around
from tests.support import fake_runner, tiny_models
from tests.support.drafting import GREEDY, Predicting, answers, answers_without
from tests.support.engine_driver import Harness
from tests.support.greedy import assert_greedy
from tests.support.tiny_mtp import (
    CONFIGS,
    learned_texts,
    model_of,
    module_of,
    plain,
    prompt,
    tensors_of,
    trained_module_of,
)

PAIRS = [("qwen3", "llama"), ("llama_swa", "qwen3_5"), ("qwen3_5", "llama_swa")]


@functools.cache
def runner_for(name: str, draft: str) -> Runner:
    model, vocab_size = tiny_models.build(name), tiny_models.VOCAB
    drafter = ModelDrafter(model, vocab_size, DraftModel(draft, tiny_models.build(draft), vocab_size))
    return Runner(model, vocab_size=vocab_size, drafter=drafter, max_probe_seconds=float("inf"))


def harness_for(name: str, draft: str, length: int, **options: Any) -> Harness:
    """Drafts of `length` tokens in every step."""
    runner = runner_for(name, draft)
    runner.overlaps = fake_runner.OVERLAPS
    return Harness(runner=runner, speculation=Predicting(length), **options)


@pytest.mark.usual("overlap-qwen3-llama", "overlap-llama_swa-qwen3_5", "in turns-qwen3_5-llama_swa")
@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_a_draft_model_changes_no_token(name: str, draft: str) -> None:
    assert answers(harness_for(name, draft, 3, num_slots=2)) == answers_without(name)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_an_answer_that_the_draft_model_expects_takes_a_fraction_of_the_steps(name: str) -> None:
    speculation = Predicting(3)
    harness = Harness(runner=harness_for(name, name, 3).runner, speculation=speculation)
    sink = harness.submit(prompt(12), max_tokens=40, sampling=GREEDY, ignore_eos=True)
    harness.run()
    assert sink.tokens == plain(tiny_models.build(name), prompt(12), 40)
    assert speculation.num_accepted >= 27
    assert speculation.num_steps <= 13


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_a_draft_model_that_fails_costs_drafts_only(name: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, num_asked = harness_for(name, draft, 2, num_slots=2), 0

    def fail(*_: object) -> mx.array:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelDrafter, "_predict", fail)
    assert answers(harness) == answers_without(name)
    assert 0 < num_asked <= 7


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_a_cancel_leaves_what_both_models_have_evaluated(name: str, draft: str) -> None:
    harness, text = harness_for(name, draft, 3), prompt(20)
    sink = harness.submit(text, max_tokens=40, sampling=GREEDY, ignore_eos=True, request_id="r")
    harness.step(5)
    held = harness.prefix_cache.slots[sink.started.slot].offset
    harness.worker.cancel("r")
    assert sink.last.reason is FinishReason.CANCELLED
    following = harness.submit([*text, *sink.tokens], max_tokens=8, sampling=GREEDY, ignore_eos=True)
    harness.run()
    assert following.started.hit_tokens == held
    # Recurrent layers take back all of a feed.
    assert held == len(text) + len(sink.tokens) - 1 or "qwen3_5" in (name, draft)
    assert [*sink.tokens, *following.tokens] == plain(tiny_models.build(name), text, len(sink.tokens) + 8)


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_whoever_waits_for_memory_goes_on_with_a_draft_model(
    name: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.layers.layout.GROWTH_TOKENS", 8)
    harness = harness_for(name, draft, 2, num_slots=4)
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, np.ones(40, np.int32))
    harness.prefix_cache.layout.calibrate(caches)
    prompts = [prompt(40, seed=index) for index in range(4)]
    sinks = [harness.submit(each, max_tokens=24, sampling=GREEDY, ignore_eos=True) for each in prompts]
    while any(sink.text == "" for sink in sinks):
        harness.step()
    ledger = harness.prefix_cache.ledger
    ledger.budget_bytes = ledger.charged_bytes - ledger.stored_bytes - ledger.slot_bytes(PADDING)
    harness.run(limit=5000)
    assert harness.worker.stats().num_preempted > 0
    for each, sink in zip(prompts, sinks, strict=True):
        assert len(sink.tokens) == 24
        assert_greedy(tiny_models.build(name), each, sink.tokens)


# ------------------------------------------------------------------------------------------------------- the setting


def small(**changes: Any) -> dict[str, Any]:
    return {**tiny_models.CONFIGS["llama"], "num_hidden_layers": 1, "intermediate_size": 32, **changes}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a model, and of models that are asked to draft for it."""
    root = tmp_path_factory.mktemp("models")
    main = tiny_models.write("qwen3", root / "main")
    found = {"main": main, "twin": Path(shutil.copytree(main, root / "twin"))}
    found |= {"draft": tiny_models.write_model(tiny_models.make(small()), small(), root / "draft")}
    for name in ("other", "vectors", "broken"):
        found[name] = Path(shutil.copytree(found["draft"], root / name))
    found["large vectors"] = Path(shutil.copytree(main, root / "large vectors"))
    (found["large vectors"] / "modules.json").write_text("[]")
    tokens = found["other"] / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace("<think>", "<thunk>"))
    (found["vectors"] / "modules.json").write_text("[]")
    (found["broken"] / "model.safetensors").write_bytes(b"\0" * 64)
    return found


def opened(model: Path, draft: str | Path, **settings: Any) -> Service:
    return open_service(
        ServerConfig(models=(str(model),), speculate=f"draft={draft}", slots=1, context_tokens=512, **settings)
    )


def test_a_service_loads_the_draft_model_beside_the_model(folders: dict[str, Path]) -> None:
    with_draft, plainly = opened(folders["main"], folders["draft"]), opened(folders["main"], folders["main"])
    assert with_draft.loaded.draft is not None
    assert " draft " in with_draft.loaded.state_fingerprint
    assert plainly.loaded.state_fingerprint in with_draft.loaded.state_fingerprint
    assert with_draft.memory.weights_bytes > plainly.memory.weights_bytes
    with_draft.start()
    try:
        stats = with_draft.engine.stats()
        assert stats.drafts_form.startswith("from earlier text and by ")
        assert stats.drafts is not None and DraftSource.DRAFT in stats.drafts.drafted
    finally:
        with_draft.engine.stop()


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ("other", "its tokenizer is another, by 2 tokens such as '<think>'"),
        ("twin", "its weights are no smaller than those of "),
        ("vectors", "it makes vectors, not text"),
    ],
)
def test_a_model_that_cannot_draft_is_left_out_and_the_report_says_why(
    draft: str, told: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    service = opened(folders["main"], folders[draft])
    assert service.loaded.draft is None
    assert told in caplog.text
    service.start()
    try:
        assert told in service.engine.stats().drafts_form
    finally:
        service.engine.stop()


def test_a_draft_model_that_cannot_be_loaded_ends_the_start(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^--speculate: .*nowhere"):
        opened(folders["main"], tmp_path / "nowhere")
    with pytest.raises(ModelBroken):
        opened(folders["main"], folders["broken"])


def test_a_model_loaded_later_gets_the_draft_model_too(folders: dict[str, Path]) -> None:
    config = ServerConfig(models=(str(folders["main"]),), speculate=f"draft={folders['draft']}", context_tokens=512)
    opener = ServiceOpener(config, pool_memory(config, Machine(8 << 30, None), ()), None)
    source = source_of(str(folders["main"]))
    files = [folders[name] / "model.safetensors" for name in ("main", "draft")]
    assert opener.measure(source) == sum(file.stat().st_size for file in files)
    with ThreadPoolExecutor(1) as pool:  # the opener ends its thread's streams
        model = pool.submit(opener.open, source, Around((), 1 << 28), lambda step: None).result()
    try:
        assert str(folders["draft"].name) in model.engine.stats().drafts_form
    finally:
        model.engine.stop()


NAMES = ("qwen3", "qwen3_5", "deepseek_v3")


@functools.cache
def mtp_runner(name: str) -> Runner:
    drafter = MtpDrafter(model_of(name), trained_module_of(name))
    return Runner(model_of(name), vocab_size=tiny_models.VOCAB, drafter=drafter, max_probe_seconds=float("inf"))


def mtp_harness(name: str, speculation: Predicting, **sizes: int) -> Harness:
    runner = mtp_runner(name)
    runner.overlaps = fake_runner.OVERLAPS
    return Harness(runner=runner, speculation=speculation, **sizes)  # type: ignore[arg-type]


@pytest.mark.usual("overlap-qwen3", "overlap-deepseek_v3", "in turns-qwen3_5")
@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_a_module_change_no_token(name: str) -> None:
    assert answers(mtp_harness(name, Predicting(1, 3), num_slots=2)) == answers_without(name)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_a_module_expects_takes_half_the_steps(name: str) -> None:
    text, speculation = learned_texts(name)[0], Predicting(1)
    harness = mtp_harness(name, speculation)
    sink = harness.submit(text[:12], max_tokens=24, sampling=GREEDY, ignore_eos=True)
    harness.run()
    assert sink.tokens == text[12:36]
    assert speculation.num_accepted >= 10
    assert speculation.num_steps <= 13


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_module_that_fails_costs_each_answer_a_replay_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, num_asked = mtp_harness(name, Predicting(2)), 0

    def fail(*_: object) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MtpDrafter, "_predict", fail)
    assert answers(harness) == answers_without(name)
    assert 0 < num_asked <= len(answers_without(name))


@pytest.mark.alone("machines leave MTP modules out")
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
