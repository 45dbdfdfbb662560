"""What a client asked for, once its dialect and text are behind it. Immutable."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.snapshots import RestorePoint
from models.adapter import NO_ADAPTER, Adapter, state_namespace
from models.inference.sampling_params import SamplingParams
from models.output.grammar import OutputGrammar
from models.output.reasoning import Thinking
from models.output.tool_calls import CallMarkers
from models.prompt.shapes import NO_OUTLINE, Outline

TokenArray: TypeAlias = NDArray[np.int32]


class Priority(IntEnum):
    """Scheduling class; lower runs first."""

    INTERACTIVE = 0
    BACKGROUND = 1


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt to continue. Every field is already valid: the engine does not check parameters again."""

    request_id: str
    tokens: TokenArray
    """The prompt, shape [num_tokens], int32, at least one token, read-only by agreement."""
    max_tokens: int
    """0 only evaluates the prompt, all of it, and keeps a restore point at its end."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its `min_tokens` also holds back stop strings; its `end_token_ids` are filled in by the engine."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched on decoded text; none is empty."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output, besides the model's ends of turn, even where those are ignored."""
    keeps_stop: bool = False
    """Whether the stop string or stop token that ends the output is part of it."""
    session_id: str | None = None
    """A hint for slot affinity and order, never a key to other tokens."""
    namespace: str = ""
    """The client's own: state is shared only between requests of one namespace and one adapter."""
    adapter: Adapter | None = None
    """What the model is evaluated with."""
    prompt_logprobs: int | None = None
    """How many likely tokens are told with each token of the prompt, at `Finished`; None where nothing is.

    It needs every token evaluated, so that `cache_prompt` is false where this is asked for.
    """
    cache_prompt: bool = True
    """False: neither reuse nor keep state."""
    is_volatile: bool = False
    """The state of this request is never written to disk."""
    priority: Priority = Priority.INTERACTIVE
    restore_points: tuple[RestorePoint, ...] = ()
    outline: Outline = NO_OUTLINE
    """How the prompt is made up, to explain what of it could not be reused."""
    is_idle_work: bool = False
    """Nobody waits for it: it is not counted among the open requests, and any other request ends it."""
    ignore_eos: bool = False
    """Generate `max_tokens` whatever is sampled (benchmarks)."""
    thinking: Thinking | None = None
    """How thoughts are marked, and their limit; None where the output holds none that could be told apart."""
    single_call: CallMarkers | None = None
    """What stands around a tool call, where the output ends with the first; None where it does not."""
    grammar: OutputGrammar | None = None
    """What the answer is bound to, its thought left aside; None where any answer is right."""

    @property
    def state_namespace(self) -> str:
        """The name under which its states are kept, in memory and on disk."""
        return state_namespace(self.namespace, self.adapter)

    @property
    def adapter_index(self) -> int:
        """Its adapter as the runner knows it."""
        return NO_ADAPTER if self.adapter is None else self.adapter.index

    @property
    def is_prime(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0
