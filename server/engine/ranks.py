"""The engine of a model that several machines hold: rank 0 leads, the workers of the other ranks follow.

A worker does what its messages and `Measured` say, so workers that get the same, in one order, do the same: the same
rows in the same calls, the same state in the same slots. Rank 0 sends a *turn* before each step: the messages since
the last turn, its measurements, and a digest of the state after its last step. A rank with another digest ends the
group, since sums over the ranks would add different rows, unnoticed. Nothing is mended: an error, a death or a
silence of one rank ends all, since the others wait for it within a model call.

Turns are plain data in JSON over a socket of `multiprocessing.connection` with a key; nothing is unpickled.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from cache.snapshots import RestorePoint, RestorePointKind
from models.formats import Judgement, Pooling
from models.inference.sampling_params import SamplingParams
from models.output.call_formats import CallFormat, Literal, Tags
from models.output.grammar import CallOpener, Grammar, GrammarKind, OutputGrammar
from models.output.pieces import ReasoningFormat, Thinking
from server.engine import commands
from server.engine.embeddings import EmbeddingJob
from server.engine.request import Event, GenerationRequest, LoopRule, Priority, RankLost, ScoredQuestion
from server.engine.worker import Measured, Worker

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""Without a beat for so long a rank counts as lost: its process stands still, or the network."""

END = b"{}"
"""The turn after which there are no more."""

_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(GenerationRequest, SamplingParams, RestorePoint, RestorePointKind, LoopRule, Priority, Thinking),
        *(ReasoningFormat, OutputGrammar, CallOpener, Grammar, GrammarKind, CallFormat, Tags, Literal),
        *(Judgement, Pooling, ScoredQuestion),
    )
}
_LEFT_OUT = {"adapter", "pictures", "outline"}
"""Fields of a request that a model on several machines cannot have, or that only reports need."""


def packed(value: Any) -> Any:
    """A value of `_KINDS` and of what these hold, as plain data. Raises TypeError for any other."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return {"tokens": value.tolist()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, re.Pattern):
        return {"pattern": value.pattern}
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        own = {one.name: getattr(value, one.name) for one in fields(value) if one.init and one.name not in _LEFT_OUT}
        return {type(value).__name__: {name: packed(part) for name, part in own.items()}}
    if isinstance(value, Mapping):
        return {"mapping": [[key, packed(part)] for key, part in value.items()]}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, Sequence):
        parts = [packed(part) for part in value]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if not isinstance(source := getattr(value, "source", None), Grammar):
        raise TypeError(f"{type(value).__name__} is nothing that machines tell one another")
    return {"compiled": packed(source)}


def unpacked(data: Any, compile_grammar: Callable[[Grammar], Any]) -> Any:
    """The value that was packed."""
    if isinstance(data, list):
        return [unpacked(part, compile_grammar) for part in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    make = _MAKERS.get(name)
    if make is not None:
        return make(content)
    if name == "mapping":
        return {key: unpacked(part, compile_grammar) for key, part in content}
    if name == "tuple":
        return tuple(unpacked(content, compile_grammar))
    if name == "compiled":
        return compile_grammar(unpacked(content, compile_grammar))
    kind = _KINDS[name]
    if not isinstance(content, dict):
        return kind(content)
    return kind(**{key: unpacked(part, compile_grammar) for key, part in content.items()})


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "tokens": lambda content: np.array(content, np.int32),
    "pattern": re.compile,
    "set": frozenset,
}


class _Link:
    """One end of a connection, and the beat that shows that this process runs. For any thread."""

    _lose: Callable[[str], object]

    def __init__(self, connection: Connection, name: str) -> None:
        """`name` is the other end's."""
        self._connection, self._name = connection, name
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._num_heard = 0

    def start(self, take: Callable[[bytes], object], lose: Callable[[str], object]) -> None:
        """Beats, and hands over what comes from the other end, or why nothing will come."""
        self._lose = lose
        for run in (self._beat, partial(self._read, take)):
            threading.Thread(target=run, name="mlx-serve-ranks", daemon=True).start()

    def send(self, data: bytes) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError as error:
            self._fail(f"it cannot be reached: {error}")

    def close(self) -> None:
        self._is_closed.set()
        with suppress(OSError):
            self._connection.close()

    def _beat(self) -> None:
        num_heard, num_beats = 0, 0
        while not self._is_closed.wait(BEAT_SECONDS):
            self.send(b"")
            num_beats = num_beats + 1 if num_heard == self._num_heard else 0
            num_heard = self._num_heard
            if num_beats * BEAT_SECONDS > 2 * SILENCE_SECONDS:  # a message that never ends is silence too
                self._fail(f"it has been silent for {num_beats * BEAT_SECONDS:.0f} s")

    def _read(self, take: Callable[[bytes], object]) -> None:
        try:
            while self._connection.poll(SILENCE_SECONDS):
                data = self._connection.recv_bytes()
                self._num_heard += 1
                if data:
                    take(data)
            self._fail(f"it has been silent for {SILENCE_SECONDS:.0f} s")
        except (EOFError, OSError):
            self._fail("it has ended")

    def _fail(self, why: str) -> None:
        if not self._is_closed.is_set():
            self.close()
            self._lose(f"{self._name} is lost: {why}")


def message_of(name: str, *given: Any) -> list[Any]:
    """A message as it is sent. Raises TypeError."""
    return [name, *map(packed, given)]


class LeadingRank:
    """Rank 0's side. Worker thread only."""

    def __init__(self, connections: Sequence[Connection], lose: Callable[[str], object]) -> None:
        """One connection for each further rank, in their order."""
        self.lose = lose
        """Called on any thread once another rank is lost or has gone another way; says which, and why."""
        self._links = [_Link(connection, f"machine {rank}") for rank, connection in enumerate(connections, 1)]
        self._messages: list[Any] = []
        self._digest = 0
        for link in self._links:
            link.start(lambda data: self.lose(data.decode()), lambda why: self.lose(why))

    def note(self, message: Any) -> None:
        """Has the next turn begin with a message, as `message_of` makes it, that this worker has handled."""
        self._messages.append(message)

    def step(self, worker: Worker) -> None:
        """Has all workers step."""
        measured = worker.measure()
        self._tell(measured)
        worker.step(measured)
        self._digest = worker.digest()

    def pause(self) -> None:
        """Sends what no step follows."""
        if self._messages:
            self._tell(None)

    def _tell(self, measured: Measured | None) -> None:
        told = None if measured is None else [measured.now, sorted(measured.behind), measured.seconds]
        turn = json.dumps({"digest": self._digest, "messages": self._messages, "measured": told}).encode()
        self._messages = []
        for link in self._links:
            link.send(turn)

    def end(self) -> None:
        """The other ranks end, with status 0."""
        for link in self._links:
            link.send(END)
            link.close()


class _Unread:
    """Takes the events of a request whose client another machine answers."""

    is_behind = False

    def post(self, events: list[Event]) -> None: ...


class FollowingRank:
    """Another rank's side: does what rank 0's turns say. Worker thread only."""

    def __init__(
        self, connection: Connection, lose: Callable[[str], object], end: Callable[[], object] = lambda: None
    ) -> None:
        """`lose` is called on any thread once rank 0 is lost, `end` once it ends the group, or ends at its start."""
        self._link = _Link(connection, "machine 0")
        self._turns = SimpleQueue[bytes]()
        self._digest, self._is_started = 0, False
        self._is_over, self._lose, self._end = threading.Event(), lose, end
        self._link.start(self._take, self._lost)

    def _take(self, turn: bytes) -> None:
        if turn == END:
            self._is_over.set()
            self._end()
        self._turns.put(turn)

    def _lost(self, why: str) -> None:
        self._is_over.set()
        self._turns.put(json.dumps(why).encode())  # ends the wait for a turn
        self._lose(why) if self._is_started else self._end()

    def is_over(self, within_seconds: float) -> bool:
        """Whether rank 0 has ended, or does so within a time. For any thread."""
        return self._is_over.wait(within_seconds)

    def end(self) -> None:
        """Rank 0 loses this rank. For any thread."""
        self._link.close()

    def follow(self, worker: Worker, compile_grammar: Callable[[Grammar], Any]) -> None:
        """Returns once rank 0 ends the group. Raises RankLost, and what a step raises, after telling rank 0."""
        self._is_started = True
        try:
            while turn := json.loads(self._turns.get()):
                if isinstance(turn, str):
                    raise RankLost(turn)
                if turn["digest"] != self._digest:
                    raise AssertionError("its state differs from machine 0's")
                for name, *given in turn["messages"]:
                    _handle(worker, name, [unpacked(one, compile_grammar) for one in given])
                if turn["measured"] is not None:
                    now, behind, seconds = turn["measured"]
                    worker.step(Measured(now, frozenset(behind), seconds))
                    self._digest = worker.digest()
        except BaseException as error:
            self._link.send(f"a machine has failed: {error}".encode())
            raise
        finally:
            self._link.close()


def _handle(worker: Worker, name: str, given: Sequence[Any]) -> None:
    if name == "submit":
        (request,) = given
        worker.submit(request, _Unread())
    elif name == "cancel":
        worker.cancel(*given)
    elif name == "embed":
        worker.embed(EmbeddingJob(*given))
    else:
        worker.finish_step()
        with suppress(Exception):  # rank 0's caller has the error
            getattr(commands, name)(worker, *given)
