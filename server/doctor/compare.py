"""What recorded requests would evaluate again, by the same comparison that the server makes. Pure.

A character stands for a token here, and a cache that forgets nothing is assumed. Tokens are then estimated as
characters / 4.
"""

from collections.abc import Iterable

import numpy as np

from cache.types import TokenArray, common_prefix_length
from models.prompt.shapes import NO_OUTLINE
from server.diagnosis.account import Conversations, EvaluatedTurn, Name, Rendered, explain
from server.diagnosis.compare import Turn
from server.diagnosis.prompt import Part, Prompt
from server.doctor.findings import Checkup, LinkedTurn, Loss, in_hindsight, loss_of
from server.doctor.recorded import Recorded
from server.engine.diagnosis import Miss

CHARACTERS_PER_TOKEN = 4
MAX_BYTES = 1 << 30
"""Memory for the last turns of all conversations of a file."""


def checkups_of(requests: Iterable[Recorded], tokens_per_second: float | None = None) -> list[Checkup]:
    """Returns the losses of each conversation; with a speed of prefill, also in seconds."""
    visits: dict[Name, _Visit] = {}
    conversations = Conversations(MAX_BYTES)
    for number, request in enumerate(requests):
        rendered = Rendered(request.prompt, characters_of(request.prompt), NO_OUTLINE)
        name, previous = conversations.find(request.session_id, rendered, str(number))
        visits.setdefault(name, _Visit(tokens_per_second)).add(str(number), previous, rendered)
        turn = Turn(request.prompt, request.reply)
        tokens = characters_of(request.prompt, request.reply)
        conversations.record(name, EvaluatedTurn(turn, tokens, len(rendered.tokens), request_id=str(number)))
    return [visit.checkup(label) for label, visit in zip(_labels(visits), visits.values(), strict=True)]


def characters_of(prompt: Prompt, reply: Part | None = None) -> TokenArray:
    """Returns a prompt as one array of character numbers: template arguments, tools, messages."""
    parts = prompt.parts if reply is None else (*prompt.parts, reply)
    messages = (f"\0{part.role}\0{part.shown}{' '.join(part.call_ids)}" for part in parts)
    text = "".join([prompt.arguments, prompt.tools_text, *messages])
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def _labels(names: Iterable[Name]) -> list[str]:
    labels, num_unnamed = list[str](), 0
    for name in names:
        num_unnamed += not name.is_named
        labels.append(name.id if name.is_named else f"(unnamed {num_unnamed})")
    return labels


class _Visit:
    def __init__(self, tokens_per_second: float | None) -> None:
        self._speed = tokens_per_second
        self._turns: list[LinkedTurn] = []
        self._kept: list[float] = []

    def add(self, request_id: str, previous: EvaluatedTurn | None, request: Rendered) -> None:
        losses = self._losses(previous, request, len(self._turns) + 1) if previous is not None else ()
        previous_id = previous.request_id if previous is not None else None
        self._turns.append(LinkedTurn(request_id, previous_id, tuple(losses)))

    def _losses(self, previous: EvaluatedTurn, request: Rendered, number: int) -> list[Loss]:
        hit = 0
        if request.prompt.shares_state_with(previous.turn.prompt):
            hit = min(common_prefix_length(previous.tokens, request.tokens), len(request.tokens) - 1)
        reuse = explain(previous, request, match=hit, hit=hit)
        self._kept += [reuse.kept] if reuse.kept is not None else []
        return [loss for miss in reuse.misses if (loss := self._loss(miss, number)) is not None]

    def _loss(self, miss: Miss, number: int) -> Loss | None:
        tokens = miss.lost_tokens // CHARACTERS_PER_TOKEN
        seconds = tokens / self._speed if self._speed else None
        return loss_of(
            number,
            reason=miss.reason,
            cause=miss.cause,
            index=miss.message_index,
            role=miss.role,
            tokens=tokens,
            seconds=seconds,
            before=miss.before,
            after=miss.after,
            is_hidden=miss.lost_tokens == 0,
        )

    def checkup(self, label: str) -> Checkup:
        kept = sum(self._kept) / len(self._kept) if self._kept else None
        return Checkup(label, len(self._turns), kept, tuple(in_hindsight(self._turns)))
