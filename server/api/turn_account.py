"""Follows one request as a turn of its conversation: what it goes on from, and what the next one goes on from.

Used on the event loop. Knows no dialect, no clock and no engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from server.api.dialect import Exchange
from server.diagnosis.account import Conversations, EvaluatedTurn, Name, Rendered, declined, explain
from server.diagnosis.compare import Turn
from server.diagnosis.prompt import PLAIN, Part, part_of
from server.engine.diagnosis import Reuse
from server.engine.request import Started


class TurnAccount:
    """One request and the conversation that it belongs to."""

    def __init__(self, conversations: Conversations, exchange: Exchange) -> None:
        self._conversations = conversations
        self._exchange = exchange
        self.name: Name | None = None
        """The conversation; None until the request holds a slot, and for an unnamed request without a turn."""
        self.previous_id: str | None = None
        """The request that it was compared with; None without one."""
        self._is_recorded = False

    async def explained(self, started: Started) -> Started:
        """Returns the event with the reasons for what was not reused. Long texts are compared on another thread."""
        request = self._exchange.request
        rendered = Rendered(self._exchange.asked, request.tokens, request.outline)
        if request.is_prime:
            self.name = Name(request.namespace, request.session_id) if request.session_id is not None else None
            return started
        self.name, previous = self._conversations.find(request.session_id, rendered, request.request_id)
        self.previous_id = previous.request_id if previous is not None else None
        if not request.cache_prompt:
            return _with_reuse(started, declined(previous, rendered))
        match, hit = started.match_tokens, started.hit_tokens
        if previous is None or hit >= min(len(previous.tokens), len(request.tokens) - 1):
            return _with_reuse(started, explain(previous, rendered, match=match, hit=hit))
        reuse = await asyncio.to_thread(explain, previous, rendered, match=match, hit=hit)
        return _with_reuse(started, reuse)

    def record(self, num_evaluated: int, reply_ids: Sequence[int], reply: str | None) -> None:
        """Keeps the turn, once: `num_evaluated` tokens of its prompt, then `reply_ids`.

        `reply` is the text of a complete answer, None where it was broken off.
        """
        request = self._exchange.request
        if self._is_recorded or self.name is None or request.is_prime or not request.cache_prompt:
            return
        self._is_recorded = True
        tokens = request.tokens[:num_evaluated]
        if num_evaluated == len(request.tokens):
            tokens = np.concatenate([tokens, np.array(reply_ids, np.int32)])
        turn = Turn(self._exchange.asked, None if reply is None else self._reply_part(reply))
        evaluated = EvaluatedTurn(turn, tokens, len(request.tokens), request_id=request.request_id)
        self._conversations.record(self.name, evaluated)

    def _reply_part(self, text: str) -> Part:
        messages = self._exchange.reply_messages()
        return part_of(messages[0]) if messages else Part(PLAIN, text)


def _with_reuse(started: Started, reuse: Reuse) -> Started:
    """Returns the event with its reuse explained, unless the engine has said why itself."""
    return started if started.reuse.miss is not None else replace(started, reuse=reuse)
