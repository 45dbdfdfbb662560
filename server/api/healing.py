"""Prompts shown otherwise than sent, so that state is reused: what is always done, and what `--heal` asks for.

Always, without changing what the model reads: constant headers, tools and calls as they were shown before. By model,
with `--heal`, since the model reads something else:
* `git`: a system message that differs in a few lines from an earlier one is shown as that, and a note before the
  newest message, kept where it stood, has the lines, if fewer tokens are new so;
* `system`: a long system message right after the first message of the user goes before that;
* `compaction`: a request without tools that goes on with a conversation that had tools is shown with them, and may
  not call them. A client that says that it compacts needs no `--heal` for that.

For any thread.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

from cache.types import common_prefix_length
from models.errors import PromptTooLong
from models.prompt.chat_template import ChatTemplateError, plain_text
from models.prompt.shapes import Message, ToolOrders, num_leading_system, with_constant_headers
from models.texts import shared_length
from server.api.conversation import Conversation
from server.api.own_calls import FILE_NAME, OwnCalls
from server.app.config import ServerConfig, parse_heal
from server.diagnosis.causes import Heal, HealKind

MAX_HEADS: Final = 128
"""Conversations whose beginnings are remembered."""
MAX_BASES: Final = 8
"""Other conversations whose system message a new one may be shown with."""
MAX_CHANGED_CHARACTERS: Final = 8192
MAX_COMPARED_LINES: Final = 1000
MAX_NOTES: Final = 16
"""Most notes of one conversation; with more, its system message is shown as sent."""
MIN_SYSTEM_CHARACTERS: Final = 1000
"""A shorter system message after the user's first one stays there."""
_CHANGED: Final = (
    "The instructions at the beginning have changed. In place of these lines:\n{}\nthey now have these:\n{}"
)
_UNCHANGED: Final = "The instructions at the beginning are as they stand there again."


def changed_lines(base: str, text: str) -> tuple[int, str] | None:
    """Where two texts part, and a note with the lines that differ; None if much differs."""
    ours, theirs = base.splitlines(), text.splitlines()
    start = shared_length(ours, theirs)
    end = shared_length(ours[start:][::-1], theirs[start:][::-1])
    ours, theirs = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if len(ours) + len(theirs) > MAX_COMPARED_LINES:
        return None
    changes = [one for one in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes() if one[0] != "equal"]
    removed = [line for _, i1, i2, _, _ in changes for line in ours[i1:i2]]
    added = [line for _, _, _, j1, j2 in changes for line in theirs[j1:j2]]
    size = sum(map(len, (*removed, *added)))
    if size > min(MAX_CHANGED_CHARACTERS, max(len(base), len(text)) // 2):
        return None
    old, new = ("\n".join(lines) or "(none)" for lines in (removed, added))
    return shared_length(base, text), _CHANGED.format(old, new) if changes else _UNCHANGED


def system_in_front(messages: Sequence[Message]) -> tuple[list[Message], list[Heal]]:
    """With long system messages after the user's first message before that."""
    start = num_leading_system(messages)
    stop = start + 1 + num_leading_system(messages[start + 1 :])
    after = messages[start + 1 : stop]
    size = sum(len(plain_text(one.get("content"))) for one in after)
    if size < MIN_SYSTEM_CHARACTERS:
        return list(messages), []
    moved = [*messages[:start], *after, *messages[start : start + 1], *messages[stop:]]
    return moved, [Heal(HealKind.SYSTEM, start + len(after) - 1, size, not has_replies(messages))]


@dataclass(frozen=True)
class Head:
    """How a conversation began."""

    system: Sequence[Message]
    text: str
    """The text of `system`, as shown."""
    sent: str
    """The text as sent last."""
    notes: tuple[tuple[int, str], ...] = ()
    """Before which messages notes stand."""
    tools: Sequence[Mapping[str, Any]] = ()
    changed_tools: Sequence[Mapping[str, Any]] | None = None


class HealedModel(Protocol):
    """What decides how a model's prompts are shown."""

    @property
    def id(self) -> str:
        """Which `--heal` names."""

    @property
    def can_forbid_calls(self) -> bool:
        """Whether answers can be bound to be no calls."""


class Heads:
    """The beginnings of conversations, by namespace, model and the user's first message."""

    def __init__(self) -> None:
        self._heads = OrderedDict[tuple[str, str, bytes], Head]()
        self._lock = Lock()

    def forget(self, namespace: str) -> None:
        """Drops a namespace's."""
        with self._lock:
            for key in [key for key in self._heads if key[0] == namespace]:
                del self._heads[key]

    def healed(self, asked: Conversation, model: HealedModel, kinds: frozenset[str]) -> Conversation:
        """The conversation with the beginning of earlier requests, where `kinds` allow it."""
        if HealKind.SYSTEM in kinds:
            messages, heals = system_in_front(asked.messages)
            asked = replace(asked, messages=messages, heals=heals)
        num_system = num_leading_system(asked.messages)
        first = "".join(plain_text(one.get("content")) for one in asked.messages[num_system : num_system + 1])
        key = (asked.namespace, model.id, hashlib.blake2b(first.encode(errors="replace")).digest())
        with self._lock:
            head = self._heads.get(key)
            asked = self._with_tools(asked, model, kinds, head)
            head, asked = self._with_base(asked, key, head) if HealKind.GIT in kinds else _as_sent(asked)
            if asked.tools:
                head = replace(head, tools=asked.tools, changed_tools=asked.changed_tools)
            self._heads[key] = head
            self._heads.move_to_end(key)
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return asked

    def _with_tools(
        self, asked: Conversation, model: HealedModel, kinds: frozenset[str], head: Head | None
    ) -> Conversation:
        """With the conversation's tools, not to be called, if it is compacted without them."""
        is_compaction = asked.is_compaction or (HealKind.COMPACTION in kinds and has_replies(asked.messages))
        if asked.declared_tools or not is_compaction or head is None or head.sent != _system_text(asked.messages):
            return asked
        if not (head.tools and model.can_forbid_calls):
            return asked
        asked = replace(asked, tools=head.tools, changed_tools=head.changed_tools, forbids_calls=True)
        return replace(asked, heals=[*asked.heals, Heal(HealKind.COMPACTION, 0, is_new=True)])

    def _with_base(
        self, asked: Conversation, key: tuple[str, str, bytes], head: Head | None
    ) -> tuple[Head, Conversation]:
        """With the system message of the conversation's first request, else of a similar conversation."""
        messages, text = asked.messages, _system_text(asked.messages)
        base = head or self._similar(key, text)
        change = changed_lines(base.text, text) if base is not None and base.system else None
        if base is None or change is None:
            return _as_sent(asked)
        if not has_replies(messages):  # it begins
            base = replace(base, notes=(), sent=base.text)
        newest = (_newest(messages), change[1])
        notes = base.notes if text == base.sent else (*base.notes, newest)
        if len(notes) > MAX_NOTES or any(place > len(messages) for place, _ in notes):
            return _as_sent(asked)
        if notes:
            is_new = text != base.sent
            heal = Heal(HealKind.GIT, len(base.system) - 1, len(base.text) - change[0], is_new)
            shown = replace(asked, messages=_with_notes(base, messages, notes), heals=[*asked.heals, heal])
            before = replace(asked, messages=_with_notes(base, messages, base.notes))
            if is_new and not _is_cheaper(shown, asked, before):
                return _as_sent(asked)
            asked = shown
        return replace(base, sent=text, notes=notes), asked

    def _similar(self, key: tuple[str, str, bytes], text: str) -> Head | None:
        """The beginning of a latest conversation whose system message differs in a few lines."""
        others = [one for place, one in self._heads.items() if place[:2] == key[:2]][-MAX_BASES:]
        similar = next((one for one in reversed(others) if changed_lines(one.text, text)), None)
        return None if similar is None else Head(similar.system, similar.text, similar.text)


def _is_cheaper(shown: Conversation, sent: Conversation, before: Conversation) -> bool:
    """Whether fewer tokens of `shown` than of `sent` follow those that each begins with like `before`."""
    try:
        known, healed = before.render().tokens, shown.render().tokens
    except (ChatTemplateError, PromptTooLong):
        return False
    plain = sent.render().tokens
    num_shared, num_shared_plain = common_prefix_length(healed, known), common_prefix_length(plain, known)
    return len(healed) - num_shared < len(plain) - num_shared_plain


def _as_sent(asked: Conversation) -> tuple[Head, Conversation]:
    text = _system_text(asked.messages)
    return Head(asked.messages[: num_leading_system(asked.messages)], text, text), asked


def _system_text(messages: Sequence[Message]) -> str:
    return "\n".join(plain_text(one.get("content")) for one in messages[: num_leading_system(messages)])


def has_replies(messages: Sequence[Message]) -> bool:
    """Whether the assistant has said something."""
    return any(message["role"] == "assistant" for message in messages)


def _newest(messages: Sequence[Message]) -> int:
    """Where the user's newest messages begin; the end after a tool's result."""
    place = len(messages)
    while place and messages[place - 1]["role"] == "user":
        place -= 1
    return place


def _with_notes(base: Head, messages: Sequence[Message], notes: Sequence[tuple[int, str]]) -> list[Message]:
    start, shown = num_leading_system(messages), list(messages)
    for place, note in sorted(notes, key=lambda one: one[0])[::-1]:
        shown.insert(place, {"role": "system", "content": [{"text": note}]})
    # Later conversations part there.
    last = {**base.system[-1], "cache_control": {"type": "ephemeral"}}
    return [*base.system[:-1], last, *shown[start:]]


class Healing:
    """What a server remembers, to show prompts as before."""

    def __init__(self, config: ServerConfig) -> None:
        has_file = config.cache_disk_bytes is not None
        self.calls = OwnCalls(Path(config.cache_dir).expanduser() / FILE_NAME if has_file else None)
        self._heads, self._orders, self._kinds = Heads(), ToolOrders(), [*map(parse_heal, config.heals)]

    def healed(self, asked: Conversation, model: HealedModel) -> Conversation:
        """The conversation as earlier requests showed it."""
        settle = partial(self._orders.settle, asked.namespace)
        asked = replace(
            asked,
            messages=with_constant_headers(asked.messages),
            tools=settle(asked.tools),
            changed_tools=asked.changed_tools and settle(asked.changed_tools),
        )
        wanted = (kinds for pattern, kinds in self._kinds if fnmatchcase(model.id, pattern))
        kinds = frozenset[str]().union(*wanted)
        if kinds or asked.is_compaction is not None:
            asked = self._heads.healed(asked, model, kinds)
        messages, heals = self.calls.healed(asked.namespace, asked.messages, asked.declared_tools)
        return replace(asked, messages=messages, heals=[*asked.heals, *heals])

    def forget(self, namespace: str, session: str | None = None) -> None:
        """Drops how calls were written in a namespace or one of its sessions, and how conversations began."""
        self._heads.forget(namespace)
        self.calls.forget(namespace, session)


def healing_of(config: ServerConfig) -> Healing | None:
    """None where prompts are shown as sent."""
    return Healing(config) if config.prompt_hygiene else None
