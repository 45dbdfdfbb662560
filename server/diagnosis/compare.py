"""What a client changed between two turns of a conversation, from their parts. Pure.

Messages are aligned: kept, edited, removed, inserted, merged, summed up. Within a message the changed words tell the
kind of change: `09:16` that becomes `09:17` is a clock in any place.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from html import unescape
from itertools import pairwise
from unicodedata import normalize

from models.texts import shared_length
from server.diagnosis.prompt import PLAIN, Part, Prompt
from server.engine.diagnosis import Cause, Miss, MissReason

WINDOW_CHARACTERS = 120
"""Characters considered on either side of a change."""
AROUND_WORDS = 8
"""Words shown on either side of one of several changes."""
MAX_WORD_CHARACTERS = 80
"""Longer words are shown in part."""
MAX_WORDS = 2000
"""With more words between first and last change, only the first change is searched."""
MAX_ADDED_WORDS = 6
"""More added or removed words are an edit, whatever they say."""
MAX_CHARACTERS = 1 << 18
"""Longer texts are compared only around their first change."""


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_CLOCK = re.compile(
    rf"""
      \d{{1,4}}-\d{{1,2}}-\d{{1,2}}(?:[t ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?(?:z|[+-]\d\d:?\d\d)?(?![\w-])
    | (?<![\d:])\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b)?
    | (?<!\d)\d{{1,2}}\s?[ap]\.?m\b
    | (?<![\d./])\d{{1,2}}[./]\d{{1,2}}[./](?:\d{{4}}|\d{{2}})(?![\d./])
    | \b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b
    | \b\d{{1,2}}(?:st|nd|rd|th)?\.?\s+{_MONTH}(?:,?\s+\d{{4}})?(?!\w)
    | \b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b
    | \b(?:january|february|march|april|june|july|august|september|october|november|december)\b
    | \b(?:morning|noon|afternoon|evening|night)\b
    | \b\d+(?:\.\d+)?\s*(?:seconds?|secs?|minutes?|mins?|hours?|hrs?|days?)\b
    | (?<![\w.-])1[5-9]\d{{8}}(?:\d{{3}}|\.\d+)?(?![\w-])
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?\d+(?:[,._]\d+)*(?:\s?%)?(?![A-Za-z\d])")
_FIGURE = re.compile(r"\d\s?%|^\s*[\[(<{][^\])>}]*\d[^\[(<{]*[\])>}]\s*$|\w:\s*[$€£]?\d")
"""A percentage, a note in brackets that holds a number, or a number behind its name."""
_WORD = re.compile(r"[A-Za-z0-9_+/~-]+")
_WORD_THERE = re.compile(r".?\s*\S*", re.DOTALL)
_QUOTES = str.maketrans("“”„‟«»‘’‚‛–—‐‑", '"' * 6 + "'" * 4 + "-" * 4, "\ufeff\u200b\u200c\u200d\u2060\u00ad")
"""Quotes and hyphens that mean the same, and letters that nobody sees."""
_ID_PREFIX = re.compile(
    r"(?:\b|_)(?:id|uuid|guid|nonce|hash|sha\d*|token|commit|cch|etag|trace|request|session)[\"']?\s*[:=#]\s*[\"'(]?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WordChange:
    """Where two texts differ, with the words around."""

    cause: Cause
    offset: int
    """In characters of the earlier text."""
    before: str
    after: str


def find_changes(before: str, after: str) -> list[WordChange]:
    """Returns where a text changed, in order, one place per cause."""
    if before == after:
        return []
    whole = _cause_of_whole(before, after)
    if whole is not None:
        return [_change_at(before, after, whole)]
    changes: dict[Cause, WordChange] = {}
    for start, one, other in _places(before, after):
        change = _change_at(one, other, classify_text(one, other))
        changes.setdefault(change.cause, WordChange(change.cause, start + change.offset, change.before, change.after))
    return list(changes.values())


def shared_ends(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Returns how much of both is the same at the beginning, and behind that at the end."""
    head = shared_length(one, other)
    return head, shared_length(one[head:][::-1], other[head:][::-1])


def classify_text(before: str, after: str) -> Cause:
    """Returns the kind of the first change."""
    start, tail = shared_ends(before, after)
    for cause, words_at in _KINDS:
        word, other_word = words_at(before, start), words_at(after, start)
        if word is not None and other_word is not None and word != other_word:
            return cause
    return _cause_of_addition(before, after, start, tail)


def _cause_of_addition(before: str, after: str, start: int, tail: int) -> Cause:
    inner, other = before[start : len(before) - tail], after[start : len(after) - tail]
    added = inner or other
    if (inner and other) or len(added.split()) > MAX_ADDED_WORDS:
        return Cause.EDITED
    if any(_looks_random(word) for word in _WORD.findall(added)):
        return Cause.NONCE
    if _CLOCK.search(added):
        return Cause.CLOCK
    return Cause.COUNTER if _FIGURE.search(added) else Cause.EDITED


def _cause_of_whole(before: str, after: str) -> Cause | None:
    """None unless both say the same in another form."""
    if max(len(before), len(after)) > MAX_CHARACTERS:
        return None
    if "".join(before.split()) == "".join(after.split()):
        return Cause.REFORMATTED
    if _decoded(before) == _decoded(after):
        return Cause.ENCODED
    return Cause.REORDERED if _is_same_words(before, after) else None


def _decoded(text: str) -> str:
    """Undoes encoding, quotes and spaces."""
    return "".join(normalize("NFKC", unescape(text)).translate(_QUOTES).split())


def _words_of(pattern: re.Pattern[str]) -> "Callable[[str, int], str | None]":
    def find(text: str, start: int) -> str | None:
        begin = max(0, start - WINDOW_CHARACTERS)
        window = text[begin : start + WINDOW_CHARACTERS]
        touching = [m[0] for m in pattern.finditer(window) if m.start() <= start - begin <= m.end()]
        return touching[-1] if touching else None

    return find


def _random_word(text: str, start: int) -> str | None:
    word = _words_of(_WORD)(text, start)
    if word is None:
        return None
    begin = text.rfind(word, 0, start + len(word))
    named = _ID_PREFIX.search(text[max(0, begin - WINDOW_CHARACTERS) : begin])
    return word if _looks_random(word) or (named and len(word) >= 4 and not word.isdigit()) else None


def _looks_random(word: str) -> bool:
    """Hexadecimal, a UUID, base64, or too many digits to count with."""
    core = re.sub(r"^[a-z]{2,12}[_-](?=\w)", "", word)
    parts = [part for part in re.split(r"[-_]+", core) if part]
    letters, digits = sum(map(str.isalpha, core)), sum(map(str.isdigit, core))
    if not letters:
        return len(parts) == 1 and digits >= 12
    if all(re.fullmatch(r"[0-9a-fA-F]{4,}", part) for part in parts):
        return digits > 0 and len(core) >= 5
    has_both_cases = core.lower() != core and core.upper() != core
    return len(core) >= 8 and (has_both_cases or len(core) >= 16) and digits > 0 and _num_runs(core) >= 4


def _num_runs(word: str) -> int:
    kinds = [(c.isdigit(), c.isupper()) for c in word]
    return 1 + sum(one != other for one, other in pairwise(kinds))


_KINDS: tuple[tuple[Cause, Callable[[str, int], str | None]], ...] = (
    (Cause.CLOCK, _words_of(_CLOCK)),
    (Cause.NONCE, _random_word),
    (Cause.COUNTER, _words_of(_NUMBER)),
)


def _is_same_words(before: str, after: str) -> bool:
    if abs(len(before) - len(after)) > WINDOW_CHARACTERS:
        return False
    ours, theirs = (re.findall(r"\w+", text) for text in (before, after))
    return ours != theirs and sorted(ours) == sorted(theirs)


def _places(before: str, after: str) -> Iterator[tuple[int, str, str]]:
    """Yields changed stretches with context: the offset in `before`, and both texts."""
    ours, theirs = (re.findall(r"\S+|\s+", text) for text in (before, after))
    head, tail = shared_ends(ours, theirs)
    inner, other_inner = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    if len(inner) + len(other_inner) > MAX_WORDS:
        yield 0, before, after
        return
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, inner, other_inner, autojunk=False).get_opcodes():
        if kind != "equal":
            lead = "".join(ours[max(0, head + i1 - AROUND_WORDS) : head + i1])
            one = "".join(ours[head + i1 : head + i2 + AROUND_WORDS])
            other = "".join(theirs[head + j1 : head + j2 + AROUND_WORDS])
            yield sum(map(len, ours[: head + i1])) - len(lead), lead + one, lead + other


def _change_at(before: str, after: str, cause: Cause) -> WordChange:
    start = shared_length(before, after)
    return WordChange(cause, start, excerpt(before, start), excerpt(after, start))


def excerpt(text: str, offset: int) -> str:
    """Returns whole words, about `WINDOW_CHARACTERS` on either side."""
    begin, end = max(0, offset - WINDOW_CHARACTERS), min(len(text), offset + WINDOW_CHARACTERS)
    # The offset itself may stand within a word that is longer than the window's rest.
    while begin > 0 and not text[begin - 1].isspace() and offset - begin < WINDOW_CHARACTERS + MAX_WORD_CHARACTERS:
        begin -= 1
    while end < len(text) and not text[end].isspace() and end - offset < WINDOW_CHARACTERS + MAX_WORD_CHARACTERS:
        end += 1
    return text[begin:end]


def told_apart(before: str, after: str) -> tuple[str, str]:
    """Returns texts in which a reader sees the difference: `\\ufeff`, `\\u0301`, `␣` for a blank that counts."""
    shown, other = _visible(before), _visible(after)
    if not before or not after or before == after or _looks(shown) != _looks(other):
        return shown, other
    start = shared_length(before, after)
    return _spelled(before, start), _spelled(after, start)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _looks(text: str) -> str:
    return normalize("NFKC", " ".join(text.split()))


def _spelled(text: str, start: int) -> str:
    """Shows blanks, and letters that look like others, from just before `start` to the end of the word there."""
    begin = max(0, start - 1)
    stop = begin + len(_WORD_THERE.match(text, begin)[0])  # type: ignore[index]
    shown = "".join("␣" if c == " " else ascii(c)[1:-1] if not c.isascii() else c for c in text[begin:stop])
    return _visible(text[:begin]) + shown + _visible(text[stop:])


MAX_ALIGNED = 400
"""With more messages behind the first difference, only that difference is searched."""
SIMILAR = 0.5
"""Two versions of a message have this share of the longer text in common."""
MAX_COMPARED_CHARACTERS = 1 << 16
_VOLATILE = frozenset({Cause.CLOCK, Cause.COUNTER, Cause.NONCE})
MIN_SUMMARY_CHARACTERS = 40
"""A shorter reply may stand in another conversation by chance."""
MIN_TAIL_CHARACTERS = 512
"""Some 128 tokens: as many as are worth a word."""
_SUMMARY = re.compile(
    r"continued from a previous|previous conversation|conversation (?:so far|history|above) |produced a summary"
    r"|(?:been|was|is) (?:summari[sz]ed|compacted)|summary of (?:the|our|this) |<\w*summary>|<state_snapshot>",
    re.IGNORECASE,
)
_THOUGHTS = re.compile(r"<(think|thinking|thought|reasoning)>.*?(</\1>|\Z)|^.*?</think>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Turn:
    """A request and its answer."""

    prompt: Prompt
    reply: Part | None = None
    """None where there was no answer, or none is recorded."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The next turn should begin with them."""
        return self.prompt.parts if self.reply is None else (*self.prompt.parts, self.reply)

    def num_shared(self, later: Prompt) -> int:
        """Counts messages in common, system messages aside."""
        return len((self.prompt.said | ({self.reply} if self.is_answered else frozenset())) & later.said)

    @property
    def is_answered(self) -> bool:
        return self.reply is not None and bool(self.reply.shown)


def _miss(
    cause: Cause,
    reason: MissReason,
    index: int | None = None,
    role: str | None = None,
    before: str = "",
    after: str = "",
) -> Miss:
    return Miss(reason, index, role, None, *told_apart(before, after), cause)


def find_changes_between(earlier: Turn, later: Prompt) -> list[Miss]:
    """Returns what keeps `later` from continuing `earlier`, in the order of the prompt."""
    prompt = earlier.prompt
    if prompt.model != later.model:
        return [_miss(Cause.MODEL, MissReason.MODEL_CHANGED, before=prompt.model, after=later.model)]
    if prompt.namespace != later.namespace:
        return [_miss(Cause.NAMESPACE, MissReason.NAMESPACE_CHANGED)]
    changes = list(_tool_changes(prompt, later))
    if prompt.arguments != later.arguments:
        words = (prompt.arguments, later.arguments)
        changes.insert(0, _miss(Cause.TEMPLATE_ARGUMENTS, MissReason.TEMPLATE_CHANGED, None, None, *words))
    if later.parts and later.parts[0].role == PLAIN:
        return [*changes, *_plain_changes(earlier, later)]
    return [*changes, *_MessageDiff(earlier, later).changes()]


def find_volatile_head(earlier: Prompt, later: Prompt) -> list[Miss]:
    """Returns what keeps two conversations from sharing their system messages: a clock, or what differs too early.

    None where their beginnings are no versions of each other, or differ at the end only.
    """
    is_same = (earlier.tools, earlier.arguments) == (later.tools, later.arguments)
    if not is_same or earlier.num_head != later.num_head or not earlier.shares_state_with(later):
        return []
    return [
        change if change.cause is Cause.CLOCK else replace(change, cause=Cause.EARLY)
        for change in _MessageDiff(Turn(earlier), later).volatile_head(only=True)
    ]


def _tool_changes(earlier: Prompt, later: Prompt) -> Iterator[Miss]:
    ours, theirs = earlier.tools, later.tools
    if ours == theirs:
        return
    before, after = earlier.tools_text, later.tools_text
    names = [[_tool_name(tool) for tool in tools] for tools in (ours, theirs)]
    if sorted(names[0]) != sorted(names[1]):
        yield _miss(Cause.TOOLS, MissReason.TOOLS_CHANGED, before=", ".join(names[0]), after=", ".join(names[1]))
    elif sorted(map(_canonical, ours)) == sorted(map(_canonical, theirs)):
        start = shared_length(before, after)
        words = (excerpt(before, start), excerpt(after, start))
        yield _miss(Cause.REORDERED, MissReason.TOOLS_CHANGED, None, None, *words)
    else:
        for found in find_changes(_unescaped(before), _unescaped(after)):
            yield _miss(found.cause, MissReason.TOOLS_CHANGED, None, None, found.before, found.after)


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


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
    if after.startswith((before, own)) or own.startswith(after):
        return
    for found in find_changes(before[: len(after)], after[: len(before)]):
        yield _miss(found.cause, MissReason.MESSAGES_CHANGED, None, None, found.before, found.after)


class _MessageDiff:
    def __init__(self, earlier: Turn, later: Prompt) -> None:
        self._ours, self._theirs = earlier.parts, later.parts
        self._reply = len(earlier.prompt.parts) if earlier.reply is not None else None
        """Index of the reply in `_MessageDiff`'s messages."""
        self._head = later.num_head
        self._prompt = earlier.prompt
        self._is_related = earlier.num_shared(later) > 0 or (_is_answered(later.parts) and self._are_similar())

    def changes(self) -> list[Miss]:
        ours, theirs = self._ours, self._theirs
        if len(theirs) <= len(ours) and ours[: len(theirs)] == theirs:
            return []
        if not self._is_related and ours[: len(self._prompt.parts)] != theirs[: len(self._prompt.parts)]:
            head = self.volatile_head()
            if self._is_compacted():
                return [*head, self._change(Cause.COMPACTED, MissReason.HISTORY_TRIMMED, self._head, *self._firsts())]
            return [*head, self._side_request(behind=self._head if head else 0)]
        return [change for block in self._blocks() for change in self._changes_of(*block)]

    def _firsts(self) -> list[Part]:
        """The first messages that are no system messages, of either that has one."""
        both = (self._prompt.parts[self._prompt.num_head :], self._theirs[self._head :])
        return [parts[0] for parts in both if parts]

    def _are_similar(self) -> bool:
        firsts = self._firsts()
        return len(firsts) == 2 and is_version(*firsts)

    def _is_compacted(self) -> bool:
        """Whether a summary stands for the whole conversation: its last reply, or what says of itself to be one.

        A request for a title has instructions of its own.
        """
        firsts, reply = self._firsts(), self._ours[self._reply].text.strip() if self._reply is not None else ""
        if len(firsts) < 2 or not _is_answered(self._ours):
            return False
        told = [part.text for part in self._theirs[self._head : self._head + 2]]
        if len(reply) > MIN_SUMMARY_CHARACTERS and any(reply in text for text in told):
            return True
        ours, theirs = self._ours[0], self._theirs[0]
        is_same_agent = self._prompt.num_head == self._head == 0 or is_version(ours, theirs)
        return is_same_agent and any(_SUMMARY.search(text[:MIN_TAIL_CHARACTERS]) for text in told)

    def _side_request(self, *, behind: int) -> Miss:
        index = min(max(shared_length(self._ours, self._theirs), behind), len(self._theirs) - 1)
        part = self._theirs[index]
        return _miss(Cause.SIDE_REQUEST, MissReason.SIDE_REQUEST, index, part.role, "", excerpt(part.shown, 0))

    def volatile_head(self, *, only: bool = False) -> list[Miss]:
        """As `find_volatile_head`; with `only`, none if more differs, unless much is the same behind it."""
        found: list[Miss] = []
        for index in range(min(self._head, self._prompt.num_head)):
            if self._ours[index] == self._theirs[index]:
                continue
            if not is_version(self._ours[index], self._theirs[index]):
                return [] if only else found
            found += self._edits(index, index)
        volatile = [change for change in found if change.cause in _VOLATILE]
        if not only or len(volatile) == len(found):
            return volatile
        ours, theirs = ("\n".join(part.shown for part in parts[: self._head]) for parts in (self._ours, self._theirs))
        return found[:1] if shared_ends(ours, theirs)[1] >= MIN_TAIL_CHARACTERS else []

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        head = shared_length(self._ours, self._theirs)
        ours, theirs = self._ours[head:], self._theirs[head:]
        if len(ours) + len(theirs) > MAX_ALIGNED:
            yield head, min(head + 1, len(self._ours)), head, min(head + 1, len(self._theirs))
            return
        for kind, i1, i2, j1, j2 in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if kind != "equal":
                yield head + i1, head + i2, head + j1, head + j2

    def _changes_of(self, i1: int, i2: int, j1: int, j2: int) -> Iterator[Miss]:
        """Yields versions of messages, then added or removed ones."""
        if i1 < i2 and j1 < j2 and self._is_asked_anew(i1, i2, j1):
            yield self._change(Cause.BRANCHED, MissReason.BRANCHED, j1, self._ours[i1], self._theirs[j1])
            return
        if i2 - i1 > 1 and j1 < j2 and _holds_all(self._theirs[j1], self._ours[i1:i2]):
            yield self._change(Cause.MERGED, MissReason.MESSAGES_CHANGED, j1, self._ours[i1], self._theirs[j1])
            return
        while i1 < i2 and j1 < j2 and self._is_pair(i1, j1):
            yield from self._edits(i1, j1)
            i1, j1 = i1 + 1, j1 + 1
        tail = list[Miss]()
        while i1 < i2 and j1 < j2 and i2 < len(self._ours) and self._is_pair(i2 - 1, j2 - 1):
            i2, j2 = i2 - 1, j2 - 1
            tail = [*self._edits(i2, j2), *tail]
        if i1 < i2 and j1 < j2:
            yield from self._replaced(i1, i2, j1, j2)
        elif i1 < i2:
            yield from self._removed(i1, i2, j1)
        elif j1 < j2 and i1 < len(self._ours) and (part := self._theirs[j1]) not in self._ours:
            excerpted = excerpt(part.shown, 0)
            yield _miss(Cause.INSERTED, MissReason.MESSAGES_CHANGED, j1, part.role, "", excerpted)
        yield from tail

    def _is_pair(self, i: int, j: int) -> bool:
        one, other = self._ours[i], self._theirs[j]
        if one.role != other.role:
            return one.shown == other.shown != ""
        return i == self._reply or (one.is_system and i < self._prompt.num_head) or is_version(one, other)

    def _edits(self, i: int, j: int) -> Iterator[Miss]:
        one, other = self._ours[i], self._theirs[j]
        if one.role != other.role:
            yield _miss(Cause.ROLE, MissReason.MESSAGES_CHANGED, j, other.role, one.role, other.role)
            return
        if self._has_shed_a_note(i, other):
            yield self._change(Cause.NOTE, MissReason.NOTE_MOVED, j, one, other)
            return
        is_reply = one.role == "assistant"
        if one.is_system and j < self._head:
            reason = MissReason.SYSTEM_CHANGED
        else:
            reason = MissReason.REPLY_CHANGED if is_reply else MissReason.MESSAGES_CHANGED
        for cause, before, after in _part_changes(one, other):
            if cause is Cause.THOUGHTS:
                yield _miss(cause, MissReason.THOUGHTS_REMOVED, j, other.role, before, after)
            else:
                named = Cause.REPLY if is_reply and cause in (Cause.EDITED, Cause.COUNTER) else cause
                yield _miss(named, reason, j, other.role, before, after)

    def _removed(self, i1: int, i2: int, j: int) -> Iterator[Miss]:
        if i2 == len(self._ours):
            is_reply_missing = self._reply == i1 and j < len(self._theirs)
            if is_reply_missing:
                yield self._change(Cause.REPLY_LEFT_OUT, MissReason.REPLY_CHANGED, j, self._ours[i1])
            return
        part = self._ours[i1]
        if self._is_newest(i1) or part in self._theirs[j:]:
            yield self._change(Cause.NOTE, MissReason.NOTE_MOVED, j, part)
        elif i2 - i1 > 1 or i1 == self._prompt.num_head:
            yield self._change(Cause.TRIMMED, MissReason.HISTORY_TRIMMED, j, part)
        else:
            yield self._change(Cause.REMOVED, MissReason.HISTORY_TRIMMED, j, part)

    def _is_asked_anew(self, i: int, stop: int, j: int) -> bool:
        """Whether only the newest messages differ, and no answer to them is there."""
        is_last = stop == len(self._ours) and i != self._reply and i >= self._prompt.num_head
        return is_last and self._is_newest(i) and not _is_answered(self._theirs[j:])

    def _has_shed_a_note(self, i: int, other: Part) -> bool:
        """Whether a message was sent with more around it, as passages to answer from, while it was the newest."""
        return i >= self._prompt.num_head and self._is_newest(i) and _encloses(self._ours[i].text, other.text)

    def _is_newest(self, i: int) -> bool:
        return all(part.role in ("user", "tool", "system") for part in self._prompt.parts[i:])

    def _replaced(self, i1: int, i2: int, j1: int, j2: int) -> Iterator[Miss]:
        ours, theirs = self._ours[i1:i2], self._theirs[j1:j2]
        part, other = ours[0], theirs[0]
        if part.role == other.role and self._has_shed_a_note(i1, other):
            yield self._change(Cause.NOTE, MissReason.NOTE_MOVED, j1, part, other)
        elif i1 == self._reply:
            yield self._change(Cause.REPLY_LEFT_OUT, MissReason.REPLY_CHANGED, j1, part)
        elif i2 == len(self._ours) and self._is_newest(i1):
            yield self._change(Cause.BRANCHED, MissReason.BRANCHED, j1, part, other)
        elif len(ours) > len(theirs):
            yield self._change(Cause.SUMMARISED, MissReason.HISTORY_TRIMMED, j1, part, other)
        elif i2 == len(self._ours):
            yield self._change(Cause.BRANCHED, MissReason.BRANCHED, j1, part, other)
        else:
            yield self._change(Cause.EDITED, MissReason.MESSAGES_CHANGED, j1, part, other)

    @staticmethod
    def _change(cause: Cause, reason: MissReason, index: int, part: Part, other: Part | None = None) -> Miss:
        start = shared_length(part.shown, other.shown) if other is not None else 0
        after = excerpt(other.shown, start) if other is not None else ""
        return _miss(cause, reason, index, (other or part).role, excerpt(part.shown, start), after)


def _encloses(text: str, inner: str) -> bool:
    """Whether a text holds another, and words more than a clock or an id."""
    added = len(text.split()) - len(inner.split())
    return added > MAX_ADDED_WORDS and bool(inner.strip()) and inner.strip() in text


def _is_answered(parts: Sequence[Part]) -> bool:
    return any(part.role == "assistant" for part in parts)


def _part_changes(one: Part, other: Part) -> Iterator[tuple[Cause, str, str]]:
    if _lacks_thoughts(one, other):
        yield Cause.THOUGHTS, excerpt(one.shown, 0), excerpt(other.shown, 0)
        return
    if one.text != other.text:
        for found in find_changes(one.text, other.text):
            yield found.cause, found.before, found.after
    elif one.thoughts != other.thoughts:
        cause = Cause.EDITED if other.thoughts else Cause.THOUGHTS
        yield cause, excerpt(one.thoughts, 0), excerpt(other.thoughts, 0)
    if one.calls != other.calls:
        before, after = "\n".join(one.calls), "\n".join(other.calls)
        start = shared_length(before, after)
        is_same = [_canonical(call) for call in one.calls] == [_canonical(call) for call in other.calls]
        yield Cause.REORDERED if is_same else Cause.EDITED, excerpt(before, start), excerpt(after, start)
    elif one.call_ids != other.call_ids and one.text == other.text:
        yield Cause.CALL_IDS, ", ".join(one.call_ids), ", ".join(other.call_ids)


def _lacks_thoughts(one: Part, other: Part) -> bool:
    is_same = _without_thoughts(one) == other.text.strip() and one.calls == other.calls
    had_thoughts = bool(one.thoughts) or one.text.strip() != other.text.strip()
    return one.role == "assistant" and is_same and had_thoughts and not other.thoughts


def _without_thoughts(part: Part) -> str:
    return _THOUGHTS.sub("", part.text).strip()


def _holds_all(part: Part, others: Sequence[Part]) -> bool:
    position = 0
    for other in others:
        found = part.text.find(other.text.strip(), position)
        if found < 0 or not other.text.strip():
            return False
        position = found + len(other.text.strip())
    return True


def is_version(one: Part, other: Part) -> bool:
    """Whether messages of one role have most words in common."""
    if one.role != other.role:
        return False
    ours, theirs = one.shown, other.shown
    if "".join(ours.split()) == "".join(theirs.split()) or _without_thoughts(one) == other.text.strip() != "":
        return True
    longest = max(len(ours), len(theirs))
    if sum(shared_ends(ours, theirs)) >= SIMILAR * longest:
        return True
    if longest > MAX_COMPARED_CHARACTERS:
        return False
    words, other_words = Counter(ours.split()), Counter(theirs.split())
    return (words & other_words).total() >= SIMILAR * max(words.total(), other_words.total())
