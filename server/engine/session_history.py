"""The last turns of each session: what the next prompt of that session is compared with. Pure.

A session may hold several conversations (an agent and its sub-agents share an id), so the last turn of each is kept,
and a prompt is compared with the one that it shares most with.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from cache.tokens import TokenArray, common_prefix_length
from models.prompt.outline import Outline

MAX_TURNS = 4
"""Turns kept per session: one for each conversation that shares its id."""
MAX_SESSIONS = 1024
MAX_BYTES = 64 << 20
"""Memory for the turns of all sessions: some 160 of 100 000 tokens."""
_TURN_BYTES = 1024
_MESSAGE_BYTES = 96
"""What Python takes for a message in an outline: its role and where it starts."""


@dataclass(frozen=True, eq=False)
class FinishedTurn:
    """Prompt and output of a finished request, and the outline of its prompt."""

    tokens: TokenArray
    """Those that were evaluated: fewer than the prompt has if the request was cancelled early."""
    num_prompt_tokens: int
    outline: Outline

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes."""
        return self.tokens.nbytes + _MESSAGE_BYTES * len(self.outline.starts) + _TURN_BYTES


class SessionHistory:
    """The last turns of each session, bounded in number and bytes; the least recently used go. Worker thread only."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, str], list[FinishedTurn]] = OrderedDict()
        self.num_bytes = 0

    def record(self, namespace: str, session_id: str, turn: FinishedTurn) -> None:
        """Keeps a turn in place of the one that it continues, unless a turn that begins with it is kept already."""
        turns = self._take(namespace, session_id)
        if not any(common_prefix_length(turn.tokens, one.tokens) == len(turn.tokens) for one in turns):
            continued = self.closest(turns, turn.tokens)
            kept = [one for one in turns if one is not continued or not _continues(turn, one)]
            turns = [*kept, _owned(turn)][-MAX_TURNS:]
        self._turns[namespace, session_id] = turns
        self.num_bytes += sum(one.num_bytes for one in turns)
        while len(self._turns) > MAX_SESSIONS or self.num_bytes > MAX_BYTES:
            self._drop_one()

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops the turns of a session; an unknown one has none."""
        self._take(namespace, session_id)

    def _take(self, namespace: str, session_id: str) -> list[FinishedTurn]:
        turns = self._turns.pop((namespace, session_id), [])
        self.num_bytes -= sum(turn.num_bytes for turn in turns)
        return turns

    def _drop_one(self) -> None:
        """Drops the least recently used session; if only one is left, its oldest turn."""
        key = next(iter(self._turns))
        turns = self._take(*key)
        if not self._turns and len(turns) > 1:
            self._turns[key] = turns[1:]
            self.num_bytes += sum(turn.num_bytes for turn in turns[1:])

    def last(self, namespace: str, session_id: str) -> TokenArray | None:
        """Returns the tokens of the turn that was recorded last."""
        turns = self._turns.get((namespace, session_id))
        return turns[-1].tokens if turns else None

    def previous(self, namespace: str, session_id: str, tokens: TokenArray) -> FinishedTurn | None:
        """Returns the turn that a prompt shares most with."""
        return self.closest(self._turns.get((namespace, session_id), []), tokens)

    @staticmethod
    def closest(turns: list[FinishedTurn], tokens: TokenArray) -> FinishedTurn | None:
        """Returns the turn with the longest common prefix, the newest among equals."""
        return max(reversed(turns), key=lambda turn: common_prefix_length(turn.tokens, tokens), default=None)


def _owned(turn: FinishedTurn) -> FinishedTurn:
    """Returns the turn with tokens of its own, if they are a view that would keep a longer array alive."""
    return turn if turn.tokens.base is None else replace(turn, tokens=turn.tokens.copy())


def _continues(turn: FinishedTurn, earlier: FinishedTurn) -> bool:
    """Whether `turn` is a later turn of the conversation of `earlier`, not another one with the same head."""
    shared = common_prefix_length(turn.tokens, earlier.tokens)
    return shared > max(earlier.outline.head_end, turn.outline.head_end)
