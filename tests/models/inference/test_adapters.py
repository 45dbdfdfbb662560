"""A model with adapters computes what mlx-lm computes with one of them, and without any what it always did."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters

from models import lora
from models.adapter import NO_ADAPTER
from models.errors import ModelBroken, ModelError, ModelNotFound
from models.formats import Pooling
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.embedding import Embedder
from models.inference.probe import Form
from models.inference.row import DecodeRow
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import DraftModel
from models.lora import AdapterSet, can_mix
from models.lora_files import attach
from tests.support import adapters as tiny_adapters
from tests.support import tiny_models, tiny_mtp

PROMPT = mx.array([[5, 17, 33, 8, 41, 2]])
LINEAR = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")


def logits(model: Any, adapters: AdapterSet | None = None, index: int = NO_ADAPTER) -> Any:
    if adapters is None:
        return np.array(model(PROMPT))
    with adapters.selecting([index]):
        return np.array(model(PROMPT))


def attached(name: str, *folders: Path) -> tuple[Any, AdapterSet]:
    model: Any = tiny_adapters.fresh(name)
    places = [(f"a{number}", str(folder)) for number, folder in enumerate(folders, 1)]
    return model, attach(model, places)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "lfm2"])
def test_each_adapter_gives_what_mlx_lm_gives_with_it(name: str, tmp_path: Path) -> None:
    folders = [tiny_adapters.write_mlx(name, tmp_path / str(seed), seed=seed, rank=2 + seed) for seed in (1, 2)]
    bare = logits(tiny_adapters.fresh(name))
    model, adapters = attached(name, *folders)
    np.testing.assert_array_equal(logits(model, adapters), bare)
    for index, folder in enumerate(folders, 1):
        expected = load_adapters(tiny_adapters.fresh(name), str(folder))
        expected.eval()
        found = logits(model, adapters, index)
        np.testing.assert_array_equal(found, logits(expected))
        assert np.abs(found - bare).max() > 0.1


def test_embeddings_and_dora_are_mlx_lms_too(tmp_path: Path) -> None:
    embedding = tiny_adapters.write_mlx("gemma3", tmp_path / "e", seed=1, keys=["model.embed_tokens"])
    dora = tiny_adapters.write_mlx("gemma3", tmp_path / "d", seed=2, keys=["self_attn.q_proj"], kind="dora")
    model, adapters = attached("gemma3", embedding, dora)
    for index, folder in enumerate((embedding, dora), 1):
        expected = load_adapters(tiny_adapters.fresh("gemma3"), str(folder))
        expected.eval()
        np.testing.assert_array_equal(logits(model, adapters, index), logits(expected))
    assert not can_mix(model, adapters, tiny_models.VOCAB)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3"])
def test_rows_of_different_adapters_are_evaluated_together(name: str, tmp_path: Path) -> None:
    folders = [
        tiny_adapters.write_mlx(name, tmp_path / "1", seed=1, rank=2),
        tiny_adapters.write_mlx(name, tmp_path / "2", seed=2, rank=5, keys=["mlp.up_proj"], scale=7),
    ]
    model, adapters = attached(name, *folders)
    assert can_mix(model, adapters, tiny_models.VOCAB)


def test_rows_that_are_mixed_up_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tiny_adapters.write_mlx("llama", tmp_path / str(seed), seed=seed, keys=LINEAR) for seed in (1, 2)]
    model, adapters = attached("llama", *folders)
    places = lora._places
    monkeypatch.setattr(lora, "_places", lambda rows, held: places((*rows[1:], rows[0]), held))
    assert not can_mix(model, adapters, tiny_models.VOCAB)


def test_pefts_form_is_the_same_as_mlx_lms(tmp_path: Path) -> None:
    paths = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(2)}
    peft = tiny_adapters.write_peft(tmp_path / "peft", paths, seed=3)
    tensors: Any = mx.load(str(peft / "adapter_model.safetensors"))
    model, adapters = attached("llama", peft)
    with_peft = logits(model, adapters, 1)
    own = tiny_adapters.fresh("llama")
    for path in paths:
        layer: Any = own
        for part in path.split("."):
            layer = layer[int(part)] if part.isdigit() else layer[part]
        a, b = (tensors[f"base_model.model.{path}.lora_{factor}.weight"] for factor in "AB")
        layer.weight = layer.weight + 2.0 * (b @ a)
    np.testing.assert_allclose(with_peft, logits(own), atol=2e-4)
    assert can_mix(model, adapters, tiny_models.VOCAB)


def test_the_weights_are_held_once_and_counted(tmp_path: Path) -> None:
    folders = [tiny_adapters.write_mlx("llama", tmp_path / str(seed), seed=seed, keys=LINEAR) for seed in (1, 2)]
    tensors: list[Any] = [mx.load(str(folder / "adapters.safetensors")) for folder in folders]
    stored = sum(array.nbytes for held in tensors for array in held.values())
    model, adapters = attached("llama", *folders)
    assert adapters.num_bytes == 2 * stored
    own = {name: array.shape for name, array in flat(tiny_adapters.fresh("llama")).items()}
    assert {name.replace(".layer.", "."): array.shape for name, array in flat(model).items()} == own


def flat(model: Any) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def broken(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_what_is_no_adapter_of_the_model_is_refused_in_words(tmp_path: Path) -> None:
    def lora(name: str, **options: Any) -> Path:
        return tiny_adapters.write_mlx("llama", tmp_path / name, seed=1, keys=LINEAR, **options)

    def peft(name: str, path: str = "model.layers.0.self_attn.q_proj", dims: int = 64, **config: Any) -> Path:
        return tiny_adapters.write_peft(tmp_path / name, {path: (dims, 64)}, seed=1, **config)

    empty, damaged, cut = tmp_path / "empty", lora("damaged"), lora("cut")
    empty.mkdir()
    (damaged / "adapter_config.json").write_text("{")
    (cut / "adapters.safetensors").write_bytes((cut / "adapters.safetensors").read_bytes()[:1000])
    endless = lora("endless")
    (endless / "adapters.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    bare = lora("bare")
    (bare / "adapters.safetensors").unlink()
    cases: list[tuple[Path, str]] = [
        (tmp_path / "nowhere", "there is no file"),
        (empty, "there is no file .*adapter_config.json"),
        (damaged, "is damaged"),
        (bare, "there is no file .*adapters.safetensors"),
        (cut, "adapters.safetensors is damaged"),
        (endless, "adapters.safetensors is damaged"),
        (broken(lora("full"), fine_tune_type="full"), "a model of its own"),
        (broken(lora("odd"), lora_parameters={}), "lacks .* rank"),
        (broken(lora("older"), lora_parameters=None), "lacks .* lora_parameters"),
        (tiny_adapters.write_mlx("qwen3_5", tmp_path / "other", seed=1), "does not fit this model"),
        (peft("ia3", peft_type="IA3"), "'IA3' is not supported"),
        (peft("dora", use_dora=True), "use_dora"),
        (peft("saved", modules_to_save=["lm_head"]), "modules_to_save"),
        (peft("bias", bias="all"), "bias"),
        (peft("path", path="model.layers.9.self_attn.q_proj"), "is none of this model's linear layers"),
        (peft("norm", path="model.norm"), "is a RMSNorm of this model's"),
        (peft("dims", dims=32), "has factors of shapes"),
    ]
    for folder, words in cases:
        with pytest.raises(ModelError, match=words) as caught:
            attached("llama", folder)
        assert isinstance(caught.value, ModelBroken | ModelNotFound) and "adapter a1" in str(caught.value)


NUM_TOKENS = 12
PROMPTS = [
    np.random.default_rng(seed).integers(1, 60, length).astype(np.int32) for seed, length in enumerate((9, 4, 20, 6))
]
ADAPTERS = (1, 0, 2, 1)


def model_with(name: str, folder: Path) -> tuple[Any, Any]:
    model = tiny_adapters.fresh(name)
    places = [
        (f"a{seed}", str(tiny_adapters.write_mlx(name, folder / str(seed), seed=seed, size=0.3))) for seed in (1, 2)
    ]
    return model, attach(model, places)


def row_of(runner: Runner, prompt: Any, adapter: int) -> DecodeRow:
    caches = runner.make_caches()
    runner.prefill(caches, prompt[:-1], adapter)
    return runner.make_row(caches, SamplingParams(temperature=0.0), int(prompt[-1]), adapter=adapter)


def decoded(runner: Runner, rows: list[DecodeRow]) -> list[list[int]]:
    found: list[list[int]] = []
    step = None
    for _ in range(NUM_TOKENS):
        step = runner.prepare(rows, step)
        runner.start(step)
        found.append([token for (token,) in step.tokens()])
    return [list(tokens) for tokens in zip(*found, strict=True)]


@pytest.mark.usual("llama-True", "gpt_oss-False")
@pytest.mark.parametrize(("name", "mixes"), [("llama", True), ("qwen3_5", True), ("gpt_oss", False), ("lfm2", True)])
def test_rows_decode_together_as_alone(name: str, mixes: bool, tmp_path: Path) -> None:
    model, adapters = model_with(name, tmp_path)
    runner = Runner(model, vocab_size=tiny_models.VOCAB, adapters=adapters, max_probe_seconds=float("inf"))
    assert runner.abilities.form is Form.HEADS and runner.abilities.mixes is mixes
    alone = [decoded(runner, [row_of(runner, *pair)])[0] for pair in zip(PROMPTS, ADAPTERS, strict=True)]
    together = decoded(runner, [row_of(runner, *pair) for pair in zip(PROMPTS, ADAPTERS, strict=True)])
    assert together == alone
    without = decoded(runner, [row_of(runner, prompt, 0) for prompt in PROMPTS])
    assert [a == b for a, b in zip(together, without, strict=True)] == [adapter == 0 for adapter in ADAPTERS]


@pytest.mark.usual("llama")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_draft_model_drafts_for_rows_of_any_adapter(name: str, tmp_path: Path) -> None:
    model, adapters = model_with(name, tmp_path)
    small, vocab_size = tiny_models.build("qwen3"), tiny_models.VOCAB
    drafter = ModelDrafter(model, vocab_size, DraftModel("small", small, vocab_size))
    runners = [
        Runner(model, vocab_size=vocab_size, adapters=adapters, drafter=one, max_probe_seconds=float("inf"))
        for one in (drafter, None)
    ]
    pairs = list(zip(PROMPTS, ADAPTERS, strict=True))
    said = [decoded(runner, [row_of(runner, *pair) for pair in pairs]) for runner in runners]
    assert said[0] == said[1]
    rows = [row_of(runners[0], *pair) for pair in pairs]
    decoded(runners[0], rows)
    for row, tokens in zip(rows, said[0], strict=True):
        row.known = tokens[-1:]
    texts = [[*prompt.tolist(), *tokens] for prompt, tokens in zip(PROMPTS, said[0], strict=True)]
    assert runners[0].draft(rows, [3] * len(rows)) == [tiny_mtp.plain(small, text, 3) for text in texts]


def test_vectors_are_made_with_the_adapter(tmp_path: Path) -> None:
    model, adapters = model_with("llama", tmp_path)
    embedder = Embedder(model, adapters)
    bare, adapted = (embedder.embed([PROMPTS[2]], Pooling.MEAN, index)[0] for index in (0, 1))
    assert np.abs(bare - adapted).max() > 0.01
    long = embedder.begin(Pooling.MEAN, 1)
    for piece in np.split(PROMPTS[2], [7, 15]):
        long.feed(piece)
    np.testing.assert_allclose(long.vector(), adapted, atol=2e-4)


def test_adapters_of_the_output_layer_share_a_call_with_an_mtp_module(tmp_path: Path) -> None:
    model, layers = tiny_models.make(tiny_models.CONFIGS["qwen3"]), {"lm_head": (64, tiny_models.VOCAB)}
    folders = [tiny_adapters.write_peft(tmp_path / str(seed), layers, seed=seed) for seed in (1, 2)]
    adapters = attach(model, [(folder.name, str(folder)) for folder in folders])
    outputs = []
    for drafter in (None, MtpDrafter(model, tiny_mtp.module_of("qwen3"))):
        runner = Runner(
            model, vocab_size=tiny_models.VOCAB, adapters=adapters, drafter=drafter, max_probe_seconds=float("inf")
        )
        assert runner.abilities.mixes
        outputs.append(decoded(runner, [row_of(runner, *pair) for pair in zip(PROMPTS, ADAPTERS, strict=True)]))
    assert outputs[0] == outputs[1]
