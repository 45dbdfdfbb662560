"""A smaller model drafts for a model: it knows every token that the model has, and changes none."""

import functools
from typing import Any, cast

import mlx.core as mx
import pytest

from cache.layers.kinds import make_caches, split_at_head
from cache.types import LayerCache
from models.errors import RowLost
from models.inference.drafters import ModelDrafter
from models.inference.runner import Runner
from models.loader import DraftModel
from tests.support import tiny_models
from tests.support.drafting import Decoding
from tests.support.greedy import assert_greedy
from tests.support.tiny_mtp import prompt

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
def runner_for(name: str, draft: str) -> Runner:
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
    decoding = Decoding(runner_for(name, draft), TEXTS)
    decoding.step([0] * 3)
    for limits in ([3, 3, 3], [1, 0, 2], [0, 0, 0], [5, 5, 5], [0, 4, 0], [2, 2, 2]):
        step(decoding, TEXTS, tiny_models.build(draft), limits)
        decoding.plain_steps(1)
    decoding.assert_as_without(tiny_models.build(name), TEXTS)


@pytest.mark.parametrize(("name", "draft"), [("qwen3", "llama_swa"), ("qwen3_5", "llama_swa")])
def test_a_long_draft_leaves_windows_as_they_were(name: str, draft: str) -> None:
    texts = [prompt(tiny_models.WINDOW + 20 * index, seed=index) for index in range(1, 4)]
    for count in (1, 3):
        decoding = Decoding(runner_for(name, draft), texts[:count])
        decoding.step([0] * count)
        for _ in range(3):
            step(decoding, texts[:count], tiny_models.build(draft), [24] * count)
        decoding.assert_as_without(tiny_models.build(name), texts[:count])


@pytest.mark.usual("qwen3", "qwen3_5")
@pytest.mark.parametrize("name", ["qwen3", "llama_swa", "qwen3_5"])
def test_a_draft_model_with_the_same_weights_is_always_right(name: str) -> None:
    decoding = Decoding(runner_for(name, name), TEXTS[:2])
    decoding.step([0, 0])
    for _ in range(4):
        decoding.step([4, 4])
    assert list(map(len, decoding.outputs)) == [21, 21]
    decoding.assert_as_without(tiny_models.build(name), TEXTS[:2])


def test_eight_rows_and_rows_on_a_head_are_drafted_for() -> None:
    texts = [[*prompt(24, seed=1), *prompt(3 + 4 * index, seed=9 + index)] for index in range(8)]
    decoding = Decoding(runner_for("qwen3", "llama"), texts)
    head = decoding.runner.make_caches()
    for row in decoding.rows[:4]:
        split_at_head(row.caches, head, 20)
    decoding.step([0] * 8)
    for limits in ([2] * 8, [1, 0, 3, 2] * 2, [3] * 8):
        step(decoding, texts, tiny_models.build("llama"), limits)
    decoding.assert_as_without(tiny_models.build("qwen3"), texts)


def test_rows_are_drafted_for_while_state_of_others_moves() -> None:
    decoding = Decoding(runner_for("qwen3", "llama"), TEXTS)
    decoding.step([0] * 3)
    decoding.runner.separate(decoding.runner.make_caches())
    step(decoding, TEXTS, tiny_models.build("llama"), [3, 3, 3])
    decoding.assert_as_without(tiny_models.build("qwen3"), TEXTS)


@pytest.mark.parametrize(("name", "draft"), [("qwen3", "llama"), ("qwen3", "qwen3_5"), ("qwen3_5", "llama_swa")])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_draft_that_fails_are_decoded_no_more(
    name: str, draft: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(runner_for(name, draft), TEXTS[:count])
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
