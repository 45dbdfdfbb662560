"""Why a prompt was not reused whole. `server.diagnosis` finds causes."""

from dataclasses import dataclass
from enum import StrEnum


class MissReason(StrEnum):
    """What kept a prompt from being reused."""

    COLD = "cold"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    MESSAGES_CHANGED = "messages_changed"
    HISTORY_TRIMMED = "history_trimmed"
    REPLY_CHANGED = "reply_changed"
    THOUGHTS_REMOVED = "thoughts_removed"
    TEMPLATE_CHANGED = "template_changed"
    NAMESPACE_CHANGED = "namespace_changed"
    MODEL_CHANGED = "model_changed"
    SIDE_REQUEST = "side_request"
    BRANCHED = "branched"
    NOTE_MOVED = "note_moved"
    TEMPLATE = "template"
    NO_RESTORE_POINT = "no_restore_point"
    EVICTED = "evicted"
    CLEARED = "cleared"
    UNLOADED = "model_unloaded"
    RESTARTED = "restarted"
    DISABLED = "disabled"


class Cause(StrEnum):
    """What was changed, or is missing, in words for people."""

    CLOCK = "date or time"
    COUNTER = "counter or percentage"
    NONCE = "nonce or id"
    EARLY = "early difference"
    REORDERED = "other order"
    REFORMATTED = "other spacing"
    ENCODED = "other encoding"
    EDITED = "edited text"
    ROLE = "changed role"
    TOOLS = "other tools"
    TRIMMED = "trimmed history"
    SUMMARISED = "summarised history"
    COMPACTED = "wholly summarised history"
    REMOVED = "removed message"
    MERGED = "merged messages"
    INSERTED = "inserted message"
    REPLY = "rewritten reply"
    REPLY_LEFT_OUT = "reply left out"
    THOUGHTS = "removed thoughts"
    CALL_IDS = "renamed call ids"
    TEMPLATE_ARGUMENTS = "other template arguments"
    NAMESPACE = "other key or salt"
    MODEL = "other model"
    SIDE_REQUEST = "side request"
    BRANCHED = "another way to go on"
    NOTE = "moving note"
    TEMPLATE = "the model's template"
    COLD = "first request"
    EVICTED = "evicted state"
    CLEARED = "cleared cache"
    UNLOADED = "unloaded model"
    RESTARTED = "restarted server"
    NOT_RESTORABLE = "no restore point"
    DECLINED = "declined cache"
    LOGPROBS = "log-probabilities of the prompt"


UNTOLD = frozenset({Cause.BRANCHED, Cause.TEMPLATE, Cause.COLD, Cause.LOGPROBS})
"""Causes of which the doctor is silent."""
UNBLAMED = UNTOLD | {Cause.COMPACTED}
"""Causes that nobody can mend."""


@dataclass(frozen=True)
class Miss:
    """One cause of lost tokens, and its place."""

    reason: MissReason
    message_index: int | None = None
    """Of a removed message, where it stood."""
    role: str | None = None
    token: int | None = None
    """The first that differs or could not be restored."""
    before: str = ""
    """Whole words around the change."""
    after: str = ""
    cause: Cause = Cause.EDITED
    lost_tokens: int = 0
    """0 for a change behind another one."""
    missing_bytes: int | None = None
    """Memory that would have kept evicted state, if known."""


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt was reused, and why not more."""

    match_tokens: int
    hit_tokens: int
    kept: float | None = None
    """Share of the previous turn, 0 to 1; None without one."""
    miss: Miss | None = None
    """The costliest."""
    lost_tokens: int = 0
    misses: tuple[Miss, ...] = ()
    """In the order of the prompt."""
