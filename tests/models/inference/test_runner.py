"""Rows that decode together give the tokens that each gives alone, for every kind of layer state.

The reference for "alone" is the model itself, called once with a prompt and what a row has said.
"""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from cache.layers.kinds import make_caches
from models.inference.probe import Form
from models.inference.ragged import Parts, ragged_attention
from models.inference.row import DecodeRow
from models.inference.runner import DecodeStep, Runner
from models.inference.sampling_params import SamplingParams
from models.mlx_lm_import import CacheList
from server.measure import launch
from tests.support import tiny_models
from tests.support.greedy import assert_greedy
from tests.support.tiny_models import VOCAB, WINDOW

GREEDY = SamplingParams(temperature=0)
ROW_BY_ROW = {"gemma2", "deepseek_v32", "llama4"}
WITHOUT_GROUPS = {"deepseek_v3", "mamba2"}
"""Masks that the model makes itself fit no members of a batch; no layer keeps rows of tokens."""
ALL_NAMES = (*tiny_models.NAMES, "deepseek_v3", "gemma4", "gemma3n")


@functools.cache
def runner_of(name: str) -> Runner:
    return Runner(tiny_models.build(name), vocab_size=VOCAB, max_probe_seconds=float("inf"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return cast(list[int], np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist())


@functools.cache
def alone(name: str, length: int, num_tokens: int, seed: int = 0) -> list[int]:
    """The greedy output of the bare model for `prompt(length, seed)`."""
    model: Any = tiny_models.build(name)
    caches, tokens, output = make_caches(model), prompt(length, seed), []
    for _ in range(num_tokens):
        logits = model(mx.array([tokens]), cache=caches)
        tokens = [cast(int, mx.argmax(logits[0, -1]).item())]
        output += tokens
    return output


@dataclass(eq=False)
class Sequence:
    """One sequence under test: a row and what it has said."""

    row: DecodeRow
    length: int
    output: list[int] = field(default_factory=list)


class Decoding:
    """Drives a runner as the engine does: launch the next step, then read the current one."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.live: list[Sequence] = []
        self._current: DecodeStep | None = None
        self._unread: DecodeStep | None = None

    def join(self, length: int, *, params: SamplingParams = GREEDY, bits: int | None = None) -> Sequence:
        tokens, caches = prompt(length), self.runner.make_caches()
        for start in range(0, length - 1, 13):
            self.runner.prefill(caches, np.array(tokens[start : min(start + 13, length - 1)], np.int32))
        if bits is not None:
            caches = [cache.to_quantized(group_size=32, bits=bits) for cache in caches]
        sequence = Sequence(self.runner.make_row(caches, params, tokens[-1]), length)
        self.live.append(sequence)
        return sequence

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            launched = launch(self.runner, [sequence.row for sequence in self.live], self._current)
            self.read()
            self._current = self._unread = launched

    def read(self) -> None:
        if self._unread is not None:
            sampled = dict(zip(self._unread.rows, self._unread.tokens(), strict=True))
            for sequence in self.live:
                if sequence.row in sampled:
                    sequence.output += sampled[sequence.row]
            self._unread = None

    def leave(self, sequence: Sequence) -> None:
        """The sequence stops, its row detached: its caches then hold the prompt and all output but the last token."""
        self.read()
        self.live.remove(sequence)
        self.runner.detach(sequence.row)

    def return_(self, sequence: Sequence) -> None:
        sequence.row.known = [sequence.output[-1]]
        self.live.append(sequence)


def assert_like_alone(name: str, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert sequence.output, "nothing was decoded"
        assert_greedy(tiny_models.build(name), prompt(sequence.length), sequence.output)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_probe_finds_which_models_decode_ragged(name: str) -> None:
    expected = Form.ALONE if name in ROW_BY_ROW else Form.ROWS if name in WITHOUT_GROUPS else Form.HEADS
    assert runner_of(name).abilities.form is expected


@pytest.mark.parametrize("name", ALL_NAMES)
def test_rows_that_join_and_leave_say_what_they_say_alone(name: str) -> None:
    decoding = Decoding(runner_of(name))
    first = decoding.join(WINDOW - 1)
    decoding.step(3)
    empty, long = decoding.join(1), decoding.join(3 * WINDOW + 5)
    decoding.step(4)
    exact = decoding.join(WINDOW)
    decoding.step(1)
    decoding.leave(first)
    decoding.step(2)
    wrapping = decoding.join(WINDOW + 1)
    decoding.step(8)
    decoding.leave(empty)
    decoding.leave(long)
    decoding.step(6)
    decoding.leave(wrapping)
    decoding.step(3)
    decoding.read()
    assert_like_alone(name, first, empty, long, exact, wrapping)


@pytest.mark.usual(*tiny_models.USUAL)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_detached_row_goes_on_where_it_was(name: str) -> None:
    decoding = Decoding(runner_of(name))
    rows = [decoding.join(length) for length in (5, WINDOW + 9, 2)]
    decoding.step(3)
    decoding.runner.detach(rows[1].row)  # and it stays in
    decoding.step(3)
    decoding.leave(rows[1])
    decoding.step(2)
    decoding.return_(rows[1])
    decoding.step(4)
    decoding.leave(rows[0])
    decoding.return_(rows[0])  # at another place among the rows
    decoding.step(3)
    decoding.leave(rows[2])
    decoding.leave(rows[1])
    decoding.step(3)  # alone
    decoding.return_(rows[2])
    decoding.step(3)
    decoding.read()
    assert_like_alone(name, *rows)


def recurrent_states(caches: list[Any]) -> Iterator[mx.array]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from recurrent_states(cache.caches)
        elif hasattr(cache, "cache"):
            yield from cache.cache


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba2", "lfm2"])
def test_detached_recurrent_state_is_right_and_owns_its_bytes(name: str) -> None:
    decoding = Decoding(runner_of(name))
    row, _ = decoding.join(20), decoding.join(50)
    decoding.step(5)
    decoding.leave(row)
    reference = make_caches(tiny_models.build(name))
    model: Any = tiny_models.build(name)
    model(mx.array([prompt(20) + row.output[:-1]]), cache=reference)
    detached = list(recurrent_states(row.row.caches))
    assert detached
    for state, expected in zip(detached, recurrent_states(reference), strict=True):
        assert mx.allclose(state, expected, rtol=1e-3, atol=1e-3)
        assert mx.get_array_buffer_size(state) < 2 * state.nbytes, "a slice, which holds both rows' bytes"


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_seeds_do_not_see_the_company(name: str) -> None:
    params = [SamplingParams(temperature=1.2, top_p=0.9, seed=seed, presence_penalty=0.5) for seed in range(3)]

    def output(members: list[int]) -> dict[int, list[int]]:
        decoding = Decoding(runner_of(name))
        sequences = {i: decoding.join(10 + 7 * i, params=params[i]) for i in members}
        decoding.step(12)
        decoding.read()
        return {i: sequence.output for i, sequence in sequences.items()}

    together = output([0, 1, 2])
    assert together == {**output([2]), **output([0]), **output([1])}
    assert len({tuple(tokens) for tokens in together.values()}) == 3


@pytest.mark.parametrize("bits", [[4, 4], [8, 4], [None, 8]], ids=str)
def test_quantized_keys_and_values_too_and_mixed(bits: list[int | None]) -> None:
    lengths = [40, 9]

    def output(members: list[int]) -> list[list[int]]:
        decoding = Decoding(runner_of("llama_wide_heads"))
        sequences = [decoding.join(lengths[i], bits=bits[i]) for i in members]
        decoding.step(20)
        decoding.read()
        return [sequence.output for sequence in sequences]

    assert output([0, 1]) == output([0]) + output([1])


def test_a_growing_buffer_is_updated_in_place() -> None:
    """A live slice of a cache would make each step copy the whole buffer, which is 4 MiB a layer here."""
    decoding = Decoding(runner_of("llama"))
    rows = [decoding.join(length) for length in (1, 1)]
    for row in rows:
        for cache in row.row.caches:
            cache.step = 1 << 14
    decoding.step(6)
    decoding.read()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    decoding.step(6)
    decoding.read()
    assert mx.get_peak_memory() - before < 1 << 20


class FlakyModel:
    """In place of a runner's model: raises when told to, after some caches have grown."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model: Any = runner._model
        self.fails = False
        monkeypatch.setattr(runner, "_model", self)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if self.fails:
            raise RuntimeError("out of memory")
        return logits


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_failing_launch_harms_no_row_outside_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(runner_of(name))
    model = FlakyModel(decoding.runner, monkeypatch)
    bystander, victims = decoding.join(9), [decoding.join(20), decoding.join(30)]
    decoding.step(4)
    decoding.read()
    decoding.live = list(victims)
    model.fails = True
    with pytest.raises(RuntimeError):
        decoding.step()
    decoding.runner.drain([victim.row for victim in victims])
    model.fails = False
    decoding.live = [bystander, decoding.join(40)]
    bystander.row.known = [bystander.output[-1]]
    decoding.step(5)
    decoding.read()
    assert_like_alone(name, *decoding.live)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "falcon_h1"])
def test_a_detached_row_may_go_on_from_another_state(name: str) -> None:
    decoding = Decoding(runner_of(name))
    changed, other = decoding.join(12), decoding.join(25)
    decoding.step(3)
    decoding.read()
    decoding.runner.detach(changed.row)
    donor = decoding.join(18)
    decoding.live.remove(donor)
    for cache, state in zip(changed.row.caches, [cache.state for cache in donor.row.caches], strict=True):
        cache.state = state
    changed.row.known, changed.length, changed.output = donor.row.known, 18, []
    decoding.step(5)
    decoding.read()
    assert_like_alone(name, changed, other)


@pytest.mark.parametrize("ending", ["detached", "failed"])
def test_the_runner_lets_go_of_rows_that_are_over(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(runner_of("qwen3_5"))
    model = FlakyModel(decoding.runner, monkeypatch)
    rows = [decoding.join(5), decoding.join(6)]
    held = weakref.ref(rows[0].row)
    decoding.step(3)
    if ending == "detached":
        decoding.leave(rows[0])
        decoding.leave(rows[1])
    else:
        decoding.read()
        model.fails = True
        with pytest.raises(RuntimeError):
            decoding.step()
        decoding.runner.drain([row.row for row in rows])
    decoding.live, decoding._current = [], None
    rows.clear()
    gc.collect()
    assert held() is None


def decoded(runner: Runner, sampling: SamplingParams, forced: dict[int, int], replayed_at: int | None) -> list[int]:
    """Thirty tokens of a row beside another; some forced, each known when the step after is prepared; or replayed."""
    given, output = prompt(20), list[int]()
    company = row_after(runner, prompt(9), [], GREEDY)
    row = row_after(runner, given, output, sampling)
    step = launch(runner, [row, company], None)
    while len(output) < 30:
        token = forced.get(len(output))
        if replayed_at == len(output):
            output.append(step.tokens()[0][0] if token is None else token)
            row, company = row_after(runner, given, output, sampling), row_after(runner, prompt(9), [], GREEDY)
            step = launch(runner, [row, company], None)
            continue
        if token is not None:
            row.known = [token]
            runner.force(row, prompt=given, generated=[*output, token])
        following = launch(runner, [row, company], step)
        output.append(step.tokens()[0][0] if token is None else token)
        step = following
    return output


def row_after(runner: Runner, given: list[int], output: list[int], sampling: SamplingParams) -> DecodeRow:
    caches, tokens = runner.make_caches(), [*given, *output]
    runner.prefill(caches, np.array(tokens[:-1], np.int32))
    return runner.make_row(caches, sampling, tokens[-1], prompt=given, generated=output)


PENALISED = SamplingParams(
    temperature=0,
    repetition_penalty=1.1,
    presence_penalty=1,
    frequency_penalty=2,
    logit_bias=tuple((token, 100.0) for token in range(5, 12)),
)
"""Seven tokens are likely, and their penalties say which comes next."""


WINDOWED = replace(PENALISED, repeat_last_n=6)
DRY = replace(
    SamplingParams(temperature=0, logit_bias=PENALISED.logit_bias),
    dry_multiplier=5,
    dry_allowed_length=1,
    dry_penalty_last_n=30,
    dry_breakers=(6,),
)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, WINDOWED, DRY])
def test_a_row_goes_on_from_forced_tokens_as_if_they_had_been_sampled(sampling: SamplingParams) -> None:
    runner, forced = runner_of("llama"), {1: 5, 2: 6, 3: 5}
    output = decoded(runner, sampling, forced, None)
    assert output[1:4] == [5, 6, 5]
    assert output != decoded(runner, sampling, {}, None)
    for place in (4, 6, 15):
        assert decoded(runner, sampling, forced, place) == output


def test_a_row_needs_a_token_from_somewhere() -> None:
    runner = runner_of("llama")
    row = runner.make_row(runner.make_caches(), GREEDY, next_token=3)
    row.known = []
    with pytest.raises(AssertionError):
        launch(runner, [row], None)


def attention(keys: Any, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(mx.ones((1, 2, 1, 4)), keys, keys, scale=1.0, **options)


def test_attention_is_replaced_only_within_the_call_and_only_for_rows() -> None:
    original, plain = mx.fast.scaled_dot_product_attention, mx.random.normal((1, 1, 3, 4))
    expected = attention(plain)
    mx.eval(plain, expected)
    seen: list[bool] = []
    with ragged_attention(), ragged_attention():
        other = threading.Thread(target=lambda: seen.append(bool(mx.allclose(attention(plain), expected))))
        other.start()
        other.join()
        assert mx.array_equal(attention(plain), expected)
        with pytest.raises(TypeError, match="mask"):
            attention(Parts([plain], []), mask=mx.zeros((1, 3)))
    assert seen == [True]
    with pytest.raises(ZeroDivisionError), ragged_attention():
        raise ZeroDivisionError
    assert mx.fast.scaled_dot_product_attention is original


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows + mx.ones((2, 3)),
        lambda rows: mx.ones((2, 1, 1, 3)) @ mx.expand_dims(rows, 1),
        lambda rows: mx.ones((2, 1, 3)) @ rows,
        lambda rows: mx.concatenate([rows, mx.ones((1, 3))], axis=1),
        lambda rows: rows[..., :1, :],
        lambda rows: rows.reshape(2, -1, 3),
        lambda rows: rows.astype(mx.float16).shape[2],
        lambda rows: rows.swapaxes(-1, -2) + mx.ones((2, 1, 3, 4)),
    ],
)
def test_what_rows_do_not_know_fails_instead_of_computing_nonsense(use: Callable[[Parts], object]) -> None:
    rows = Parts([mx.ones((1, 1, 4, 3)), mx.ones((1, 1, 2, 3))], [1])
    with pytest.raises((TypeError, ValueError, IndexError)):
        use(rows)


def test_the_error_of_a_step_that_nobody_reads_meets_no_other() -> None:
    runner = runner_of("qwen3")
    with suppress(RuntimeError):  # where the device is faster than this thread, MLX raises it here
        mx.async_eval(mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu))  # type: ignore[no-untyped-call]
    # MLX raises it at the next use of the stream, whatever that evaluates.
    runner.drain()
    mx.eval(mx.ones(3, stream=mx.cpu) + 1)
