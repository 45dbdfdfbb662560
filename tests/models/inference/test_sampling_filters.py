"""Which tokens may be drawn: filters of random rows, compared with a plain calculation for each alone."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.sampling import RowSampling, filters_of
from models.inference.sampling_params import SamplingParams

VOCAB = 40
Floats = NDArray[np.float64]
PLAIN = SamplingParams()


def kept(logits: Floats, rows: list[RowSampling]) -> list[set[int]]:
    """The tokens that each row may draw, by the filters of the code."""
    scaled = mx.array(logits - logits.max(axis=-1, keepdims=True), mx.float32)
    for one in filters_of(rows, logits.shape[-1]):
        scaled = one(scaled)
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in np.array(scaled)]


def plainly_kept(logits: Floats, params: SamplingParams) -> set[int]:
    """The same for one row, one filter after the other over lists; for parameters without ties."""
    if params.is_greedy:
        return set(range(logits.size))
    near = [i for i in range(logits.size) if not params.top_n_sigma or is_near(logits, i, params.top_n_sigma)]
    likeliest = sorted(near, key=lambda i: -logits[i])[: params.top_k or logits.size]
    by_mass = first_with(likeliest, probabilities(logits, likeliest), params.top_p)
    found = [i for i in by_mass if np.exp(logits[i] - logits.max()) >= params.min_p]
    typical = plainly_typical(logits, found, params.typical_p)
    # Without a draw: XTC strikes never or always here.
    return set(plainly_without_top(logits, typical, params.xtc_threshold) if params.xtc_probability else typical)


def is_near(logits: Floats, token: int, num_deviations: float) -> bool:
    there = logits[logits > -np.inf]
    return bool(logits[token] >= logits.max() - num_deviations * np.std(there))


def plainly_typical(logits: Floats, tokens: list[int], mass: float) -> list[int]:
    probs = probabilities(logits, tokens)
    entropy = -sum(prob * np.log(prob) for prob in probs.values())
    return first_with(sorted(tokens, key=lambda i: abs(-np.log(probs[i]) - entropy)), probs, mass)


def plainly_without_top(logits: Floats, tokens: list[int], threshold: float) -> list[int]:
    probs = probabilities(logits, tokens)
    likely = sorted((i for i in tokens if probs[i] >= threshold), key=lambda i: probs[i])
    return [i for i in tokens if i not in likely[1:]]


def probabilities(logits: Floats, tokens: list[int]) -> dict[int, float]:
    weights = {i: float(np.exp(logits[i] - logits.max())) for i in tokens}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def first_with(tokens: list[int], probs: dict[int, float], mass: float) -> list[int]:
    """The first tokens that have `mass` together, the one that reaches it included."""
    found: list[int] = []
    for token in tokens:
        if found and sum(probs[i] for i in found) >= mass:
            break
        found.append(token)
    return found if mass < 1 else tokens


FILTERED = [
    PLAIN,
    SamplingParams(typical_p=0.3),
    SamplingParams(typical_p=0.95),
    SamplingParams(typical_p=0.001),
    SamplingParams(top_k=10, typical_p=0.5),
    SamplingParams(top_p=0.8, typical_p=0.7),
    SamplingParams(top_p=0.9, min_p=0.05, top_k=20, typical_p=0.6),
    SamplingParams(min_p=1.0, typical_p=0.2),
    SamplingParams(temperature=0, typical_p=0.2),
    SamplingParams(xtc_probability=1),
    SamplingParams(xtc_probability=1, xtc_threshold=0.02),
    SamplingParams(xtc_probability=1, xtc_threshold=0),
    SamplingParams(xtc_probability=1, xtc_threshold=0.6),
    SamplingParams(xtc_probability=1, xtc_threshold=0.2, top_p=0.7),
    SamplingParams(xtc_probability=1, xtc_threshold=0.05, top_k=9, min_p=0.01, typical_p=0.8),
    SamplingParams(xtc_probability=0, xtc_threshold=0.01),
    SamplingParams(temperature=0, xtc_probability=1),
    SamplingParams(top_n_sigma=1),
    SamplingParams(top_n_sigma=0.2),
    SamplingParams(top_n_sigma=2, top_p=0.7),
    SamplingParams(top_n_sigma=1.5, top_k=5, typical_p=0.6, xtc_probability=1),
    SamplingParams(temperature=0, top_n_sigma=1),
]


@pytest.mark.parametrize("seed", range(8))
def test_rows_together_keep_what_a_plain_calculation_keeps_of_each(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(FILTERED), VOCAB))
    rows = [RowSampling(params, VOCAB) for params in FILTERED]
    found = kept(logits, rows)
    for index, params in enumerate(FILTERED):
        assert found[index] == plainly_kept(logits[index], params), params


def test_masked_tokens_have_no_part_in_the_deviation() -> None:
    free, masked = np.array([[3.0, 1.0, 0.0]]), np.array([[3.0, 1.0, 0.0, *[-np.inf] * 5]])
    for num_deviations in (1.5, 1.7, 2.5):
        params = SamplingParams(top_n_sigma=num_deviations)
        found = [kept(logits, [RowSampling(params, logits.size)]) for logits in (free, masked)]
        assert found[0] == found[1] == [plainly_kept(free[0], params)]


def test_equal_logits_are_all_near() -> None:
    assert kept(np.zeros((1, 3)), [RowSampling(SamplingParams(top_n_sigma=1), 3)]) == [{0, 1, 2}]


def test_the_likeliest_token_may_be_untypical() -> None:
    # One token of 40 % among 600 of 0.1 %: the many are nearer to what is expected.
    logits = np.log([[0.4, *[0.001] * 600]])
    assert kept(logits, [RowSampling(SamplingParams(typical_p=0.5), 601)])[0] == set(range(1, 601))


def test_tokens_that_are_equally_typical_are_kept_together() -> None:
    assert kept(np.zeros((1, VOCAB)), [RowSampling(SamplingParams(typical_p=0.1), VOCAB)]) == [set(range(VOCAB))]


def test_filters_that_no_row_asks_for_are_not_there() -> None:
    greedy = SamplingParams(
        temperature=0, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5, xtc_probability=1, top_n_sigma=1
    )
    assert filters_of([RowSampling(PLAIN, VOCAB), RowSampling(greedy, VOCAB)], VOCAB) == []


def test_xtc_strikes_as_often_as_asked_and_in_the_same_draws_in_any_company() -> None:
    logits = np.log([[0.6, 0.3, 0.1]])
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.2, seed=1)

    def struck(company: list[RowSampling]) -> list[bool]:
        row, found = RowSampling(params, 3), []
        for _ in range(400):
            found.append(0 not in kept(np.repeat(logits, len(company) + 1, axis=0), [*company, row])[-1])
            row.position += 1
        return found

    alone = struck([])
    assert 0.2 < np.mean(alone) < 0.4
    assert struck([RowSampling(SamplingParams(xtc_probability=0.5, seed=2), 3), RowSampling(PLAIN, 3)]) == alone


def test_the_draw_of_xtc_is_not_that_of_the_token() -> None:
    rows = [RowSampling(SamplingParams(seed=seed), 3) for seed in range(2000)]
    chances = np.array([row.chance() for row in rows])
    noise = np.array([int.from_bytes(row.key(), "little") / 2**64 for row in rows])
    assert abs(np.corrcoef(chances, noise)[0, 1]) < 0.1
    assert abs(chances.mean() - 0.5) < 0.03
