"""What a request rules out, for rows together, compared with a plain calculation for each."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.inference.sampling import BatchSampler, Penalty, RowSampling, penalties_of
from models.inference.sampling_params import SamplingParams

VOCAB = 6
BANS: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": (1, 4, 5)},
    {"bad_words": ((2,),)},
    {"bad_words": ((2, 3), (3,), (0, 0))},
    {"bad_words": ((1, 2, 3), (3, 3), (2, 1))},
    {"allowed_token_ids": (0, 1, 2), "bad_words": ((0, 1), (1, 1, 0), (2, 2, 2, 2))},
]


def plainly_ruled_out(params: SamplingParams, output: list[int]) -> set[int]:
    found = set(range(VOCAB)) - set(params.allowed_token_ids or range(VOCAB))
    for word in params.bad_words:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            found.add(word[-1])
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_together_rule_out_what_each_asks_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    states = [RowSampling(SamplingParams(**fields), VOCAB, prompt=[2, 3, 1, 2]) for fields in BANS]
    outputs: list[list[int]] = [[] for _ in BANS]
    for present in (range(len(BANS)), [4, 0, 3], [5], reversed(range(len(BANS)))):
        members = list(present)
        bans = penalties_of([states[index] for index in members], VOCAB)
        counting = [ban for ban in bans if isinstance(ban, Penalty)]
        for _ in range(8):
            found = mx.zeros((len(members), VOCAB))
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
    rows = [RowSampling(SamplingParams(temperature=temperature, **fields), VOCAB) for temperature in (0, 1)]
    for _ in range(5):
        found = BatchSampler(VOCAB).sample(mx.array([[0.0, 9, 9, 1, 9, 9]] * 2), rows, [words, words])
        assert set(np.array(found).tolist()) <= {0, 3}


def test_penalties_and_filters_are_safe_beside_what_is_ruled_out() -> None:
    params = SamplingParams(
        temperature=1, allowed_token_ids=(3,), repetition_penalty=1.5, presence_penalty=1, dry_multiplier=2,
        top_p=0.5, typical_p=0.5, top_n_sigma=1, xtc_probability=1, xtc_threshold=0, min_p=0.1, seed=1,
    ).within(50)  # fmt: skip
    sampler, row = BatchSampler(VOCAB), RowSampling(params, VOCAB, prompt=[3, 3, 3])
    for _ in range(6):
        assert sampler.sample(mx.array([[5.0, 60.0, 1.0, -50.0, 2.0, 3.0]]), [row]).item() == 3
