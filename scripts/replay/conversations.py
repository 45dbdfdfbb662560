"""Conversations to replay: recorded ones, and the tokens that stand for their text.

A recorded conversation knows no text, only numbers of 64-token blocks that are equal where the prompts are. Each
block becomes 64 token ids of its own, so that two prompts share exactly the tokens that the recorded ones shared.
What a block number cannot say is decided once, here: the last, partial block of a prompt is the start of the next
prompt's block wherever that prompt extends this one; the reply is what the next prompt holds in its place if there
is space for all of it, and otherwise (a template dropped or re-rendered some of it) tokens that never come back.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.types import TokenArray, common_prefix_length

BLOCK_TOKENS = 64
MAX_COMMON_BLOCKS = 200
"""Blocks of the agent's own head that all conversations are taken to have in common."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One recorded request: when, how long, and the numbers of the full blocks of its prompt."""

    seconds: float
    """Since the conversation's first request."""
    num_prompt: int
    num_output: int
    blocks: TokenArray
    stop: str
    """Why the reply ended; empty where the record does not say."""

    def extends(self, earlier: "Turn") -> bool:
        """Whether this prompt begins with all that is known of an earlier one, and is longer."""
        return self.num_prompt > earlier.num_prompt and common_prefix_length(self.blocks, earlier.blocks) == len(
            earlier.blocks
        )


@dataclass(frozen=True, eq=False)
class Conversation:
    """Requests in order. `head_tokens` is the length of tools and system prompt of the first of them."""

    name: str
    head_tokens: int
    turns: Sequence[Turn]


class TraceError(Exception):
    """A trace file does not hold what a trace holds; the message names the file."""


def read_conversations(folder: Path, limit: int | None = None) -> list[Conversation]:
    """Returns the conversations of a folder's `*.json` and `*.json.gz` files in the order of their names.

    Raises TraceError for a file that is none, and for a folder without any.
    """
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if not paths:
        raise TraceError(f"no traces (*.json, *.json.gz) in {folder}")
    return [_read(path) for path in paths[:limit]]


def _read(path: Path) -> Conversation:
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        turns = [_turn(fields) for fields in content["requests"]]
        head = int(content["tool_tokens"]) + int(content["system_tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a trace: {type(error).__name__}: {error}") from error
    return Conversation(path.name.removesuffix(".gz").removesuffix(".json"), head, turns)


def _turn(fields: dict[str, Any]) -> Turn:
    num_prompt = int(fields["in"])
    blocks = np.array(fields["hash_ids"][: num_prompt // BLOCK_TOKENS], np.int32)
    return Turn(float(fields["t"]), num_prompt, int(fields.get("out") or 0), blocks, fields.get("stop") or "")


# ------------------------------------------------------------------------------------------------------ tokens


class BlockNumbers:
    """Hands out numbers of blocks; a block's tokens follow from its number. The first are common to all."""

    def __init__(self) -> None:
        self._next = MAX_COMMON_BLOCKS

    def take(self, num_blocks: int) -> TokenArray:
        """Returns numbers that nobody else has."""
        self._next += num_blocks
        return np.arange(self._next - num_blocks, self._next, dtype=np.int32)

    def unique_tokens(self, num_tokens: int) -> TokenArray:
        """Returns tokens that occur nowhere else."""
        return tokens_of(self.take(-(-num_tokens // BLOCK_TOKENS)))[:num_tokens]


def tokens_of(numbers: TokenArray) -> TokenArray:
    """Returns the token ids of blocks, 64 for each."""
    first: TokenArray = numbers * np.int32(BLOCK_TOKENS)
    return np.add.outer(first, np.arange(BLOCK_TOKENS, dtype=np.int32)).reshape(-1)


class Script:
    """What one conversation sends and is answered, in tokens. Made when asked for, since all of it is large."""

    def __init__(self, conversation: Conversation, numbers: BlockNumbers) -> None:
        self.conversation = conversation
        self._numbers = numbers
        self._blocks = self._renumbered(conversation, numbers)
        self._extend_by_tails(conversation.turns)

    def prompt(self, index: int) -> TokenArray:
        """Returns the prompt tokens of one request."""
        return tokens_of(self._blocks[index])[: self.conversation.turns[index].num_prompt]

    def output(self, index: int) -> TokenArray:
        """Returns the tokens of the reply to one request."""
        turn = self.conversation.turns[index]
        if self.is_replayed(index):
            stop = turn.num_prompt + turn.num_output
            first = turn.num_prompt // BLOCK_TOKENS
            tail = tokens_of(self._blocks[index + 1][first : -(-stop // BLOCK_TOKENS)])
            return tail[turn.num_prompt - first * BLOCK_TOKENS :][: turn.num_output]
        return self._numbers.unique_tokens(turn.num_output)

    def is_extension(self, index: int) -> bool:
        """Whether a request goes on exactly where the prompt before it ended."""
        turns = self.conversation.turns
        return index > 0 and turns[index].extends(turns[index - 1])

    def is_replayed(self, index: int) -> bool:
        """Whether the next prompt holds the whole reply to this one, and more."""
        turns = self.conversation.turns
        return (
            index + 1 < len(turns)
            and self.is_extension(index + 1)
            and turns[index + 1].num_prompt > turns[index].num_prompt + turns[index].num_output
        )

    def common_tokens(self, index: int) -> int:
        """Returns how many leading tokens a prompt shares with the one before it."""
        if index == 0:
            return 0
        return common_prefix_length(self.prompt(index), self.prompt(index - 1))

    @staticmethod
    def _renumbered(conversation: Conversation, numbers: BlockNumbers) -> list[TokenArray]:
        """Returns each prompt's full blocks in numbers that are unique among all conversations."""
        turns = conversation.turns
        top = max((int(turn.blocks.max()) for turn in turns if len(turn.blocks)), default=-1) + 1
        table = numbers.take(top)
        if turns:
            num_common = min(MAX_COMMON_BLOCKS, conversation.head_tokens // BLOCK_TOKENS, len(turns[0].blocks))
            table[turns[0].blocks[:num_common]] = np.arange(num_common, dtype=np.int32)
        return [table[turn.blocks] for turn in turns]

    def _extend_by_tails(self, turns: Sequence[Turn]) -> None:
        """Gives each prompt a number for its last, partial block: the next prompt's, where that one goes on."""
        for index in reversed(range(len(turns))):
            num_full = len(self._blocks[index])
            if num_full * BLOCK_TOKENS >= turns[index].num_prompt:
                continue
            if self.is_extension(index + 1) if index + 1 < len(turns) else False:
                tail = self._blocks[index + 1][num_full : num_full + 1]
            else:
                tail = self._numbers.take(1)
            self._blocks[index] = np.concatenate([self._blocks[index], tail])


def scripts_of(conversations: Sequence[Conversation], numbers: BlockNumbers) -> Iterator[Script]:
    """Yields the script of each conversation."""
    for conversation in conversations:
        yield Script(conversation, numbers)
