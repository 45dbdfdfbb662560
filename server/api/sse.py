"""Server-sent events, as dialects write them: one JSON object an event, and comments, which clients skip."""

from typing import Any

from sse_starlette.event import ServerSentEvent

from server.api.json_body import json_text

SEPARATOR = "\n"


def sse_event(payload: Any, name: str | None = None) -> bytes:
    """Returns an event; raises ValueError or TypeError for a payload that JSON cannot hold."""
    # JSON is a line; the library's frames, made for any text, cost more than its encoding.
    head = f"event: {name}{SEPARATOR}" if name else ""
    return f"{head}data: {json_text(payload)}{SEPARATOR}{SEPARATOR}".encode()


def sse_text(text: str, name: str | None = None) -> bytes:
    """Returns an event whose data is no JSON."""
    return ServerSentEvent(text, event=name, sep=SEPARATOR).encode()


def sse_comment(text: str) -> bytes:
    """Returns a comment."""
    return ServerSentEvent(comment=text, sep=SEPARATOR).encode()
