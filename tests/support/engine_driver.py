"""Drives the engine's worker without threads: a manual clock, collected events, steps on demand."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from cache.disk.tier import DiskTier
from cache.layers.layout import EXACT, Layout, StoredForm
from cache.prefix_cache import PrefixCache
from cache.snapshots import RestorePoint, RestorePointKind
from models.output.call_formats import GLM, CallFormat
from models.output.call_reader import DeclaredTools
from server.engine.request import Delta, Event, Failed, Finished, GenerationRequest, Started
from server.engine.sequence import EngineState
from server.engine.worker import Worker
from tests.support.fake_embedder import FakeEmbedder
from tests.support.fake_runner import EOS, FakeRunner

EXPECTED_TOKENS = 16
"""Of output that live buffers are sized for."""


class NumberDecoder:
    """Decodes every token to its number and a space, so that texts can be read back into tokens."""

    def push(self, token_id: int) -> str:
        """Returns the token's text."""
        return f"{token_id} "

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


@dataclass
class Collected:
    """The events of one request, and what they must look like."""

    events: list[Event] = field(default_factory=list)
    is_behind: bool = False
    """Set by a test whose reader is slow."""

    def post(self, events: list[Event]) -> None:
        """Takes events; none may come after the last one."""
        assert not self.is_over, "events after the last one"
        self.events.extend(events)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    @property
    def last(self) -> Any:
        return self.events[-1]

    @property
    def started(self) -> Started:
        return next(event for event in self.events if isinstance(event, Started))

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def tokens(self) -> list[int]:
        return [int(word) for word in self.text.split()]


def make_worker(
    runner: Any,
    *,
    num_slots: int = 2,
    budget_bytes: int = 1 << 30,
    chunk_tokens: int = 16,
    disk: DiskTier | None = None,
    clock: Callable[[], float] = time.monotonic,
    embedder: Any = None,
    speculation: Any = None,
    form: StoredForm = EXACT,
) -> Worker:
    """Returns a worker over a runner, with a cache of its own."""
    return Worker(
        runner,
        EngineState(
            PrefixCache(
                runner.make_caches,
                num_slots=num_slots,
                budget_bytes=budget_bytes,
                layout=Layout(runner.make_caches(), chunk_tokens, form),
                disk=disk,
            )
        ),
        NumberDecoder,
        eos_token_ids=frozenset({EOS}),
        chunk_tokens=chunk_tokens,
        expected_tokens=EXPECTED_TOKENS,
        clock=clock,
        embedder=cast(Any, embedder or FakeEmbedder()),
        speculation=speculation,
    )


class Harness:
    """A worker over the fake model, with everything that happened at hand."""

    def __init__(
        self,
        layout: str = "T",
        *,
        num_slots: int = 4,
        budget_bytes: int = 1 << 30,
        chunk_tokens: int = 16,
        runner: Any = None,
        disk: DiskTier | None = None,
        speculation: Any = None,
        form: StoredForm = EXACT,
    ) -> None:
        self.now = 0.0
        self.embedder = FakeEmbedder()
        self.runner = runner or FakeRunner(layout)
        self.worker = make_worker(
            self.runner,
            num_slots=num_slots,
            budget_bytes=budget_bytes,
            chunk_tokens=chunk_tokens,
            disk=disk,
            clock=lambda: self.now,
            embedder=self.embedder,
            speculation=speculation,
            form=form,
        )
        self.prefix_cache = self.worker.prefix_cache
        self._ids = (f"r{number}" for number in itertools.count())

    def submit(
        self, prompt: Sequence[int], *, max_tokens: int = 8, user_start: int | None = None, **fields: Any
    ) -> Collected:
        """Submits a request; `request_id` may be given to cancel it later."""
        points = [] if user_start is None else [RestorePoint(user_start, RestorePointKind.USER_START)]
        request = GenerationRequest(
            request_id=fields.pop("request_id", None) or next(self._ids),
            tokens=np.array(prompt, np.int32),
            max_tokens=max_tokens,
            restore_points=fields.pop("restore_points", tuple(points)),
            **fields,
        )
        sink = Collected()
        self.worker.submit(request.seeded, sink)
        return sink

    def step(self, count: int = 1) -> None:
        """Runs steps, checking the cache after each."""
        for _ in range(count):
            self.now += 0.01
            self.worker.step()
            self.prefix_cache.check()

    def run(self, *sinks: Collected, limit: int = 2000) -> None:
        """Steps until everything, or the given requests, are over."""
        for _ in range(limit):
            if all(sink.is_over for sink in sinks) if sinks else not self.worker.has_work:
                return
            self.step()
        raise AssertionError("the engine made no progress")


def single_call(tokens: Sequence[int], start: int, stop: int) -> tuple[CallFormat, DeclaredTools]:
    """A format in which `tokens`, whose texts are numbers, call a tool between two places."""
    name = " ".join(map(str, tokens[start + 1 : stop]))
    return replace(GLM, open=f"{tokens[start]} ", close=f"{tokens[stop]} "), [{"function": {"name": name}}]
