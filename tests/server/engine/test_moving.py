"""Conversations move to another engine: as much is cached there as here, and answers equal those from cold."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache import moving
from cache.disk.bundle import BundleError
from cache.disk.tier import DiskTier
from cache.layers.layout import StoredForm
from cache.moving import Departure, Intake, MovingText, NoRoom
from cache.types import TokenArray
from models.inference.runner import Runner
from server.engine.moving import ALL, calling, into, take_in
from tests.server.engine.test_real_models import ask, runner_for, text_of
from tests.support import tiny_models
from tests.support.bundles import FINGERPRINT, arrive, bundle_of, bundle_of_text, intake_at, packed, reader_of
from tests.support.disk_driver import open_tier
from tests.support.engine_driver import Collected, Harness

NAMES = ("llama", "llama_swa", "qwen3_5", "mamba2", "gpt_oss")
"""Full attention, sliding window, hybrid, recurrent, window and full attention."""
PLACES = ("memory", "disk")
NUM_TOKENS = 300
DEADLINE_SECONDS = 60.0

pytestmark = pytest.mark.usefixtures("short_prompts")


def make(name: str, tmp_path: Path, tiers: list[DiskTier], place: str, folder: str) -> Harness:
    if place == "disk":
        tiers.append(open_tier(tmp_path / folder))
    return Harness(runner=runner_for(name), num_slots=2, chunk_tokens=64, disk=tiers[-1] if place == "disk" else None)


def tokens_of(prompt: list[int], answer: Collected) -> TokenArray:
    return np.array([*prompt, *answer.tokens], np.int32)


def turn(harness: Harness, prompt: list[int], session: str, **fields: object) -> Collected:
    sink = ask(harness, prompt, session_id=session, user_start=len(prompt) - 5, **fields)
    harness.run(sink)
    return sink


def next_prompt(prompt: list[int], answer: Collected) -> list[int]:
    return [*prompt, *answer.tokens, 7, 8, 9]


@pytest.mark.usual("llama-memory-memory", "llama_swa-disk-memory", "qwen3_5-memory-disk", "mamba2-disk-disk")
@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on_elsewhere(
    name: str, place: str, to: str, tmp_path: Path, tiers: list[DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PIECE_BYTES", 1)  # pieces of 256 tokens
    here = make(name, tmp_path, tiers, place, "here")
    prompts = {session: text_of(seed, NUM_TOKENS) for seed, session in enumerate(("mine", "other"))}
    answers = {session: turn(here, prompt, session) for session, prompt in prompts.items()}
    if place == "disk":
        here.prefix_cache.end(120)
        tiers[-1:] = [open_tier(tmp_path / "here")]
        here = Harness(runner=here.runner, num_slots=2, chunk_tokens=64, disk=tiers[-1])
    tokens = tokens_of(prompts["mine"], answers["mine"])
    data = bundle_of_text(here.prefix_cache, MovingText("", "mine", tokens))
    here.prefix_cache.check()

    there = make(name, tmp_path, tiers, to, "there")
    turn(there, text_of(9, 200), "resident")
    intake = arrive(there.prefix_cache, data)
    there.prefix_cache.check()
    assert len(intake.kept) == 1 and intake.num_tokens >= 0.95 * len(tokens)
    follow = next_prompt(prompts["mine"], answers["mine"])
    got = turn(there, follow, "mine")
    assert got.started.hit_tokens >= 0.95 * len(follow)
    assert got.tokens == turn(make(name, tmp_path, tiers, "memory", ""), follow, "cold").tokens
    other = next_prompt(prompts["other"], answers["other"])
    assert turn(there, other, "other").started.hit_tokens == 0, "only what was asked for moves"


def in_memory(name: str, budget_bytes: int = 1 << 30) -> Harness:
    return Harness(runner=runner_for(name), num_slots=2, chunk_tokens=64, budget_bytes=budget_bytes)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_what_runs_leaves_too_and_what_came_since_follows(name: str) -> None:
    here, there = in_memory(name), in_memory(name)
    prompt = text_of(1, NUM_TOKENS)
    first = turn(here, prompt, "mine")
    follow = next_prompt(prompt, first)
    running = ask(here, follow, session_id="mine", user_start=len(follow) - 3)
    here.step(2)
    assert not running.is_over

    def call(function: Callable[..., Any], *given: object) -> Any:
        here.step()
        return function(here.prefix_cache, *given)

    departure = Departure(call)
    arrive(there.prefix_cache, packed(departure, moving.conversations(here.prefix_cache, lambda name: True)))
    here.run(running)
    here.worker.close_answered("")
    rest = packed(departure, moving.conversations(here.prefix_cache, lambda name: True))
    intake = arrive(there.prefix_cache, rest)
    assert 0 < intake.num_tokens < 30, "only what came since"
    last = next_prompt(follow, running)
    got = turn(there, last, "mine")
    assert got.started.hit_tokens >= 0.95 * len(last)
    assert got.tokens == turn(in_memory(name), last, "cold").tokens


def test_the_end_of_an_idle_conversation_leaves_within_the_budget() -> None:
    here, there = in_memory("qwen3_5"), in_memory("qwen3_5")
    prompt = text_of(1, NUM_TOKENS)
    follow = next_prompt(prompt, turn(here, prompt, "mine"))
    here.worker.close_answered("")
    ledger = here.prefix_cache.ledger
    ledger.budget_bytes = ledger.charged_bytes
    arrive(there.prefix_cache, bundle_of(here.prefix_cache))
    assert ledger.excess_bytes() <= 0
    here.prefix_cache.check()
    assert turn(there, follow, "mine").started.hit_tokens >= 0.95 * len(follow)


def test_the_state_of_requests_that_are_not_stored_stays(tmp_path: Path, tiers: list[DiskTier]) -> None:
    here, there = in_memory("llama"), in_memory("llama")
    public, secret = text_of(1, 100), text_of(2, 200)
    turn(here, public, "mine")
    turn(here, [*public, *secret], "mine", is_volatile=True)
    arrive(there.prefix_cache, bundle_of(here.prefix_cache))
    assert turn(there, [*public, *secret], "mine").started.hit_tokens <= 110


def test_only_wanted_namespaces_leave_and_another_may_be_entered() -> None:
    here, there = in_memory("llama"), in_memory("llama")
    prompts = {name: text_of(seed, 100) for seed, name in enumerate(("a", "b"))}
    for name, prompt in prompts.items():
        turn(here, prompt, "mine", namespace=name)
    data = bundle_of(here.prefix_cache, lambda name: name == "a")
    arrive(there.prefix_cache, data, namespace_of=lambda name: "c")
    assert turn(there, [*prompts["a"], 5], "mine", namespace="c").started.hit_tokens == 100
    assert turn(there, [*prompts["a"], 5], "mine", namespace="a").started.hit_tokens == 0
    assert turn(there, [*prompts["b"], 5], "mine", namespace="c").started.hit_tokens == 0


@pytest.mark.parametrize("to", PLACES)
def test_flipped_bits_cost_what_lies_after_them(to: str, tmp_path: Path, tiers: list[DiskTier]) -> None:
    here, there = in_memory("llama"), make("llama", tmp_path, tiers, to, "there")
    prompts = [text_of(seed, 200) for seed in range(3)]
    for prompt in prompts:
        turn(here, prompt, "s")
    data = bytearray(bundle_of(here.prefix_cache))
    data[len(data) // 2] ^= 1
    intake = intake_at(there.prefix_cache)
    with pytest.raises(BundleError, match="damaged"):
        intake.take(reader_of(bytes(data)), FINGERPRINT)
    there.prefix_cache.check()
    assert len(intake.kept) == 1
    hits = [turn(there, [*prompt, 5], "s").started.hit_tokens for prompt in reversed(prompts)]
    assert hits[0] >= 198 and hits[2] < 3, "the last used is the first in the bundle"


def test_state_of_other_weights_is_refused() -> None:
    here = in_memory("llama")
    turn(here, text_of(1, 100), "s")
    data = bundle_of(here.prefix_cache, fingerprint="other")
    with pytest.raises(BundleError, match="of other weights than these of m"):
        arrive(here.prefix_cache, data)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_memory_that_is_full_takes_no_more(name: str) -> None:
    here = in_memory(name)
    prompts = [text_of(seed, NUM_TOKENS) for seed in range(4)]
    for prompt in prompts:
        turn(here, prompt, "s")
    data = bundle_of(here.prefix_cache)
    there = in_memory(name, budget_bytes=len(data) // 3)
    intake = intake_at(there.prefix_cache)
    with pytest.raises(NoRoom):
        intake.take(reader_of(data), FINGERPRINT)
    there.prefix_cache.check()
    assert there.prefix_cache.ledger.excess_bytes() <= 0
    assert intake.num_tokens >= NUM_TOKENS - 5 and all(moving.holds(there.prefix_cache, one) for one in intake.kept)


def test_a_disk_that_takes_no_more_says_so(tmp_path: Path, tiers: list[DiskTier]) -> None:
    here = in_memory("llama")
    turn(here, text_of(1, NUM_TOKENS), "s")
    tiers.append(open_tier(tmp_path, write_budget_bytes_per_day=1000))
    there = Harness(runner=here.runner, disk=tiers[-1])
    with pytest.raises(NoRoom):
        arrive(there.prefix_cache, bundle_of(here.prefix_cache))
    assert tiers[-1].tree.num_bytes == 0


def test_a_bundle_that_came_before_costs_nothing(tmp_path: Path, tiers: list[DiskTier]) -> None:
    here = in_memory("qwen3_5")
    turn(here, text_of(1, NUM_TOKENS), "s")
    data = bundle_of(here.prefix_cache)
    for place in PLACES:
        there = make("qwen3_5", tmp_path, tiers, place, "there")
        arrive(there.prefix_cache, data)
        before = there.prefix_cache.stats()
        again: Intake = arrive(there.prefix_cache, data)
        after = there.prefix_cache.stats()
        assert len(again.kept) == 1
        assert (before.disk_bytes, before.stored_bytes) == (after.disk_bytes, after.stored_bytes)


@functools.cache
def wide_runner(name: str) -> Runner:
    """One for all tests: a new one would probe its model again."""
    return Runner(tiny_models.build_wide(name), vocab_size=tiny_models.VOCAB, max_probe_seconds=float("inf"))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("to", PLACES)
def test_state_in_8_bits_moves_in_8_bits(name: str, to: str, tmp_path: Path, tiers: list[DiskTier]) -> None:
    """What is live is exact here; there, on disk, the rows of one conversation are joined, and have one form."""
    form = StoredForm(rows=True, recurrent=name == "qwen3_5")
    runner = wide_runner(name)
    here = Harness(runner=runner, num_slots=1, chunk_tokens=64, form=form)
    prompt = text_of(1, NUM_TOKENS)
    answer = turn(here, prompt, "mine")
    turn(here, text_of(2, NUM_TOKENS), "other")
    here.prefix_cache.pager.page_out(here.prefix_cache.slots[0], 0)
    follow = next_prompt(prompt, answer)
    again = turn(here, follow, "mine")
    data = bundle_of(here.prefix_cache)
    assert all(b"ounded" in own for _, own in reader_of(data).pieces())
    if to == "disk":
        tiers.append(open_tier(tmp_path / "there"))
    disk = tiers[-1] if to == "disk" else None
    there = Harness(runner=runner, num_slots=1, chunk_tokens=64, form=form, disk=disk)
    arrive(there.prefix_cache, data)
    there.prefix_cache.check()
    last = next_prompt(follow, again)
    got = turn(there, last, "mine")
    assert got.started.hit_tokens >= 0.95 * len(last)


def test_who_sends_slowly_holds_no_thread_of_asyncio() -> None:
    """There are few, which a server needs to end."""

    async def take() -> None:
        begun = asyncio.Event()

        async def stalled() -> AsyncIterator[bytes]:
            begun.set()
            await asyncio.Event().wait()
            yield b""

        async def execute(command: object) -> str:
            return "fingerprint"

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        engine: Any = SimpleNamespace(execute=execute, execute_later=lambda *given: None)
        intake = Intake(calling(engine), into(ALL))
        taking = asyncio.ensure_future(take_in(engine, intake, stalled(), 1 << 20))
        await asyncio.wait_for(begun.wait(), DEADLINE_SECONDS)
        assert await asyncio.wait_for(asyncio.to_thread(int), DEADLINE_SECONDS) == 0
        taking.cancel()

    asyncio.run(take())
