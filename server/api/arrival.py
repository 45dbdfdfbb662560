"""Where a request came from and when, and who is told of what becomes of it. Event loop only."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from server.api.answer_figures import AnswerFigures
from server.api.live.activity import Activity, OpenRequest
from server.api.session_records import TurnRecord
from server.diagnosis.account import Conversations, Name
from server.engine.request import GenerationRequest

OnTurn: TypeAlias = Callable[[Name, TurnRecord], int]
"""Takes the conversation and its turn; returns the number of the turn there, from 1."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """One HTTP request."""

    endpoint: str
    received: float
    """Reading of `time.monotonic()`."""
    activity: Activity
    on_turn: OnTurn
    """Called once for each request that got a slot, however it ended."""
    conversations: Conversations = field(default_factory=Conversations)
    """Those that it may go on from."""
    key_name: str | None = None
    """The name of its key, for the log."""
    trace_parent: str | None = None
    """The header that says which trace of the client it belongs to."""

    def begin(self, request: GenerationRequest, model_id: str, figures: AnswerFigures) -> OpenRequest:
        """Notes that a request of the engine was submitted for it."""
        opened = OpenRequest(
            request, model_id, self.endpoint, self.key_name, self.received, figures, self.activity.log
        )
        self.activity.begin(opened)
        return opened
