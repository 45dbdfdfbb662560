"""The events of a request, in order: Started, Progress*, Delta*, then Finished or Failed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from models.output.pieces import TokenLogprob
from server.engine.diagnosis import Reuse


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Timings:
    """Token counts and milliseconds of one request; `cache_tokens + evaluated_tokens` = prompt tokens."""

    cache_tokens: int
    """Prompt tokens restored, hence really not evaluated."""
    evaluated_tokens: int
    prompt_ms: float
    predicted_tokens: int
    predicted_ms: float


@dataclass(frozen=True)
class Started:
    """The request holds a slot; its prefix is restored and prefill begins."""

    slot: int
    prompt_tokens: int
    reuse: Reuse
    """What the cache knew and gave; who asked it adds why not more."""
    restore_ms: float = 0.0
    """Time it took to make the restored part live."""
    tier: str | None = None
    """Where the restored part came from: `live`, `memory`; None if there is none."""

    @property
    def match_tokens(self) -> int:
        """Prompt tokens that the cache knew."""
        return self.reuse.match_tokens

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens restored, hence not evaluated."""
        return self.reuse.hit_tokens


@dataclass(frozen=True)
class Progress:
    """`evaluated` of `total` prompt tokens are in the caches (restored ones included)."""

    evaluated: int
    total: int


@dataclass(frozen=True)
class Delta:
    """New text, never empty as an event; `token_ids` are the tokens that completed it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of these tokens, where the request asks for them."""


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ended well (a cancel included)."""

    reason: FinishReason
    prompt_tokens: int
    timings: Timings
    stop_text: str | None = None
    """The stop string that ended it, if one did."""
    started: Started | None = None
    """How it began; None if it was cancelled before that."""
    reasoning_tokens: int | None = None
    """Output tokens that are thought, without its markers; None where thoughts are not told apart."""
    token_ids: tuple[int, ...] = ()
    """The tokens of all deltas, added by who follows the answer."""
    stop_token: int | None = None
    """The token that ended it, if one did: an end of turn, or one that the request names."""
    rest: Delta = Delta("", ())
    """The tokens behind those of the last delta, which completed no text: an end of turn, a stop string."""
    scored: tuple[TokenLogprob, ...] = ()
    """Of all tokens of prompt and output but the first, where the request asks for those of its prompt."""


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be served; `error` is one of `server.engine.errors`."""

    error: Exception


Event: TypeAlias = Started | Progress | Delta | Finished | Failed
