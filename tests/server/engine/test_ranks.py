"""Ranks as threads: workers of several machines go the same way as one machine, or end the group.

What differs between machines is made to differ: clocks, measurements, what probes suspect, slow readers. Each cure is
taken out once, and the ranks part.
"""

import asyncio
import json
import random
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest

from cache.layers import state
from cache.layers.kinds import make_caches
from cache.prefix_cache import PrefixCache
from models.formats import Pooling
from models.inference import abilities
from models.inference.abilities import Trials
from models.inference.batch import DecodeBatch
from models.inference.grammar import GrammarCompiler
from models.inference.grouping import Costs
from models.inference.probe import Form, Probe
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.output.call_formats import HERMES
from models.output.grammar import CallOpener, Grammar, GrammarKind, OutputGrammar
from models.output.pieces import ReasoningFormat, Thinking
from models.precision import Precision
from models.ranks import Ranks
from server.app import service
from server.app.config import ServerConfig
from server.app.memory_budget import Machine
from server.engine import commands, ranks
from server.engine.embeddings import EmbeddingJob
from server.engine.engine import Engine, EngineConfig
from server.engine.ranks import FollowingRank, LeadingRank, message_of, packed, unpacked
from server.engine.request import GenerationRequest, LoopRule, Priority, RankLost, ScoredQuestion
from server.engine.sequence import EngineState
from server.engine.speculation import Speculation
from server.engine.worker import Measured, Worker
from tests.support import loopback, tiny_models
from tests.support.engine_driver import Collected, NumberDecoder
from tests.support.fake_embedder import FakeEmbedder

NUM_REQUESTS = 20
STEP_SECONDS = {1: 1e-3, 2: 1e-3, 4: 1.1e-3, 8: 1.2e-3, 16: 1.5e-3, 32: 2e-3}


def other(value: float) -> float:
    """A measurement of another machine, on each rank but the first."""
    return value / 1000 if loopback.rank() else value


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Runs functions on ranks whose models need no probe, and whose measurements differ."""
    own_bytes = mx.get_array_buffer_size
    state._granule_bytes()
    state.count_by_size()
    monkeypatch.setattr(mx, "get_array_buffer_size", lambda *arrays: own_bytes(*arrays) + 4096 * loopback.rank())
    draws = random.Random(0)
    monkeypatch.setattr(secrets, "randbits", lambda bits: draws.getrandbits(bits) + loopback.rank())
    monkeypatch.setattr(Probe, "find_form", lambda *_, **__: (Form.HEADS, "given"))
    monkeypatch.setattr(Probe, "find_feed_fault", lambda self: None)
    monkeypatch.setattr(Probe, "find_flat_fault", lambda self, form: None)
    monkeypatch.setattr(abilities, "measure_costs", lambda caches: Costs(other(100.0), 0.0, 1.0))
    monkeypatch.setattr(abilities, "measure_head_tokens", lambda caches: other(32.0))
    steps = STEP_SECONDS.items()
    monkeypatch.setattr(
        abilities, "measure_step_seconds", lambda *_: {w: s if w == 1 else other(s) for w, s in steps}
    )
    with loopback.loopback() as run:
        yield run
    state.count_by_size(False)


@dataclass
class Clock:
    """Ticks at each reading, on ranks but the first unevenly."""

    seconds: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(loopback.rank()))

    def __call__(self) -> float:
        self.seconds += 1e-3 * (self.rng.uniform(0.2, 3.0) if loopback.rank() else 1.0)
        return self.seconds


def make_worker(name: str, group: loopback.Group | None, salt: bytes = b"the same on all") -> Worker:
    """A worker over a rank's part of a tiny model, or over all of it."""
    model = loopback.part_of(name, group)
    runner = Runner(model, vocab_size=tiny_models.VOCAB, ranks=Ranks(group))
    cache = PrefixCache(runner.make_caches, num_slots=6, budget_bytes=250_000, chunk_tokens=16, salt=salt)
    caches = runner.make_caches()
    runner.prefill(caches, np.ones(8, np.int32))
    cache.layout.calibrate(caches)
    assert runner.abilities.feeds is not None
    speculation = Speculation(cache.history, runner.abilities.feeds, feeds_again=cache.layout.has_recurrent)
    return Worker(
        runner,
        EngineState(cache),
        NumberDecoder,
        eos_token_ids=frozenset({3}),
        chunk_tokens=16,
        expected_tokens=16,
        clock=Clock(),
        embedder=FakeEmbedder(),  # type: ignore[arg-type]
        speculation=speculation,
    )


Messages: TypeAlias = list[tuple[Any, ...]]
"""Each with its name, as `message_of` takes it."""


class Clients:
    """Requests of six conversations on two beginnings, cancels, pins and other budgets now and then, slow readers.

    A seed is a story.
    """

    def __init__(self, seed: int, num_steps: int = 0) -> None:
        """Requests come until there were so many steps, and a few in any case."""
        self._rng, self._left_steps = random.Random(seed), num_steps
        self.sinks: dict[str, Collected] = {}
        self.cancelled: set[str] = set()
        self._systems = [[self._rng.randrange(4, 300) for _ in range(90)] for _ in range(2)]
        self._said: dict[str, list[int]] = {}

    def messages(self, now: float = 0.0) -> Messages:
        """What they send before a step, by rank 0's clock."""
        rng, sent = self._rng, Messages()
        self._left_steps -= 1
        num_running = sum(not sink.is_over for sink in self.sinks.values())
        if not self.are_done and num_running < 9 and rng.random() < 0.4:
            request = self._ask(f"r{len(self.sinks)}")
            self.sinks[request.request_id] = Collected()
            sent.append(("submit", request))
        if self.sinks and rng.random() < 0.03:
            name = rng.choice(sorted(self.sinks))
            self.cancelled.add(name)
            sent.append(("cancel", name))
        if self._said and rng.random() < 0.1:
            said = self._said[rng.choice(sorted(self._said))]
            until = now + rng.uniform(0, 0.2) - commands.PIN_SECONDS
            sent.append(("pin_turn", "", f"t{rng.randrange(4)}", np.array(said, np.int32), (), until))
        if rng.random() < 0.05:
            sent.append(("resize", rng.randrange(200_000, 300_000)))
        for sink in self.sinks.values():
            sink.is_behind = rng.random() < 0.3
        return sent

    def _ask(self, name: str) -> GenerationRequest:
        rng, session = self._rng, f"s{self._rng.randrange(6)}"
        said = self._said.get(session, list(self._systems[int(session[1]) % 2]))
        if len(said) > 250:  # a few of more would fill the memory, and one machine have other answers end early
            said = said[:90]
        self._said[session] = said + [rng.randrange(4, 300) for _ in range(12)] + said[90:112]
        # Of few tokens, an output repeats itself, and is drafted.
        few = tuple(rng.sample(range(4, 300), 2)) if rng.random() < 0.5 else ()
        temperature = 0.0 if rng.random() < 0.6 else 1.0
        seed = None if rng.random() < 0.5 else rng.getrandbits(62)
        sampling = SamplingParams(temperature=temperature, seed=seed, allowed_token_ids=few)
        request = GenerationRequest(
            request_id=name,
            tokens=np.array(self._said[session], np.int32),
            max_tokens=rng.randrange(1, 40),
            sampling=sampling,
            session_id=session,
            ignore_eos=True,
            priority=rng.choice(list(Priority)),
        )
        return self._settle(request)

    def _settle(self, request: GenerationRequest) -> GenerationRequest:
        """As `Engine.submit` does."""
        return request.seeded

    @property
    def are_done(self) -> bool:
        return len(self.sinks) >= NUM_REQUESTS and self._left_steps <= 0

    def answers(self) -> dict[str, list[int]]:
        """Of requests that nobody cancelled."""
        return {name: sink.tokens for name, sink in self.sinks.items() if name not in self.cancelled}


def act(worker: Worker, message: tuple[Any, ...], clients: Clients) -> None:
    """What rank 0 and one machine alone do with a message."""
    name, *given = message
    if name == "submit":
        worker.submit(given[0], clients.sinks[given[0].request_id])
    elif name == "cancel":
        worker.cancel(*given)
    else:
        worker.finish_step()
        getattr(commands, name)(worker, *given)


def served(
    connections: tuple[Connection, Connection],
    worker: Worker,
    seed: int,
    num_steps: int = 0,
    lose: Callable[[str], object] = lambda why: None,
) -> tuple[Clients, list[Messages], Worker]:
    """One rank's part; rank 0's clients, what they sent before each step, and the worker."""
    clients, story = Clients(seed, num_steps), list[Messages]()
    if loopback.rank():
        FollowingRank(connections[1], lambda why: None).follow(worker, lambda grammar: grammar)
        return clients, story, worker
    leader = LeadingRank([connections[0]], lose)
    try:
        while worker.has_work or not clients.are_done:
            story.append(clients.messages(worker.now()))
            for message in story[-1]:
                act(worker, message, clients)
                leader.note(message_of(*message))
            leader.step(worker) if worker.has_work else leader.pause()
    finally:
        leader.end()
    return clients, story, worker


def alone(name: str, story: list[Messages]) -> dict[str, list[int]]:
    """What one machine answers to the same messages."""
    worker, clients = make_worker(name, None), Clients(0)
    for messages in story:
        for message in messages:
            if message[0] == "submit":
                clients.sinks[message[1].request_id] = Collected()
            elif message[0] == "cancel":
                clients.cancelled.add(message[1])
            act(worker, message, clients)
        if worker.has_work:
            worker.step()
    while worker.has_work:
        worker.step()
    return clients.answers()


MODELS = ("llama", "llama_4bit", "qwen3", "qwen3_5", "gpt_oss", "deepseek_v3")


@pytest.mark.usual("qwen3-0")
@pytest.mark.parametrize(("name", "num_steps"), [("qwen3", 0), *[(name, 300) for name in MODELS]])
def test_two_ranks_answer_as_one_machine(
    name: str, num_steps: int, machines: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "deepseek_v3":  # latent attention has no form for heads, nor for several tokens of a row
        monkeypatch.setattr(Probe, "find_form", lambda *_, **__: (Form.ROWS, "given"))
        monkeypatch.setattr(Probe, "find_flat_fault", lambda self, form: "given")
    connections = Pipe()
    (clients, story, worker), _ = machines(
        2, lambda group: served(connections, make_worker(name, group), 1, num_steps)
    )
    assert len(clients.answers()) > NUM_REQUESTS // 2 and len(story) >= num_steps
    assert clients.answers() == alone(name, story)
    drafts = worker.stats().drafts
    assert drafts is not None and (drafts.steps > 5 or name == "deepseek_v3"), "the ranks agree on nothing hard"


def test_a_leader_that_fails_leaves_nobody_waiting(
    machines: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links are closed, so the other rank waits for no turn."""
    monkeypatch.setattr(Clients, "messages", lambda *_: pytest.fail("no more clients"))
    connections, followers = Pipe(), list[BaseException]()

    def serve(group: loopback.Group) -> None:
        try:
            served(connections, make_worker("qwen3", group), seed=1)
        except BaseException as error:
            followers.append(error)
            raise

    with pytest.raises(pytest.fail.Exception, match="no more clients"):
        machines(2, serve)
    assert len(followers) == 1, "the other rank ends as rank 0 has it end"


def test_a_lost_leader_leaves_nobody_waiting(machines: Callable[..., list[Any]]) -> None:
    ours, theirs = Pipe()

    def follow(group: loopback.Group) -> None:
        ours.close()
        FollowingRank(theirs, lambda why: None).follow(make_worker("qwen3", None), lambda grammar: grammar)

    with pytest.raises(RankLost, match="machine 0 is lost: it has ended"):
        machines(1, follow)


def test_ranks_that_part_are_named_with_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "RUN_SECONDS", 0.05)
    waits = threading.Event()
    with loopback.loopback() as run, pytest.raises(AssertionError, match=r"rank 1 stands at\n(.*\n)*.*waits\.wait"):
        run(2, lambda group: waits.wait(60) if group.rank() else None)
    waits.set()


def test_all_ranks_plan_by_what_the_first_measured(machines: Callable[..., list[Any]]) -> None:
    def measured(group: loopback.Group) -> tuple[Any, ...]:
        found = make_worker("qwen3", group)._table.runner.abilities
        assert found.feeds is not None
        return found.costs, found.head_tokens, found.feeds.step_seconds

    first, second = machines(2, measured)
    assert first == second == (Costs(100.0, 0.0, 1.0), 32.0, STEP_SECONDS)


def _own_seconds(patch: pytest.MonkeyPatch) -> None:
    step, rng = Worker.step, random.Random(1)

    def stepped(self: Worker, measured: Measured) -> None:
        if loopback.rank():
            own = [[took * 100 ** rng.uniform(-1, 1) for took in note] for note in measured.seconds]
            measured = measured._replace(seconds=own)
        step(self, measured)

    patch.setattr(Worker, "step", stepped)


def _own_readers(patch: pytest.MonkeyPatch) -> None:
    step = Worker.step
    patch.setattr(
        Worker,
        "step",
        lambda self, measured: step(
            self, measured if loopback.rank() == 0 else measured._replace(behind=frozenset())
        ),
    )


def _own_clock(patch: pytest.MonkeyPatch) -> None:
    """Pins end by it."""
    step = Worker.step
    patch.setattr(
        Worker,
        "step",
        lambda self, measured: step(self, measured._replace(now=measured.now + 1e3 * loopback.rank())),
    )


def _own_costs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trials, "_measure", lambda self, measure: measure(make_caches(self.model)))


def _own_order(patch: pytest.MonkeyPatch) -> None:
    """Rows of a step by something of each process, as addresses: sums of unlike rows, whose shapes agree."""
    regroup = DecodeBatch._regroup

    def regrouped(self: DecodeBatch, rows: Any, spare_bytes: float) -> None:
        regroup(self, rows, spare_bytes)
        if loopback.rank():
            self._groups.reverse()

    patch.setattr(DecodeBatch, "_regroup", regrouped)


def _own_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_is_by_size", False)


def _own_seeds(patch: pytest.MonkeyPatch) -> None:
    """Drawn as a sequence begins, not as its request is submitted."""
    patch.setattr(Clients, "_settle", lambda self, request: request)


def _own_budget(patch: pytest.MonkeyPatch) -> None:
    """Rank 0's command stays its own."""
    resize = commands.resize
    patch.setattr(commands, "resize", lambda worker, size: None if loopback.rank() else resize(worker, size))


CURES = [
    _own_seconds,
    _own_readers,
    _own_clock,
    _own_costs,
    _own_order,
    _own_bytes,
    _own_seeds,
    _own_budget,
]


@pytest.mark.parametrize("take_out", CURES)
def test_without_each_cure_the_ranks_part(
    take_out: Callable[[pytest.MonkeyPatch], None],
    machines: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_out(monkeypatch)
    monkeypatch.setattr(loopback, "BARRIER_SECONDS", 5.0)
    connections = Pipe()
    with pytest.raises((AssertionError, ValueError, RankLost, threading.BrokenBarrierError)):
        machines(2, lambda group: served(connections, make_worker("qwen3", group), 1, 100))


def test_another_salt_parts_the_ranks(machines: Callable[..., list[Any]]) -> None:
    """Draft candidates would differ; here by texts of a chain that is cut at another place."""
    salts = b"the same on all", b"another"
    workers = [make_worker("qwen3", None, salt) for salt in salts]
    assert workers[0].prefix_cache.history.salt_of("a") != workers[1].prefix_cache.history.salt_of("a")


def test_machines_of_unlike_memory_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Precision, the budget, and the salt of texts are one for all."""
    folder = tiny_models.write("llama_4bit", tmp_path / "tiny")
    memory = [8 << 30, 1 << 30]
    monkeypatch.setattr(service, "read_machine", lambda _: Machine(memory[loopback.rank()]))
    monkeypatch.setattr(service, "find_float32_bytes", lambda *_: 0 if loopback.rank() else 1 << 30)

    def begun(group: loopback.Group) -> list[Any]:
        config = ServerConfig(models=(str(folder),), speculate="off")
        opened = service.open_service(config, ranks=Ranks(group))
        worker = opened.engine._make_worker()
        cache = worker.prefix_cache
        return [opened.loaded.precision, cache.stats().budget_bytes, cache.history.salt_of("a"), opened.machines]

    try:
        with loopback.loopback() as run:
            first, second = run(2, begun)
    finally:
        state.count_by_size(False)
    assert first == second and first[0] is not Precision.FLOAT32
    assert first[1] == 256 << 20, "what the smaller machine can give"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_ends_the_group(
    failing: int, machines: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory is mended nowhere: others would not know."""
    prepare, why = Runner.prepare, list[str]()

    def prepared(self: Runner, *arguments: Any, **named: Any) -> Any:
        if loopback.rank() == failing:
            raise MemoryError("out of memory")
        return prepare(self, *arguments, **named)

    monkeypatch.setattr(Runner, "prepare", prepared)
    connections = Pipe()
    with pytest.raises(RankLost, match="out of memory"):
        machines(2, lambda group: served(connections, make_worker("qwen3", group), 1, lose=why.append))
    assert failing == 1 or not why  # rank 0 may have ended its links before it reads what rank 1 says


GRAMMAR = Grammar(GrammarKind.REGEX, "[ab]+")


class Compiled:
    """What a compiler makes."""

    def __init__(self, source: Grammar) -> None:
        self.source = source


def test_a_request_of_every_field_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(seed=5, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)), top_logprobs=2)
    opener = CallOpener(re.compile("<tool_call>(.*)"), 7)
    request = GenerationRequest(
        request_id="a",
        tokens=np.array([5, 6, 7], np.int32),
        max_tokens=9,
        sampling=sampling,
        stop=("x", "y"),
        stop_token_ids=frozenset({9, 4}),
        loops=LoopRule(min_tokens=3),
        prediction=np.array([1], np.int32),
        thinking=Thinking(ReasoningFormat("<think>", "</think>"), is_open=True, max_tokens=4),
        single_call=(HERMES, [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1, "é"]}}}]),
        grammar=OutputGrammar(Compiled(GRAMMAR), opener=opener),  # type: ignore[arg-type]
        quotable=(np.array([2, 3], np.int32),),
        questions=(ScoredQuestion(np.array([4], np.int32), ((1,), (2, 3))),),
        priority=Priority.BACKGROUND,
    )
    arrived = unpacked(json.loads(json.dumps(packed(request))), Compiled)
    assert _plain(arrived) == _plain(request)


def _plain(value: Any) -> Any:
    """A value that can be compared."""
    return repr(packed(value)), type(value)


def test_what_is_not_known_to_all_is_told_to_nobody() -> None:
    with pytest.raises(TypeError, match="Collected is nothing that machines tell one another"):
        message_of("submit", Collected())
    assert message_of("pin", np.int64(3)) == ["pin", 3]


def test_messages_of_unknown_kinds_are_refused() -> None:
    with pytest.raises(KeyError):
        unpacked({"Popen": {"args": "true"}}, lambda grammar: grammar)


def test_a_compiled_grammar_knows_its_source() -> None:
    compiler = GrammarCompiler(lambda: tiny_models.tokenizer().backend_tokenizer.to_str(), [2])
    assert compiler.compile(GRAMMAR).source == GRAMMAR
    assert ranks.packed(OutputGrammar(compiler.compile(GRAMMAR)))["OutputGrammar"]["compiled"]


def test_a_rank_that_ends_is_told_at_once() -> None:
    ours, theirs = Pipe()
    told, heard = list[str](), threading.Event()

    def lose(why: str) -> None:
        told.append(why)
        heard.set()

    LeadingRank([ours], lose)
    theirs.close()
    assert heard.wait(60) and told == ["machine 1 is lost: it has ended"]


def test_a_silent_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 0.05)
    ours, _theirs = Pipe()
    heard = threading.Event()
    LeadingRank([ours], lambda why: heard.set() if "silent" in why else None)
    assert heard.wait(60)


def test_what_all_machines_do_goes_on_without_its_client() -> None:
    """A text that one machine dropped would have the others' sums add other rows."""

    async def run() -> bool:
        engine = Engine(lambda: pytest.fail("not started"), EngineConfig(), LeadingRank([], lambda why: None))
        future = Future[int]()
        asking = asyncio.ensure_future(engine._result_of(future))
        await asyncio.sleep(0)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        return future.cancelled()

    assert not asyncio.run(run())


def test_what_follows_an_answer_needs_no_machine_that_is_lost() -> None:
    """The answer has ended well."""
    engine = Engine(lambda: pytest.fail("not started"), EngineConfig(), LeadingRank([], lambda why: None))
    engine.lost = "machine 1 is lost"
    with pytest.raises(RankLost):
        engine._queue(commands.give_back)
    engine.execute_later(commands.give_back)


def test_texts_that_one_machine_has_dropped_show_in_its_digest() -> None:
    workers = [make_worker("qwen3", None) for _ in range(2)]
    assert workers[0].digest() == workers[1].digest()
    workers[0].embed(EmbeddingJob([np.array([5, 6], np.int32)], Pooling.MEAN))
    assert workers[0].digest() != workers[1].digest()
