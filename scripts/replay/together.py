"""Replays agents at once through the real engine with little memory: what runs takes it from what is stored.

Sessions are coding agents that now and then have sub-agents work for them; all begin with one system prompt and the
same tools. Scheduler, admission, reservations, preemption, slots, trie and eviction are the server's own; layers'
state and the device are objects that have a size and a speed, and time is arithmetic. The peer is an LRU of the same
bytes that sees the requests in the order in which they began, and holds nothing for what runs, or what that took.

    python -m scripts.replay.together --memory-gb 2 4 8 --sessions 4 8 16
"""

import argparse
import heapq
import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from cache.prefix_cache import PrefixCache
from cache.types import LayerCache, TokenArray
from models.inference.abilities import Abilities
from models.inference.embedding import Embedder
from models.inference.probe import Form
from models.output.pieces import TokenLogprob
from scripts.bench.common import Report, Target, write_json
from scripts.replay.conversations import BLOCK_TOKENS, MAX_COMMON_BLOCKS, BlockNumbers, Script
from scripts.replay.drive import CHUNK_TOKENS, EXPECTED_TOKENS, Request, turn_request
from scripts.replay.generator import AgentShape, Range, write
from scripts.replay.layout import SizedLayout
from scripts.replay.report import prefill_seconds
from scripts.replay.rivals import Sizes, TreeRival
from scripts.replay.schedule import Arrival
from server.engine.request import Event, Failed, Finished, GenerationRequest, Started
from server.engine.sequence import EngineState
from server.engine.worker import Worker


@dataclass(frozen=True)
class Model:
    """What a model's state weighs in half precision, and how long prompts are that its users can afford."""

    bytes_per_token: int
    snapshot_bytes: int
    head_tokens: int

    def agent(self, start: Range, requests: Range, max_prompt: float) -> AgentShape:
        """Returns a kind of agent; lengths are given in heads."""
        low, middle, high = (self.head_tokens * part for part in start)
        return AgentShape(self.head_tokens, (low, middle, high), requests, int(self.head_tokens * max_prompt))

    @property
    def main(self) -> AgentShape:
        """An agent that people talk to."""
        return self.agent((1.03, 1.13, 1.4), (6, 14, 30), 3.1)

    @property
    def sub_agent(self) -> AgentShape:
        """An agent that works for a main agent."""
        return self.agent((1.02, 1.06, 1.2), (2, 5, 10), 1.9)


MODELS = {
    "qwen3.5-4b": Model(32_768, 52_800_000, MAX_COMMON_BLOCKS * BLOCK_TOKENS),
    "qwen3-4b": Model(147_456, 0, MAX_COMMON_BLOCKS * BLOCK_TOKENS // 4),
}
"""8 layers of 4 heads of 256 and 24 recurrent ones; 36 layers of 8 heads of 128."""
DELEGATING_SHARE = 1 / 6
"""Requests of an agent after which sub-agents work, one to three of them at once."""
START_SECONDS = 60.0
STEP_SECONDS = 0.03
"""Of a decode step of all rows."""
WANTED_AT_8_GB = 3.0
"""Points above LRU."""


@dataclass(eq=False)
class Agent:
    """A conversation, and who works for it when."""

    script: Script
    parent: "Agent | None" = None
    helpers: dict[int, list["Agent"]] = field(default_factory=dict)
    """By the request after which they begin."""
    index: int = 0
    """Of the next request."""
    num_working: int = 0

    @property
    def gap_seconds(self) -> float:
        """From the end of the last request to the next."""
        turns = self.script.conversation.turns
        return turns[self.index].seconds - turns[self.index - 1].seconds if self.index else 0.0


def make_agents(num_sessions: int, model: Model, seed: int) -> list[Agent]:
    """Returns the main agents; the same ones for the same arguments."""
    numbers, agents = BlockNumbers(), []
    for number in range(num_sessions):
        rng = np.random.default_rng([seed, number])
        main = Agent(Script(write(rng, f"agent {number}", model.main), numbers))
        for index in range(len(main.script.conversation.turns) - 1):
            if rng.random() < DELEGATING_SHARE:
                names = [f"agent {number}, {index}.{part}" for part in range(rng.integers(1, 4))]
                scripts = [Script(write(rng, name, model.sub_agent), numbers) for name in names]
                main.helpers[index] = [Agent(script, main) for script in scripts]
        agents.append(main)
    return agents


# ------------------------------------------------------------------------------------------------- the device


@dataclass(eq=False)
class SizedRow:
    """A decoding sequence, whose tokens are known."""

    caches: list[LayerCache]
    output: TokenArray
    position: int
    known: list[int]
    num_fed, draft = 1, ()


@dataclass(frozen=True)
class SizedStep:
    """A token of each row."""

    sampled: list[int]
    is_long, has_sampled = False, True

    def tokens(self) -> list[list[int]]:
        """Returns them."""
        return [[token] for token in self.sampled]

    def logprob(self, index: int, token: int, place: int = 0) -> None:
        """Nobody asks."""


class SizedRunner:
    """A runner over state that has sizes only; counts what it evaluates and the seconds that takes."""

    overlaps, padding_bytes, encoder, is_divided = False, 0, None, False
    abilities = Abilities(Form.HEADS, "together", "off")

    def __init__(self, head_tokens: float | None) -> None:
        self.head_tokens = head_tokens
        self.outputs: dict[int, TokenArray] = {}
        """By the identity of a prompt's array."""
        self.seconds = 0.0
        self.num_prefilled = 0

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int = 0, *more: Any) -> None:
        """Evaluates tokens of one sequence."""
        start = caches[0].num_tokens
        caches[0].num_tokens += len(tokens)
        self.seconds += prefill_seconds(start, caches[0].num_tokens)
        self.num_prefilled += len(tokens)

    def score(self, *arguments: Any) -> list[TokenLogprob]:
        """Has no logits to tell of."""
        raise NotImplementedError

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: Any,
        next_token: int,
        *,
        prompt: TokenArray,
        generated: Any,
        **others: Any,
    ) -> SizedRow:
        """Returns a row over caches."""
        return SizedRow(caches, self.outputs[id(prompt)], len(generated), [next_token])

    def force(self, *arguments: Any, **options: Any) -> None:
        """Nothing is ever forced here."""
        raise AssertionError("no request forces a token")

    def prepare(self, rows: Sequence[SizedRow], *arguments: Any, **options: Any) -> SizedStep:
        """Evaluates a token for each row."""
        self.seconds += STEP_SECONDS
        return SizedStep([self._next(row) for row in rows])

    def _next(self, row: SizedRow) -> int:
        row.caches[0].num_tokens += 1
        row.position += 1
        return int(row.output[row.position - 1]) if row.position <= len(row.output) else 0

    def sample(self, *arguments: Any) -> None:
        """Nothing is ever bound here."""
        raise AssertionError("no request is bound to a grammar")

    def draft(self, *arguments: Any) -> list[list[int]]:
        """There is no MTP module."""
        raise AssertionError("nothing is drafted")

    def settle(self, *arguments: Any) -> list[int]:
        """No step takes several tokens."""
        raise AssertionError("a step of one token per row is settled by itself")

    def nothing(self, *arguments: Any) -> None:
        """Steps are done when they are prepared, and rows share nothing."""

    start = drain = detach = close = separate = separate_all = drop = nothing

    def own_bytes(self, caches: Any) -> int:
        """Nothing is shared."""
        return 0

    def take_change(self) -> bool:
        """Nothing is shared."""
        return False


class Silent:
    """Decodes every token to nothing."""

    def push(self, token_id: int) -> str:
        """Returns no text."""
        return ""

    def finish(self) -> str:
        """Returns no text."""
        return ""


@dataclass
class Heard:
    """What a client was told of a request."""

    is_behind = False
    hit_tokens: int | None = None
    """None until it has begun."""
    is_over: bool = False
    is_counted: bool = False

    def post(self, events: list[Event]) -> None:
        """Takes a request's events."""
        for event in events:
            if isinstance(event, Started):
                self.hit_tokens = event.hit_tokens
            self.is_over |= isinstance(event, Finished | Failed)


# -------------------------------------------------------------------------------------------------- the replay


@dataclass
class Outcome:
    """What a replay came to. `order` holds all requests as they began."""

    order: list[Request] = field(default_factory=list)
    running_bytes: list[float] = field(default_factory=list)
    """When each began: what running rows held or reserved beyond their state, counted once."""
    num_prompt: int = 0
    num_hit: int = 0
    num_prefilled: int = 0
    num_preempted: int = 0
    seconds: float = 0.0

    @property
    def reuse(self) -> float:
        """Percentage of prompt tokens that were restored."""
        return 100 * self.num_hit / self.num_prompt


class Replay:
    """Agents beside one another on one worker."""

    def __init__(
        self, agents: Sequence[Agent], sizes: Sizes, *, num_slots: int, heads: bool, is_checked: bool = False
    ) -> None:
        self._sizes, layout = sizes, SizedLayout(sizes.bytes_per_token, sizes.snapshot_bytes)
        cache = PrefixCache(
            layout.make_caches, num_slots=num_slots, budget_bytes=int(sizes.memory_bytes), layout=layout
        )
        cache.layout.calibrate(layout.make_caches())
        self._runner, self._now = SizedRunner(math.inf if heads else None), 0.0
        self._worker = Worker(
            cast(Any, self._runner),
            EngineState(cache),
            Silent,
            eos_token_ids=frozenset(),
            chunk_tokens=CHUNK_TOKENS,
            expected_tokens=EXPECTED_TOKENS,
            clock=lambda: self._now,
            embedder=Embedder(None),
        )
        self._users: dict[str, int] = {}
        self._numbers = itertools.count()
        self._arrivals: list[tuple[float, int, Agent]] = []
        for number, agent in enumerate(agents):
            self._expect(agent, START_SECONDS * number / len(agents))
        self._running: dict[int, tuple[Agent, Request, Heard]] = {}
        self._outcome, self._is_checked = Outcome(), is_checked

    def run(self) -> Outcome:
        """Runs all conversations to their ends."""
        while self._arrivals or self._running:
            while self._arrivals and (self._arrivals[0][0] <= self._now or not self._running):
                self._submit()
            self._worker.step()
            self._now, self._runner.seconds = self._now + max(self._runner.seconds, STEP_SECONDS), 0.0
            self._listen()
        self._outcome.num_prefilled = self._runner.num_prefilled
        self._outcome.num_preempted, self._outcome.seconds = self._worker.stats().num_preempted, self._now
        return self._outcome

    def _expect(self, agent: Agent, seconds: float) -> None:
        heapq.heappush(self._arrivals, (seconds, next(self._numbers), agent))

    def _submit(self) -> None:
        seconds, number, agent = heapq.heappop(self._arrivals)
        self._now = max(self._now, seconds)
        request, heard = (
            turn_request(Arrival(self._now, agent.script, agent.index), agent.script, self._users),
            Heard(),
        )
        self._running[number] = agent, request, heard
        self._runner.outputs[id(request.prompt)] = request.output
        self._worker.submit(
            GenerationRequest(
                f"{number}",
                request.prompt,
                len(request.output),
                session_id=request.session_id,
                restore_points=request.points,
                ignore_eos=True,
            ),
            heard,
        )

    def _listen(self) -> None:
        for number, (agent, request, heard) in list(self._running.items()):
            if heard.hit_tokens is not None and not heard.is_counted:
                self._count(request, heard)
            if heard.is_over:
                del self._running[number]
                del self._runner.outputs[id(request.prompt)]
                self._go_on(agent)
                if self._is_checked:
                    self._worker.prefix_cache.check()

    def _count(self, request: Request, heard: Heard) -> None:
        heard.is_counted = True
        self._outcome.order.append(request)
        self._outcome.running_bytes.append(self._running_bytes())
        self._outcome.num_prompt += len(request.prompt)
        self._outcome.num_hit += heard.hit_tokens or 0

    def _running_bytes(self) -> float:
        pager = self._worker.prefix_cache.pager
        running = [slot for slot in pager.slots if slot.is_leased]
        charged = sum(pager.ledger.slot_bytes(slot.index) for slot in (*running, *pager.heads))
        sessions = {slot.session_id for slot in running}
        requests = [request for _, request, _ in self._running.values() if request.session_id in sessions]
        num_rows = sum(len(request.prompt) + len(request.output) for request in requests)
        readers = Counter(node for slot in running for node in slot.tip.path())
        num_common = sum((count - 1) * (node.stop - node.start) for node, count in readers.items())
        held_bytes = (num_rows - num_common) * self._sizes.bytes_per_token + len(running) * self._sizes.snapshot_bytes
        return max(0, charged - held_bytes)

    def _go_on(self, agent: Agent) -> None:
        helpers = agent.helpers.get(agent.index, [])
        agent.index += 1
        agent.num_working = len(helpers)
        for helper in helpers:
            self._expect(helper, self._now)
        if helpers:
            return
        if agent.index < len(agent.script.conversation.turns):
            self._expect(agent, self._now + agent.gap_seconds)
        elif agent.parent is not None:
            agent.parent.num_working -= 1
            if not agent.parent.num_working:
                self._expect(agent.parent, self._now)


def least_recently_used(outcome: Outcome, sizes: Sizes, *, is_charged: bool) -> float:
    """Returns the percentage of prompt tokens that an LRU restores, the better one of two.

    With `is_charged` the LRU has less memory, by what running rows needed beyond their state.
    """
    rivals = TreeRival(sizes), TreeRival(sizes, keeps_points=True)
    return 100 * max(_num_hit(rival, outcome, is_charged) for rival in rivals) / outcome.num_prompt


def _num_hit(rival: TreeRival, outcome: Outcome, is_charged: bool) -> int:
    num_hit = 0
    for request, running_bytes in zip(outcome.order, outcome.running_bytes, strict=True):
        rival.running_bytes = running_bytes * is_charged
        num_hit += rival.run(request).hit_tokens
    return num_hit


def replay(options: argparse.Namespace) -> Report:
    """Replays all numbers of sessions with all budgets, without heads and with."""
    columns = ["memory GB", "sessions", "heads", "requests", "reused %", "LRU %", "LRU, charged %"]
    columns += ["evaluated M", "preempted", "hours"]
    report = Report(f"Agents at once with little memory, {options.model}", columns)
    model = MODELS[options.model]
    for gigabytes, sessions, heads in itertools.product(options.memory_gb, options.sessions, options.heads):
        name = f"{gigabytes:g} GB, {sessions} sessions, {'with' if heads == 'yes' else 'without'} heads"
        print(f"{name} …", file=sys.stderr, flush=True)
        sizes = Sizes(model.bytes_per_token, model.snapshot_bytes, gigabytes * 1e9)
        agents = make_agents(sessions, model, options.seed)
        how: Any = {"num_slots": options.slots, "heads": heads == "yes", "is_checked": options.check}
        outcome = Replay(agents, sizes, **how).run()
        peer, charged = (least_recently_used(outcome, sizes, is_charged=is_charged) for is_charged in (False, True))
        counts = [f"{gigabytes:g}", f"{sessions}", heads, f"{len(outcome.order)}"]
        shares = [f"{share:.1f}" for share in (outcome.reuse, peer, charged)]
        evaluated, hours = f"{outcome.num_prefilled / 1e6:.2f}", f"{outcome.seconds / 3600:.1f}"
        report.rows.append([*counts, *shares, evaluated, f"{outcome.num_preempted}", hours])
        report.figures[name] = {
            "reused_percent": outcome.reuse,
            "lru_percent": peer,
            "charged_lru_percent": charged,
            "evaluated_tokens": outcome.num_prefilled,
            "preempted": outcome.num_preempted,
            "seconds": outcome.seconds,
        }
        wanted = WANTED_AT_8_GB if gigabytes >= 8 else 0.0
        report.add_verdict(f"{name}, points above LRU", outcome.reuse - peer, Target(wanted, is_ceiling=False))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="replay_together", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--memory-gb", type=float, nargs="+", default=[2.0, 4.0, 8.0], metavar="X", help="budgets in 10^9 bytes")
    add("--sessions", type=int, nargs="+", default=[4, 8, 16], metavar="N", help="main agents")
    add("--heads", choices=("no", "yes"), nargs="+", default=["no", "yes"], help="rows hold a common beginning once")
    add("--slots", type=int, default=8, metavar="N", help="slots of the cache, as the server's --slots")
    add("--model", choices=list(MODELS), default="qwen3-4b", help="whose state it is")
    add("--seed", type=int, default=0, metavar="S", help="of the conversations")
    add("--check", action="store_true", help="assert the cache's invariants after each request (slow)")
    add("--json", type=Path, metavar="FILE", help="write the figures by name")
    options = parser.parse_args(arguments)
    report = replay(options)
    print(report.text())
    if options.json is not None:
        write_json(options.json, "python -m scripts.replay.together", [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
