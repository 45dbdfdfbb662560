"""The account of one prompt: how many of its tokens each cause made the server evaluate again. Pure.

Every token of a prompt is restored, new, or evaluated again for a reason that is named:
`evaluated = new + lost`, with `new` the tokens beyond what the turn before could have given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.types import TokenArray, common_prefix_length
from models.prompt.shapes import Outline
from server.diagnosis.compare import Change, Turn, find_changes_between, find_volatile_head
from server.diagnosis.prompt import Prompt
from server.engine.diagnosis import Cause, Miss, MissReason, Reuse

EDGE_TOKENS = 16
"""The most tokens of an answer's header. A prompt may be restorable only before this header, which is no miss."""


@dataclass(frozen=True, eq=False)
class EvaluatedTurn:
    """A turn that the server has run."""

    turn: Turn
    tokens: TokenArray
    """Prompt and reply, as far as they were evaluated."""
    num_prompt_tokens: int
    was_cleared: bool = False
    """Whether the cache was cleared since."""
    was_unloaded: bool = False
    """Whether its model was unloaded since, and the state of its conversations given up."""
    request_id: str = ""
    """What the request was called."""
    is_neighbour: bool = False
    """Whether it is of another conversation, whose system messages are the request's but for a clock, say."""

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, with text that other turns may share."""
        reply = self.turn.reply.num_bytes if self.turn.reply is not None else 0
        return self.tokens.nbytes + self.turn.prompt.num_bytes + reply


@dataclass(frozen=True, eq=False)
class Rendered:
    """A prompt and what it was made of."""

    prompt: Prompt
    tokens: TokenArray
    outline: Outline


def explain(previous: EvaluatedTurn | None, request: Rendered, *, match: int, hit: int) -> Reuse:
    """Returns why not more than `hit` tokens were restored, of `match` tokens that the cache knew."""
    if previous is None:
        return _of_first(request, match, hit)
    if previous.is_neighbour:
        return _of_neighbour(previous, request, match, hit)
    lost = _Loss(previous, request, match, hit)
    misses = tuple(lost.misses())
    kept: float | None = min(hit, len(previous.tokens)) / len(previous.tokens) if len(previous.tokens) else 1.0
    costliest = max(misses, key=lambda miss: miss.lost_tokens, default=None)
    if any(miss.cause is Cause.SIDE_REQUEST for miss in misses):
        # A side request goes on from no turn, so there is no share to tell.
        kept = None
    return Reuse(match, hit, kept, costliest, sum(miss.lost_tokens for miss in misses), misses)


def declined(previous: EvaluatedTurn | None, request: Rendered) -> Reuse:
    """Returns the account of a request that wanted nothing reused."""
    reach = min(len(previous.tokens), len(request.tokens) - 1) if previous is not None else 0
    miss = Miss(MissReason.DISABLED, cause=Cause.DECLINED, lost_tokens=reach)
    return Reuse(0, 0, None, miss, reach, (miss,))


def _of_first(request: Rendered, match: int, hit: int) -> Reuse:
    """Returns the account of a request that goes on from no turn, though others may have had its beginning."""
    if match - hit > EDGE_TOKENS:
        miss = _state_miss(request, hit, match - hit, MissReason.NO_RESTORE_POINT, Cause.NOT_RESTORABLE)
        return Reuse(match, hit, None, miss, miss.lost_tokens, (miss,))
    return Reuse(match, hit, miss=Miss(MissReason.COLD, token=hit, cause=Cause.COLD) if hit == 0 else None)


def _of_neighbour(previous: EvaluatedTurn, request: Rendered, match: int, hit: int) -> Reuse:
    """Returns the account of a conversation's first request, whose system messages another one had but for a clock.

    What they could have shared is these messages, no more.
    """
    starts, num_head = request.outline.starts, request.prompt.num_head
    reach = starts[num_head] if len(starts) > num_head else min(len(previous.tokens), len(request.tokens) - 1)
    changes = find_volatile_head(previous.turn.prompt, request.prompt)
    lost = reach - hit
    if not changes or lost <= EDGE_TOKENS:
        return _of_first(request, match, hit)
    first, *hidden = map(_miss_of, changes)
    common = common_prefix_length(previous.tokens, request.tokens)
    misses = (replace(first, token=common, lost_tokens=lost), *hidden)
    return Reuse(match, hit, None, misses[0], lost, misses)


def _miss_of(change: Change) -> Miss:
    return Miss(change.reason, change.index, change.role, None, change.before, change.after, cause=change.cause)


def _state_miss(request: Rendered, hit: int, lost: int, reason: MissReason, cause: Cause) -> Miss:
    index, role = request.outline.message_at(hit)
    return Miss(reason, index, role, hit, cause=cause, lost_tokens=lost)


class _Loss:
    """What one prompt lost: by what was changed, and by what the cache lacked before that."""

    def __init__(self, previous: EvaluatedTurn, request: Rendered, match: int, hit: int) -> None:
        self._previous = previous
        self._request = request
        self._match, self._hit = match, hit
        longest = len(request.tokens) - 1
        self._reach = max(0, min(len(previous.tokens), longest))
        """What could have been reused at best."""
        is_known = request.prompt.shares_state_with(previous.turn.prompt)
        self._common = min(common_prefix_length(previous.tokens, request.tokens), longest) if is_known else 0

    def misses(self) -> list[Miss]:
        """Returns them in the order of the prompt: what the cache lacked comes first."""
        by_state = max(0, min(self._common, self._reach) - self._hit)
        by_change = max(0, self._reach - max(self._common, self._hit))
        changes = find_changes_between(self._previous.turn, self._request.prompt) if by_change else []
        if by_change and self._is_consequence(changes, by_state):
            by_state, by_change = 0, by_change + by_state
        state = [self._state_miss(by_state)] if by_state else []
        return [*state, *self._change_misses(changes, by_change)]

    def _is_consequence(self, changes: Sequence[Change], by_state: int) -> bool:
        """Whether state is missing only because of the change: it is kept for prompts that go on unchanged.

        Where a template changes a reply, prompts part within the answer's header; the restore point is before it.
        """
        if self._match < self._common or self._previous.was_cleared or self._previous.was_unloaded:
            return False
        if not changes:
            return self._hit >= min(self._previous.num_prompt_tokens, self._common) - EDGE_TOKENS
        # A request beside the conversation shares its beginning, and could have been restored at the end of that.
        is_other = changes[0].cause is Cause.SIDE_REQUEST and by_state > EDGE_TOKENS
        return changes[0].cause is not Cause.BRANCHED and not is_other

    def _state_miss(self, lost: int) -> Miss:
        reason, cause = MissReason.EVICTED, Cause.EVICTED
        if self._previous.was_cleared:
            reason, cause = MissReason.CLEARED, Cause.CLEARED
        elif self._previous.was_unloaded:
            reason, cause = MissReason.UNLOADED, Cause.UNLOADED
        elif self._match >= self._common:
            reason, cause = MissReason.NO_RESTORE_POINT, Cause.NOT_RESTORABLE
        return _state_miss(self._request, self._hit, lost, reason, cause)

    def _change_misses(self, changes: Sequence[Change], lost: int) -> list[Miss]:
        if not lost:
            return []
        if not changes:
            index, role = self._request.outline.message_at(self._common)
            miss = Miss(MissReason.TEMPLATE, index, role, self._common, cause=Cause.TEMPLATE, lost_tokens=lost)
            return [miss]
        first, *hidden = map(_miss_of, changes)
        return [replace(first, token=self._common, lost_tokens=lost), *hidden]
