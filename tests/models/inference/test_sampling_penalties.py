"""Penalties on tokens that were there before: rows together, compared with a plain calculation for each."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.sampling import MAX_PENALTY, BatchSampler, Penalty, RowSampling, penalties_of
from models.inference.sampling_params import ALL_TOKENS, MAX_REPEATED, SamplingParams

VOCAB = 6
LONGEST = 200
"""Tokens of no sequence here."""
Floats = NDArray[np.float64]
ALL_THREE: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def plainly_penalised(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """The penalties of one row, from all of its tokens."""
    held = [*prompt, *output]
    repeated, counted = held, output
    if params.repeat_last_n is not None:
        window = len(held) if params.repeat_last_n == ALL_TOKENS else params.repeat_last_n
        repeated = counted = held[max(0, len(held) - window) :]
    found = logits.copy()
    for token in {token for token in repeated if token < VOCAB}:
        value = found[token]
        found[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in {token for token in counted if token < VOCAB}:
        found[token] -= params.presence_penalty + params.frequency_penalty * counted.count(token)
    for token, length in repetitions(held, params).items():
        if token < VOCAB and length >= params.dry_allowed_length:
            found[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return found


def repetitions(held: list[int], params: SamplingParams) -> dict[int, int]:
    """How long a repetition each token would go on with, in the window that DRY looks at."""
    window = (
        held if params.dry_penalty_last_n == ALL_TOKENS else held[max(0, len(held) - params.dry_penalty_last_n) :]
    )
    walls = {*params.dry_breakers, VOCAB, VOCAB + 1}
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
        self.states = [RowSampling(one, VOCAB, prompt=prompt) for one, prompt in zip(bounded, prompts, strict=True)]
        self._random = np.random.default_rng(seed)

    def decode(self, present: list[int], num_steps: int) -> None:
        """Has some of the rows take that many steps in one batch, and checks the logits of each step."""
        states = [self.states[index] for index in present]
        penalties = [one for one in penalties_of(states, VOCAB) if isinstance(one, Penalty)]
        for _ in range(num_steps):
            logits = self._random.normal(0, 3, (len(present), VOCAB))
            found = mx.array(logits, mx.float32)
            for penalty in penalties:
                found = penalty(found)
            for place, index in enumerate(present):
                params = self.params[index]
                expected = plainly_penalised(logits[place], params, self.prompts[index], self.outputs[index])
                np.testing.assert_allclose(found[place], expected, rtol=1e-4, atol=1e-4, err_msg=str(params))
            tokens = self._random.integers(0, VOCAB, len(present))
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
    prompts = [random.integers(0, VOCAB + 2, random.integers(0, 12)).tolist() for _ in kinds]
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
    [dry] = penalties_of([RowSampling(params.within(2000), VOCAB, prompt=[0, 1, 2] * MAX_REPEATED)], VOCAB)
    assert dry(mx.zeros((1, VOCAB))).tolist() == [[-penalty, *[0.0] * (VOCAB - 1)]]


def test_lengths_that_are_followed_are_those_of_a_new_beginning() -> None:
    params, prompt = SamplingParams(**DRY).within(900), [0, 1, 1, 2] * 10
    state, sampler = RowSampling(params, VOCAB, prompt=prompt), BatchSampler(VOCAB)
    forced = mx.full((1, VOCAB), -1e30)
    output = [0, 1, 1, 2] * 80
    for token in output:
        forced[0] = -1e30
        forced[0, token] = 1e30
        assert sampler.sample(forced, [state]).item() == token
    sampler.release()
    fresh = RowSampling(params, VOCAB, prompt=prompt, emitted=output)
    found, expected = state.windows[-1], fresh.windows[-1]
    assert found is not None and expected is not None
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert expected["lengths"].max().item() == MAX_REPEATED


def test_a_window_as_long_as_the_sequence_can_become_is_all_of_it() -> None:
    params = SamplingParams(presence_penalty=1, repeat_last_n=10)
    assert params.within(11) == params
    assert params.within(10) == replace(params, repeat_last_n=ALL_TOKENS)
    assert SamplingParams(**DRY).within(10).dry_penalty_last_n == 10
    assert SamplingParams(**DRY, dry_penalty_last_n=7).within(10).dry_penalty_last_n == 7
    assert SamplingParams().within(1) == SamplingParams()
