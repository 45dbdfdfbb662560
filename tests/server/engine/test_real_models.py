"""The whole engine on tiny real architectures: sharing, batching, paging and rounding (`--cache-bits`)."""

import functools
import gc
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache import reclaim
from cache.budget import PADDING
from cache.layers.layout import StoredForm
from cache.layers.state import Rounded
from cache.memory_tier import ROUNDED_TOKENS
from cache.slots import Lookup
from models.inference.grouping import Costs
from models.inference.groups import GroupLayer
from models.inference.probe import Probe
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from server.engine.scheduler import Phase
from tests.support import fake_runner, tiny_models
from tests.support.engine_driver import Collected, Harness
from tests.support.oracle import Oracle

# isort: split
from mlx_lm.models.cache import make_prompt_cache

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 6
STEP_BYTES = 16 << 10
"""What a step leaves behind: its tokens, offsets and logits."""


def harness_for(
    name: str, *, num_slots: int = 4, chunk_tokens: int = 16, speculation: Oracle | None = None
) -> Harness:
    """Returns a worker over a tiny real model."""
    runner = runner_for(name)
    runner.overlaps = fake_runner.OVERLAPS
    return Harness(runner=runner, num_slots=num_slots, chunk_tokens=chunk_tokens, speculation=speculation)


@functools.cache
def runner_for(name: str) -> Runner:
    """One for all workers in turn: a new one would probe its model again."""
    return Runner(tiny_models.build(name), vocab_size=tiny_models.VOCAB, max_probe_seconds=float("inf"))


def ask(harness: Harness, prompt: list[int], **fields: object) -> Collected:
    """Submits a greedy request."""
    return harness.submit(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, sampling=GREEDY, **fields)  # type: ignore[arg-type]


def text_of(seed: int, length: int) -> list[int]:
    """Returns random tokens of the tiny vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@functools.cache
def alone(name: str, prompt: tuple[int, ...]) -> list[int]:
    """Returns the answer of a fresh engine that shares nothing, the prompt evaluated in one chunk."""
    harness = harness_for(name, chunk_tokens=128)
    sink = ask(harness, list(prompt), cache_prompt=False)
    harness.run()
    return sink.tokens


@pytest.mark.usual(
    "llama",
    "llama_swa",
    "qwen3_5",
    "gpt_oss",
    "gemma3",
    "gemma3n",
    "llama4",
    "deepseek_v3",
    "mamba2",
    "gemma2",
    "qwen3_next",
)
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_sharing_batching_and_paging_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three conversations on one prefix, two turns each, an edit and a repeat, through two slots."""
    # In one test, so that what is answered alone is evaluated once for both.
    for overlaps in (True, False):
        monkeypatch.setattr(fake_runner, "OVERLAPS", overlaps)
        share_batch_and_page(name)


def share_batch_and_page(name: str) -> None:
    harness = harness_for(name, num_slots=2, chunk_tokens=24)
    system = text_of(0, 50)
    openings = [[*system, *text_of(seed, 9 + seed)] for seed in (1, 2, 3)]
    first = [ask(harness, prompt) for prompt in openings]
    harness.run()
    turns = [
        [*prompt, *sink.tokens, *text_of(seed, 7)]
        for seed, (prompt, sink) in enumerate(zip(openings, first, strict=True))
    ]
    second = [ask(harness, prompt) for prompt in turns]
    harness.run()
    others = [[*system, *text_of(9, 5)], turns[0], [*turns[1][:70], 5, 6]]
    third = [ask(harness, prompt) for prompt in others]
    harness.run()
    assert third[1].tokens == second[0].tokens
    for prompt, sink in zip([*openings, *turns, *others], [*first, *second, *third], strict=True):
        assert sink is third[1] or sink.tokens == alone(name, tuple(prompt))
    for prompt, sink in zip(turns, second, strict=True):
        assert sink.started.hit_tokens >= len(prompt) - 7 - 1, "a turn's history was evaluated again"
    assert third[1].started.hit_tokens == len(turns[0]) - 1, "an exact repeat evaluates one token"
    assert third[0].started.hit_tokens >= len(system), "a third conversation did not share the system prompt"


@pytest.mark.usefixtures("overlaps")
def test_seeded_sampling_is_the_same_alone_and_in_company() -> None:
    wanted = SamplingParams(temperature=0.9, seed=11, top_p=0.95)
    prompt = text_of(1, 30)
    lonely, busy = harness_for("llama"), harness_for("llama")
    alone_sink = lonely.submit(prompt, max_tokens=12, sampling=wanted, ignore_eos=True)
    lonely.run()
    for seed in range(3):
        busy.submit(text_of(seed + 5, 20), max_tokens=30, sampling=SamplingParams(seed=seed), ignore_eos=True)
    busy.step(5)
    sink = busy.submit(prompt, max_tokens=12, sampling=wanted, ignore_eos=True)
    busy.run()
    assert sink.tokens == alone_sink.tokens


SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=11, top_p=0.95),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, top_logprobs=2),
    SamplingParams(temperature=0.7, seed=3, dry_multiplier=0.8, repeat_last_n=16, frequency_penalty=0.4),
)


@pytest.mark.usual("overlap-llama", "overlap-qwen3_5", "in turns-gpt_oss", "in turns-llama")
@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "gpt_oss"])
def test_drafts_change_no_token_whatever_they_say(name: str) -> None:
    prompts = [text_of(seed, 20 + 13 * seed) for seed in range(len(SAMPLINGS))]

    def answers(harness: Harness) -> list[list[int]]:
        asked = zip(prompts, SAMPLINGS, strict=True)
        sinks = [harness.submit(each, max_tokens=24, sampling=how, ignore_eos=True) for each, how in asked]
        harness.run()
        following = [[*prompt, *sink.tokens, 5] for prompt, sink in zip(prompts, sinks, strict=True)]
        sinks += [ask(harness, prompt) for prompt in following]
        harness.run()
        return [sink.tokens for sink in sinks]

    plain = answers(harness_for(name))
    outputs = {tuple(prompt): output for prompt, output in zip(prompts, plain, strict=False)}

    def after(prompt: Sequence[int], output: Sequence[int]) -> int:
        return [*outputs.get(tuple(prompt), []), *[7] * 99][len(output)]

    for error_rate in (0.0, 0.3, 1.0):
        oracle = Oracle(error_rate, after=after, length=5, idles=0.2)
        assert answers(harness_for(name, speculation=oracle)) == plain
        assert (oracle.num_accepted > 20) == (error_rate < 1)


@pytest.mark.parametrize("call", ["separate", "separate_all"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_an_error_on_the_way_out_of_shared_buffers_changes_no_token(
    name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows in a group, one beside it; then one goes on, and two are cancelled."""
    harness = harness_for(name, chunk_tokens=128)
    monkeypatch.setattr(harness.runner.abilities, "costs", Costs(100))
    prompts = [text_of(seed, length) for seed, length in ((1, 30), (2, 31), (3, 200))]
    sinks = [ask(harness, prompt, request_id=f"{seed}") for seed, prompt in enumerate(prompts)]
    while any(len(sink.tokens) < 3 for sink in sinks):
        harness.step()
    with monkeypatch.context() as patched, suppress(RuntimeError):
        patched.setattr(GroupLayer, "given", _fail)
        row = harness.prefix_cache.slots[sinks[1].started.slot].caches
        harness.runner.separate_all() if call == "separate_all" else harness.runner.separate(row)
    harness.worker.cancel("1")
    harness.worker.cancel("2")
    harness.run()
    assert sinks[0].tokens == alone(name, tuple(prompts[0])), sinks[0].last
    turns = [(*prompt, *sink.tokens, 7) for prompt, sink in zip(prompts, sinks, strict=True)]
    again = [ask(harness, list(turn)) for turn in turns]
    harness.run()
    assert [sink.tokens for sink in again] == [alone(name, turn) for turn in turns]


def test_rows_that_an_error_kept_in_shared_buffers_become_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_for("llama", chunk_tokens=128)
    cache = harness.prefix_cache
    monkeypatch.setattr(reclaim, "MIN_HEAD_TOKENS", 16)
    monkeypatch.setattr(harness.runner.abilities, "costs", Costs(1000))
    monkeypatch.setattr(harness.runner.abilities, "head_tokens", float("inf"))
    prompts = [[*text_of(0, 50), *text_of(seed, 9)] for seed in range(1, 5)]
    sinks = [ask(harness, prompt) for prompt in prompts[:3]]
    while any(len(sink.tokens) < 3 for sink in sinks):
        harness.step()
    with monkeypatch.context() as patched:
        patched.setattr(GroupLayer, "given", _fail)
        cache.reclaimer.free(1)
    cache.check()
    assert not cache.pager.heads and any(slot.is_lost for slot in cache.slots)
    harness.run()
    sinks.append(ask(harness, prompts[3]))
    harness.run()
    assert [sink.tokens for sink in sinks] == [alone("llama", tuple(prompt)) for prompt in prompts]


def _fail(*_: object) -> None:
    raise RuntimeError("[malloc] out of memory")


@pytest.mark.parametrize(
    ("name", "costs"), [("llama", Costs(0)), ("llama", Costs(1e6)), ("qwen3_5", Costs(1e6)), ("mamba2", None)]
)
def test_what_is_held_is_charged_whoever_leaves(
    name: str, costs: Costs | None, monkeypatch: pytest.MonkeyPatch, exact_buffers: None
) -> None:
    """One row ends, another fails, and then all; a merged state or a place in a group outlives none of them."""
    harness = harness_for(name, chunk_tokens=128)
    monkeypatch.setattr(harness.runner.abilities, "costs", costs)
    harness.runner.overlaps = False
    prompts = [text_of(seed, 30 + seed) for seed in range(4)]
    gc.freeze()  # what earlier tests left is not looked through at each collection
    mx.synchronize()
    before_bytes = mx.get_active_memory()
    for number, prompt in enumerate(prompts):
        ask(harness, prompt, request_id=f"{number}", cache_prompt=False)
    ledger, table = harness.prefix_cache.ledger, harness.worker._table
    harness.step(3)
    assert {one.phase for one in table} == {Phase.DECODING} and len(table) == len(prompts)
    for leaving in ("", "1", "2", "", "0", "3"):
        if leaving == "1":
            harness.worker.cancel("1")
        elif leaving:
            table.fail_step(table.sequences[leaving], RuntimeError("the model failed"))  # which detaches no row
        else:
            harness.step()
        harness.worker._decode.read()
        gc.collect()
        held_bytes = mx.get_active_memory() - before_bytes
        assert held_bytes <= ledger.live_bytes + STEP_BYTES, leaving


@pytest.mark.usefixtures("overlaps")
def test_no_padding_is_charged_once_nobody_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_for("llama")
    monkeypatch.setattr(harness.runner.abilities, "costs", Costs(1e6))
    for length in (20, 60, 61):
        ask(harness, text_of(length, length), cache_prompt=False)
    ledger, table = harness.prefix_cache.ledger, harness.worker._table
    while not ledger.slot_bytes(PADDING):
        harness.step()
    for sequence in list(table):
        table.fail_step(sequence, RuntimeError("the model failed"))  # which detaches no row
    harness.prefix_cache.pager.take_back_padding()
    assert ledger.slot_bytes(PADDING) == ledger.charged_bytes == 0


GREEDILY: dict[str, Any] = {"ignore_eos": True, "sampling": SamplingParams(temperature=0.0)}
ROWS = StoredForm(rows=True)


def stored_form(model: Any) -> StoredForm:
    return Probe(model, tiny_models.VOCAB).find_stored_form()


def test_rows_and_recurrent_state_pass_where_they_have_whole_groups() -> None:
    assert stored_form(tiny_models.build_wide("llama")) == ROWS
    assert stored_form(tiny_models.build_wide("qwen3_5")) == StoredForm(rows=True, recurrent=True)
    assert stored_form(tiny_models.build_wide("mamba2")) == StoredForm(recurrent=True)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_without_whole_groups_is_refused_in_words(name: str) -> None:
    form = stored_form(tiny_models.build(name))
    assert form.is_exact and "as it is, because it has no groups of 32 numbers" in form.told


def test_a_model_that_goes_on_otherwise_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Rounded.exact
    monkeypatch.setattr(Rounded, "exact", lambda self: exact(Rounded(self.codes // 64 * 64, self.peaks)))
    form = stored_form(tiny_models.build_wide("llama"))
    assert form.is_exact and "what follows differs by" in form.told


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, tiny_models.VOCAB, num_tokens)]


def cold(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    caches, fed, answer = make_prompt_cache(model), list(prompt), list[int]()
    while len(answer) < num_tokens:
        fed = [int(mx.argmax(model(mx.array(fed)[None], cache=caches)[0, -1]))]
        answer += fed
    return answer


@pytest.fixture
def rounded_tokens(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many tokens' rows were rounded; the model has two layers of keys and values."""
    counted, of = [0.0], Rounded.of

    def count(array: mx.array) -> Rounded:
        counted[0] += array.shape[0] * array.shape[2] / 4
        return of(array)

    monkeypatch.setattr(Rounded, "of", count)
    return counted


def test_a_stream_goes_on_while_a_long_conversation_is_rounded(rounded_tokens: list[float]) -> None:
    model = tiny_models.build_wide("llama")
    runner = Runner(model, vocab_size=tiny_models.VOCAB, drafts=False, max_probe_seconds=0.0)
    harness = Harness(runner=runner, num_slots=2, chunk_tokens=256, form=ROWS)
    layout = harness.prefix_cache.layout
    layout.calibrate(_caches_of(model))
    long, beside, other = prompt_of(1, 3000), prompt_of(2, 20), prompt_of(3, 1200)
    harness.run(harness.submit(long, max_tokens=1, **GREEDILY))
    stream = harness.submit(beside, max_tokens=60, **GREEDILY)
    harness.step(2)
    harness.prefix_cache.ledger.budget_bytes = int(2600 * layout.bytes_per_token)
    waiting, most = harness.submit(other, max_tokens=4, **GREEDILY), 0.0
    for _ in range(4):
        before, told = rounded_tokens[0], len(stream.tokens)
        harness.step()
        most = max(most, rounded_tokens[0] - before)
        assert len(stream.tokens) > told
    assert 0 < most <= reclaim.MAX_ROUNDED_TOKENS + 2 * ROUNDED_TOKENS and rounded_tokens[0] > 2000
    harness.run()
    assert stream.tokens == cold(model, beside, 60) and waiting.tokens == cold(model, other, 4)
    assert harness.prefix_cache.memory.num_evictions == 0
    assert harness.prefix_cache.peek(Lookup(np.array(long, np.int32))) == 2999
    harness.prefix_cache.ledger.budget_bytes *= 2
    again = harness.submit([*long, 5], max_tokens=1, **GREEDILY)
    harness.run(again)
    assert again.started.rounded_tokens == again.started.hit_tokens == 3000


def _caches_of(model: Any) -> Any:
    caches = make_prompt_cache(model)
    model(mx.ones((1, 8), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches
