"""Seeded conversations that look like a coding agent's: the same shapes as recorded ones, without the records.

The distributions were fitted to 49 000 requests of 710 recorded conversations: lognormal growth per request,
lognormal replies and gaps, prompts that start with a harness that all share, now and then a rewind of the last
message, and a compaction: the history is replaced by a summary.
"""

import math
from dataclasses import dataclass

import numpy as np

from cache.types import TokenArray
from scripts.replay.conversations import BLOCK_TOKENS, Conversation, Turn

HARNESS_TOKENS = 15_000
MAX_PROMPT_TOKENS = 170_000
"""Where an agent compacts whatever the draw says."""

_GROWTH = (6.63, 1.13)
_OUTPUT = (5.56, 0.90)
_GAP_AFTER_TOOL = (2.48, 1.20)
_GAP_AFTER_PERSON = (4.95, 1.87)
_COMPACTION_SHARE = 0.0045
_REWIND_SHARE = 0.0086
_PERSON_SHARE = 1 / 8.8
_Z90 = 1.2816
"""Standard deviations between the median and the 90th percentile of a normal distribution."""


Range = tuple[float, float, float]
"""10th percentile, median, 90th percentile."""


@dataclass(frozen=True)
class AgentShape:
    """How one kind of agent talks."""

    head_tokens: int
    """Tools and system prompt."""
    start: Range
    """Tokens of the first prompt."""
    requests: Range
    max_prompt_tokens: int


RECORDED = AgentShape(HARNESS_TOKENS, (13_600, 19_200, 30_900), (7, 46, 160), MAX_PROMPT_TOKENS)


def generate(num_conversations: int, seed: int) -> list[Conversation]:
    """Returns conversations of a seed; the same ones for the same arguments."""
    return [
        write(np.random.default_rng([seed, number]), f"generated_{number:04}", RECORDED)
        for number in range(num_conversations)
    ]


def write(rng: np.random.Generator, name: str, shape: AgentShape) -> Conversation:
    """Returns a conversation of one kind of agent."""
    return _Writer(rng, name, shape).write()


class _Writer:
    """Writes one conversation, request by request."""

    def __init__(self, rng: np.random.Generator, name: str, shape: AgentShape) -> None:
        self._rng = rng
        self._name = name
        self._shape = shape
        start = int(self._between(*shape.start))
        self._head_tokens = min(shape.head_tokens, start - BLOCK_TOKENS)
        self._num_prompt = start
        self._next_block = start // BLOCK_TOKENS
        self._blocks: TokenArray = np.arange(self._next_block, dtype=np.int32)

    def write(self) -> Conversation:
        """Returns the whole conversation."""
        turns, seconds = list[Turn](), 0.0
        for _ in range(max(1, int(self._between(*self._shape.requests)))):
            is_person = self._rng.random() < _PERSON_SHARE
            stop = "end_turn" if is_person else "tool_use"
            turns.append(Turn(seconds, self._num_prompt, max(1, int(self._draw(_OUTPUT))), self._blocks, stop))
            seconds += self._draw(_GAP_AFTER_PERSON if is_person else _GAP_AFTER_TOOL)
            self._go_on()
        return Conversation(self._name, self._head_tokens, turns)

    def _go_on(self) -> None:
        """Makes the prompt the next one's."""
        chance = self._rng.random()
        if chance < _COMPACTION_SHARE or self._num_prompt > self._shape.max_prompt_tokens:
            summary = int(self._rng.uniform(0.1, 0.5) * self._num_prompt)
            self._grow_from(self._head_tokens, max(summary, BLOCK_TOKENS))
        elif chance < _COMPACTION_SHARE + _REWIND_SHARE:
            kept = self._num_prompt - int(self._rng.uniform(1, 1000))
            self._grow_from(max(kept, self._head_tokens), int(self._draw(_GROWTH)) + 1)
        else:
            self._grow_from(self._num_prompt, int(self._draw(_GROWTH)) + 1)

    def _grow_from(self, kept_tokens: int, num_new: int) -> None:
        self._num_prompt = kept_tokens + num_new
        num_kept = kept_tokens // BLOCK_TOKENS
        num_added = self._num_prompt // BLOCK_TOKENS - num_kept
        added = np.arange(self._next_block, self._next_block + num_added, dtype=np.int32)
        self._next_block += num_added
        self._blocks = np.concatenate([self._blocks[:num_kept], added])

    def _draw(self, parameters: tuple[float, float]) -> float:
        return float(self._rng.lognormal(*parameters))

    def _between(self, low: float, middle: float, high: float) -> float:
        """Draws from two half lognormals that meet at the median and have these 10th and 90th percentiles."""
        z = self._rng.standard_normal()
        width = math.log(high / middle) if z > 0 else math.log(middle / low)
        return middle * math.exp(z * width / _Z90)
