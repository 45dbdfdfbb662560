"""What answers of the Messages API say of their tokens, of reuse, and of their end."""

from collections.abc import Sequence
from typing import Final, NotRequired, TypedDict

from cache.snapshots import RestorePointKind
from server.api.usage import CacheBody, TimingsBody, cache_of, timings_of
from server.engine.diagnosis import Miss, MissReason
from server.engine.request import Finished, FinishReason, GenerationRequest, Started

_MISS_TYPES: Final = {
    MissReason.SYSTEM_CHANGED: "system_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.MODEL_CHANGED: "model_changed",
    MissReason.MESSAGES_CHANGED: "messages_changed",
    MissReason.HISTORY_TRIMMED: "messages_changed",
    MissReason.REPLY_CHANGED: "messages_changed",
    MissReason.THOUGHTS_REMOVED: "messages_changed",
    MissReason.BRANCHED: "messages_changed",
    MissReason.NOTE_MOVED: "messages_changed",
    MissReason.SIDE_REQUEST: "messages_changed",
}
"""Anthropic's words for reasons; for those that it has none for it says `unavailable`."""


class OutputTokensDetails(TypedDict):
    """What the answer's tokens were spent on."""

    thinking_tokens: int


class MessagesUsage(TypedDict):
    """Token counts of one request. The prompt has the sum of the three that tell of input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]
    """Only where the model's thoughts are told apart."""


class CacheMissReason(TypedDict):
    """Why not all was reused of what the conversation's last turn held, in Anthropic's words."""

    type: str
    cache_missed_input_tokens: NotRequired[int]


class DiagnosticsBody(TypedDict):
    """What was reused, why not more, and what the answer cost."""

    cache_miss_reason: CacheMissReason | None
    cache: CacheBody | None
    timings: NotRequired[TimingsBody]
    """Only once the answer is complete."""


def usage_at_start(request: GenerationRequest, started: Started, *, caches_all: bool) -> MessagesUsage:
    """Returns the counts of a request that has just begun. `caches_all`: the whole prompt is a block to be cached."""
    num_prompt, num_read = started.prompt_tokens, started.hit_tokens
    explicit = (point.offset for point in request.restore_points if point.kind is RestorePointKind.EXPLICIT)
    # Blocks up to the last one that is marked are written to the cache; of the rest, Anthropic counts plain input.
    marked = num_prompt if caches_all else max(explicit, default=0)
    num_created = max(0, min(marked, num_prompt) - num_read)
    return {
        "input_tokens": num_prompt - num_read - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_read,
        "output_tokens": 0,
    }


def usage_at_end(at_start: MessagesUsage, parts: Sequence[Finished]) -> MessagesUsage:
    """Returns the counts of a finished answer: the prompt of its first part, and what all parts have put out."""
    usage: MessagesUsage = {**at_start, "output_tokens": sum(part.timings.predicted_tokens for part in parts)}
    thought = [part.reasoning_tokens for part in parts if part.reasoning_tokens is not None]
    if thought:
        usage["output_tokens_details"] = {"thinking_tokens": sum(thought)}
    return usage


def diagnostics_of(started: Started, session_id: str | None, finished: Finished | None = None) -> DiagnosticsBody:
    """Returns what was reused and why not more, and of a finished request the times."""
    body: DiagnosticsBody = {
        "cache_miss_reason": _miss_reason(started.reuse.miss),
        "cache": cache_of(started, session_id),
    }
    if finished is not None:
        body["timings"] = timings_of(finished.timings)
    return body


def _miss_reason(miss: Miss | None) -> CacheMissReason | None:
    if miss is None:
        return None
    kind = _MISS_TYPES.get(miss.reason)
    if kind is None:
        return {"type": "unavailable"}
    return {"type": kind, "cache_missed_input_tokens": miss.lost_tokens}


def stop_reason(finished: Finished, *, made_calls: bool, max_tokens: int) -> str:
    """Returns Anthropic's word for why the answer ended; `max_tokens` is what the request allowed."""
    if finished.reason is FinishReason.LENGTH:
        is_cut_by_context = finished.timings.predicted_tokens < max_tokens
        return "model_context_window_exceeded" if is_cut_by_context else "max_tokens"
    if finished.stop_text is not None:
        return "stop_sequence"
    return "tool_use" if made_calls else "end_turn"
