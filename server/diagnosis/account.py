"""Why a prompt was evaluated again. Pure.

Every token is restored, new, or lost for a named cause: `evaluated = new + lost`, with `new` what the turn before
could not have given. A request continues the conversation of its name, else the one that it shares most messages
with; of each the last turns are kept, since an agent and its sub-agents may share a name. One thread at a time.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cache.types import TokenArray, common_prefix_length
from models.prompt.shapes import NO_OUTLINE, Outline
from server.diagnosis.causes import Cause, Heal, Healed, HealKind, Miss, MissReason, Reuse
from server.diagnosis.compare import (
    Turn,
    find_changes_between,
    find_volatile_head,
    is_flattened,
    is_version,
    tool_names,
)
from server.diagnosis.prompt import Prompt
from server.diagnosis.words import shared_ends

CHARACTERS_PER_TOKEN = 4
"""About."""
EDGE_TOKENS = 16
"""The most tokens of an answer's header; a prompt restorable up to there is no miss."""


@dataclass(frozen=True, eq=False)
class EvaluatedTurn(Turn):
    """A turn that the server has run."""

    tokens: TokenArray = field(kw_only=True)
    num_prompt_tokens: int = field(kw_only=True)
    lost: Cause | None = None
    """Why the cache holds nothing of the turn any more: it was cleared since, or the model unloaded."""
    request_id: str = ""
    outline: Outline = NO_OUTLINE
    """The prompt's."""
    head_tokens: int = 0
    """Of the leading system messages and the tools; 0 where unknown."""
    note: tuple[int, str] | None = None
    """What `find_moved_note` found when the newest question came."""
    is_neighbour: bool = False
    """The turn is of another conversation whose system messages differ only by a clock, say."""

    @property
    def num_bytes(self) -> int:
        """Includes text that other turns may share."""
        reply = self.reply.num_bytes if self.reply is not None else 0
        return self.tokens.nbytes + self.prompt.num_bytes + reply


@dataclass(frozen=True, eq=False)
class Rendered:
    """A prompt and its parts."""

    prompt: Prompt
    tokens: TokenArray
    outline: Outline = NO_OUTLINE
    heals: Sequence[Heal] = ()

    def miss_at(self, offset: int, lost_tokens: int, cause: Cause) -> Miss:
        """A loss that begins at a token."""
        return Miss(cause.reason, *self.outline.message_at(offset), offset, cause=cause, lost_tokens=lost_tokens)

    @property
    def num_answered(self) -> int:
        """Tokens up to the end of the last reply, all evaluated by some server; 0 without a reply."""
        replies = [index for index, role in enumerate(self.outline.roles) if role == "assistant"]
        return next((start for start in self.outline.starts[replies[-1] + 1 :]), 0) if replies else 0


def explain(
    previous: EvaluatedTurn | None, request: Rendered, *, match: int, hit: int, is_unseen: bool = False
) -> Reuse:
    """Why only `hit` of the `match` tokens in the cache were restored; `is_unseen` as in `Conversations`."""
    num_unseen = request.num_answered - hit if is_unseen and (previous is None or previous.is_neighbour) else 0
    if num_unseen > EDGE_TOKENS:
        return Reuse((Miss(MissReason.RESTARTED, token=hit, cause=Cause.RESTARTED, lost_tokens=num_unseen),))
    if previous is None:
        return _of_first(request, match, hit)
    if previous.is_neighbour:
        return _of_neighbour(previous, request, match, hit)
    misses = tuple(_misses(previous, request, match, hit))
    if any(miss.cause is Cause.SIDE_REQUEST for miss in misses):
        return Reuse(misses)  # the request continues no turn
    return Reuse(misses, min(hit, len(previous.tokens)) / len(previous.tokens) if len(previous.tokens) else 1.0)


def healed(previous: EvaluatedTurn | None, request: Rendered, hit: int) -> Healed:
    """What the request's heals saved: the tokens restored from where the prompt as sent would part first."""
    num_known = previous.num_prompt_tokens if previous is not None and not previous.is_neighbour else 0
    last = min(hit, len(previous.tokens)) if num_known and previous is not None else hit
    starts, saved = [*request.outline.starts, len(request.tokens), len(request.tokens)], [0]
    for kind, index, num_after, is_new in request.heals if request.outline.starts else ():
        text_end, end = starts[index + 1 : index + 3]
        if kind is HealKind.CALLS and end > num_known:
            # A message's calls stand after its text, where the outline has the next one begin.
            saved.append(last - max(text_end, num_known))
        elif is_new:
            # Without the tools the prompt parts at its first token.
            parts_at = 0 if kind is HealKind.COMPACTION else text_end - num_after // CHARACTERS_PER_TOKEN
            saved.append(hit - max(0, parts_at))
    return Healed(tuple(dict.fromkeys(heal.kind for heal in request.heals)), max(saved))


def declined(previous: EvaluatedTurn | None, request: Rendered) -> Reuse:
    """The reuse of a request that asked for none."""
    reach = min(len(previous.tokens), len(request.tokens) - 1) if previous is not None else 0
    return Reuse((Miss(MissReason.DISABLED, cause=Cause.DECLINED, lost_tokens=reach),))


def with_missing_bytes(reuse: Reuse, missing_bytes: int) -> Reuse:
    """Adds to a loss of evicted state how much more memory would have kept the state, if known and above 0."""
    if missing_bytes <= 0:
        return reuse
    misses = (
        replace(miss, missing_bytes=missing_bytes) if miss.cause is Cause.EVICTED else miss for miss in reuse.misses
    )
    return replace(reuse, misses=tuple(misses))


def _of_first(request: Rendered, match: int, hit: int) -> Reuse:
    """The reuse of a request that continues no turn."""
    if match - hit > EDGE_TOKENS:
        return Reuse((request.miss_at(hit, match - hit, Cause.NOT_RESTORABLE),))
    return Reuse((Miss(MissReason.COLD, token=hit, cause=Cause.COLD),) if hit == 0 else ())


def _of_neighbour(previous: EvaluatedTurn, request: Rendered, match: int, hit: int) -> Reuse:
    starts, num_head = request.outline.starts, request.prompt.num_head
    reach = starts[num_head] if len(starts) > num_head else min(len(previous.tokens), len(request.tokens) - 1)
    changes = find_volatile_head(previous.prompt, request.prompt)
    if not changes or reach - hit <= EDGE_TOKENS:
        return _of_first(request, match, hit)
    common = common_prefix_length(previous.tokens, request.tokens)
    return Reuse((replace(changes[0], token=common, lost_tokens=reach - hit), *changes[1:]))


def _misses(previous: EvaluatedTurn, request: Rendered, match: int, hit: int) -> Iterator[Miss]:
    """One prompt's losses, by changes and by missing state."""
    longest = len(request.tokens) - 1
    reach = max(0, min(len(previous.tokens), longest))
    is_known = request.prompt.shares_state_with(previous.prompt)
    common = min(common_prefix_length(previous.tokens, request.tokens), longest) if is_known else 0
    by_state, by_change = max(0, min(common, reach) - hit), max(0, reach - max(common, hit))
    differences = find_changes_between(previous, request.prompt) if by_change else []
    changes = list(_shown(differences, request.outline.message_at(common)[0]))
    if by_change and match >= common and previous.lost is None:
        num_missing = min(previous.num_prompt_tokens, common) - hit
        if _is_consequence(changes, by_state, num_missing):
            by_state, by_change = 0, by_change + by_state
    if by_state:
        missing = Cause.NOT_RESTORABLE if match >= common else Cause.EVICTED
        # The last tokens of an answer may be evaluated by nobody before the next request comes.
        is_end = by_state <= EDGE_TOKENS and hit >= previous.num_prompt_tokens
        yield request.miss_at(hit, by_state, previous.lost or (Cause.TEMPLATE if is_end else missing))
    if by_change and changes:
        yield replace(changes[0], token=common, lost_tokens=by_change)
        yield from changes[1:]
    elif by_change:
        yield request.miss_at(common, by_change, Cause.TEMPLATE)


def _shown(changes: Sequence[Miss], index: int | None) -> Iterator[Miss]:
    """Changes that may be why prompts part in a message.

    The template shows no change where the tokens of its message are the same. Its arguments are blamed only where no
    message explains the place.
    """
    placed = [change for change in changes if index is not None and change.message_index is not None]
    is_explained = any(change.message_index <= index <= change.message_index + 1 for change in placed)  # type: ignore[operator]
    for change in changes:
        is_hidden = change in placed and change.message_index + 1 < index  # type: ignore[operator]
        if not is_hidden and not (is_explained and change.cause is Cause.TEMPLATE_ARGUMENTS):
            yield change


def _is_consequence(changes: Sequence[Miss], by_state: int, num_missing: int) -> bool:
    """Whether state is missing only because of the change: state is kept for prompts that continue unchanged.

    If a template changes a reply, prompts part within the answer's header, after the restore point.
    """
    if not changes:
        return num_missing <= EDGE_TOKENS
    # A request beside the conversation shares the conversation's beginning, and could have been restored there.
    is_other = changes[0].cause is Cause.SIDE_REQUEST and by_state > EDGE_TOKENS
    return changes[0].cause is not Cause.BRANCHED and not is_other


MAX_TURNS = 16
MAX_CONVERSATIONS = 1024
MAX_UNNAMED_LOOKED_AT = 256
MAX_NEIGHBOURS = 8
MAX_EXAMPLE_CHARACTERS = 3072
MAX_BYTES = 64 << 20
"""Holds some 80 turns of 100 000 tokens."""


@dataclass(frozen=True)
class Name:
    """The key of a conversation."""

    namespace: str
    id: str
    is_named: bool = True


class Conversations:
    """Last turns, bounded in number and bytes; the least recently used are dropped."""

    def __init__(self, max_bytes: int = MAX_BYTES, *, is_of_one_owner: bool = False) -> None:
        """`is_of_one_owner`: all keys and salts may be told of each other."""
        self._turns: OrderedDict[Name, list[EvaluatedTurn]] = OrderedDict()
        self._max_bytes = max_bytes
        self._is_of_one_owner = is_of_one_owner
        self.num_bytes = 0
        self.is_whole = False
        """No conversation since the start is missing here, and no state of earlier ones is on disk."""

    def find(self, session_id: str | None, request: Rendered, request_id: str) -> tuple[Name, EvaluatedTurn | None]:
        """A conversation, old or new, and the turn that the request continues."""
        namespace = request.prompt.namespace
        name = Name(namespace, session_id) if session_id is not None else self._find_unnamed(request)
        if name is None:
            digest = hashlib.blake2b(request_id.encode(), digest_size=4).hexdigest()
            name = Name(namespace, f"unnamed-{digest}", is_named=False)
        previous = self._closest(self._turns.get(name, []), request)
        return name, previous or self._find_elsewhere(session_id, request) or self._find_neighbour(request)

    def record(self, name: Name, turn: EvaluatedTurn) -> None:
        """Keeps a turn, and drops the turn that it continues unchanged."""
        turns = self._take(name)
        if turn.tokens.base is not None:
            turn = replace(turn, tokens=turn.tokens.copy())  # a view keeps a longer array alive
        previous = self._closest(turns, Rendered(turn.prompt, turn.tokens))
        if previous is not None:
            # So that equal texts are kept once.
            known = {part: part for part in previous.prompt.parts}
            parts = tuple(known.get(part, part) for part in turn.prompt.parts)
            turn = replace(turn, prompt=replace(turn.prompt, parts=parts))
            if _goes_on(previous, turn.prompt):
                turns = [turn for turn in turns if turn is not previous]
        self._put(name, [*turns, turn][-MAX_TURNS:])
        while len(self._turns) > MAX_CONVERSATIONS or self.num_bytes > self._max_bytes:
            self._drop_one()

    def is_unseen(self, request: Rendered) -> bool:
        """Whether the request continues replies from before the server's start, or of another server.

        Examples before a first question are shorter, and hold no results of tools.
        """
        parts = request.prompt.parts
        said = sum(len(part.shown) for part in parts if part.role == "assistant")
        return self.is_whole and (said > MAX_EXAMPLE_CHARACTERS or any(part.role == "tool" for part in parts))

    def num_tokens_since(self, name: Name, request: Rendered) -> int:
        """Tokens that a cache must hold to keep a conversation until now."""
        later = itertools.takewhile(lambda other: other != name, reversed(self._turns))
        turns = [self._turns[other][-1] for other in later]
        own = (turn.tokens for turn in turns if turn.prompt.model == request.prompt.model)
        return len(request.tokens) + sum(len(tokens) - common_prefix_length(tokens, request.tokens) for tokens in own)

    def turns_of(self, namespace: str | None, model: str | None = None) -> Iterator[tuple[Name, EvaluatedTurn]]:
        """Kept turns, of one namespace or model if named, the latest conversation's latest turn first."""
        for name, turns in reversed(self._turns.items()):
            if namespace in (None, name.namespace):
                yield from ((name, turn) for turn in reversed(turns) if model in (None, turn.prompt.model))

    def forget(self, namespace: str, conversation_id: str) -> None:
        """An unknown conversation is no error."""
        self.is_whole = False
        for is_named in (True, False):
            self._take(Name(namespace, conversation_id, is_named))

    def note_cleared(self, namespace: str) -> None:
        """The cache holds nothing of a namespace any more."""
        for name, turns in self._turns.items():
            if name.namespace == namespace:
                turns[:] = [replace(turn, lost=Cause.CLEARED) for turn in turns]

    def note_unloaded(self, model: str) -> None:
        """A model was unloaded and its conversations dropped."""
        for turns in self._turns.values():
            for place, turn in enumerate(turns):
                if turn.prompt.model == model and turn.lost is None:
                    turns[place] = replace(turn, lost=Cause.UNLOADED)

    def _take(self, name: Name) -> list[EvaluatedTurn]:
        turns = self._turns.pop(name, [])
        self.num_bytes -= sum(turn.num_bytes for turn in turns)
        return turns

    def _put(self, name: Name, turns: list[EvaluatedTurn]) -> None:
        self._turns[name] = turns
        self.num_bytes += sum(turn.num_bytes for turn in turns)

    def _drop_one(self) -> None:
        self.is_whole = False
        name = next(iter(self._turns))
        turns = self._take(name)
        if not self._turns and len(turns) > 1:
            self._put(name, turns[1:])

    def _find_unnamed(self, request: Rendered) -> Name | None:
        namespace = request.prompt.namespace
        names = (name for name in reversed(self._turns) if name.namespace == namespace and not name.is_named)
        looked_at = itertools.islice(names, MAX_UNNAMED_LOOKED_AT)
        closest = [(self._closest(self._turns[name], request), name) for name in looked_at]
        fitting = [(turn, name) for turn, name in closest if turn is not None and _belongs(turn, request.prompt)]
        best = max(fitting, key=lambda pair: _score(pair[0], request), default=None)
        return None if best is None else best[1]

    def _find_elsewhere(self, session_id: str | None, request: Rendered) -> EvaluatedTurn | None:
        """Looks under other keys and salts for a turn whose reply the request contains.

        Who sends the reply has seen the conversation: nothing is revealed.
        """
        for name, turns in reversed(self._turns.items()):
            is_same = name.id == session_id if session_id is not None else not name.is_named
            if name.namespace != request.prompt.namespace and is_same:
                for turn in reversed(turns):
                    is_owned = self._is_of_one_owner and _goes_on(turn, request.prompt)
                    if is_owned or turn.is_quoted_in(request.prompt):
                        return turn
        return None

    def _find_neighbour(self, request: Rendered) -> EvaluatedTurn | None:
        """The last turn that begins like the request but for a clock, a counter or an id.

        None if a latest turn has the same beginning, which the two then share.
        """
        later = request.prompt
        ours = (turns[-1] for name, turns in reversed(self._turns.items()) if name.namespace == later.namespace)
        latest = list(itertools.islice(ours, MAX_NEIGHBOURS))
        if any(turn.prompt.head == later.head for turn in latest):
            return None
        neighbour = next((turn for turn in latest if find_volatile_head(turn.prompt, later)), None)
        return replace(neighbour, is_neighbour=True) if neighbour is not None else None

    @staticmethod
    def _closest(turns: list[EvaluatedTurn], request: Rendered) -> EvaluatedTurn | None:
        followed = (turn for turn in reversed(turns) if not _is_beside(turn, request.prompt))
        return max(followed, key=lambda turn: _score(turn, request), default=None)


def _score(turn: EvaluatedTurn, request: Rendered) -> tuple[int, int]:
    """Ranks a turn by messages in common, then by tokens.

    A request without the turn's newest message or reply may continue an earlier turn.
    """
    newest = turn.prompt.said.intersection(turn.prompt.parts[-1:])
    num_missing = len(newest - request.prompt.said) + (turn.is_answered and not turn.is_quoted_in(request.prompt))
    return turn.num_shared(request.prompt) - num_missing, common_prefix_length(turn.tokens, request.tokens)


def _is_beside(earlier: Turn, later: Prompt) -> bool:
    """Whether a turn is a title or summary under the same name, or the request a sub-agent's first one.

    Titles have their own instructions; the request has the same question with other ones, or with tools. A sub-agent
    has its own question, tools and instructions.
    """
    ours, theirs = earlier.prompt.head, later.head
    if earlier.is_quoted_in(later) or not ours or not theirs:
        return False
    shares, is_first = earlier.num_shared(later) > 0, bool(later.tools) and not later.has_replies
    if is_first and not shares and sorted(tool_names(earlier.prompt)) != sorted(tool_names(later)):
        return True
    if any(is_version(part, other) for part in ours for other in theirs):
        return False
    return shares or is_first or (bool(later.tools) and not earlier.prompt.tools)


def _belongs(turn: EvaluatedTurn, later: Prompt) -> bool:
    """Whether an unnamed request has a turn's reply, most messages, or beginning."""
    said, is_shorter = turn.prompt.said, bool(later.said) and turn.parts[: len(later.parts)] == later.parts
    # The first question of a conversation may be asked under other instructions too.
    may_share = later.has_replies or turn.prompt.head == later.head
    has_most = may_share and bool(said) and 2 * len(said & later.said) >= len(said)
    is_alike = _starts_alike(turn.prompt, later) or is_flattened(turn, later)
    return turn.is_quoted_in(later) or is_shorter or has_most or is_alike


def _starts_alike(earlier: Prompt, later: Prompt) -> bool:
    if len(later.parts) < len(earlier.parts) or not later.has_replies:
        return False
    ours, theirs = (
        next((part.shown for part in prompt.parts if not part.is_system), "") for prompt in (earlier, later)
    )
    return 2 * sum(shared_ends(ours, theirs)) > max(len(ours), len(theirs), 40)


def _goes_on(earlier: Turn, later: Prompt) -> bool:
    """Whether `later` continues `earlier` unchanged, and so replaces it.

    Of two versions both are kept: later turns show which one continues.
    """
    before = earlier.prompt
    is_same = before.has_inputs_of(later) and later.parts[: len(before.parts)] == before.parts
    return is_same and earlier.num_shared(later) > 0 and len(later.parts) > len(before.parts)
