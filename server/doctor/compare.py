"""What recorded requests would evaluate again, by the comparison that the server makes. Pure.

Assumes a cache that forgets nothing. A character stands for a token; tokens are then estimated as characters / 4.
"""

from collections.abc import Iterable

import numpy as np

from cache.types import TokenArray, common_prefix_length
from models.prompt.shapes import NO_OUTLINE
from server.diagnosis.account import Conversations, EvaluatedTurn, Name, Rendered, explain
from server.diagnosis.compare import Turn
from server.diagnosis.prompt import Part, Prompt
from server.doctor.findings import Checkup, LinkedTurn, checkup_from, losses_of
from server.doctor.recorded import Recorded

CHARACTERS_PER_TOKEN = 4
MAX_BYTES = 1 << 30
"""For the last turns of all conversations."""


def checkups_of(requests: Iterable[Recorded], tokens_per_second: float | None = None) -> list[Checkup]:
    """Returns each conversation's losses; with a speed of prefill, also in seconds."""
    seconds_per_token = 1 / tokens_per_second if tokens_per_second else None
    visits: dict[Name, list[LinkedTurn]] = {}
    conversations = Conversations(MAX_BYTES)
    for number, request in enumerate(requests):
        rendered = Rendered(request.prompt, characters_of(request.prompt), NO_OUTLINE)
        name, previous = conversations.find(request.session_id, rendered, str(number))
        turns = visits.setdefault(name, [])
        hit = _restorable(previous, rendered)
        reuse = explain(previous, rendered, match=hit, hit=hit)
        losses = losses_of(len(turns) + 1, reuse.misses, lambda lost: lost // CHARACTERS_PER_TOKEN, seconds_per_token)
        previous_id = previous.request_id if previous is not None else None
        turns.append(LinkedTurn(str(number), previous_id, losses, reuse.kept))
        turn, tokens = Turn(request.prompt, request.reply), characters_of(request.prompt, request.reply)
        conversations.record(name, EvaluatedTurn(turn, tokens, len(rendered.tokens), request_id=str(number)))
    return [checkup_from(label, turns) for label, turns in zip(_labels(visits), visits.values(), strict=True)]


def _restorable(previous: EvaluatedTurn | None, request: Rendered) -> int:
    if previous is None or not request.prompt.shares_state_with(previous.turn.prompt):
        return 0
    return min(common_prefix_length(previous.tokens, request.tokens), len(request.tokens) - 1)


def characters_of(prompt: Prompt, reply: Part | None = None) -> TokenArray:
    """Returns a prompt's characters as numbers: template arguments, tools, messages."""
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
