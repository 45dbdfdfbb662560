"""Rows of different adapters decode together as each does alone."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.formats import Pooling
from models.inference.drafters import ModelDrafter, MtpDrafter
from models.inference.embedding import Embedder
from models.inference.probe import Form
from models.inference.row import DecodeRow
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import DraftModel
from models.lora_files import attach
from tests.support import adapters as tiny_adapters
from tests.support import tiny_models, tiny_mtp

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
    assert runner.form is Form.HEADS and runner.mixes is mixes
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


def test_a_row_without_an_adapter_is_evaluated_as_by_a_model_that_has_none(tmp_path: Path) -> None:
    model, adapters = model_with("llama", tmp_path)
    plain, adapted = (
        Runner(one, vocab_size=tiny_models.VOCAB, adapters=ones, max_probe_seconds=float("inf"))
        for one, ones in ((tiny_models.build("llama"), None), (model, adapters))
    )
    adapted.costs = plain.costs  # or rows might be in other groups
    rows = [[row_of(runner, prompt, 0) for prompt in PROMPTS] for runner in (plain, adapted)]
    assert decoded(plain, rows[0]) == decoded(adapted, rows[1])
    for one, other in zip(*rows, strict=True):
        plain.detach(one)
        adapted.detach(other)
        for a, b in zip(one.caches, other.caches, strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(a.state, b.state, strict=True))


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
        assert runner.mixes
        outputs.append(decoded(runner, [row_of(runner, *pair) for pair in zip(PROMPTS, ADAPTERS, strict=True)]))
    assert outputs[0] == outputs[1]
