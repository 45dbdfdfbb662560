"""A model's MTP module, or a smaller model, drafts what comes next; with it the model says what it says without."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx_lm.models import ernie4_5_moe, mimo_v2_flash, step3p5
from safetensors.numpy import save_file

from cache.layers.kinds import make_caches, split_at_head
from cache.types import LayerCache
from models import mtp
from models.errors import ModelBroken, RowLost
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.grouping import Costs
from models.inference.runner import Runner
from models.loader import DraftModel, convert_weights, load
from models.mlx_lm_import import ArraysCache
from models.mtp import MtpModule, language_model, load_mtp
from models.weights import MTP_FILE
from tests.support import tiny_models
from tests.support.drafting import Decoding, lengths
from tests.support.greedy import assert_greedy
from tests.support.tiny_mtp import (
    CHECKPOINT_NAMES,
    CONFIGS,
    best,
    learned_texts,
    model_of,
    module_of,
    parameters_of,
    prompt,
    tensors_of,
    trained_module_of,
    weights_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a model's files, of which only those of a module matter."""
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def loaded(folder: Path, name: str, tensors: dict[str, mx.array]) -> MtpModule:
    mx.save_safetensors(str(folder / MTP_FILE), tensors)
    module = load_mtp(folder, "tiny", model_of(name))
    assert module is not None
    return module


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


@pytest.mark.parametrize("file", [MTP_FILE, "model_mtp.safetensors"])
def test_the_first_module_of_several_is_read(file: str, folder: Path) -> None:
    first = tensors_of(module_of("mimo_v2_flash"), "mimo_v2_flash")
    others = {path.replace(".mtp.layers.0.", ".mtp.layers.1."): 2 * array for path, array in first.items()}
    mx.save_safetensors(str(folder / file), first | others)
    module = load_mtp(folder, "tiny", model_of("mimo_v2_flash"))
    assert module is not None
    assert_same_weights(module, module_of("mimo_v2_flash"))


def test_norms_as_differences_are_told_by_those_of_the_layer(folder: Path) -> None:
    found = tensors_of(module_of("step3p5"), "step3p5")
    found = {path: array - 1.0 if "norm" in path else array for path, array in found.items()}
    path = CHECKPOINT_NAMES["step3p5"]["embedding_norm"] + ".weight"
    found[path] = found[path] + 9.0
    assert mx.allclose(loaded(folder, "step3p5", found).embedding_norm.weight, found[path] + 1.0)


def test_there_is_no_module_without_tensors_or_for_another_family(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), {"model.norm.weight": mx.ones(64)})
    assert load_mtp(folder, "tiny", model_of("qwen3_5")) is None
    mx.save_safetensors(str(folder / MTP_FILE), tensors_of(module_of("qwen3_5"), "qwen3_5"))
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


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"])
def test_an_original_checkpoint_has_keys_and_values_in_one_matrix(name: str, folder: Path) -> None:
    found, layer = tensors_of(module_of(name), name), CHECKPOINT_NAMES[name]["layer"]
    keys = found.pop(f"{layer}.self_attn.embed_q.weight").swapaxes(-1, -2)
    values = found.pop(f"{layer}.self_attn.unembed_out.weight")
    found[f"{layer}.self_attn.kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).flatten(0, 1)
    for part in ("gate", "up", "down"):
        for expert, array in enumerate(found.pop(f"{layer}.mlp.switch_mlp.{part}_proj.weight")):
            found[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = array
    assert_same_weights(loaded(folder, name, found), module_of(name))


def test_a_module_that_does_not_fit_is_refused_by_name(folder: Path) -> None:
    tensors = tensors_of(module_of("qwen3_5"), "qwen3_5")
    lacking = {name: array for name, array in tensors.items() if "q_proj" not in name and "k_proj" not in name}
    with pytest.raises(ModelBroken, match=r"^tiny: .* Missing 2 parameters: .*layer\.self_attn\.k_proj\.weight"):
        loaded(folder, "qwen3_5", lacking)
    with pytest.raises(ModelBroken, match=r"not in model: .*layer\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(folder, "qwen3_5", tensors | {"mtp.layers.1.mlp.up_proj.weight": mx.ones((2, 2))})
    with pytest.raises(ModelBroken, match=r"Expected shape .* for parameter projection\.weight"):
        loaded(folder, "qwen3_5", tensors | {"mtp.fc.weight": mx.ones((64, 64))})
    integers = tensors["mtp.fc.weight"].astype(mx.uint8)
    with pytest.raises(ModelBroken, match=r"projection\.weight of its MTP module is of another type"):
        loaded(folder, "qwen3_5", tensors | {"mtp.fc.weight": integers})
    with pytest.raises(ModelBroken, match="do not belong together"):
        loaded(folder, "qwen3_5", tensors | {"mtp.fc.scales": mx.zeros((64, 0))})
    save_file({"mtp.fc.weight": np.zeros((64, 128))}, folder / MTP_FILE)
    with pytest.raises(ModelBroken, match=r"unsupported dtype F64"):
        load_mtp(folder, "tiny", model_of("qwen3_5"))
    (folder / MTP_FILE).write_bytes(b"\0" * 64)
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
    mx.save_safetensors(str(path / MTP_FILE), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    return path


def test_stored_state_with_and_without_a_module_does_not_mix(written: Path) -> None:
    without, with_module = load(written, "tiny"), load(written, "tiny", with_mtp=True)
    assert without.mtp is None
    assert with_module.mtp is not None
    other = {name: 2 * array for name, array in tensors_of(module_of("qwen3_5"), "qwen3_5").items()}
    mx.save_safetensors(str(written / MTP_FILE), other)
    with_other = load(written, "tiny", with_mtp=True)
    assert len({one.state_fingerprint for one in (without, with_module, with_other)}) == 3
    assert without.state_fingerprint in with_module.state_fingerprint


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_is_written_as_it_is_read(name: str, folder: Path) -> None:
    module, published = module_of(name), list(tensors_of(module_of(name), name))
    written = mtp.tensors_of(module)
    num_common = next(
        i for i, pair in enumerate(zip(min(published), max(published), strict=False)) if len({*pair}) > 1
    )
    names = {path[num_common:].replace("pre_mlp", "post_attention") for path in published}
    assert written.keys() == names
    assert_same_weights(loaded(folder, name, written), module)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_converted_model_keeps_its_module(bits: int | None, written: Path, tmp_path: Path) -> None:
    mx.save_safetensors(str(written / MTP_FILE), tensors_of(module_of("qwen3_5"), "qwen3_5"))
    convert_weights(written, "tiny", tmp_path / "converted", bits, lambda done, total: None)
    module = load(tmp_path / "converted", "tiny", with_mtp=True).mtp
    assert module is not None
    assert isinstance(module.projection, QuantizedLinear) == (bits is not None)
    if bits is None:
        assert_same_weights(module, module_of("qwen3_5"))


def test_a_model_is_loaded_without_a_module_that_does_not_fit(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mx.save_safetensors(str(written / MTP_FILE), {"mtp.fc.weight": mx.ones((64, 128))})
    assert load(written, "tiny", with_mtp=True).mtp is None
    assert "Missing 14 parameters" in caplog.text


# ----------------------------------------------------------------------------------------------------------- decoding


LAYERS: dict[str, Callable[[Any], Any]] = {
    "step3p5": lambda args: step3p5.Step3p5DecoderLayer(args, 4),
    "mimo_v2_flash": lambda args: mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True),
    "ernie4_5_moe": lambda args: ernie4_5_moe.Ernie4_5_DecoderLayer(args, 4),
}
"""The decoder layer of each module, as published."""


class Published:
    """What a published module drafts: without caches, from its tensors as the checkpoint names them."""

    def __init__(self, name: str) -> None:
        self.model, self.name = model_of(name), name
        self.tensors, self.names = tensors_of(module_of(name), name), CHECKPOINT_NAMES[name]
        prefix, self.layer = self.names["layer"] + ".", LAYERS[name](self.model.args)
        own = {path.removeprefix(prefix) for path in self.tensors if path.startswith(prefix)}
        named = {path.replace("pre_mlp_layernorm", "post_attention_layernorm"): path for path in own}
        weights = [(ours, self.tensors[prefix + path]) for ours, path in named.items()]
        self.layer.load_weights([one for one in weights if one[0] in weights_of(self.layer)])

    def norm(self, part: str, states: mx.array) -> mx.array:
        return mx.fast.rms_norm(states, self.tensors[f"{self.names[part]}.weight"], self.model.model.norm.eps)

    def hidden(self, tokens: list[int]) -> mx.array:
        """Before the last norm for Step, behind it for the others."""
        states = self.model.model.embed_tokens(mx.array(tokens))[None]
        for layer in self.model.model.layers:
            slides = getattr(layer, "is_sliding", False) or getattr(layer, "is_sliding_window", False)
            states = layer(states, self.mask(len(tokens), slides), None)
        return cast(mx.array, states if self.name == "step3p5" else self.model.model.norm(states))[0]

    def mask(self, length: int, slides: bool) -> mx.array:
        ages = mx.arange(length)[:, None] - mx.arange(length)
        return (ages >= 0) & (ages < (tiny_models.WINDOW if slides else length))

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Behind all but the last of `tokens`, which the model says there."""
        before = self.hidden(tokens[:-1])
        before, drafted = mx.concatenate([mx.zeros_like(before[:1]), before]), list[int]()
        for _ in range(count):
            embedded = self.model.model.embed_tokens(mx.array(tokens + drafted))
            parts = [self.norm("embedding_norm", embedded), self.norm("hidden_norm", before)]
            joined = mx.concatenate(parts, axis=-1) @ self.tensors[f"{self.names['projection']}.weight"].T
            states = self.layer(joined[None], self.mask(len(joined), self.name != "ernie4_5_moe"), None)[0]
            last = self.model.model.norm(states) if self.name == "ernie4_5_moe" else self.norm("norm", states)
            matrix = self.model.lm_head.weight
            if self.name == "step3p5":
                matrix = self.tensors[f"{self.names['output']}.weight"]
            drafted += best(last[-1:] @ matrix.T)
            before = mx.concatenate([before, (states if self.name == "step3p5" else last)[-1:]])
        return drafted


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_drafts_what_the_published_one_does(name: str) -> None:
    published = Published(name)
    for seed in range(4):
        row = begin(name, module_of(name), prompt(50, seed))
        tokens = [*prompt(50, seed), *row.known]
        for _ in range(3):
            assert row.draft(4) == published.draft([*tokens, *row.output], 4)
            row.step(limit=0)


class Row:
    """One row decoded with drafts, greedily."""

    def __init__(self, model: MtpDrafter, caches: list[LayerCache], tokens: list[int]) -> None:
        """`caches` hold what comes before `tokens`."""
        self.model, self.caches = model, caches
        self.num_steps, self.output = 0, list[int]()
        found = model.evaluate(mx.array([tokens]), caches, [len(tokens)], [None])
        self.known, self.before = best(found.logits[-1:]), found.states[0][-1:]

    def draft(self, limit: int) -> list[int]:
        if limit == 0:
            return []
        return cast(list[int], self.model.draft_alone(self.caches, self.known, self.before, limit).tolist())

    def step(self, limit: int) -> None:
        draft, known = self.draft(limit), self.known
        feed, recurrent = [*known, *draft], [list(cache.cache) for cache in self._recurrent()]
        found = self.model.evaluate(mx.array([feed]), self.caches, [len(feed)], [self.before[:1]])
        sampled = best(found.logits[len(known) - 1 :])
        num_accepted = next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))
        num_kept = len(known) + num_accepted
        kept, self.known = feed[:num_kept], sampled[num_accepted : num_accepted + 1]
        states = found.states[0][: num_kept + 1]
        self.before = states[-1:]
        if recurrent and num_kept < len(feed):
            # Nothing stays; what was accepted is known, and evaluated again.
            self.known, self.before = [*kept, *self.known], states
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
    model = MtpDrafter(model_of(name), module)
    caches = model.make_cache()
    if num_restored:
        other = Row(model, caches, tokens[:num_restored])
        caches = model.make_cache()
        for cache, restored in zip(caches, other.caches, strict=True):
            cache.state = restored.state
    return Row(model, caches, tokens[num_restored:])


def assert_says_the_same(name: str, module: MtpModule, tokens: list[int], limit: int, num_restored: int = 0) -> None:
    row = begin(name, module, tokens, num_restored)
    output = list(row.known)
    while len(row.output) < 16:
        row.step(limit)
        evaluated = len(tokens) + 1 + len(row.output) - len(row.known)
        assert set(lengths(row.caches)) == {evaluated}, "the module's cache is as long as the others"
    assert_greedy(model_of(name), tokens, [*output, *row.output])


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_says_the_same_with_drafts_of_any_length(name: str, limit: int) -> None:
    assert_says_the_same(name, module_of(name), prompt(20), limit)


# --------------------------------------------------------------------------------------------------------- the runner


@functools.cache
def runner_for(name: str) -> Runner:
    """One for all tests: a new one would probe its model again."""
    drafter = MtpDrafter(model_of(name), trained_module_of(name))
    runner = Runner(model_of(name), vocab_size=tiny_models.VOCAB, drafter=drafter, max_probe_seconds=float("inf"))
    if runner.abilities.costs is not None:
        runner.abilities.costs = Costs(1e6)  # what is measured beside other tests may say that rows are better apart
    return runner


def decoding_of(name: str, texts: Sequence[list[int]]) -> Decoding:
    runner_for(name).separate_all()
    return Decoding(runner_for(name), texts)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "step3p5"])
def test_rows_of_a_runner_are_drafted_for_together_as_each_alone(name: str) -> None:
    texts = [text[: 9 + 4 * index] for index, text in enumerate(learned_texts(name)[:3])]
    together, alone = decoding_of(name, texts), [decoding_of(name, [text]) for text in texts]
    for limits in ([3, 3, 3], [1, 0, 2], [0, 0, 0], [2, 2, 2], [4, 1, 4], [3, 3, 3]):
        drafts = together.step(limits)
        assert drafts == [one.step([limit])[0] for one, limit in zip(alone, limits, strict=True)]
        assert list(map(len, drafts)) == limits
    together.assert_as_without(model_of(name), texts)
    assert max(map(len, together.outputs)) > 9


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "step3p5"])
def test_rows_of_a_runner_say_the_same_with_steps_of_both_kinds(name: str) -> None:
    texts = [learned_texts(name)[0][:12], prompt(30, seed=77), learned_texts(name)[1][:20]]
    decoding = decoding_of(name, texts)
    for _ in range(3):
        decoding.plain_steps(2)
        for limits in ([2, 0, 1], [1, 3, 0], [0, 0, 0], [4, 4, 4]):
            decoding.step(limits)
    decoding.assert_as_without(model_of(name), texts)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_of_a_draft_that_fails_are_decoded_no_more(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text[: 9 + 4 * index] for index, text in enumerate(learned_texts("qwen3")[:num_rows])]
    decoding, num_calls, call = decoding_of("qwen3", texts), 0, MtpModule.__call__

    def fail_at_the_third(*arguments: Any) -> mx.array:
        nonlocal num_calls
        num_calls += 1
        found = call(*arguments)
        if num_calls == 3:
            raise RuntimeError("out of memory")
        return found

    decoding.step([0] * num_rows)
    with monkeypatch.context() as patch:
        patch.setattr(MtpModule, "__call__", fail_at_the_third)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoding.step([4] * num_rows)
    decoding.runner.drain(decoding.rows)
    with pytest.raises(RowLost):
        decoding.step([2] * num_rows)


PAIRS = [
    ("qwen3", "llama"),
    ("llama_swa", "qwen3"),
    ("qwen3", "llama_swa"),
    ("gemma3", "llama_swa"),
    ("qwen3_5", "qwen3"),
    ("qwen3", "qwen3_5"),
    ("falcon_h1", "mamba2"),
    ("llama", "gemma4"),
    ("qwen3_5", "llama_swa"),
]
TEXTS = [prompt(9, seed=1), prompt(40, seed=2), prompt(21, seed=3)]


def draft_model(name: str, vocab_size: int = tiny_models.VOCAB) -> DraftModel:
    return DraftModel(f"tiny-{name}", tiny_models.build(name), vocab_size)


@functools.cache
def paired_runner(name: str, draft: str) -> Runner:
    drafter = ModelDrafter(tiny_models.build(name), tiny_models.VOCAB, draft_model(draft))
    return Runner(
        tiny_models.build(name), vocab_size=tiny_models.VOCAB, drafter=drafter, max_probe_seconds=float("inf")
    )


def step(decoding: Decoding, texts: list[list[int]], draft: Any, limits: list[int]) -> None:
    """Drafts are what the draft model says greedily behind all that was said."""
    said = [[*text, *output] for text, output in zip(texts, decoding.outputs, strict=True)]
    drafts = decoding.step(limits)
    assert list(map(len, drafts)) == limits
    for tokens, found in zip(said, drafts, strict=True):
        if found:
            assert_greedy(draft, tokens, found)


@pytest.mark.usual("qwen3-llama", "llama_swa-qwen3", "qwen3_5-llama_swa")
@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_drafts_are_what_the_draft_model_says_behind_all_tokens(name: str, draft: str) -> None:
    decoding = Decoding(paired_runner(name, draft), TEXTS)
    decoding.step([0] * 3)
    for limits in ([3, 3, 3], [1, 0, 2], [0, 0, 0], [5, 5, 5], [0, 4, 0], [2, 2, 2]):
        step(decoding, TEXTS, tiny_models.build(draft), limits)
        decoding.plain_steps(1)
    decoding.assert_as_without(tiny_models.build(name), TEXTS)


def test_eight_rows_and_rows_on_a_head_are_drafted_for() -> None:
    texts = [[*prompt(24, seed=1), *prompt(3 + 4 * index, seed=9 + index)] for index in range(8)]
    decoding = Decoding(paired_runner("qwen3", "llama"), texts)
    head = decoding.runner.make_caches()
    for row in decoding.rows[:4]:
        split_at_head(row.caches, head, 20)
    decoding.step([0] * 8)
    for limits in ([2] * 8, [1, 0, 3, 2] * 2, [3] * 8):
        step(decoding, texts, tiny_models.build("llama"), limits)
    decoding.assert_as_without(tiny_models.build("qwen3"), texts)


@pytest.mark.parametrize(("name", "draft"), [("qwen3", "llama"), ("qwen3", "qwen3_5"), ("qwen3_5", "llama_swa")])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_draft_models_draft_that_fails_are_decoded_no_more(
    name: str, draft: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(paired_runner(name, draft), TEXTS[:count])
    decoding.step([0] * count)
    num_calls, logits_of = 0, ModelDrafter._logits

    def fail_at_the_third(*arguments: Any) -> mx.array:
        nonlocal num_calls
        num_calls += 1
        found = logits_of(*arguments)
        if num_calls == 3:
            raise RuntimeError("out of memory")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "_logits", fail_at_the_third)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoding.step([4] * count)
    decoding.runner.drain(decoding.rows)
    with pytest.raises(RowLost):
        decoding.step([3] * count)


class Narrowed:
    """A model with some of a vocabulary: it takes its last token for those beyond, and says none beyond `width`."""

    def __init__(self, model: Any, width: int) -> None:
        self.model, self.width, self.last = model, width, width_of(model) - 1

    def make_cache(self) -> list[LayerCache]:
        return list(make_caches(self.model))

    def __call__(self, tokens: mx.array, cache: list[LayerCache]) -> mx.array:
        return cast(mx.array, self.model(mx.minimum(tokens, self.last), cache=cache)[..., : self.width])


def width_of(model: Any) -> int:
    return int(model(mx.array([[1]])).shape[-1])


@pytest.mark.parametrize("is_wider", [True, False])
def test_vocabularies_may_differ_in_width(is_wider: bool) -> None:
    narrow, wide = tiny_models.make({**tiny_models.CONFIGS["llama"], "vocab_size": 100}), tiny_models.build("qwen3")
    model, draft = (narrow, wide) if is_wider else (wide, narrow)
    width = width_of(model)
    drafter = ModelDrafter(model, width, DraftModel("other", draft, width_of(draft)))
    text = [token % width for token in prompt(12)]
    decoding = Decoding(Runner(model, vocab_size=width, drafter=drafter), [text])
    decoding.step([0])
    for _ in range(4):
        step(decoding, [text], Narrowed(draft, width), [3])
    decoding.assert_as_without(model, [text])


def test_the_cost_of_a_step_is_that_of_both_models() -> None:
    drafter = ModelDrafter(tiny_models.build("qwen3"), tiny_models.VOCAB, draft_model("llama"))
    caches = drafter.make_cache()
    mx.eval(drafter(mx.array([[1, 2, 3]]), caches))
    used = mx.get_active_memory()
    mx.eval([cache.state for cache in caches])
    assert mx.get_active_memory() <= used, "the draft model's entries were not evaluated with the logits"
