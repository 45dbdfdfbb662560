"""Seeded conversations that look like a coding agent's: the same shapes as recorded ones, without the records.

The distributions were fitted to 49 000 requests of 710 recorded conversations: lognormal growth per request,
lognormal replies and gaps, prompts that start with a harness that all share, now and then a rewind of the last
message, and a compaction: the history is replaced by a summary.
"""

import math

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
_START = (13_600, 19_200, 30_900)
_REQUESTS = (7, 46, 160)
_COMPACTION_SHARE = 0.0045
_REWIND_SHARE = 0.0086
_PERSON_SHARE = 1 / 8.8
_Z90 = 1.2816
"""Standard deviations between the median and the 90th percentile of a normal distribution."""


def generate(num_conversations: int, seed: int) -> list[Conversation]:
    """Returns conversations of a seed; the same ones for the same arguments."""
    return [_Writer(np.random.default_rng([seed, number]), number).write() for number in range(num_conversations)]


class _Writer:
    """Writes one conversation, request by request."""

    def __init__(self, rng: np.random.Generator, number: int) -> None:
        self._rng = rng
        self._name = f"generated_{number:04}"
        start = int(self._between(*_START))
        self._head_tokens = min(HARNESS_TOKENS, start - BLOCK_TOKENS)
        self._num_prompt = start
        self._next_block = start // BLOCK_TOKENS
        self._blocks: TokenArray = np.arange(self._next_block, dtype=np.int32)

    def write(self) -> Conversation:
        """Returns the whole conversation."""
        turns, seconds = list[Turn](), 0.0
        for _ in range(max(1, int(self._between(*_REQUESTS)))):
            is_person = self._rng.random() < _PERSON_SHARE
            stop = "end_turn" if is_person else "tool_use"
            turns.append(Turn(seconds, self._num_prompt, max(1, int(self._draw(_OUTPUT))), self._blocks, stop))
            seconds += self._draw(_GAP_AFTER_PERSON if is_person else _GAP_AFTER_TOOL)
            self._go_on()
        return Conversation(self._name, self._head_tokens, turns)

    def _go_on(self) -> None:
        """Makes the prompt the next one's."""
        chance = self._rng.random()
        if chance < _COMPACTION_SHARE or self._num_prompt > MAX_PROMPT_TOKENS:
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
