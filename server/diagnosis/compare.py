"""What a client changed between two turns. Pure.

Messages are aligned: kept, edited, removed, inserted, merged, summed up.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import cycle, dropwhile

from models.output.pieces import KNOWN_MARKERS
from models.texts import shared_length
from server.diagnosis.causes import Cause, Miss, MissReason
from server.diagnosis.prompt import PLAIN, Part, Prompt
from server.diagnosis.words import (
    MAX_ADDED_WORDS,
    change_at,
    excerpt,
    find_changes,
    is_in_code,
    shared_ends,
    told_apart,
)

MAX_ALIGNED = 400
"""With more messages after the first difference, only that difference is searched."""
SIMILAR = 0.5
"""Versions of one message have this share of the longer text in common."""
MAX_COMPARED_CHARACTERS = 1 << 16
_VOLATILE = frozenset({Cause.CLOCK, Cause.COUNTER, Cause.NONCE, Cause.ADDRESS})
MIN_SUMMARY_CHARACTERS = 40
"""A shorter reply may be in another conversation by chance."""
MIN_TAIL_CHARACTERS = 512
"""Some 128 tokens: fewer are not worth reporting."""
_ASKING = ("user", "tool", "system")
_SUMMARY = re.compile(
    r"continued from a previous|previous conversation|conversation (?:so far|history|above) |produced a summary"
    r"|(?:been|was|is) (?:summari[sz]ed|compacted)|summary of (?:the|our|this) |<\w*summary>|<state_snapshot>",
    re.IGNORECASE,
)
_SUMMED_UP = re.compile(r"summar|compacted|snapshot", re.IGNORECASE)
_TO_SUM_UP = re.compile(r"\b(?:compact|summar|hand-?off|checkpoint)", re.IGNORECASE)
_TOLD_REPLY = re.compile(r'"role"\s*:\s*"assistant"|^\W*(?:assistant|ai|bot|model)\W*:', re.IGNORECASE | re.MULTILINE)
MIN_FLAT_SHARE = 0.9
"""A longer history told in one text begins with this share of the shorter one."""
_STARTS, _ENDS = ("|".join(map(re.escape, markers)) for markers in zip(*KNOWN_MARKERS, strict=True))
_REASONING = re.compile(
    rf"(?:{_STARTS}|<reasoning>)(.*?)(?:{_ENDS}|</reasoning>|\Z)|\A((?:(?!{_STARTS}).)*?)</think>", re.S | re.I
)
"""The prompt may have begun them."""


@dataclass(frozen=True)
class Turn:
    """A request and its answer."""

    prompt: Prompt
    reply: Part | None = None
    """None where there was no answer, or none is recorded."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts with which the next turn should begin."""
        return self.prompt.parts if self.reply is None else (*self.prompt.parts, self.reply)

    def num_shared(self, later: Prompt) -> int:
        """Counts messages in common, system messages aside."""
        return len((self.prompt.said | ({self.reply} if self.is_answered else frozenset())) & later.said)

    @property
    def is_answered(self) -> bool:
        return self.reply is not None and bool(self.reply.shown)

    def is_quoted_in(self, later: Prompt) -> bool:
        """Whether a later prompt holds the reply."""
        return self.is_answered and self.reply in later.said


def _miss(
    cause: Cause,
    index: int | None = None,
    role: str | None = None,
    before: str = "",
    after: str = "",
    *,
    reason: MissReason | None = None,
) -> Miss:
    return Miss(reason or cause.reason, index, role, None, *told_apart(before, after), cause=cause)


def _change(cause: Cause, index: int, part: Part, other: Part | None = None) -> Miss:
    """A miss for a whole message, at its first difference from another message."""
    start = shared_length(part.shown, other.shown) if other is not None else 0
    after = excerpt(other.shown, start) if other is not None else ""
    return _miss(cause, index, (other or part).role, excerpt(part.shown, start), after)


def find_changes_between(earlier: Turn, later: Prompt) -> list[Miss]:
    """What keeps `later` from continuing `earlier`, in the order of the prompt."""
    prompt = earlier.prompt
    if prompt.model != later.model:
        return [_miss(Cause.MODEL, before=prompt.model, after=later.model)]
    if prompt.namespace != later.namespace:
        return [_miss(Cause.NAMESPACE)]
    if _is_compaction(earlier, later):
        return [_change(Cause.COMPACTION, len(later.parts) - 1, later.parts[-1])]
    changes = list(_tool_changes(prompt, later))
    if prompt.arguments != later.arguments:
        changes.insert(0, _miss(Cause.TEMPLATE_ARGUMENTS, before=prompt.arguments, after=later.arguments))
    if later.parts and later.parts[0].role == PLAIN:
        return [*changes, *_plain_changes(earlier, later)]
    return [*changes, *_MessageDiff(earlier, later).changes()]


def find_volatile_head(earlier: Prompt, later: Prompt) -> list[Miss]:
    """What keeps two conversations from sharing their system messages.

    None if the beginnings are no versions of each other, or differ only at the end, or if the later one only lacks
    text of the earlier one: the client can mend nothing.
    """
    is_same = earlier.tools == later.tools and earlier.num_head == later.num_head
    if not is_same or not earlier.shares_state_with(later):
        return []
    return [
        change if change.cause is Cause.CLOCK else replace(change, cause=Cause.EARLY)
        for change in _MessageDiff(Turn(earlier), later).volatile_head(only=True)
    ]


def find_moved_note(earlier: Prompt, later: Prompt) -> tuple[int, str] | None:
    """Where in `later` a note stands that stood beside the newest question of `earlier` and is not left there.

    A message's index, and its text without the note: empty if the whole message is the note.
    """
    start = shared_length(earlier.parts, later.parts)
    newest = next((at for at in reversed(range(len(later.parts))) if later.parts[at].role == "assistant"), -1) + 1
    answered = dropwhile(lambda part: part.role in _ASKING, earlier.parts[start:])
    if any(part.role not in ("assistant", "tool") for part in answered) or not start < min(
        len(earlier.parts), newest
    ):
        return None
    one, other = earlier.parts[start], later.parts[start]
    alike = [at for at in range(newest, len(later.parts)) if later.parts[at].role == one.role]
    inner = other.text.strip()
    if one.role == other.role and inner and inner in one.text:
        before, _, after = one.text.partition(inner)
        text = later.parts[alike[-1]].text if alike else ""
        is_around = text.startswith(before) and text.endswith(after) and len(before) + len(after) < len(text)
        return (alike[-1], text[len(before) : len(text) - len(after)]) if is_around else None
    notes = [at for at in alike if is_version(one, later.parts[at])]
    return (notes[-1], "") if notes and len(later.parts) - newest > 1 else None


def keeps_question(earlier: Prompt, later: Prompt) -> bool:
    """Whether only replies and results of tools follow an unchanged prompt."""
    new = later.parts[len(earlier.parts) :]
    return later.parts[: len(earlier.parts)] == earlier.parts and all(
        part.role in ("assistant", "tool") for part in new
    )


def _is_compaction(earlier: Turn, later: Prompt) -> bool:
    """Whether a request asks for a summary of an unchanged history, and leaves out the tools."""
    is_bare = bool(earlier.prompt.tools) and not later.tools and earlier.num_shared(later) > 0
    newest = later.parts[-1]
    return is_bare and newest not in earlier.parts and not newest.calls and bool(_TO_SUM_UP.search(newest.text))


def is_flattened(earlier: Turn, later: Prompt) -> bool:
    """Whether a text tells of the history, and goes on with the earlier turn's reply."""
    firsts = _firsts(earlier.prompt, later)
    if len(firsts) < 2 or firsts[0].role != firsts[1].role:
        return False
    shared = shared_length(firsts[0].text, firsts[1].text)
    reply, added = earlier.reply.text if earlier.reply else "", firsts[1].text[shared:]
    forms = (reply, *(json.dumps(reply, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)))
    holds_reply = bool(reply.strip()) and any(text in added for text in forms)
    return shared >= MIN_FLAT_SHARE * len(firsts[0].text) > 0 and (holds_reply or bool(_TOLD_REPLY.search(added)))


def _firsts(*prompts: Prompt) -> list[Part]:
    """Each request's first message after the system's."""
    return [prompt.parts[prompt.num_head] for prompt in prompts if prompt.num_head < len(prompt.parts)]


def _text(parts: Iterable[Part]) -> str:
    return "\n".join(part.shown for part in parts)


def _tool_changes(earlier: Prompt, later: Prompt) -> Iterator[Miss]:
    ours, theirs = earlier.tools, later.tools
    if ours == theirs:
        return
    before, after = earlier.tools_text, later.tools_text
    names, other_names = tool_names(earlier), tool_names(later)
    if sorted(names) != sorted(other_names):
        yield _miss(Cause.TOOLS, before=", ".join(names), after=", ".join(other_names))
        return
    if sorted(map(_canonical, ours)) == sorted(map(_canonical, theirs)):
        changes = [change_at(before, after, Cause.REORDERED)]
    else:
        changes = find_changes(*(text.replace("\\n", "\n").replace("\\t", "\t") for text in (before, after)))
    for change in changes:
        yield _miss(change.cause, before=change.before, after=change.after, reason=MissReason.TOOLS_CHANGED)


def tool_names(prompt: Prompt) -> list[str]:
    """As the request orders them."""
    return list(map(_tool_name, prompt.tools))


def _tool_name(tool: str) -> str:
    read = json.loads(tool)
    function = read.get("function")
    return str(function.get("name") if isinstance(function, dict) else read.get("name"))


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def _plain_changes(earlier: Turn, later: Prompt) -> Iterator[Miss]:
    before = "".join(part.text for part in earlier.parts)
    after = later.parts[0].text
    own = earlier.prompt.parts[0].text
    if not (after.startswith((before, own)) or own.startswith(after)):
        for change in find_changes(before[: len(after)], after[: len(before)]):
            yield _miss(change.cause, before=change.before, after=change.after, reason=MissReason.MESSAGES_CHANGED)


class _MessageDiff:
    def __init__(self, earlier: Turn, later: Prompt) -> None:
        self._earlier, self._prompt, self._later = earlier, earlier.prompt, later
        self._ours, self._theirs = earlier.parts, later.parts
        self._reply = len(earlier.prompt.parts) if earlier.reply is not None else None
        self._firsts = _firsts(earlier.prompt, later)
        self._is_related = earlier.num_shared(later) > 0 or (
            later.has_replies and len(self._firsts) == 2 and is_version(*self._firsts)
        )

    def changes(self) -> list[Miss]:
        ours, theirs = self._ours, self._theirs
        if len(theirs) <= len(ours) and ours[: len(theirs)] == theirs:
            return []
        if self._is_related or self._prompt.parts == theirs[: len(self._prompt.parts)]:
            changes = list[Miss]()
            for block in self._blocks():
                if self._has_gone_on(*block):
                    return [*changes, _change(Cause.NOTE, block[2], ours[block[0]])]
                changes += self._changes_of(*block)
            return changes
        head, num_head = self.volatile_head(), self._later.num_head
        if is_flattened(self._earlier, self._later):
            return [*head, _change(Cause.FLATTENED, num_head, *self._firsts)]
        if self._is_compacted():
            return [*head, _change(Cause.COMPACTED, num_head, *self._firsts)]
        index = min(max(shared_length(ours, theirs), num_head if head else 0), len(theirs) - 1)
        part = theirs[index]
        return [*head, _miss(Cause.SIDE_REQUEST, index, part.role, "", excerpt(part.shown, 0))]

    def _is_compacted(self) -> bool:
        """Whether a summary replaces the whole conversation: the last reply, or a text that calls itself a summary.

        A request for a title has its own instructions.
        """
        reply = self._ours[self._reply].text.strip() if self._reply is not None else ""
        if len(self._firsts) < 2 or not any(part.role == "assistant" for part in self._ours):
            return False
        texts = [part.text for part in self._theirs[self._later.num_head :][:2]]
        if len(reply) > MIN_SUMMARY_CHARACTERS and any(reply in text for text in texts):
            return True
        is_same_agent = self._prompt.num_head == self._later.num_head == 0 or is_version(
            self._ours[0], self._theirs[0]
        )
        return is_same_agent and any(_SUMMARY.search(text[:MIN_TAIL_CHARACTERS]) for text in texts)

    def volatile_head(self, *, only: bool = False) -> list[Miss]:
        """As `find_volatile_head`; with `only`, none if more differs."""
        misses: list[Miss] = []
        for index, (part, other) in enumerate(zip(self._prompt.head, self._later.head, strict=False)):
            if part == other:
                continue
            if not is_version(part, other):
                return [] if only else misses
            misses += [
                _miss(change.cause, index, other.role, change.before, change.after, reason=MissReason.SYSTEM_CHANGED)
                for change in find_changes(part.text, other.text)
                if not change.is_removed
            ]
        volatile = [change for change in misses if change.cause in _VOLATILE]
        if not only or len(volatile) == len(misses):
            return volatile
        _, num_tail = shared_ends(_text(self._prompt.head), _text(self._later.head))
        return misses[:1] if num_tail >= MIN_TAIL_CHARACTERS else []

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        head = shared_length(self._ours, self._theirs)
        if num_moved := self._num_moved(head) or self._num_drawn(head):
            yield head, head + num_moved, head, head + num_moved
            head += num_moved
        ours, theirs = self._ours[head:], self._theirs[head:]
        if len(ours) + len(theirs) > MAX_ALIGNED:
            yield head, min(head + 1, len(self._ours)), head, min(head + 1, len(self._theirs))
            return
        for kind, i1, i2, j1, j2 in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if kind != "equal":
                yield head + i1, head + i2, head + j1, head + j2

    def _num_moved(self, start: int) -> int:
        """Number of messages of one role that the other request has in another order, as results of tools."""
        ours, theirs, seen = self._ours[start:], self._theirs[start:], Counter[Part]()
        for number, (part, other) in enumerate(zip(ours, theirs, strict=False), 1):
            seen.update([part])
            seen.subtract([other])
            if part.role != other.role or part.role != ours[0].role:
                return 0
            if not any(seen.values()):
                return number
        return 0

    def _num_drawn(self, start: int) -> int:
        """Number of messages in front, some in other places, where all that follow them stay in theirs."""
        pairs = list(zip(self._prompt.parts[start:], self._theirs[start:], strict=False))
        stop = max((number for number, (part, other) in enumerate(pairs, 1) if part != other), default=0)
        stop += stop % 2
        ours, theirs = (self._prompt.parts[start : start + stop], self._theirs[start : start + stop])
        has_moved = any(part in theirs and theirs.index(part) != at for at, part in enumerate(ours))
        is_in_front = start + stop < len(self._prompt.parts) <= len(self._theirs)
        is_drawn = has_moved and is_in_front and self._are_examples(start, start + stop, start, start + stop)
        return stop if is_drawn else 0

    def _changes_of(self, i1: int, i2: int, j1: int, j2: int) -> Iterator[Miss]:
        """Yields versions of messages, then added or removed ones."""
        ours, theirs = self._ours, self._theirs
        if i1 < i2 and j1 < j2 and (whole := self._change_of_all(i1, i2, j1, j2)):
            yield _change(whole, j1, ours[i1], theirs[j1])
            return
        while i1 < i2 and j1 < j2 and self._is_pair(i1, j1):
            yield from self._edits(i1, j1)
            i1, j1 = i1 + 1, j1 + 1
        tail = list[Miss]()
        while i1 < i2 and j1 < j2 and i2 < len(ours) and self._is_pair(i2 - 1, j2 - 1):
            i2, j2 = i2 - 1, j2 - 1
            tail = [*self._edits(i2, j2), *tail]
        if i1 < i2 and j1 < j2:
            yield self._replaced(i1, i2, j1, j2)
        elif i1 < i2:
            yield from self._removed(i1, i2, j1)
        elif j1 < j2 and i1 < len(ours) and _is_twice(theirs, j1, j2):
            yield _miss(Cause.DUPLICATED, j1, theirs[j1].role, "", excerpt(theirs[j1].shown, 0))
        elif j1 < j2 and i1 < len(ours) and (part := theirs[j1]) not in ours:
            yield _miss(Cause.INSERTED, j1, part.role, "", excerpt(part.shown, 0))
        yield from tail

    def _has_gone_on(self, i1: int, i2: int, j1: int, j2: int) -> bool:
        """Whether the newest question or its reply stands before messages now that stood before the question."""
        last, new, reply = len(self._prompt.parts) - 1, self._theirs[j1:j2], self._earlier.reply
        if i1 > last or (i1 < i2 and (i1 == last or (j1 < j2 and self._is_pair(i1, j1)))):
            return False
        is_answered = self._earlier.is_answered and reply in new
        return is_answered or any(self._has_shed_a_note(last, part) for part in new)

    def _change_of_all(self, i1: int, i2: int, j1: int, j2: int) -> Cause | None:
        """What became of several messages together."""
        ours, theirs = self._ours[i1:i2], self._theirs[j1:j2]
        if self._is_asked_anew(i1, i2, j1):
            return Cause.BRANCHED
        if i2 - i1 > 1 and _holds_all(theirs[0], ours):
            return Cause.MERGED
        if sorted(map(repr, ours)) == sorted(map(repr, theirs)):
            return Cause.REORDERED
        return Cause.EXAMPLES if self._are_examples(i1, i2, j1, j2) else None

    def _are_examples(self, i1: int, i2: int, j1: int, j2: int) -> bool:
        """Whether example questions and replies were replaced, and all messages after them are the same."""
        ours, theirs = self._ours[i1:i2], self._theirs[j1:j2]
        is_exchange = len(ours) == len(theirs) > 1 and all(
            part.role == other.role == role
            for part, other, role in zip(ours, theirs, cycle(("user", "assistant")), strict=False)
        )
        return is_exchange and i1 == self._prompt.num_head and i2 <= len(self._prompt.parts)

    def _is_pair(self, i: int, j: int) -> bool:
        part, other = self._ours[i], self._theirs[j]
        if part.role != other.role:
            return part.shown == other.shown != ""
        return i == self._reply or (part.is_system and i < self._prompt.num_head) or is_version(part, other)

    def _edits(self, i: int, j: int) -> Iterator[Miss]:
        part, other = self._ours[i], self._theirs[j]
        if part.role != other.role:
            yield _miss(Cause.ROLE, j, other.role, part.role, other.role)
            return
        if self._has_shed_a_note(i, other):
            yield _change(Cause.NOTE, j, part, other)
            return
        is_reply, reason = part.role == "assistant", MissReason.MESSAGES_CHANGED
        if part.is_system and j < self._later.num_head:
            reason = MissReason.SYSTEM_CHANGED
        elif is_reply:
            reason = MissReason.REPLY_CHANGED
        for cause, before, after in _part_changes(part, other):
            named = cause
            if cause is Cause.COUNTER and (
                other.role == "tool" or is_in_code(other.text, shared_length(part.text, other.text))
            ):
                named = Cause.EDITED  # figures of a result or a file count nothing
            if is_reply and cause in (Cause.EDITED, Cause.COUNTER):
                named = Cause.REPLY
            has_own = cause is Cause.THOUGHTS
            yield _miss(named, j, other.role, before, after, reason=None if has_own else reason)

    def _removed(self, i1: int, i2: int, j: int) -> Iterator[Miss]:
        part = self._ours[i1]
        if i2 == len(self._ours):
            if self._reply == i1 and j < len(self._theirs):
                yield _change(Cause.REPLY_LEFT_OUT, j, part)
            return
        if _is_twice(self._ours, i1, i2):
            yield _change(Cause.DUPLICATED, j, part)
            return
        is_question = i1 == self._later.num_head or not self._is_newest(i1 - 1)  # with all that belongs to it
        if part in self._theirs[j:] or (self._is_newest(i1) and not (is_question and i2 == len(self._prompt.parts))):
            yield _change(Cause.NOTE, j, part)
        else:
            yield _change(Cause.TRIMMED if i2 - i1 > 1 or i1 == self._prompt.num_head else Cause.REMOVED, j, part)

    def _is_asked_anew(self, i: int, stop: int, j: int) -> bool:
        """Whether only the newest messages differ, and none of them is answered."""
        is_last = stop == len(self._ours) and i != self._reply and i >= self._prompt.num_head
        return is_last and self._is_newest(i) and not any(part.role == "assistant" for part in self._theirs[j:])

    def _is_fork(self, j: int) -> bool:
        """Whether only new questions follow, and no summary of what is left out."""
        new = self._theirs[j:]
        is_asked = all(part.role in ("user", "system") for part in new)
        return is_asked and not any(_SUMMED_UP.search(part.text[:MIN_TAIL_CHARACTERS]) for part in new)

    def _has_shed_a_note(self, i: int, other: Part) -> bool:
        """Whether a message, while newest, had many more words around its text."""
        text, inner = self._ours[i].text, other.text.strip()
        num_added = len(text.split()) - len(inner.split())
        is_newest = i >= self._prompt.num_head and self._is_newest(i)
        return is_newest and num_added > MAX_ADDED_WORDS and bool(inner) and inner in text

    def _is_newest(self, i: int) -> bool:
        return i != self._reply and all(part.role in _ASKING for part in self._prompt.parts[i:])

    def _replaced(self, i1: int, i2: int, j1: int, j2: int) -> Miss:
        part, other, num_fewer = self._ours[i1], self._theirs[j1], i2 - i1 - (j2 - j1)
        if part.role == other.role and self._has_shed_a_note(i1, other):
            cause = Cause.NOTE
        elif i1 == self._reply:
            return _change(Cause.REPLY_LEFT_OUT, j1, part)
        elif i2 == len(self._ours) and (self._is_newest(i1) or num_fewer <= 0):
            cause = Cause.BRANCHED
        elif i2 == len(self._ours) and self._is_fork(j1):
            cause = Cause.FORKED
        elif num_fewer > 0:
            cause = Cause.SUMMARISED
        else:
            cause = Cause.REPLY if part.role == other.role == "assistant" else Cause.EDITED
        return _change(cause, j1, part, other)


def _part_changes(part: Part, other: Part) -> Iterator[tuple[Cause, str, str]]:
    if _lacks_thoughts(part, other):
        yield Cause.THOUGHTS, excerpt(part.shown, 0), excerpt(other.shown, 0)
        return
    if part.text != other.text:
        yield from (change[:3] for change in find_changes(part.text, other.text))
    elif part.reasoning != other.reasoning:
        cause = Cause.EDITED if other.reasoning else Cause.THOUGHTS
        yield cause, excerpt(part.reasoning, 0), excerpt(other.reasoning, 0)
    if part.calls != other.calls:
        before, after = "\n".join(part.calls), "\n".join(other.calls)
        start = shared_length(before, after)
        is_same = sorted(map(_canonical, part.calls)) == sorted(map(_canonical, other.calls))
        yield Cause.REORDERED if is_same else Cause.EDITED, excerpt(before, start), excerpt(after, start)
    elif part.call_ids != other.call_ids and part.text == other.text:
        yield Cause.CALL_IDS, ", ".join(part.call_ids), ", ".join(other.call_ids)


def _lacks_thoughts(part: Part, other: Part) -> bool:
    is_same = _without_thoughts(part) == other.text.strip() and part.calls == other.calls
    had_reasoning = bool(part.reasoning) or part.text.strip() != other.text.strip()
    return part.role == "assistant" and is_same and had_reasoning and not other.reasoning


def _without_thoughts(part: Part) -> str:
    return _REASONING.sub("", part.text).strip()


def thoughts_apart(part: Part) -> Part:
    """The message with leading thoughts moved from its text into `reasoning`."""
    match = _REASONING.match(part.text.lstrip()) if part.role == "assistant" else None
    if match is None:
        return part
    reasoning = part.reasoning or (match[1] or match[2] or "").strip()
    return replace(part, text=part.text.lstrip()[match.end() :].lstrip(), reasoning=reasoning)


def _is_twice(parts: Sequence[Part], start: int, stop: int) -> bool:
    """Whether messages stand beside their like."""
    length, some = stop - start, parts[start:stop]
    return some in (parts[max(0, start - length) : start], parts[stop : stop + length])


def _holds_all(part: Part, others: Sequence[Part]) -> bool:
    position = 0
    for other in others:
        place = part.text.find(other.text.strip(), position)
        if place < 0 or not other.text.strip():
            return False
        position = place + len(other.text.strip())
    return True


def is_version(part: Part, other: Part) -> bool:
    """Whether messages of one role have most words in common."""
    if part.role != other.role:
        return False
    ours, theirs = part.shown, other.shown
    if "".join(ours.split()) == "".join(theirs.split()) or _without_thoughts(part) == other.text.strip() != "":
        return True
    longest = max(len(ours), len(theirs))
    if sum(shared_ends(ours, theirs)) >= SIMILAR * longest:
        return True
    if longest > MAX_COMPARED_CHARACTERS:
        return False
    words, other_words = Counter(ours.split()), Counter(theirs.split())
    return (words & other_words).total() >= SIMILAR * max(words.total(), other_words.total())
