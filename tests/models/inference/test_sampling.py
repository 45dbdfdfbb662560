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
from models.inference.sampling import MAX_PENALTY, BatchSampler, Penalty, RowSampling, filters_of, penalties_of
from models.inference.sampling_params import ALL_TOKENS, MAX_REPEATED, SamplingParams, check

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


@settings(max_examples=60, deadline=None)
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


MANY = 40
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
    logits = np.random.default_rng(seed).normal(0, 2, (len(FILTERED), MANY))
    rows = [RowSampling(params, MANY) for params in FILTERED]
    found = kept(logits, rows)
    for index, params in enumerate(FILTERED):
        assert found[index] == plainly_kept(logits[index], params), params


def test_the_likeliest_token_may_be_untypical() -> None:
    # One token of 40 % among 600 of 0.1 %: the many are nearer to what is expected.
    logits = np.log([[0.4, *[0.001] * 600]])
    assert kept(logits, [RowSampling(SamplingParams(typical_p=0.5), 601)])[0] == set(range(1, 601))


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


FEW = 6
BANS: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": (1, 4, 5)},
    {"bad_words": ((2,),)},
    {"bad_words": ((2, 3), (3,), (0, 0))},
    {"bad_words": ((1, 2, 3), (3, 3), (2, 1))},
    {"allowed_token_ids": (0, 1, 2), "bad_words": ((0, 1), (1, 1, 0), (2, 2, 2, 2))},
]


def plainly_ruled_out(params: SamplingParams, output: list[int]) -> set[int]:
    found = set(range(FEW)) - set(params.allowed_token_ids or range(FEW))
    for word in params.bad_words:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            found.add(word[-1])
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_together_rule_out_what_each_asks_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    states = [RowSampling(SamplingParams(**fields), FEW, prompt=[2, 3, 1, 2]) for fields in BANS]
    outputs: list[list[int]] = [[] for _ in BANS]
    for present in (range(len(BANS)), [4, 0, 3], [5], reversed(range(len(BANS)))):
        members = list(present)
        bans = penalties_of([states[index] for index in members], FEW)
        counting = [ban for ban in bans if isinstance(ban, Penalty)]
        for _ in range(8):
            found = mx.zeros((len(members), FEW))
            for ban in bans:
                found = ban(found)
            for row, index in zip(np.array(found), members, strict=True):
                assert set(np.flatnonzero(row == -np.inf)) == plainly_ruled_out(states[index].params, outputs[index])
            tokens = random.integers(0, 4, len(members))
            for ban in counting:
                ban.count(mx.array(tokens, mx.uint32))
            for index, token in zip(members, tokens.tolist(), strict=True):
                outputs[index].append(token)
        for ban in counting:
            ban.give_back()
        # One of them is taken up again from its tokens.
        again = int(random.integers(0, len(BANS)))
        states[again] = states[again].after([2, 3, 1, 2], outputs[again])


@pytest.mark.parametrize("fields", [{"allowed_token_ids": (1, 2)}, {"bad_words": ((0,), (3,), (4,), (5,))}])
def test_where_a_grammar_leaves_nothing_else_it_counts(fields: dict[str, Any]) -> None:
    words = np.array([0b1001], np.int32)
    rows = [RowSampling(SamplingParams(temperature=temperature, **fields), FEW) for temperature in (0, 1)]
    for _ in range(5):
        found = BatchSampler(FEW).sample(mx.array([[0.0, 9, 9, 1, 9, 9]] * 2), rows, [words, words])
        assert set(np.array(found).tolist()) <= {0, 3}


def test_penalties_and_filters_are_safe_beside_what_is_ruled_out() -> None:
    params = SamplingParams(
        temperature=1, allowed_token_ids=(3,), repetition_penalty=1.5, presence_penalty=1, dry_multiplier=2,
        top_p=0.5, typical_p=0.5, top_n_sigma=1, xtc_probability=1, xtc_threshold=0, min_p=0.1, seed=1,
    ).within(50)  # fmt: skip
    sampler, row = BatchSampler(FEW), RowSampling(params, FEW, prompt=[3, 3, 3])
    for _ in range(6):
        assert sampler.sample(mx.array([[5.0, 60.0, 1.0, -50.0, 2.0, 3.0]]), [row]).item() == 3


LONGEST = 200
"""Tokens of no sequence here."""
ALL_THREE: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def plainly_penalised(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """The penalties of one row, from all of its tokens."""
    held = [*prompt, *output]
    repeated, counted = held, output
    if params.repeat_last_n is not None:
        window = len(held) if params.repeat_last_n == ALL_TOKENS else params.repeat_last_n
        repeated = counted = held[max(0, len(held) - window) :]
    found = logits.copy()
    for token in {token for token in repeated if token < FEW}:
        value = found[token]
        found[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in {token for token in counted if token < FEW}:
        found[token] -= params.presence_penalty + params.frequency_penalty * counted.count(token)
    for token, length in repetitions(held, params).items():
        if token < FEW and length >= params.dry_allowed_length:
            found[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return found


def repetitions(held: list[int], params: SamplingParams) -> dict[int, int]:
    """How long a repetition each token would go on with, in the window that DRY looks at."""
    window = (
        held if params.dry_penalty_last_n == ALL_TOKENS else held[max(0, len(held) - params.dry_penalty_last_n) :]
    )
    walls = {*params.dry_breakers, FEW, FEW + 1}
    found: dict[int, int] = {}
    for place in range(1, len(window)):
        length = 0
        while length < place and window[place - 1 - length] == window[-1 - length] not in walls:
            length += 1
        found[window[place]] = max(found.get(window[place], 0), min(length, MAX_REPEATED))
    return found


class Rows:
    """Sequences that decode side by side, with random logits and tokens, and the truth about each."""

    def __init__(self, params: list[SamplingParams], prompts: list[list[int]], seed: int) -> None:
        self.params, self.prompts = params, prompts
        self.outputs: list[list[int]] = [[] for _ in params]
        bounded = [one.within(LONGEST) for one in params]
        self.states = [RowSampling(one, FEW, prompt=prompt) for one, prompt in zip(bounded, prompts, strict=True)]
        self._random = np.random.default_rng(seed)

    def decode(self, present: list[int], num_steps: int) -> None:
        """Has some of the rows take that many steps in one batch, and checks the logits of each step."""
        states = [self.states[index] for index in present]
        penalties = [one for one in penalties_of(states, FEW) if isinstance(one, Penalty)]
        for _ in range(num_steps):
            logits = self._random.normal(0, 3, (len(present), FEW))
            found = mx.array(logits, mx.float32)
            for penalty in penalties:
                found = penalty(found)
            for place, index in enumerate(present):
                params = self.params[index]
                expected = plainly_penalised(logits[place], params, self.prompts[index], self.outputs[index])
                np.testing.assert_allclose(found[place], expected, rtol=1e-4, atol=1e-4, err_msg=str(params))
            tokens = self._random.integers(0, FEW, len(present))
            for penalty in penalties:
                penalty.count(mx.array(tokens, mx.uint32))
            for index, token in zip(present, tokens.tolist(), strict=True):
                self.outputs[index].append(token)
        for penalty in penalties:
            penalty.give_back()


WINDOWED = [
    SamplingParams(),
    SamplingParams(**ALL_THREE),
    *[SamplingParams(**ALL_THREE, repeat_last_n=length) for length in (1, 2, 5, 64, 0, ALL_TOKENS)],
    SamplingParams(repetition_penalty=0.5, repeat_last_n=3),
    SamplingParams(presence_penalty=1, repeat_last_n=4),
    SamplingParams(frequency_penalty=-1, repeat_last_n=4),
]


DRY: dict[str, Any] = {"dry_multiplier": 0.8}
REPEATING = [
    SamplingParams(),
    *[SamplingParams(**DRY, dry_penalty_last_n=length) for length in (1, 2, 7, 64, 0, ALL_TOKENS)],
    *[SamplingParams(**DRY, dry_allowed_length=length) for length in (1, 3, MAX_REPEATED)],
    SamplingParams(**DRY, dry_breakers=(2,), dry_allowed_length=1),
    SamplingParams(**DRY, dry_breakers=(0, 5), dry_base=1.0, dry_allowed_length=1, dry_penalty_last_n=9),
    SamplingParams(**ALL_THREE, repeat_last_n=4, dry_multiplier=2, dry_base=3, dry_allowed_length=1),
    SamplingParams(dry_base=3, dry_allowed_length=1),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", [WINDOWED, REPEATING])
def test_penalties_look_at_the_tokens_that_they_are_to_look_at(kinds: list[SamplingParams], seed: int) -> None:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, FEW + 2, random.integers(0, 12)).tolist() for _ in kinds]
    rows = Rows(kinds, prompts, seed)
    everybody = list(range(len(kinds)))
    rows.decode(everybody, 4)
    # Rows leave, join and change their places.
    rows.decode(random.permutation(everybody)[:5].tolist(), 5)
    rows.decode([random.integers(0, len(kinds)).item()], 3)
    rows.decode(everybody[::-1], 4)


@pytest.mark.parametrize("params", [*WINDOWED, *REPEATING])
def test_a_sequence_taken_up_again_is_penalised_as_it_would_have_been(params: SamplingParams) -> None:
    rows = Rows([params], [[1, 2, 1]], seed=3)
    rows.decode([0], 7)
    rows.states[0] = rows.states[0].after(rows.prompts[0], rows.outputs[0])
    rows.decode([0], 7)


@pytest.mark.parametrize(("allowed", "penalty"), [(MAX_REPEATED, 0.5), (2, 0.5 * MAX_PENALTY)])
def test_a_very_long_repetition_has_a_finite_penalty(allowed: int, penalty: float) -> None:
    params = SamplingParams(dry_multiplier=0.5, dry_base=100, dry_allowed_length=allowed)
    [dry] = penalties_of([RowSampling(params.within(2000), FEW, prompt=[0, 1, 2] * MAX_REPEATED)], FEW)
    assert dry(mx.zeros((1, FEW))).tolist() == [[-penalty, *[0.0] * (FEW - 1)]]
