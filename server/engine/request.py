"""A request to the engine, its events and errors, and the engine's counters. All immutable. Pure.

The server has already parsed the client's dialect and tokenized the text. The events of a request, in order: Started,
Progress*, Delta*, then Finished or Failed. No error ends the engine, but the last:

EngineError
├── QueueFull
├── EngineStopped
├── EngineStuck
├── PromptTooLarge
├── OutOfMemory
├── AnswerUnbound
├── StepFailed
└── DeviceLost, which does end it
    └── RankLost, and the process
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.budget import CacheStats
from cache.snapshots import RestorePoint, RestorePointKind
from models.adapter import NO_ADAPTER, Adapter, state_namespace
from models.inference.sampling_params import SamplingParams
from models.output.call_formats import CallFormat
from models.output.call_reader import DeclaredTools
from models.output.grammar import OutputGrammar
from models.output.pieces import Thinking, TokenLogprob
from models.prompt.pictures import NO_PICTURES, Pictures
from models.prompt.shapes import NO_OUTLINE, Outline
from server.diagnosis.causes import Reuse

TokenArray: TypeAlias = NDArray[np.int32]

SEED_BITS = 63


class Priority(IntEnum):
    """Scheduling class; lower runs first."""

    INTERACTIVE = 0
    BACKGROUND = 1


@dataclass(frozen=True)
class LoopRule:
    """Which repetition of the last tokens is a loop. A pattern of tokens repeats without a gap."""

    max_pattern: int = 128
    """Tokens of a pattern at most; 0 for no loop ever."""
    min_pattern: int = 1
    min_count: int = 8
    """The fewest times that a pattern stands there, at least 2."""
    min_tokens: int = 0
    """The fewest tokens of all times together."""


LOOP_GUARD = LoopRule(min_tokens=256)
"""Long enough for what answers repeat on purpose: rules of dashes, rows of zeros, blank cells."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationOptions:
    """What a client may ask of any prompt's continuation."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """`min_tokens` also holds back stop strings; the engine fills in `end_token_ids`."""
    stop: tuple[str, ...] = ()
    """Matched on decoded text; none is empty."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output beside the model's ends of turn, which may be ignored."""
    keeps_stop: bool = False
    """The output ends with the stop itself."""
    cache_prompt: bool = True
    """False: neither reuse nor keep state."""
    is_volatile: bool = False
    """The state of the request is never written to disk."""
    priority: Priority = Priority.INTERACTIVE
    ignore_eos: bool = False
    speculates: bool = True
    """False: every token has a decode step of its own."""
    prompt_logprobs: int | None = None
    """Likely tokens to report for each prompt token, at `Finished`. Needs `cache_prompt` to be false."""
    prediction: TokenArray | None = None
    """What the client expects of the answer: a text for drafts only."""
    loops: LoopRule | None = None
    """What ends a thought, or else the output. Not before `min_tokens`."""


@dataclass(frozen=True, eq=False)
class ScoredQuestion:
    """A prompt, and the options whose log-probabilities after it are asked for."""

    tokens: TokenArray
    options: tuple[tuple[int, ...], ...]
    """Each has a token or more; no two are equal."""


@dataclass(frozen=True)
class Line:
    """Tokens that the output is to be, and the tokens whose log-probabilities are told in place of each."""

    forced: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]
    """One more than `forced`: after all of them too."""


@dataclass(frozen=True, eq=False)
class GenerationRequest(GenerationOptions):
    """One prompt to continue; who makes it has validated every field."""

    request_id: str
    tokens: TokenArray
    """Shape [num_tokens], int32, one token or more, never written to."""
    max_tokens: int
    """0 evaluates the prompt only, and keeps a restore point at its end."""
    session_id: str | None = None
    """A hint for affinity and order, never a key to tokens."""
    namespace: str = ""
    """Only requests of one namespace and one adapter share state."""
    adapter: Adapter | None = None
    pictures: Pictures = NO_PICTURES
    restore_points: tuple[RestorePoint, ...] = ()
    outline: Outline = NO_OUTLINE
    is_idle_work: bool = False
    """Any other request ends this one."""
    thinking: Thinking | None = None
    """None where reasoning cannot be told apart."""
    single_call: tuple[CallFormat, DeclaredTools] | None = None
    """What calls are read by, where the output ends after the first one."""
    grammar: OutputGrammar | None = None
    """The grammar of the answer after its reasoning."""
    quotable: tuple[TokenArray, ...] = ()
    """New tool results as calls quote them: texts for drafts, as the prompt is."""
    questions: tuple[ScoredQuestion, ...] = ()
    """Each goes on from `tokens`. Needs `max_tokens` to be 0, and `cache_prompt`."""
    line: Line | None = None
    """A part of a request with `questions`, which the engine makes."""

    @property
    def seeded(self) -> "GenerationRequest":
        """With a seed, where draws are random: a replay, on each machine, samples the same tokens."""
        if self.sampling.seed is not None or self.sampling.is_greedy:
            return self
        return replace(self, sampling=replace(self.sampling, seed=secrets.randbits(SEED_BITS)))

    @property
    def state_namespace(self) -> str:
        return state_namespace(self.namespace, self.adapter)

    @property
    def head_tokens(self) -> int:
        """Tokens of the leading system messages and the tools; 0 where unknown."""
        ends = (one.offset for one in self.restore_points if one.kind is RestorePointKind.SYSTEM_END)
        return max(ends, default=0)

    @property
    def adapter_index(self) -> int:
        return NO_ADAPTER if self.adapter is None else self.adapter.index

    @property
    def is_prefix_only(self) -> bool:
        return self.max_tokens == 0


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Timings:
    """Token counts and milliseconds of one request; `cache_tokens + evaluated_tokens` = prompt tokens."""

    cache_tokens: int
    evaluated_tokens: int
    prompt_ms: float
    predicted_tokens: int
    predicted_ms: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """How many of `drafted_tokens` the answer holds: they needed no decode step of their own."""

    @property
    def token_ms(self) -> float | None:
        """The mean time between two tokens; None below two."""
        return self.predicted_ms / (self.predicted_tokens - 1) if self.predicted_tokens > 1 else None


@dataclass(frozen=True)
class Started:
    """The request has a slot, and its prefix is restored."""

    slot: int
    prompt_tokens: int
    match_tokens: int
    """Prompt tokens that the cache knew."""
    hit_tokens: int
    """Prompt tokens restored."""
    restore_ms: float = 0.0
    tier: str | None = None
    """Where the restored part was, if any."""
    reuse: Reuse = field(default_factory=Reuse)
    """Why not more: the asking side adds it where the engine does not know."""
    rounded_tokens: int = 0
    """Of `hit_tokens`, those whose state was stored in 8 bits."""


@dataclass(frozen=True)
class Progress:
    """`evaluated` of `total` prompt tokens are in the caches, restored ones included."""

    evaluated: int
    total: int


@dataclass(frozen=True)
class Delta:
    """New text, never empty as an event; `token_ids` are the tokens that completed it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ended well or was cancelled."""

    reason: FinishReason
    prompt_tokens: int
    timings: Timings
    stop_text: str | None = None
    started: Started | None = None
    """None if the request was cancelled before it."""
    reasoning_tokens: int | None = None
    """Without markers; None where reasoning is not told apart."""
    stop_token: int | None = None
    rest: Delta = Delta("", ())
    """Tokens without text after the last delta."""
    scored: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of all prompt tokens but the first, where the request asks."""
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    """Both None where the request has no `prediction`."""
    is_loop: bool = False
    """A loop ended the output; the reason is `LENGTH`."""
    option_logprobs: tuple[tuple[float, ...], ...] = ()
    """By question and option; `prompt_tokens` then include the questions and what was evaluated of options."""


@dataclass(frozen=True)
class Priced:
    """Log-probabilities of the next tokens that a `Line` wants; never for clients."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed, with an error of this module."""

    error: Exception


Event: TypeAlias = Started | Progress | Delta | Priced | Finished | Failed


class EngineError(Exception):
    """Base of all errors the engine reports."""


class QueueFull(EngineError):
    """Too many requests wait; retry after `retry_after_seconds`."""

    def __init__(self, num_waiting: int, retry_after_seconds: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class EngineStopped(EngineError):
    """The engine takes no more requests."""


class EngineStuck(EngineError):
    """A step of the engine does not return; retry after `retry_after_seconds`."""

    retry_after_seconds = 10

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the engine of this model is stuck: it has been at one step for {seconds:.0f} s")


class PromptTooLarge(EngineError):
    """The request's state can never be held within the budget."""


class OutOfMemory(EngineError):
    """No memory for the request now; retry after `retry_after_seconds`."""

    retry_after_seconds = 5


class AnswerUnbound(EngineError):
    """An answer's grammar cannot be followed any further."""

    param = None

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; ask for a shorter answer or for a simpler grammar")


class StepFailed(EngineError):
    """The model failed on this sequence; other sequences went on."""


class DeviceLost(EngineError):
    """The device takes no more work from this process."""

    def __init__(self) -> None:
        super().__init__("the GPU refuses all work of this process after earlier errors; restart the server")


class RankLost(DeviceLost):
    """A machine of those that hold the model is lost, or has failed; retry after `retry_after_seconds`."""

    retry_after_seconds = 10

    def __init__(self, why: str) -> None:
        Exception.__init__(self, f"{why}; the server ends, to be started again on all machines")


def check_device(error: Exception, *, is_divided: bool = False) -> None:
    """Raises DeviceLost where macOS refuses a process whose work failed too often: nothing mends it.

    A model that `is_divided` among machines cannot mend any error: the others may not have it.
    """
    if isinstance(error, DeviceLost):
        raise error
    if is_divided:
        raise RankLost(f"a machine has failed: {error}") from error
    if "submissionsignored" in str(error).lower():
        raise DeviceLost from error


_NO_MEMORY = ("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "[metal::malloc]")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a lack of memory; MLX has no class for that."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _NO_MEMORY)


@dataclass(frozen=True)
class RequestCounts:
    """Unfinished requests by phase."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0

    def slots(self, total: int) -> dict[Any, int]:
        """The slots by what they do."""
        idle = max(total - self.prefilling - self.decoding, 0)
        return {"prefilling": self.prefilling, "decoding": self.decoding, "idle": idle}


class DraftSource(StrEnum):
    """Where a draft comes from."""

    HISTORY = "history"
    PREDICTION = "prediction"
    MTP = "mtp"
    DRAFT = "draft"
    """A smaller model."""
    GRAMMAR = "grammar"
    """Forced by a grammar, or by a limit on reasoning."""


@dataclass(frozen=True)
class DraftStats:
    """Counts of one engine since it began."""

    drafted: Mapping[DraftSource, int]
    accepted: Mapping[DraftSource, int]
    steps: int
    """Decode steps with a draft."""
    tokens: int
    """Tokens that these steps put out."""


class WaitReason(StrEnum):
    """What a request waits for."""

    BEGINNING = "beginning"
    """Another request evaluates tokens that both begin with."""
    ANSWER = "answer"
    """The request continues another one, whose answer it may hold."""
    SLOT = "slot"
    MEMORY = "memory"
    DISK = "disk"
    """The request's state is being read from disk, or a picture of the request is being decoded."""
    ORDER = "order"
    """Others go first."""


@dataclass(frozen=True)
class Wait:
    """Why a request waits; `other` has evaluated `evaluated` of the `total` tokens in common."""

    reason: WaitReason
    other: str | None = None
    evaluated: int = 0
    total: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts and bytes of one engine, as of its last step."""

    requests: RequestCounts = field(default_factory=RequestCounts)
    num_preempted: int = 0
    cache: CacheStats = field(default_factory=CacheStats)
    rows_form: str = ""
    """How several answers decode, for a person."""
    drafts: DraftStats | None = None
    drafts_form: str = ""
    """Whether answers are drafted, and why not, for a person."""
    num_open: int = 0
    """Requests that have not ended, also those unseen by the worker."""
    num_encoded: int = 0
    """Pictures for which the vision tower was evaluated."""
    waits: Mapping[str, Wait] = field(default_factory=dict)
    """By the ids of waiting requests."""
    num_stuck: int = 0
    """Steps that were taken for hangs."""
