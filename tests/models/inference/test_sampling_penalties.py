"""Penalties on tokens that were there before: rows together, compared with a plain calculation for each."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.row_sampling import RowSampling
from models.inference.sampling_params import ALL_TOKENS, SamplingParams
from models.inference.sampling_penalties import penalties_of

VOCAB = 6
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
    return found


class Rows:
    """Sequences that decode side by side, with random logits and tokens, and the truth about each."""

    def __init__(self, params: list[SamplingParams], prompts: list[list[int]], seed: int) -> None:
        self.params, self.prompts = params, prompts
        self.outputs: list[list[int]] = [[] for _ in params]
        self.states = [RowSampling(one, VOCAB, prompt=prompt) for one, prompt in zip(params, prompts, strict=True)]
        self._random = np.random.default_rng(seed)

    def decode(self, present: list[int], num_steps: int) -> None:
        """Has some of the rows take that many steps in one batch, and checks the logits of each step."""
        states = [self.states[index] for index in present]
        penalties = penalties_of(states, VOCAB)
        for _ in range(num_steps):
            logits = self._random.normal(0, 3, (len(present), VOCAB))
            found = mx.array(logits, mx.float32)
            for penalty in penalties:
                found = penalty.apply_to(found)
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
            penalty.give_back(states)


WINDOWED = [
    SamplingParams(),
    SamplingParams(**ALL_THREE),
    *[SamplingParams(**ALL_THREE, repeat_last_n=length) for length in (1, 2, 5, 64, 0, ALL_TOKENS)],
    SamplingParams(repetition_penalty=0.5, repeat_last_n=3),
    SamplingParams(presence_penalty=1, repeat_last_n=4),
    SamplingParams(frequency_penalty=-1, repeat_last_n=4),
]


@pytest.mark.parametrize("seed", range(6))
def test_penalties_look_at_the_tokens_that_they_are_to_look_at(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCAB + 2, random.integers(0, 9)).tolist() for _ in WINDOWED]
    rows = Rows(WINDOWED, prompts, seed)
    everybody = list(range(len(WINDOWED)))
    rows.decode(everybody, 4)
    # Rows leave, join and change their places.
    rows.decode(random.permutation(everybody)[:5].tolist(), 5)
    rows.decode([random.integers(0, len(WINDOWED)).item()], 3)
    rows.decode(everybody[::-1], 4)


@pytest.mark.parametrize("params", WINDOWED)
def test_a_sequence_taken_up_again_is_penalised_as_it_would_have_been(params: SamplingParams) -> None:
    rows = Rows([params], [[1, 2, 1]], seed=3)
    rows.decode([0], 7)
    rows.states[0] = rows.states[0].after(rows.prompts[0], rows.outputs[0])
    rows.decode([0], 7)


def test_a_window_as_long_as_the_sequence_can_become_is_all_of_it() -> None:
    params = SamplingParams(presence_penalty=1, repeat_last_n=10)
    assert params.within(11) == params
    assert params.within(10) == replace(params, repeat_last_n=ALL_TOKENS)
    assert SamplingParams().within(1) == SamplingParams()
