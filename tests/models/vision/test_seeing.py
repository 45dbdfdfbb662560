"""Tiny models that see: what they answer depends on the picture, and not on how it was evaluated."""

import functools
import io
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import Qwen2VLImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from cache.layers.kinds import make_caches
from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import InvalidImage
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import DraftModel, LoadedModel, convert_weights, load, with_vision
from models.mtp import MtpModule, language_model
from models.prompt.pictures import Pictures
from models.vision.features import Encoder
from models.vision.gemma4 import Gemma4Tower
from models.vision.image_files import MAX_BYTES, read_header, read_pixels
from models.vision.mistral3 import MistralTower
from models.vision.qwen import QwenImages
from tests.support import tiny_models, tiny_vision
from tests.support.drafting import Predicting
from tests.support.engine_driver import Collected, Harness
from tests.support.fake_vision import prompt_of
from tests.support.oracle import Oracle
from tests.support.tiny_vision import FAMILIES, PROCESSOR, QWEN, VISION, image

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
    encoder = Encoder(loaded.vision.tower, 1e6)
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


@pytest.mark.parametrize(
    ("family", "chunk_tokens"), [*((family, 3) for family in FAMILIES), *((family, 16) for family in QWEN)]
)
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


FAULTS = [
    *((family, fault) for family in QWEN for fault in ("no shift", "flat positions")),
    *((family, "one id") for family in FAMILIES),
    ("qwen3_vl", "no deepstack"),
    *(
        (family, fault)
        for family in ("gemma3", "gemma4")
        for fault in ("causal blocks", "cut pictures", "scaled rows")
    ),
    ("gemma4", "layer inputs"),
    ("mistral3", "rows without ends"),
]


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_faults_change_answers(family: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, loaded = answers(family, folder), seeing(family, folder)
    if fault == "no shift":
        monkeypatch.setattr(Pictures, "shift", lambda self, offset: 0)
    elif fault == "flat positions":
        monkeypatch.setattr(Pictures, "positions", lambda self, start, stop: np.tile(np.arange(start, stop), (3, 1)))
    elif fault == "one id":
        monkeypatch.setattr("models.vision.towers.digest_of", lambda data, processing: bytes(16))
    elif fault == "causal blocks":
        monkeypatch.setattr("models.vision.layers.with_later", lambda mask: mask)
    elif fault == "cut pictures":
        tower: Any = loaded.vision.tower  # type: ignore[union-attr]
        monkeypatch.setattr(tower, "images", replace(tower.images, is_whole=False))
    elif fault == "scaled rows":
        monkeypatch.setattr(language_model(loaded.model).model.embed_tokens, "_scale", 1.0)
    elif fault == "layer inputs":
        monkeypatch.setattr(language_model(loaded.model).model.embed_tokens_per_layer, "_token", 5)
    elif fault == "rows without ends":
        ends = loaded.vision.tower._row_ends  # type: ignore[union-attr]
        monkeypatch.setattr(loaded.vision.tower, "_row_ends", 0 * ends)  # type: ignore[union-attr]
    else:
        steps = type(loaded.vision.tower).steps  # type: ignore[union-attr]

        def shallow(tower: Any, picture: Any, pixels: Any) -> Any:
            features = yield from steps(tower, picture, pixels)
            return type(features)(features.rows)

        monkeypatch.setattr(type(loaded.vision.tower), "steps", shallow)  # type: ignore[union-attr]
    harness = Harness(runner=runner_of(family, folder), chunk_tokens=16)
    found = []
    for parts in PROMPTS:
        sink = ask(harness, loaded, *parts)
        harness.run()
        found.append(sink.tokens)
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


SIZES = ((48, 32), (24, 40), (7, 5), (100, 3), (90, 90), (33, 64))


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
    for width, height in SIZES:
        data = image(5, width, height)
        picture = images.open(data)
        made = processor(images=[read_pixels(data)], return_tensors="np")
        assert tuple(made["image_grid_thw"][0][1:] // 2) == picture.grid
        assert np.allclose(made["pixel_values"], images.patches(picture), atol=1e-6)


def test_gemma_3_makes_a_square_of_each_image(tmp_path: Path) -> None:
    images = tiny_vision.make_tower(tiny_vision.config_of("gemma3"), tmp_path).images
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    for width, height in SIZES:
        picture = images.open(image(5, width, height))
        assert picture.grid == (4, 4) and picture.is_whole
        made = processor(images=[read_pixels(picture.data)], return_tensors="np")["pixel_values"][0]
        wanted = made.reshape(3, 8, 4, 8, 4).transpose(1, 3, 2, 4, 0).reshape(64, -1)
        assert np.allclose(wanted, images.patches(picture), atol=1e-6)


@pytest.mark.parametrize("max_tokens", [100, 300])
def test_gemma_4_keeps_the_shape_of_an_image(max_tokens: int, tmp_path: Path) -> None:
    config = tiny_vision.config_of("gemma4")
    images = Gemma4Tower.images_of(tmp_path, config, max_tokens)
    limit = 280 if max_tokens == 300 else 70
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=limit)
    for width, height in (*SIZES, (3, 500)):
        picture = images.open(image(5, width, height))
        made = processor(images=[read_pixels(picture.data)], return_tensors="np")
        values = 2 * made["pixel_values"][0, : 4 * picture.num_tokens] - 1
        assert made["num_soft_tokens_per_image"] == [picture.num_tokens] and picture.num_tokens <= limit
        assert np.allclose(values, images.patches(picture), atol=1e-6)


def test_mistral_3_keeps_the_shape_of_an_image_and_ends_its_rows(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"longest_edge": 64}}')
    config = tiny_vision.config_of("mistral3")
    images = MistralTower.images_of(tmp_path, config, 100)
    processor = PixtralImageProcessorPil(patch_size=8, size={"longest_edge": 64})
    for width, height in SIZES:
        picture = images.open(image(5, width, height))
        made = processor(images=[read_pixels(picture.data)], return_tensors="np")["pixel_values"][0]
        rows, columns = images.patches_of(picture)
        assert made.shape == (3, 4 * rows, 4 * columns) and picture.grid == (rows // 2, columns // 2 + 1)
        wanted = made.reshape(3, rows, 4, columns, 4).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        assert np.allclose(wanted, images.patches(picture), atol=1e-6)
    few = MistralTower.images_of(tmp_path, config, 12)
    assert all(few.open(image(5, width, height)).num_tokens <= 12 for width, height in SIZES)


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


UNPROVEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "crops": ("gemma3", {}, "pan and scan"),
    "uneven pools": ("gemma3", {"mm_tokens_per_image": 9}, "8x8 patches are not averaged evenly to 9 tokens"),
    "no token": ("gemma4", {"eoi_token_id": 10**6}, "its tokenizer lacks"),
    "all attend to all": ("gemma4", {"use_bidirectional_attention": "all"}, "all its tokens attend to each other"),
    "text model": ("mistral3", {"model_type": "mistral4"}, "its text model 'mistral4' was not compared"),
    "layer": ("mistral3", {"vision_feature_layer": -2}, "its features are of a layer before the last"),
    "activation": ("mistral3", {"projector_hidden_act": "swish"}, "its activation 'swish' is not known"),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_was_not_compared_is_refused_in_words(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes, words = UNPROVEN[name]
    path = shutil.copytree(seeing(family, folder).path, tmp_path / "other")
    (path / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}' if name == "crops" else "{}")
    loaded = load(path, "other")
    text = loaded.config["text_config"]
    (text if changes.keys() <= {"model_type", "use_bidirectional_attention"} else loaded.config).update(changes)
    assert with_vision(loaded, 256).vision is None
    assert "sees no images" in caplog.text and words in caplog.text


def test_a_folder_without_settings_of_its_processor_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for number in range(2):
        loaded = load(tiny_vision.write("qwen3_vl", tmp_path / str(number)), "tiny")
        if number:
            (loaded.path / "preprocessor_config.json").unlink()
        assert with_vision(loaded, 256).vision is not None
        assert ("it has no preprocessor_config.json" in caplog.text) is bool(number)


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
    encoding = Encoder(loaded.vision.tower, 1e6).begin(picture, "")
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
        encoder=Encoder(loaded.vision.tower, 1e6),
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


def packed(tensors: dict[str, mx.array], *, unpacks: bool) -> dict[str, mx.array]:
    """Returns a tower as some conversions have it, its matrices in 4 bits, or what these stand for."""
    found = dict[str, mx.array]()
    for name, array in tensors.items():
        if not name.endswith(".weight") or array.ndim != 2 or array.shape[-1] % 32:
            found[name] = array
            continue
        parts = mx.quantize(array, group_size=32, bits=4)
        whole = mx.dequantize(*parts, group_size=32, bits=4)
        names = (name, name.replace(".weight", ".scales"), name.replace(".weight", ".biases"))
        found |= {name: whole} if unpacks else dict(zip(names, parts, strict=True))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_of_quantized_models_are_read_as_they_are_stored(family: str, folder: Path, tmp_path: Path) -> None:
    convert_weights(seeing(family, folder).path, "m", tmp_path / "4bit", 4, lambda done, total: None)
    tensors: Any = mx.load(str(seeing(family, folder).path / "model-vision.safetensors"))
    rows = []
    for unpacks in (True, False):
        written = packed(tensors, unpacks=unpacks)
        assert unpacks or any(name.endswith(".scales") for name in written)
        mx.save_safetensors(str(tmp_path / "4bit" / "model-vision.safetensors"), written)
        loaded = with_vision(load(tmp_path / "4bit", "4bit"), 256)
        assert loaded.vision is not None
        rows.append(features_of(loaded, loaded.vision.open(A)))
    assert mx.allclose(rows[0], rows[1], rtol=1e-3, atol=1e-3)


def test_a_tower_packed_in_an_unknown_way_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(seeing("gemma3", folder).path, tmp_path / "other")
    read: Any = mx.load(str(path / "model-vision.safetensors"))
    tensors = packed(read, unpacks=False)
    scales = {name: array for name, array in tensors.items() if name.endswith(".scales")}
    tensors |= {name: array.astype(mx.uint8) for name, array in scales.items()}
    mx.save_safetensors(str(path / "model-vision.safetensors"), tensors)
    assert with_vision(load(path, "other"), 256).vision is None
    assert "sees no images" in caplog.text


def test_penalties_know_words_only(folder: Path) -> None:
    harness, loaded = Harness(runner=runner_of("qwen3_vl", folder)), seeing("qwen3_vl", folder)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, dry_multiplier=0.8)
    sink = ask(harness, loaded, HEAD, A, END, sampling=sampling)
    harness.run()
    assert len(sink.tokens) == 12


FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def photo(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Returns an image of smooth colours, its left upper quarter red."""
    rows, columns = np.mgrid[:height, :width]
    found = np.stack([columns * 255 // width, rows * 255 // height, np.full_like(rows, 90)], -1).astype(np.uint8)
    found[: height // 2, : width // 2] = (255, 0, 0)
    return Image.fromarray(found).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Returns the file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Returns a part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *parts: bytes) -> bytes:
    """Returns a PNG that says it is of that size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(60, 40), (33, 77), (1, 1)])
def test_sizes_are_those_of_the_decoder(kind: str, size: tuple[int, int]) -> None:
    data = encoded(photo(*size), kind)
    assert read_header(data).size == size == read_pixels(data).size


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"exif": Image.Exif().tobytes()}, {"lossless": True, "method": 0}]
)
def test_all_kinds_of_webp(options: dict[str, Any]) -> None:
    assert read_header(encoded(photo(), "WEBP", **options)).size == (60, 40)
    assert read_header(encoded(photo(mode="RGBA"), "WEBP", **options)).size == (60, 40)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), kind, exif=exif.tobytes())
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert read_header(data).size == wanted.size
    assert np.array_equal(np.asarray(read_pixels(data)), np.asarray(wanted))


def test_what_was_transparent_is_white_and_an_animation_its_first_frame() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert np.asarray(read_pixels(encoded(clear, "PNG"))).min() == 255
    first, second = photo(), photo(mode="L").convert("RGB")
    for kind, options in {"GIF": {}, "WEBP": {"lossless": True}, "PNG": {}}.items():
        moving = encoded(first, kind, save_all=True, append_images=[second], **options)
        shown = np.asarray(read_pixels(moving), np.int32)
        assert abs(shown - np.asarray(first, np.int32)).mean() < 8


def refusals() -> dict[str, bytes]:
    whole = {kind: encoded(photo(300, 200), kind) for kind in FORMATS}
    flipped = bytearray(whole["PNG"])
    flipped[len(flipped) // 2] ^= 1
    return {
        **{f"{kind} cut by {count}": data[:-count] for kind, data in whole.items() for count in (3, len(data) // 2)},
        **{f"{kind} of {count} bytes": data[:count] for kind, data in whole.items() for count in (4, 12, 20, 30)},
        "a wrong checksum": bytes(flipped),
        "nothing": b"",
        "a text": b"no image at all",
        "a PDF as PNG": b"%PDF-1.7 ...",
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "BMP": encoded(photo(), "BMP"),
        "TIFF": encoded(photo(), "TIFF"),
        "41 megapixels": png(8200, 5000),
        "a bomb": png(65_535, 65_535, chunk(b"IDAT", zlib.compress(bytes(1 << 20)))),
        "no size": png(0, 5),
        "a large webp": b"RIFF"
        + struct.pack("<I", 22)
        + b"WEBPVP8X"
        + struct.pack("<I", 10)
        + b"\0" * 4
        + b"\xff" * 6,
        "too many bytes": png(5, 5, chunk(b"IDAT", bytes(MAX_BYTES))),
        "many parts": png(5, 5, chunk(b"tEXt", b"") * 400_000),
        "a jpeg of empty parts": b"\xff\xd8" + b"\xff\xe0\0\x02" * 4_000_000,
        "a jpeg of markers": b"\xff" * 1_000 + b"\xff\xd8" + b"\xff" * 10_000_000,
        "a gif of comments": b"GIF89a\5\0\5\0\0\0\0" + b"\x21\xfe" + b"\1a" * 5_000_000 + b"\0;",
    }


def is_refused(data: bytes) -> bool:
    try:
        read_header(data)
    except InvalidImage:
        return True
    return False


def test_what_is_no_image_is_refused() -> None:
    for name, data in refusals().items():
        assert is_refused(data), f"{name} was taken"


def test_a_file_whose_pixels_are_damaged_says_so() -> None:
    data = png(50, 50, chunk(b"IDAT", b"no deflate stream"))
    assert read_header(data).size == (50, 50)
    with pytest.raises(InvalidImage, match="cannot be decoded"):
        read_pixels(data)


def test_a_decoder_that_sees_another_size_is_not_believed() -> None:
    inner = encoded(photo(), "PNG")
    with pytest.raises(InvalidImage):
        read_pixels(inner[:16] + struct.pack(">II", 70, 40) + inner[24:])
