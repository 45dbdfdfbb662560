"""Log-probabilities of options after a prompt: which tokens are evaluated for them, in which rows. Pure.

The options of a question are a trie of tokens under the prompt's last token. A *line* is a path down the trie, which
one row evaluates as forced tokens, one in a step; at each node it reads the log-probabilities of the node's children.
A node with several children that go on is followed by the line through its first; the others begin lines of their
own once the node is read, and restore what is evaluated. So each node with children is evaluated once, leaves never,
and a step is one deeper in all lines. An option's log-probability is the sum along its path.

Where an option of a question begins another one, all of its options include the end of the answer: the probability
of each is that of the whole answer. Else it is that of an answer that begins with the option.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from models.inference.sampling_params import SamplingParams
from server.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Line,
    OutOfMemory,
    Priced,
    ScoredQuestion,
    Started,
    StepFailed,
)

if TYPE_CHECKING:
    from server.engine.sequence import Sink

_Clock: TypeAlias = Callable[[], float]
END = -1
"""Stands for any token that ends an answer."""


@dataclass(eq=False)
class OptionNode:
    """A token of options, after those of `path` before it."""

    path: tuple[int, ...] = ()
    logprob: float = 0.0
    """The log-probability of the whole path, once the parent is read."""
    children: dict[int, "OptionNode"] = field(default_factory=dict)

    @property
    def going_on(self) -> "list[OptionNode]":
        """The children that must be evaluated, as they have children."""
        return [child for child in self.children.values() if child.children]

    def add(self, option: Sequence[int]) -> "OptionNode":
        """The node of a path that begins here."""
        node = self
        for token in option:
            node = node.children.setdefault(token, OptionNode((*node.path, token)))
        return node

    def line(self) -> "list[OptionNode]":
        """The nodes of the line that begins here."""
        nodes = [self]
        while following := nodes[-1].going_on:
            nodes.append(following[0])
        return nodes

    def wanted(self, ends: Collection[int]) -> tuple[int, ...]:
        """The tokens that are read here."""
        return tuple(one for token in self.children for one in (ends if token == END else (token,)))

    def read(self, logprobs: Sequence[float], ends: Collection[int]) -> None:
        """Takes what was told of the tokens `wanted`."""
        told = iter(logprobs)
        for token, child in self.children.items():
            values = [next(told) for _ in (ends if token == END else (token,))]
            child.logprob = self.logprob + float(np.logaddexp.reduce(values))


def trie_of(options: Sequence[Sequence[int]], *, has_ends: bool = True) -> tuple[OptionNode, list[OptionNode]]:
    """The root, and each option's leaf."""
    root = OptionNode()
    nodes = [root.add(option) for option in options]
    if has_ends and any(node.children for node in nodes):
        nodes = [node.add((END,)) for node in nodes]
    return root, nodes


@dataclass(eq=False)
class _Row:
    """A line that is being evaluated: where its events go."""

    scoring: "Scoring"
    request: GenerationRequest
    nodes: list[OptionNode]
    question: int
    is_behind: bool = False
    num_read: int = 0

    def __post_init__(self) -> None:
        branching = (place for place, node in enumerate(self.nodes, 1) if node.going_on[1:])
        self.num_to_branch = max(branching, default=0)
        """Once so many nodes are read, no other line begins in this one."""

    def post(self, events: list[Event]) -> None:
        """Takes the events of the line's request."""
        for event in events:
            self.scoring.take(self, event)


class Scoring:
    """A request that scores options: its beginning is evaluated, then the lines of its questions, a row each.

    The requests of lines are queued as rows become free, so that others' requests take turns with them. The client
    gets the beginning's events, and one end. Worker thread only.
    """

    is_behind = False
    """There is little to read."""

    def __init__(
        self, request: GenerationRequest, sink: "Sink", ends: Collection[int], max_rows: int, clock: _Clock
    ) -> None:
        """`ends` end an answer of the model."""
        self._request, self._sink, self._max_rows, self._clock = request, sink, max_rows, clock
        self._ends = sorted(ends)
        tries = [trie_of(one.options, has_ends=bool(ends)) for one in request.questions]
        self._leaves = [leaves for _, leaves in tries]
        self._due = deque(enumerate([root for root, _ in tries]))
        self.rows: list[_Row] = []
        """Queued and running lines."""
        self._num_begun = self._num_nodes = self._num_cached = 0
        """Lines; of options, evaluated tokens; restored tokens, each once."""
        self._beginning: Finished | None = None
        self._evaluated_at = 0.0
        self.is_over = False
        """The client has the last event: rows that still run are to be ended."""

    def post(self, events: list[Event]) -> None:
        """Takes the events of the beginning's request."""
        for event in events:
            if isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
                self._beginning, self._evaluated_at = event, self._clock()
                self._num_cached = event.timings.cache_tokens
            else:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        if not self.is_over:
            self.is_over = isinstance(event, Finished | Failed)
            self._sink.post([event])

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless it is over."""
        self._tell(Failed(error))

    def cancel(self) -> None:
        """Ends the request, unless it is over."""
        if self._beginning is not None:
            self._tell(replace(self._beginning, reason=FinishReason.CANCELLED))

    def next_rows(self) -> Iterator[_Row]:
        """Yields the next rows to be queued."""
        while self._beginning is not None and self._due and not self.is_over and len(self.rows) < self._max_rows:
            question, node = self._due.popleft()
            nodes = node.line()
            self._num_begun += 1
            self._num_nodes += len(nodes) - (not node.path)
            self.rows.append(_Row(self, self._request_for(self._request.questions[question], nodes), nodes, question))
            yield self.rows[-1]

    @property
    def may_branch(self) -> bool:
        """Whether the next row goes on from within a line, or may once the step under way is read."""
        # What goes on from within a line is first in the queue.
        goes_on = bool(self._due) and bool(self._due[0][1].path)
        return goes_on or any(row.num_read < row.num_to_branch for row in self.rows)

    def _request_for(self, question: ScoredQuestion, nodes: Sequence[OptionNode]) -> GenerationRequest:
        first, forced = nodes[0], tuple(node.path[-1] for node in nodes[1:])
        return replace(
            self._request,
            request_id=f"{self._request.request_id}/{self._num_begun}",
            tokens=np.append(question.tokens, np.array(first.path, np.int32)),
            max_tokens=len(nodes),
            session_id=None,
            sampling=SamplingParams(temperature=0.0, top_logprobs=0),
            ignore_eos=True,
            restore_points=(),
            questions=(),
            line=Line(forced, tuple(node.wanted(self._ends) for node in nodes)),
        )

    def take(self, row: _Row, event: Event) -> None:
        """Takes an event of a row's request."""
        match event:
            case Started() if not row.nodes[0].path:
                self._num_cached += max(0, event.hit_tokens - len(self._request.tokens))
            case Priced(logprobs):
                if np.isnan(logprobs).any():
                    self.fail(StepFailed("the model gives probabilities that are not numbers"))
                    return
                node = row.nodes[row.num_read]
                node.read(logprobs, self._ends)
                row.num_read += 1
                self._due.extendleft((row.question, child) for child in reversed(node.going_on[1:]))
            case Failed(error):
                self.rows.remove(row)
                self.fail(error)
            case Finished():
                self.rows.remove(row)
                if row.num_read < len(row.nodes):
                    self.fail(OutOfMemory("there is not enough memory for these questions now"))
                elif not self.rows and not self._due:
                    self._finish()

    def _finish(self) -> None:
        assert self._beginning is not None, "lines follow the beginning"
        num_before, questions = len(self._request.tokens), self._request.questions
        num_tokens = num_before + sum(len(one.tokens) - num_before for one in questions) + self._num_nodes
        timings = replace(
            self._beginning.timings,
            cache_tokens=self._num_cached,
            evaluated_tokens=num_tokens - self._num_cached,
            prompt_ms=self._beginning.timings.prompt_ms + 1000 * (self._clock() - self._evaluated_at),
        )
        logprobs = tuple(tuple(leaf.logprob for leaf in leaves) for leaves in self._leaves)
        self._tell(replace(self._beginning, prompt_tokens=num_tokens, timings=timings, option_logprobs=logprobs))
