"""Runs arrivals through the real prefix cache, one request after another, and writes down what each cost.

Requests do not overlap: begin, prefill in the engine's chunks, decode, close. What a real server would add is
only which of two requests comes first. The time that passes between them is a reading of the schedule, never of
a clock; what the cache's own decisions cost is measured in processor time, which a busy machine does not change.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cache.budget import BudgetExceeded
from cache.lease import Lease
from cache.memory_tier import ROUNDED_TOKENS
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from cache.types import TokenArray
from scripts.replay.conversations import BlockNumbers, Script, Turn
from scripts.replay.disk import SizedStore, sized_tier
from scripts.replay.layout import SizedLayout
from scripts.replay.schedule import Arrival

CHUNK_TOKENS = 512
EXPECTED_TOKENS = 512
QUIET_SECONDS = 30.0
"""Silence after which the engine writes to disk what is idle."""
WRITE_SECONDS = 60.0
GENERATION_HEADER_TOKENS = 4
"""Tokens at the end of a prompt that ask for the reply, and that the next prompt may not hold."""
ONE_SHOT_OUTPUT_TOKENS = 200


@dataclass(frozen=True)
class Request:
    """One arrival in tokens."""

    name: str
    """The conversation and the number of the request in it."""
    session_id: str | None
    prompt: TokenArray
    output: TokenArray
    points: tuple[RestorePoint, ...]
    is_extension: bool
    seconds: float
    """When it arrives."""


@dataclass
class Sample:
    """What one request came to."""

    request_name: str
    is_one_shot: bool
    is_extension: bool
    num_prompt: int
    match_tokens: int = 0
    hit_tokens: int = 0
    disk_bytes: int = 0
    """Bytes read from disk to restore the hit."""
    policy_seconds: float = 0.0
    """Spent in `begin` and `close`: match, choice of a slot, paging, eviction, handing over what is to be written."""
    record_seconds: float = 0.0
    """Spent in `advance` and `append`: recording tokens and capturing restore points."""


@dataclass
class Outcome:
    """What a contestant did with all requests."""

    samples: list[Sample]
    num_snapshots: int
    """Held at the end."""
    num_captured: int
    num_evictions: int
    live_bytes: int
    memory_bytes: int
    disk_bytes: int = 0
    disk_written_bytes: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class Contestant(Protocol):
    """Something that keeps state of prompts and says how much of the next one it can restore."""

    def run(self, request: Request) -> Sample:
        """Takes one request from its arrival to its end."""

    def outcome(self, samples: list[Sample]) -> Outcome:
        """Returns what it holds now, with the samples of all requests."""


def requests_of(arrivals: Iterable[Arrival], numbers: BlockNumbers) -> Iterator[Request]:
    """Yields each arrival as tokens; only one at a time is in memory."""
    users: dict[str, int] = {}
    for number, arrival in enumerate(arrivals):
        if arrival.script is None:
            yield _one_shot(arrival, number, numbers)
        else:
            yield turn_request(arrival, arrival.script, users)


def _one_shot(arrival: Arrival, number: int, numbers: BlockNumbers) -> Request:
    prompt = numbers.unique_tokens(arrival.one_shot_tokens)
    points = (_prompt_end(len(prompt)),)
    output = numbers.unique_tokens(ONE_SHOT_OUTPUT_TOKENS)
    return Request(f"one-shot {number}", None, prompt, output, points, False, arrival.seconds)


def turn_request(arrival: Arrival, script: Script, users: dict[str, int]) -> Request:
    """Returns a turn in tokens; `users` is where the last user message of each conversation began."""
    name, index = script.conversation.name, arrival.index
    users[name] = _user_start(script, index, users.get(name, 0))
    return Request(
        f"{name} {index}",
        name,
        script.prompt(index),
        script.output(index),
        _restore_points(script, index, users[name]),
        script.is_extension(index),
        arrival.seconds,
    )


def _user_start(script: Script, index: int, before: int) -> int:
    """Returns where the last user message starts, as far as the record tells; 0 where it does not.

    After a tool call the last user message is still the one of the request before. After the end of a turn, and
    where nothing is said, the new message comes after the reply, if the prompt is long enough for both.
    """
    if index == 0:
        return 0
    turns: Any = script.conversation.turns
    last: Turn = turns[index - 1]
    if not script.is_extension(index):
        return script.common_tokens(index)
    if last.stop == "tool_use":
        return before
    return last.num_prompt + (last.num_output if last.stop and script.is_replayed(index - 1) else 0)


def _restore_points(script: Script, index: int, user_start: int) -> tuple[RestorePoint, ...]:
    num_prompt = script.conversation.turns[index].num_prompt
    points = [
        RestorePoint(script.conversation.head_tokens, RestorePointKind.SYSTEM_END),
        RestorePoint(user_start, RestorePointKind.USER_START),
        _prompt_end(num_prompt),
    ]
    return tuple(point for point in points if 0 < point.offset < num_prompt)


def _prompt_end(num_prompt: int) -> RestorePoint:
    return RestorePoint(max(num_prompt - GENERATION_HEADER_TOKENS, 0), RestorePointKind.PROMPT_END)


class CacheDriver:
    """The real prefix cache over state that has sizes only."""

    def __init__(
        self,
        *,
        num_slots: int,
        memory_bytes: float,
        layout: SizedLayout,
        disk_bytes: int = 0,
        is_checked: bool = False,
    ) -> None:
        """`memory_bytes` may be infinite; `is_checked` asserts the cache's invariants after each request."""
        self.layout = layout
        budget = 1 << 60 if math.isinf(memory_bytes) else int(memory_bytes)
        self._store = SizedStore(layout)
        self._tier = sized_tier(self._store, disk_bytes) if disk_bytes else None
        self.prefix_cache = PrefixCache(
            self.layout.make_caches, num_slots=num_slots, budget_bytes=budget, layout=self.layout, disk=self._tier
        )
        self.prefix_cache.layout.calibrate(self.layout.make_caches())
        self.now = 0.0
        self._is_checked = is_checked

    def run(self, request: Request) -> Sample:
        """Takes one request from its arrival to its end. One that can never fit is evaluated without the cache."""
        if request.seconds - self.now >= QUIET_SECONDS:
            self._rest()
        self.now, num_read = request.seconds, self._store.read_bytes_total
        sample = Sample(
            request.name, request.session_id is None, request.is_extension, num_prompt=len(request.prompt)
        )
        started = time.thread_time()
        try:
            lease = self.prefix_cache.begin(
                CacheRequest(
                    Lookup(request.prompt),
                    session_id=request.session_id,
                    restore_points=request.points,
                    expected_tokens=EXPECTED_TOKENS,
                )
            )
        except BudgetExceeded:
            return sample
        begun = time.thread_time()
        assert lease is not None, "nothing else runs, yet there is no slot"
        sample.match_tokens, sample.hit_tokens = lease.match_tokens, lease.hit_tokens
        self._evaluate(lease, request)
        evaluated = time.thread_time()
        lease.close()
        sample.policy_seconds = begun - started + time.thread_time() - evaluated
        sample.record_seconds = evaluated - begun
        sample.disk_bytes = self._store.read_bytes_total - num_read
        if self._tier is not None:
            self._tier.queue.wait(WRITE_SECONDS)
        if self._is_checked:
            self.prefix_cache.check()
        return sample

    def outcome(self, samples: list[Sample]) -> Outcome:
        """Returns what the cache holds now."""
        stats = self.prefix_cache.stats()
        snapshots = [node for node in self.prefix_cache.memory.nodes() if node.snapshot is not None]
        return Outcome(
            samples,
            num_snapshots=len(snapshots),
            num_captured=self.layout.num_taken,
            num_evictions=stats.num_evictions,
            live_bytes=stats.live_bytes,
            memory_bytes=stats.stored_bytes,
            disk_bytes=stats.disk_bytes,
            disk_written_bytes=self._store.written_bytes_total,
        )

    def _rest(self) -> None:
        """Does what the engine's worker does when nothing comes for a while."""
        for _ in self.prefix_cache.save():
            pass
        if self._tier is not None:
            self._tier.flush(WRITE_SECONDS)

    def _evaluate(self, lease: Lease, request: Request) -> None:
        """Does what the engine's worker does between begin and close."""
        limit = len(request.prompt) - 1
        while lease.offset < limit:
            stop = lease.chunk_stop(CHUNK_TOKENS, limit)
            lease.caches[0].num_tokens = stop
            lease.advance(request.prompt[lease.offset : stop])
            self.prefix_cache.memory.round_stored(ROUNDED_TOKENS)
        decoded = np.concatenate([request.prompt[-1:], request.output[:-1]])
        for token in decoded.tolist():
            lease.caches[0].num_tokens += 1
            lease.append(token)
            self.prefix_cache.memory.round_stored(ROUNDED_TOKENS)
