"""A model's MTP module drafts what comes next; with it the model says what it says without."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map_with_path

from cache.types import LayerCache
from models.errors import ModelBroken
from models.inference.mtp import MtpModel
from models.inference.ragged import RaggedBatch, ragged_attention
from models.loader import load
from models.mlx_lm_import import ArraysCache, make_prompt_cache
from models.mtp import SIDECAR, MtpModule, language_model, load_mtp
from scripts.architectures.configs import config
from tests.support import tiny_models

_DENSE = tiny_models.CONFIGS["qwen3_5"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": tiny_models.CONFIGS["qwen3"],
    "qwen3_next": tiny_models.CONFIGS["qwen3_next"],
    "qwen3_5": _DENSE,
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**_DENSE["text_config"], **_EXPERTS, "moe_intermediate_size": 64},
    },
    "deepseek_v3": tiny_models.EXTRA_CONFIGS["deepseek_v3"],
    "deepseek_v32": tiny_models.CONFIGS["deepseek_v32"],
    "glm4_moe": config("glm4_moe"),
    "mimo": config("mimo"),
}
_QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}


def _named_for(num_layers: int) -> dict[str, str]:
    prefix = f"model.layers.{num_layers}"
    named = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
    return {ours: f"{prefix}.{theirs}" for ours, theirs in named.items()} | {"layer": prefix}


CHECKPOINT_NAMES = {
    "deepseek_v3": _named_for(3),
    "deepseek_v32": _named_for(3),
    "glm4_moe": _named_for(4),
    "mimo": {
        "embedding_norm": "model.mtp_layers.0.token_layernorm",
        "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "projection": "model.mtp_layers.0.input_proj",
        "layer": "model.mtp_layers.0",
        "norm": "model.mtp_layers.0.final_layernorm",
    },
}


@functools.cache
def model_of(name: str) -> Any:
    return tiny_models.make(CONFIGS[name])


@functools.cache
def module_of(name: str) -> MtpModule:
    """With random weights, evaluated."""
    module = MtpModule(language_model(model_of(name)))
    generator = np.random.default_rng(3)

    def weight(path: str, array: mx.array) -> mx.array:
        scale, shift = (0.1, 1.0) if "norm" in path else (array.shape[-1] ** -0.5, 0.0)
        return mx.array(generator.normal(shift, scale, array.shape), mx.float32)

    module.update(tree_map_with_path(weight, parameters_of(module)))
    mx.eval(parameters_of(module))
    return module


def parameters_of(module: Any) -> Any:
    return module.parameters()


def tensors_of(module: MtpModule, name: str) -> dict[str, mx.array]:
    """Under the names of the family's checkpoints."""
    names, found = CHECKPOINT_NAMES.get(name, _QWEN), dict[str, mx.array]()
    for path, array in cast(list[tuple[str, mx.array]], tree_flatten(parameters_of(module))):
        part, _, rest = path.partition(".")
        found[f"{names[part]}.{rest}"] = array
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a model's files, of which only those of a module matter."""
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def loaded(folder: Path, name: str, tensors: dict[str, mx.array]) -> MtpModule:
    mx.save_safetensors(str(folder / SIDECAR), tensors)
    module = load_mtp(folder, "tiny", model_of(name))
    assert module is not None
    return module


def weights_of(module: MtpModule) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(parameters_of(module))))


def assert_same_weights(one: MtpModule, other: MtpModule) -> None:
    found, expected = weights_of(one), weights_of(other)
    assert found.keys() == expected.keys()
    assert all(mx.allclose(found[name], expected[name], atol=1e-6) for name in expected)


# ------------------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_is_read_from_the_file_beside_the_models(name: str, folder: Path) -> None:
    tensors = tensors_of(module_of(name), name)
    assert_same_weights(loaded(folder, name, tensors), module_of(name))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_module_is_read_from_the_models_own_shards(prefix: str, folder: Path) -> None:
    tensors = tensors_of(module_of("qwen3_5"), "qwen3_5")
    other = {"model.norm.weight": mx.ones(64), "model.mtp.not_a_module": mx.ones(3)}
    first = dict(list(tensors.items())[:5])
    second = {name: array for name, array in tensors.items() if name not in first}
    for shard, part in enumerate((first, second)):
        named = {prefix + name: array for name, array in part.items()}
        mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), named | other)
    module = load_mtp(folder, "tiny", model_of("qwen3_5"))
    assert module is not None
    assert_same_weights(module, module_of("qwen3_5"))


def test_a_sidecars_names_may_lack_the_prefix(folder: Path) -> None:
    bare = {name.removeprefix("mtp."): array for name, array in tensors_of(module_of("qwen3_5"), "qwen3_5").items()}
    assert_same_weights(loaded(folder, "qwen3_5", bare), module_of("qwen3_5"))


def test_there_is_no_module_without_tensors_or_for_another_family(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), {"model.norm.weight": mx.ones(64)})
    assert load_mtp(folder, "tiny", model_of("qwen3_5")) is None
    mx.save_safetensors(str(folder / SIDECAR), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    assert load_mtp(folder, "tiny", tiny_models.build("llama")) is None


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_an_original_checkpoint_has_separate_experts_and_norms_as_differences(name: str, folder: Path) -> None:
    found = tensors_of(module_of(name), name)
    found = {path: array - 1.0 if "norm" in path else array for path, array in found.items()}
    parts = {part: found.pop(f"mtp.layers.0.mlp.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
    if name == "qwen3_next":
        for part, stacked in parts.items():
            for expert, array in enumerate(stacked):
                found[f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = array
    else:
        joined = mx.concatenate([parts["gate"], parts["up"]], axis=-2)
        found["mtp.layers.0.mlp.experts.gate_up_proj"] = joined
        found["mtp.layers.0.mlp.experts.down_proj"] = parts["down"]
    assert_same_weights(loaded(folder, name, found), module_of(name))


def test_copies_of_the_models_matrices_are_left_out(folder: Path) -> None:
    tensors = tensors_of(module_of("glm4_moe"), "glm4_moe")
    prefix = CHECKPOINT_NAMES["glm4_moe"]["layer"]
    copies = {f"{prefix}.{name}.weight": mx.ones((320, 64)) for name in ("embed_tokens", "shared_head.head")}
    assert_same_weights(loaded(folder, "glm4_moe", tensors | copies), module_of("glm4_moe"))


def test_a_module_that_does_not_fit_is_refused_by_name(folder: Path) -> None:
    tensors = tensors_of(module_of("qwen3_5"), "qwen3_5")
    lacking = {name: array for name, array in tensors.items() if "q_proj" not in name and "k_proj" not in name}
    with pytest.raises(ModelBroken, match=r"tiny: its MTP module lacks layer\.self_attn\.k_proj\.weight and 1 more"):
        loaded(folder, "qwen3_5", lacking)
    with pytest.raises(ModelBroken, match=r"has too much: layer\.layers\.1\.mlp\.up_proj\.weight$"):
        loaded(folder, "qwen3_5", tensors | {"mtp.layers.1.mlp.up_proj.weight": mx.ones((2, 2))})
    with pytest.raises(ModelBroken, match=r"has in another shape projection\.weight$"):
        loaded(folder, "qwen3_5", tensors | {"mtp.fc.weight": mx.ones((64, 64))})
    (folder / SIDECAR).write_bytes(b"\0" * 64)
    with pytest.raises(ModelBroken, match="damaged"):
        load_mtp(folder, "tiny", model_of("qwen3_5"))


def test_a_quantized_module_is_read_whatever_the_model_has(folder: Path) -> None:
    module = MtpModule(language_model(model_of("qwen3_5")))
    module.update(parameters_of(module_of("qwen3_5")))
    quantize(module, group_size=32, bits=8, class_predicate=lambda path, module: hasattr(module, "to_quantized"))
    found = loaded(folder, "qwen3_5", tensors_of(module, "qwen3_5"))
    assert isinstance(found.projection, QuantizedLinear)
    assert_same_weights(found, module)
    assert_says_the_same("qwen3_5", found, prompt(20), limit=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.write("qwen3_5", tmp_path_factory.mktemp("models") / "qwen3_5")
    mx.save_safetensors(str(path / SIDECAR), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    return path


def test_stored_state_with_and_without_a_module_does_not_mix(written: Path) -> None:
    without, with_module = load(written, "tiny"), load(written, "tiny", with_mtp=True)
    assert without.mtp is None
    assert with_module.mtp is not None
    other = {name: 2 * array for name, array in tensors_of(module_of("qwen3_5"), "qwen3_5").items()}
    mx.save_safetensors(str(written / SIDECAR), other)
    with_other = load(written, "tiny", with_mtp=True)
    assert len({one.state_fingerprint for one in (without, with_module, with_other)}) == 3
    assert without.state_fingerprint in with_module.state_fingerprint


def test_a_model_is_loaded_without_a_module_that_does_not_fit(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mx.save_safetensors(str(written / SIDECAR), {"mtp.fc.weight": mx.ones((64, 128))})
    assert load(written, "tiny", with_mtp=True).mtp is None
    assert "lacks" in caplog.text


# ----------------------------------------------------------------------------------------------------------- decoding


def prompt(length: int, seed: int = 5) -> list[int]:
    return cast(list[int], np.random.default_rng(seed).integers(1, tiny_models.VOCAB, length).tolist())


def best(logits: mx.array) -> list[int]:
    """Of logits `[num_tokens, vocab_size]`."""
    return cast(list[int], mx.argmax(logits, axis=-1).tolist())


def plain(model: Any, tokens: list[int], num_tokens: int) -> list[int]:
    caches, output, fed = make_prompt_cache(model), list[int](), tokens
    while len(output) < num_tokens:
        fed = best(model(mx.array([fed]), cache=caches)[0, -1:])
        output += fed
    return output


class Row:
    """One row decoded with drafts, greedily."""

    def __init__(self, model: MtpModel, caches: list[LayerCache], tokens: list[int]) -> None:
        """`caches` hold what comes before `tokens`."""
        self.model, self.caches = model, caches
        self.num_steps, self.output = 0, list[int]()
        found = model.evaluate(mx.array(tokens), caches, [len(tokens)], [None])
        self.known, self.before = best(found.logits[-1:]), found.behind[-1:]

    def draft(self, limit: int) -> list[int]:
        if limit == 0:
            return []
        return cast(list[int], self.model.draft(self.caches[-1], self.known, self.before, limit).tolist())

    def step(self, limit: int) -> None:
        draft, known = self.draft(limit), self.known
        feed, recurrent = [*known, *draft], [list(cache.cache) for cache in self._recurrent()]
        found = self.model.evaluate(mx.array(feed), self.caches, [len(feed)], [self.before[:1]])
        sampled = best(found.logits[len(known) - 1 :])
        num_accepted = next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))
        num_kept = len(known) + num_accepted
        kept, self.known = feed[:num_kept], sampled[num_accepted : num_accepted + 1]
        self.before = found.states(0, num_kept)[-1:]
        if recurrent and num_kept < len(feed):
            # Nothing stays; what was accepted is known, and evaluated again.
            self.known, self.before = [*kept, *self.known], found.states(0, num_kept)
            kept = []
        self._rewind(len(feed) - len(kept), recurrent)
        self.output += sampled[: num_accepted + 1]
        self.num_steps += 1

    def _rewind(self, num_tokens: int, recurrent: list[list[Any]]) -> None:
        for cache in self.caches:
            if num_tokens and not isinstance(cache, ArraysCache):
                cache.trim(num_tokens)
        for cache, state in zip(self._recurrent(), recurrent, strict=True):
            if num_tokens:
                cache.cache = state

    def _recurrent(self) -> list[ArraysCache]:
        return [cache for cache in self.caches if isinstance(cache, ArraysCache)]


def begin(name: str, module: MtpModule, tokens: list[int], num_restored: int = 0) -> Row:
    """The first `num_restored` tokens come from another row's caches."""
    model = MtpModel(model_of(name), module)
    caches = model.make_caches()
    if num_restored:
        other = Row(model, caches, tokens[:num_restored])
        caches = model.make_caches()
        for cache, restored in zip(caches, other.caches, strict=True):
            cache.state = restored.state
    return Row(model, caches, tokens[num_restored:])


def lengths(caches: Sequence[LayerCache]) -> Iterator[int]:
    for cache in caches:
        if not isinstance(cache, ArraysCache):
            yield (cache[0] if hasattr(cache, "caches") else cache).offset


def assert_says_the_same(name: str, module: MtpModule, tokens: list[int], limit: int, num_restored: int = 0) -> None:
    row = begin(name, module, tokens, num_restored)
    output = list(row.known)
    while len(row.output) < 16:
        row.step(limit)
        evaluated = len(tokens) + 1 + len(row.output) - len(row.known)
        assert set(lengths(row.caches)) == {evaluated}, "the module's cache is as long as the others"
    output += row.output
    assert output == plain(model_of(name), tokens, len(output))


@pytest.mark.parametrize("limit", [0, 1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_says_the_same_with_drafts_of_any_length(name: str, limit: int) -> None:
    assert_says_the_same(name, module_of(name), prompt(20), limit)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_row_goes_on_from_a_restored_prefix(name: str) -> None:
    assert_says_the_same(name, module_of(name), prompt(20), limit=2, num_restored=12)


@functools.cache
def learned_texts(name: str) -> list[list[int]]:
    """What the model says behind random prompts of 8 tokens, and these."""
    prompts = [prompt(8, seed) for seed in range(16)]
    return [[*given, *plain(model_of(name), given, 40)] for given in prompts]


@functools.cache
def trained_module_of(name: str) -> MtpModule:
    """Knows what the model says in `learned_texts`."""
    model, texts = model_of(name), mx.array(learned_texts(name))
    text, module = language_model(model), MtpModule(language_model(model_of(name)))
    module.update(parameters_of(module_of(name)))
    hidden, embedded = text.model(texts), text.model.embed_tokens(texts[:, 1:])
    wanted = mx.argmax(text.lm_head(hidden), axis=-1)[:, 1:]

    def loss(module: MtpModule) -> mx.array:
        states = module(embedded, hidden[:, :-1])
        return cross_entropy(text.lm_head(states), wanted, reduction="mean")

    optimizer, gradients = optim.Adam(3e-3), value_and_grad(module, loss)
    for _ in range(150):
        _, found = gradients(module)
        optimizer.update(module, found)
        mx.eval(parameters_of(module), optimizer.state)
    return module


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "deepseek_v3"])
def test_a_module_that_has_learned_a_text_gives_two_tokens_a_step(name: str) -> None:
    for text in learned_texts(name)[:2]:
        row = begin(name, trained_module_of(name), text[:12])
        while len(row.output) < 28:
            row.step(limit=1)
        assert row.output[:28] == text[13:41]
        assert len(row.output) / row.num_steps > 1.9


def test_rows_draft_together_what_each_drafts_alone() -> None:
    texts = [text[: 9 + 5 * index] for index, text in enumerate(learned_texts("qwen3")[:3])]
    rows = [begin("qwen3", trained_module_of("qwen3"), text) for text in texts]
    alone = [row.draft(3) for row in rows]
    layer = RaggedBatch([row.caches[-1:] for row in rows]).layers[0]
    before = mx.concatenate([row.before for row in rows])
    found = rows[0].model.draft_together(layer, [row.known[0] for row in rows], before, 3, lambda: None)
    assert found.tolist() == alone
    assert [list(lengths(row.caches[-1:])) for row in rows] == [[len(text) + 3] for text in texts]


def test_rows_in_one_line_are_evaluated_as_each_alone() -> None:
    texts = [text[: 9 + 5 * index] for index, text in enumerate(learned_texts("qwen3")[:3])]
    rows, alone = ([begin("qwen3", trained_module_of("qwen3"), text) for text in texts] for _ in range(2))
    batch = RaggedBatch([row.caches for row in rows])
    for _ in range(3):
        tokens = mx.array([row.known[0] for row in rows])
        with ragged_attention():
            found = rows[0].model.evaluate(tokens, batch.layers, [1, 1, 1], [row.before for row in rows])
        for place, row in enumerate(rows):
            row.known, row.before = best(found.logits[place : place + 1]), found.behind[place : place + 1]
        for row in alone:
            row.step(limit=0)
        assert [row.known for row in rows] == [row.known for row in alone]
        assert [row.draft(3) for row in rows] == [row.draft(3) for row in alone]
