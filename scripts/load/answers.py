"""What of an answer is the same whenever the same is asked: all but names, times, and what the cache held. Pure."""

import json
from collections.abc import Iterator
from typing import Any

from scripts.load.wire import Reply

CHANGING = {
    *("id", "item_id", "created", "created_at", "completed_at", "modified_at", "expires_at", "signature"),
    *("timings", "cache", "diagnostics", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
    *("prompt_eval_count", "cached_tokens", "cache_write_tokens", "input_tokens", "cache_read_input_tokens"),
    "cache_creation_input_tokens",
}
"""Fields that tell of one request, of the clock, or of how much was reused: Anthropic counts only what was not."""
_TEXTS = ("content", "text", "delta", "response", "thinking", "partial_json", "reasoning_content")


def essence(reply: Reply) -> Any:
    """Returns the part of an answer that must not change: for a stream its text, however it was cut."""
    kind = reply.headers.get("content-type", "")
    if kind.startswith(("text/event-stream", "application/x-ndjson")):
        return reply.status, streamed_text(reply.body)
    return reply.status, _without_changing(json.loads(reply.body))


def streamed_text(body: bytes) -> str:
    """Returns all text that a stream's events carry, in order."""
    return "".join(text for event in events(body) for text in _delta_texts(event))


def events(body: bytes) -> Iterator[Any]:
    """Yields the JSON of each event or line."""
    for line in body.decode().splitlines():
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


def _delta_texts(event: Any) -> Iterator[str]:
    if event.get("type", "").startswith("response.") and not event["type"].endswith(".delta"):
        return
    for carrier in (event, event.get("message"), event.get("delta"), *event.get("choices", ())):
        if isinstance(carrier, dict):
            for field in (*_TEXTS,):
                if isinstance(carrier.get(field), str):
                    yield carrier[field]
            inner = carrier.get("delta") if carrier is not event else None
            if isinstance(inner, dict):
                yield from (inner[field] for field in _TEXTS if isinstance(inner.get(field), str))


def _without_changing(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_changing(part) for name, part in value.items() if name not in CHANGING}
    if isinstance(value, list):
        return [_without_changing(part) for part in value]
    return value
