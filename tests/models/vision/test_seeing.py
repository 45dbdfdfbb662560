"""Tiny models that see: what they answer depends on the picture, and not on how it was evaluated."""

import functools
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import Qwen2VLImageProcessor

from cache.layers.kinds import make_caches
from cache.snapshots import RestorePoint, RestorePointKind
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import DraftModel, LoadedModel, convert_weights, load, with_vision
from models.mtp import MtpModule, language_model
from models.prompt.pictures import Pictures
from models.vision.features import Encoder
from models.vision.image_files import read_pixels
from models.vision.qwen import QwenImages
from tests.support import tiny_models, tiny_vision
from tests.support.drafting import Predicting
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_vision import prompt_of
from tests.support.oracle import Oracle
from tests.support.tiny_vision import FAMILIES, PROCESSOR, VISION, image

GREEDY = SamplingParams(temperature=0.0)
HEAD, MIDDLE, END = [*range(40, 60)], [*range(80, 92)], [*range(100, 109)]
A, B = image(6), image(7)
C = image(3, 24, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@functools.cache
def seeing(family: str, folder: Path) -> LoadedModel:
    path = tiny_vision.write(family, folder / family)
    return with_vision(load(path, family), 256)


@functools.cache
def runner_of(family: str, folder: Path) -> Runner:
    loaded = seeing(family, folder)
    assert loaded.vision is not None
    encoder = Encoder(loaded.vision.tower, 1e6, 1 << 20)
    return Runner(
        loaded.model,
        vocab_size=loaded.vocab_size,
        encoder=encoder,
        vision_inputs=loaded.vision.inputs,
        max_probe_seconds=float("inf"),
    )


def ask(harness: Harness, loaded: LoadedModel, *parts: Any, **fields: Any) -> Collected:
    assert loaded.vision is not None
    opened = [loaded.vision.open(part) if isinstance(part, bytes) else part for part in parts]
    tokens, pictures = prompt_of(*opened)
    points = tuple(RestorePoint(one.stop, RestorePointKind.BRANCH) for one in pictures.placed)
    made = {"sampling": GREEDY, "ignore_eos": True, "max_tokens": 12, "restore_points": points, **fields}
    return harness.submit(tokens, pictures=pictures, **made)


PROMPTS = ((HEAD, A, END), (HEAD, B, END), (HEAD, A, MIDDLE), (A, C, END), (HEAD, C, MIDDLE, A, END))


@functools.cache
def answers(family: str, folder: Path) -> list[list[int]]:
    """Returns what is answered alone, cold, to each of `PROMPTS`."""
    found = []
    for parts in PROMPTS:
        harness = Harness(runner=runner_of(family, folder), chunk_tokens=512)
        sink = ask(harness, seeing(family, folder), *parts)
        harness.run()
        found.append(sink.tokens)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_depend_on_the_picture(family: str, folder: Path) -> None:
    found = answers(family, folder)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [3, 16])
def test_chunks_restored_state_and_rows_side_by_side_change_nothing(
    family: str, chunk_tokens: int, folder: Path
) -> None:
    harness, loaded = Harness(runner=runner_of(family, folder), chunk_tokens=chunk_tokens), seeing(family, folder)
    for parts, wanted in zip(PROMPTS, answers(family, folder), strict=True):
        sink = ask(harness, loaded, *parts)
        harness.run()
        assert sink.tokens == wanted
    again = [ask(harness, loaded, *parts) for parts in PROMPTS[:4]]
    apart = [ask(harness, loaded, *parts, namespace=str(number)) for number, parts in enumerate(PROMPTS)]
    harness.run()
    assert [sink.tokens for sink in again] == answers(family, folder)[:4]
    assert [sink.tokens for sink in apart] == answers(family, folder)
    assert again[0].started.hit_tokens > len(HEAD)


FAULTS = [(family, fault) for family in FAMILIES for fault in ("no shift", "flat positions", "one id")]


@pytest.mark.parametrize(("family", "fault"), [*FAULTS, ("qwen3_vl", "no deepstack")])
def test_faults_change_answers(family: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, loaded = answers(family, folder), seeing(family, folder)
    if fault == "no shift":
        monkeypatch.setattr(Pictures, "shift", lambda self, offset: 0)
    elif fault == "flat positions":
        monkeypatch.setattr(Pictures, "positions", lambda self, start, stop: np.tile(np.arange(start, stop), (3, 1)))
    elif fault == "one id":
        monkeypatch.setattr("models.vision.qwen.digest_of", lambda data, processing: bytes(16))
    else:
        steps = type(loaded.vision.tower).steps  # type: ignore[union-attr]

        def shallow(tower: Any, picture: Any, pixels: Any) -> Any:
            features = yield from steps(tower, picture, pixels)
            return type(features)(features.rows)

        monkeypatch.setattr(type(loaded.vision.tower), "steps", shallow)  # type: ignore[union-attr]
    runner_of(family, folder).encoder.kept.__init__(1 << 20)  # type: ignore[misc, union-attr]
    harness = Harness(runner=runner_of(family, folder), chunk_tokens=16)
    found = []
    for parts in PROMPTS:
        sink = ask(harness, loaded, *parts)
        harness.run()
        found.append(sink.tokens)
    runner_of(family, folder).encoder.kept.__init__(1 << 20)  # type: ignore[misc, union-attr]
    assert found != wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_has_the_same_logits_to_the_bit(family: str, folder: Path, tmp_path: Path) -> None:
    path = tiny_vision.write(family, tmp_path / family)
    plain = load(path, family).model
    for tokens in (HEAD, [7], END):
        made = [
            model(mx.array([tokens]), cache=make_caches(model)) for model in (plain, seeing(family, folder).model)
        ]
        assert mx.array_equal(made[0], made[1])


def test_patches_are_those_of_transformers(tmp_path: Path) -> None:
    images = QwenImages.read(tmp_path, VISION, 16)
    options = {
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = Qwen2VLImageProcessor(**options, size={"shortest_edge": 4096 // 4, "longest_edge": 16 * 64})
    for width, height in ((48, 32), (24, 40), (7, 5), (100, 3), (90, 90), (33, 64)):
        data = image(5, width, height)
        picture = images.open(data)
        made = processor(images=[read_pixels(data)], return_tensors="np")
        assert tuple(made["image_grid_thw"][0][1:] // 2) == picture.grid
        assert np.allclose(made["pixel_values"], images.patches(picture), atol=1e-6)


def test_the_processors_settings_and_the_limit_are_read(tmp_path: Path) -> None:
    import json

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    images = QwenImages.read(tmp_path, VISION, 16)
    assert (images.min_pixels, images.max_pixels) == (256, 16 * 64)
    assert images.open(image(1, 400, 300)).num_tokens <= 16
    other = QwenImages.read(tmp_path, {**VISION, "temporal_patch_size": 1}, 16)
    assert images.open(A).digest == images.open(A).digest != other.open(A).digest


@pytest.mark.parametrize("lacks", ["tensors", "vision_config", "family", "positions"])
def test_a_folder_without_a_whole_tower_sees_nothing(
    lacks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, Any] = {}
    path = tiny_vision.write("qwen3_vl", tmp_path / "model", **changes)
    loaded = load(path, "m")
    if lacks == "tensors":
        (path / "model-vision.safetensors").unlink()
    elif lacks == "vision_config":
        loaded.config.pop("vision_config")
    elif lacks == "family":
        loaded.config["model_type"] = "qwen9_vl"
    else:
        loaded.config["text_config"]["rope_scaling"]["mrope_section"] = [1, 1, 1]
    assert with_vision(loaded, 256).vision is None
    assert ("sees no images" in caplog.text) == (lacks != "tensors")


def test_a_kernel_may_be_stored_either_way(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(seeing("qwen3_vl", folder).path, tmp_path / "other")
    tensors: Any = mx.load(str(path / "model-vision.safetensors"))
    kernel = tensors["vision_tower.patch_embed.proj.weight"].transpose(0, 2, 3, 4, 1)
    renamed = {f"visual.{name.removeprefix('vision_tower.')}": array for name, array in tensors.items()}
    mx.save_safetensors(str(path / "model-vision.safetensors"), {**renamed, "visual.patch_embed.proj.weight": kernel})
    other = with_vision(load(path, "other"), 256)
    assert other.vision is not None
    picture = other.vision.open(A)
    found = [features_of(one, picture) for one in (seeing("qwen3_vl", folder), other)]
    assert mx.array_equal(found[0], found[1])


def features_of(loaded: LoadedModel, picture: Any) -> mx.array:
    assert loaded.vision is not None
    encoding = Encoder(loaded.vision.tower, 1e6, 1 << 20).begin(picture, "")
    while encoding.features is None:
        encoding.step()
    return encoding.features.rows


@pytest.mark.parametrize("bits", [None, 8])
def test_a_conversion_keeps_the_tower(bits: int | None, folder: Path, tmp_path: Path) -> None:
    loaded = seeing("qwen3_vl", folder)
    convert_weights(loaded.path, "m", tmp_path / "to", bits, lambda done, total: None)
    other = with_vision(load(tmp_path / "to", "to"), 256)
    assert loaded.vision is not None and other.vision is not None
    picture = loaded.vision.open(A)
    assert other.vision.open(A).digest == picture.digest
    found = [features_of(one, picture) for one in (loaded, other)]
    assert mx.array_equal(found[0], found[1])


@pytest.mark.parametrize("drafts", ["known", "model", "module"])
def test_drafts_change_nothing_beside_pictures(drafts: str, folder: Path) -> None:
    loaded, wanted = seeing("qwen3_5", folder), answers("qwen3_5", folder)
    assert loaded.vision is not None
    drafter: Any = None
    if drafts == "model":
        small = tiny_models.build("llama")
        drafter = ModelDrafter(loaded.model, loaded.vocab_size, DraftModel("small", small, tiny_models.VOCAB))
    elif drafts == "module":
        drafter = MtpDrafter(loaded.model, MtpModule(language_model(loaded.model)))
    runner = Runner(
        loaded.model,
        vocab_size=loaded.vocab_size,
        drafter=drafter,
        encoder=Encoder(loaded.vision.tower, 1e6, 1 << 20),
        vision_inputs=loaded.vision.inputs,
        max_probe_seconds=float("inf"),
    )
    speculation: Any = Predicting(2, 3)
    if drafter is None:
        opened = [[loaded.vision.open(one) if isinstance(one, bytes) else one for one in parts] for parts in PROMPTS]
        known = {tuple(prompt_of(*parts)[0]): told for parts, told in zip(opened, wanted, strict=True)}
        speculation = Oracle(0.3, after=lambda prompt, output: [*known[tuple(prompt)], 0][min(len(output), 12)])
    harness = Harness(runner=runner, chunk_tokens=16, speculation=speculation)
    sinks = [ask(harness, loaded, *parts) for parts in PROMPTS]
    harness.run()
    assert [sink.tokens for sink in sinks] == wanted
    assert drafter is None or speculation.num_steps


def test_penalties_know_words_only(folder: Path) -> None:
    harness, loaded = Harness(runner=runner_of("qwen3_vl", folder)), seeing("qwen3_vl", folder)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, dry_multiplier=0.8)
    sink = ask(harness, loaded, HEAD, A, END, sampling=sampling)
    harness.run()
    assert len(sink.tokens) == 12
