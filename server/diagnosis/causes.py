"""Why a prompt was not reused whole: the reasons and causes there are, and what to do about each. Pure."""

import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from models.texts import size_text


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
    """What was changed, or is missing, in words for people, with the reason that follows in any place."""

    reason: MissReason

    def __new__(cls, words: str, reason: MissReason = MissReason.MESSAGES_CHANGED) -> "Cause":
        """The value is the words. Most causes are changed messages."""
        member = str.__new__(cls, words)
        member._value_, member.reason = words, reason
        return member

    CLOCK = "date or time"
    COUNTER = "counter or percentage"
    NONCE = "nonce or id"
    ADDRESS = "address or port"
    EXAMPLES = "other examples"
    EARLY = "early difference"
    REORDERED = "other order"
    REFORMATTED = "other spacing"
    ENCODED = "other encoding"
    EDITED = "edited text"
    ROLE = "changed role"
    TOOLS = "other tools", MissReason.TOOLS_CHANGED
    COMPACTION = "compaction without tools", MissReason.TOOLS_CHANGED
    TRIMMED = "trimmed history", MissReason.HISTORY_TRIMMED
    SUMMARISED = "summarised history", MissReason.HISTORY_TRIMMED
    COMPACTED = "wholly summarised history", MissReason.HISTORY_TRIMMED
    REMOVED = "removed message", MissReason.HISTORY_TRIMMED
    MERGED = "merged messages"
    INSERTED = "inserted message"
    DUPLICATED = "message sent twice"
    FLATTENED = "history sent as one text"
    REPLY = "rewritten reply", MissReason.REPLY_CHANGED
    REPLY_LEFT_OUT = "reply left out", MissReason.REPLY_CHANGED
    THOUGHTS = "removed thoughts", MissReason.THOUGHTS_REMOVED
    CALL_IDS = "renamed call ids"
    TEMPLATE_ARGUMENTS = "other template arguments", MissReason.TEMPLATE_CHANGED
    NAMESPACE = "other key or salt", MissReason.NAMESPACE_CHANGED
    MODEL = "other model", MissReason.MODEL_CHANGED
    SIDE_REQUEST = "side request", MissReason.SIDE_REQUEST
    BRANCHED = "another way to go on", MissReason.BRANCHED
    FORKED = "fork of the session", MissReason.BRANCHED
    NOTE = "moving note", MissReason.NOTE_MOVED
    TEMPLATE = "the model's template", MissReason.TEMPLATE
    COLD = "first request", MissReason.COLD
    EVICTED = "evicted state", MissReason.EVICTED
    CLEARED = "cleared cache", MissReason.CLEARED
    UNLOADED = "unloaded model", MissReason.UNLOADED
    RESTARTED = "restarted server", MissReason.RESTARTED
    NOT_RESTORABLE = "no restore point", MissReason.NO_RESTORE_POINT
    DECLINED = "declined cache", MissReason.DISABLED
    LOGPROBS = "log-probabilities of the prompt", MissReason.DISABLED


UNTOLD = frozenset({Cause.BRANCHED, Cause.TEMPLATE, Cause.COLD, Cause.LOGPROBS})
"""Causes of which the doctor is silent."""
UNBLAMED = UNTOLD | {Cause.COMPACTED, Cause.FORKED}
"""Causes that nobody can mend."""


TOOLS = "tools"
"""Stands for a role where the place is the tools."""

_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
"""By cause and place; `any` has the sentence for all other places."""


def advice(cause: Cause, place: str | None, missing_bytes: int | None = None) -> str:
    """What to change; `place` is the role of the message, or `TOOLS`."""
    more = "more " if missing_bytes is None else f"about {size_text(missing_bytes)} more "
    by_place: dict[str, str] = _ADVICE[cause.name]
    return by_place.get(place or "", by_place["any"]).replace("{more}", more)


@dataclass(frozen=True)
class Miss:
    """One cause of lost tokens, its place, and what to do about it: as clients are told."""

    reason: MissReason
    cause: Cause = field(default=Cause.EDITED, kw_only=True)
    message_index: int | None = None
    """The message that changed first; of a removed message, where it stood."""
    role: str | None = None
    token: int | None = None
    """The first that differs or could not be restored."""
    before: str = ""
    """Whole words around the change."""
    after: str = ""
    lost_tokens: int = 0
    """0 for a change after another one."""
    missing_bytes: int | None = None
    """Memory that would have kept evicted state, if known."""
    cure: str = field(default="", init=False)

    def __post_init__(self) -> None:
        place = TOOLS if self.reason is MissReason.TOOLS_CHANGED else self.role
        object.__setattr__(self, "cure", advice(self.cause, place, self.missing_bytes))


class HealKind(StrEnum):
    """What may be shown otherwise than sent."""

    CALLS = "calls"
    GIT = "git"
    SYSTEM = "system"
    COMPACTION = "compaction"


OPT_IN = (HealKind.GIT, HealKind.SYSTEM, HealKind.COMPACTION)


class Heal(NamedTuple):
    """A message shown otherwise than sent."""

    kind: HealKind
    message_index: int
    num_after: int = 0
    """Characters of the message after the difference."""
    is_new: bool = False
    """Whether no earlier request was healed so; of calls the last turn tells."""


@dataclass(frozen=True)
class Healed:
    """The changes that the server made to a prompt before it showed it to the model."""

    kinds: tuple[HealKind, ...]
    saved_tokens: int
    """Restored, and else evaluated again: counted in the first request that is healed so."""


@dataclass(frozen=True)
class Reuse:
    """Why no more of a prompt was reused."""

    misses: tuple[Miss, ...] = ()
    """In the order of the prompt."""
    kept: float | None = None
    """Share of the previous turn that was reused, 0 to 1; None without one."""
    healed: Healed | None = None

    @property
    def miss(self) -> Miss | None:
        """The costliest."""
        return max(self.misses, key=lambda miss: miss.lost_tokens, default=None)

    @property
    def lost_tokens(self) -> int:
        return sum(miss.lost_tokens for miss in self.misses)


OF_SCORED = Reuse((Miss(MissReason.DISABLED, token=0, cause=Cause.LOGPROBS),))
"""The reuse of a request for log-probabilities of its prompt."""
