"""Vectors are the pooled outputs of the last layer, whatever is evaluated beside a text or before its next piece."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.errors import EmbeddingUnsupported
from models.formats import Judgement, Pooling
from models.inference.embedding import Embedder
from tests.support import tiny_models

NAMES = ("llama", "llama_swa", "gemma3", "qwen3_5", "mamba", "gpt_oss", "rwkv7")


def text(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(1, 60, length).astype(np.int32)


def alone(model: Any, tokens: NDArray[np.int32], pooling: Pooling) -> NDArray[np.float32]:
    return Embedder(model).embed([tokens], pooling)[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name in tiny_models.NAMES])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_texts_get_the_same_vectors_together_in_pieces_and_alone(name: str, pooling: Pooling) -> None:
    model = tiny_models.build(name)
    embedder = Embedder(model)
    texts = [text(seed, length) for seed, length in enumerate((7, 1, 40, 3))]
    for tokens, vector in zip(texts, embedder.embed(texts, pooling), strict=True):
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(vector, alone(model, tokens, pooling), atol=2e-4)
    long = embedder.begin(pooling)
    for piece in np.split(texts[2], [16, 17, 33]):
        long.feed(piece)
    np.testing.assert_allclose(long.vector(), alone(model, texts[2], pooling), atol=2e-4)


def test_the_vector_is_made_of_the_states_that_become_logits() -> None:
    model = tiny_models.build("llama")
    tokens = text(1, 9)
    states = np.array(model.model(mx.array(tokens)[None])[0].astype(mx.float32))
    wanted = {Pooling.MEAN: states.mean(axis=0), Pooling.LAST: states[-1], Pooling.FIRST: states[0]}
    for pooling, vector in wanted.items():
        np.testing.assert_allclose(
            alone(model, tokens, pooling), vector / np.linalg.norm(vector), atol=1e-5, err_msg=pooling
        )


def test_a_model_without_a_part_of_its_own_makes_none() -> None:
    with pytest.raises(EmbeddingUnsupported, match="no vectors"):
        Embedder(lambda tokens: tokens).embed([text(1, 3)], Pooling.MEAN)


def probability(model: Any, tokens: NDArray[np.int32], judgement: Judgement) -> float:
    """As mlx-lm alone says it: of the whole text at once, by the logits behind its last token."""
    logits = np.array(model(mx.array(tokens)[None])[0, -1].astype(mx.float32))
    no, yes = np.exp(logits[[judgement.no_id, judgement.yes_id]] - logits.max())
    return float(yes / (no + yes))


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_judgement_is_the_model_s_own_together_in_pieces_and_alone(name: str) -> None:
    model = tiny_models.build(name)
    embedder, judgement = Embedder(model), Judgement(no_id=7, yes_id=31)
    texts = [text(seed, length) for seed, length in enumerate((7, 1, 40, 3))]
    for tokens, vector in zip(texts, embedder.embed(texts, judgement), strict=True):
        assert vector.shape == (1,)
        assert float(vector[0]) == pytest.approx(probability(model, tokens, judgement), abs=2e-4)
    long = embedder.begin(judgement)
    for piece in np.split(texts[2], [16, 17, 33]):
        long.feed(piece)
    assert float(long.vector()[0]) == pytest.approx(probability(model, texts[2], judgement), abs=2e-4)


def test_a_head_that_does_not_make_the_model_s_logits_is_not_used() -> None:
    model = tiny_models.build("llama")

    def doubled(tokens: mx.array, cache: Any = None) -> mx.array:
        return mx.tanh(model(tokens, cache=cache)) * 3

    doubled.model, doubled.lm_head, doubled.layers = model.model, model.lm_head, model.layers  # type: ignore[attr-defined]
    judgement = Judgement(3, 5)
    found = Embedder(doubled).embed([text(1, 9)], judgement)[0]
    assert Embedder(doubled)._head is None
    assert float(found[0]) == pytest.approx(probability(doubled, text(1, 9), judgement), abs=1e-5)
