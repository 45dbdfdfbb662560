"""Sampling: vectorised over rows, and for each row what a slow, plain calculation allows."""

import math
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.errors import InvalidParameter
from models.inference.sampling import BatchSampler, RowSampling
from models.inference.sampling_params import ALL_TOKENS, SamplingParams, check

VOCAB = 24
Floats = NDArray[np.float64]

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, VOCAB + 100]),
    min_p=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    logit_bias=st.sampled_from([(), ((3, 5.0),), ((0, -100.0), (7, 2.5), (7, 1.0))]),
)
MIXED = st.builds(
    lambda params, filters: replace(params, **filters),
    PARAMS,
    st.fixed_dictionaries(
        {
            "typical_p": st.sampled_from([0.2, 0.7, 1.0]),
            "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
            "top_n_sigma": st.sampled_from([0.0, 1.0, 3.0]),
            "xtc_threshold": st.sampled_from([0.05, 0.3]),
            "repeat_last_n": st.sampled_from([None, 0, 1, 3, ALL_TOKENS]),
            "dry_multiplier": st.sampled_from([0.0, 2.0]),
            "dry_allowed_length": st.just(1),
            "dry_penalty_last_n": st.sampled_from([0, 3, 8]),
            "allowed_token_ids": st.sampled_from([(), (2, 5, 9)]),
            "bad_words": st.sampled_from([(), ((2,),), ((5, 9), (1, 2, 3))]),
            "dry_breakers": st.sampled_from([(), (1, 2)]),
        }
    ),
)
"""With what the oracle below knows nothing of."""
PROMPT = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def sample(sampler: BatchSampler, logits: mx.array, states: list[RowSampling]) -> list[int]:
    return cast(list[int], sampler.sample(logits, states).tolist())


def adjusted(logits: Floats, params: SamplingParams, prompt: list[int], emitted: list[int]) -> Floats:
    """The oracle, first half: bias and penalties for one row; only that on repetition looks at the prompt."""
    logits = logits.copy()
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *emitted}:
        value = logits[token_id]
        logits[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(emitted):
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * emitted.count(token_id)
    return logits


def allowed(logits: Floats, params: SamplingParams, slack: float) -> set[int]:
    """The oracle, second half: the tokens that may be drawn, top-p and min-p moved by `slack` for rounding."""
    if params.is_greedy:
        return {int(i) for i in np.flatnonzero(logits >= logits.max() - slack)}
    ranked = sorted(range(VOCAB), key=lambda i: -logits[i])[: params.top_k or VOCAB]
    weights = np.exp((logits[ranked] - logits.max()) / params.temperature)
    mass_before = np.concatenate([[0.0], np.cumsum(weights / weights.sum())[:-1]])
    is_kept = (mass_before < params.top_p + slack) & (weights >= params.min_p - slack)
    return {token for token, kept in zip(ranked, is_kept, strict=True) if kept}


@settings(deadline=None)
@given(st.lists(st.tuples(PARAMS, PROMPT), min_size=1, max_size=5), st.integers(0, 2**31))
def test_every_row_draws_what_the_oracle_allows(rows: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    sampler, states = BatchSampler(VOCAB), [RowSampling(params, VOCAB, prompt=prompt) for params, prompt in rows]
    emitted: list[list[int]] = [[] for _ in rows]
    for _ in range(4):
        logits = generator.normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
        tokens = sample(sampler, mx.array(logits), states)
        for row, token in enumerate(tokens):
            params, prompt = rows[row]
            row_logits = adjusted(logits[row].astype(np.float64), params, prompt, emitted[row])
            assert token in allowed(row_logits, params, slack=1e-4)
            emitted[row].append(token)


@settings(deadline=None)
@given(st.lists(MIXED, min_size=2, max_size=4), st.integers(0, 2**31))
def test_a_row_draws_the_same_in_any_company(rows: list[SamplingParams], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (6, len(rows), VOCAB)).astype(np.float32)

    def draw(members: list[int]) -> dict[int, list[int]]:
        sampler, states = BatchSampler(VOCAB), {i: RowSampling(rows[i], VOCAB, prompt=[i, i + 5]) for i in members}
        drawn: dict[int, list[int]] = {i: [] for i in members}
        for step in range(6):
            # The second row sits out two steps of the larger batch, so that rows leave and join.
            present = [i for i in members if len(members) == 1 or i != 1 or step not in (2, 3)]
            rows_now = mx.array(logits[[len(drawn[i]) for i in present], present])
            tokens = sample(sampler, rows_now, [states[i] for i in present])
            for i, token in zip(present, tokens, strict=True):
                drawn[i].append(token)
        return drawn

    together = draw(list(range(len(rows))))
    for i in range(len(rows)):
        alone = draw([i])[i]
        assert together[i] == alone[: len(together[i])]


def test_the_penalty_on_repetition_looks_at_the_prompt_and_the_others_do_not() -> None:
    logits = mx.array([[3.0, 2.0, 1.0]])

    def drawn(**penalty: Any) -> list[int]:
        params = SamplingParams(temperature=0, **penalty)
        sampler, state = BatchSampler(3), RowSampling(params, 3, prompt=[0, 0, 0])
        return [sample(sampler, logits, [state])[0] for _ in range(3)]

    assert drawn(repetition_penalty=2.0) == [1, 0, 0]
    assert drawn(presence_penalty=1.5) == [0, 1, 0]
    assert drawn(frequency_penalty=1.5) == [0, 1, 0]
    assert drawn(repetition_penalty=2.0, presence_penalty=1.0) == [1, 0, 2]


def test_a_sequence_taken_up_again_goes_on_as_it_would_have() -> None:
    params = SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5)
    logits = mx.random.normal((8, VOCAB), key=mx.random.key(0))

    def draw(state: RowSampling, steps: range) -> list[int]:
        sampler = BatchSampler(VOCAB)
        return [sample(sampler, logits[step : step + 1], [state])[0] for step in steps]

    whole = draw(RowSampling(params, VOCAB, prompt=[1, 2]), range(8))
    assert draw(RowSampling(params, VOCAB, prompt=[1, 2], emitted=whole[:5]), range(5, 8)) == whole[5:]


def test_draws_follow_the_distribution() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]] * 8))
    # So few rows that one which always drew the same token could not pass either.
    states, sampler = [RowSampling(SamplingParams(seed=seed), 4) for seed in range(8)], BatchSampler(4)
    tokens = [sample(sampler, logits, states) for _ in range(500)]
    shares = np.bincount(np.array(tokens).reshape(-1), minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_seeds_differ_and_rows_without_one_too() -> None:
    logits = mx.zeros((1, 4096))

    def first(params: SamplingParams) -> int:
        return sample(BatchSampler(4096), logits, [RowSampling(params, 4096)])[0]

    assert first(SamplingParams(seed=1)) == first(SamplingParams(seed=1)) != first(SamplingParams(seed=2))
    assert len({first(SamplingParams()) for _ in range(5)}) > 1


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = mx.array([[1.0, 1.0, 1.0, 0.0]])
    states = [RowSampling(SamplingParams(top_k=1, seed=seed), 4) for seed in range(40)]
    assert {sample(BatchSampler(4), logits, [state])[0] for state in states} == {0, 1, 2}


def test_half_precision_logits_and_tiny_temperatures_are_safe() -> None:
    logits = mx.array([[30000.0, -30000.0, 29000.0]], dtype=mx.float16)
    state = RowSampling(SamplingParams(temperature=1e-4), 3)
    assert sample(BatchSampler(3), logits, [state]) == [0]


INVALID: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, "1", None, True)],
    *[("top_p", value) for value in (0.0, 1.1, -1, math.nan)],
    *[("top_k", value) for value in (-1, 2**63, 1.5, True)],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("typical_p", value) for value in (0.0, 1.1, math.nan)],
    *[("xtc_probability", value) for value in (-0.1, 1.1, math.nan)],
    *[("xtc_threshold", value) for value in (-0.1, 1.1, True)],
    *[("repeat_last_n", value) for value in (-2, 2**31, 1.5, True)],
    *[("dry_multiplier", value) for value in (-0.1, 100.1, math.nan)],
    *[("dry_base", value) for value in (0.9, 100.1, math.inf)],
    *[("dry_allowed_length", value) for value in (0, 257, 1.5)],
    *[("dry_penalty_last_n", value) for value in (-2, 2**31, True)],
    ("dry_breakers", (VOCAB,)),
    ("allowed_token_ids", (-1,)),
    ("bad_words", ((0, VOCAB),)),
    *[("top_n_sigma", value) for value in (-0.1, 100.1, math.nan)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 0.5, True)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, 10.5, math.nan)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, math.inf)],
    *[
        ("logit_bias", ((token, bias),))
        for token, bias in ((VOCAB, 0.0), (-1, 0.0), (0, 101.0), (0, math.nan), (0.5, 1))
    ],
]


@pytest.mark.parametrize(("param", "value"), INVALID)
def test_what_is_out_of_range_is_named(param: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as raised:
        check(SamplingParams(**{param: value}), VOCAB)  # type: ignore[arg-type]
    assert raised.value.param == param


@given(MIXED)
def test_what_is_in_range_passes(params: SamplingParams) -> None:
    check(params, VOCAB)
    check(SamplingParams(temperature=2, top_p=1, top_k=10**9, seed=-(2**63), logit_bias=((VOCAB - 1, -100),)), VOCAB)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(top_p=0.2)]
)
def test_a_masked_row_takes_its_allowed_tokens_and_the_others_what_they_would_have_had(
    params: SamplingParams,
) -> None:
    logits = mx.array(np.random.default_rng(1).normal(size=(3, 50)), mx.float32)
    bits = np.zeros(64, np.uint8)
    bits[[4, 9, 60]] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    for seed in range(20):
        rows = [RowSampling(replace(params, seed=seed + n), 50) for n in range(3)]
        free = [RowSampling(replace(params, seed=seed + n), 50) for n in range(3)]
        tokens = np.array(BatchSampler(50).sample(logits, rows, [None, words, None]))
        unbound = np.array(BatchSampler(50).sample(logits, free))
        assert tokens[1] in (4, 9)
        assert (tokens[0], tokens[2]) == (unbound[0], unbound[2])


def test_tokens_beyond_a_mask_are_not_allowed() -> None:
    logits = mx.arange(50, dtype=mx.float32)[None]
    words = np.array([1 << 5], np.int32)
    rows = [RowSampling(SamplingParams(temperature=0), 50)]
    assert BatchSampler(50).sample(logits, rows, [words]).tolist() == [5]


def test_a_row_ends_no_earlier_than_it_may_and_the_others_when_they_will() -> None:
    ending = [0.0] * VOCAB
    ending[3], ending[5], ending[7] = 30.0, 20.0, 10.0
    logits = mx.array([ending] * 3)
    least = [
        SamplingParams(temperature=0, min_tokens=2, end_token_ids=(3, 5, VOCAB + 9)),
        SamplingParams(temperature=0),
    ]
    drawn_from = SamplingParams(seed=1, min_tokens=3, end_token_ids=(3,), top_k=2, top_p=0.9)
    states = [*(RowSampling(params, VOCAB) for params in least), RowSampling(drawn_from, VOCAB, emitted=[7])]
    sampler = BatchSampler(VOCAB)
    assert [sample(sampler, logits, states) for _ in range(4)] == [[7, 3, 5], [7, 3, 5], [3, 3, 3], [3, 3, 3]]
