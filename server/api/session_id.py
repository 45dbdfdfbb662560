"""Finds a request's session in what its client happens to send, and reads and writes header text. Pure.

A session is a hint for slot affinity and order, never a key to other tokens. The first of these wins:

1. `session_id` in the body
2. the headers of `SESSION_HEADERS`, in that order
3. `prompt_cache_key` in the body
4. `metadata.user_id`: JSON with a `session_id`, or a text that ends in `_session_<uuid>`
5. `metadata.session_id`, `metadata.chat_id`, `metadata.conversation_id`
6. `previous_response_id`, `conversation` (a text, or an object with an `id`)

Without any, the tokens themselves decide. Bytes of HTTP headers have no encoding: the server reads them as Latin-1,
clients write UTF-8.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote


def header_text(value: str) -> str:
    """Returns a header's value: UTF-8 if its bytes are, else Latin-1."""
    with contextlib.suppress(UnicodeError):
        # Must precede stripping white space: a letter's UTF-8 byte may be white space in Latin-1.
        value = value.encode("latin-1").decode()
    return value.strip()


def ascii_text(value: str) -> str:
    """Returns a value for a header: printable ASCII, else UTF-8 with percent signs."""
    is_plain = value.isascii() and value.isprintable() and value == value.strip()
    return value if is_plain else quote(value, safe="", errors="replace")


SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-session-affinity",
    "x-openwebui-chat-id",
    "x-conversation-id",
    "x-litellm-session-id",
    "x-smg-routing-key",
)
SESSION_METADATA = ("session_id", "chat_id", "conversation_id")
MAX_SESSION_ID_CHARACTERS = 256

_SESSION_SUFFIX = re.compile(
    r"_session_([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\Z", re.IGNORECASE
)


class SessionIdError(ValueError):
    """An invalid session name; `param` is its place in the request."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param} {reason}")
        self.param = param


def resolve_session_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Returns the session's name, 1 to 256 printable characters, or None; raises SessionIdError for any other name.

    Null and empty texts count as absent.
    """
    for param, value in _candidates(body, headers):
        if value is None or value == "":
            continue
        return _checked(param, value)
    return None


def _candidates(body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    yield "session_id", body.get("session_id")
    lowered = {name.lower(): value for name, value in headers.items()}
    for name in SESSION_HEADERS:
        yield name, header_text(lowered.get(name, ""))
    yield "prompt_cache_key", body.get("prompt_cache_key")
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        yield "metadata.user_id", _session_in_user_id(metadata.get("user_id"))
        for name in SESSION_METADATA:
            yield f"metadata.{name}", metadata.get(name)
    yield "previous_response_id", body.get("previous_response_id")
    conversation = body.get("conversation")
    yield "conversation", conversation.get("id") if isinstance(conversation, Mapping) else conversation


def _session_in_user_id(user_id: Any) -> Any:
    """Agents put the session into a user's name."""
    if not isinstance(user_id, str):
        return None
    suffix = _SESSION_SUFFIX.search(user_id)
    if suffix:
        return suffix.group(1)
    if not user_id.startswith("{"):
        return None
    try:
        fields = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    return fields.get("session_id") if isinstance(fields, dict) else None


def _checked(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SessionIdError(param, "must be a text")
    if len(value) > MAX_SESSION_ID_CHARACTERS:
        raise SessionIdError(param, f"has {len(value)} characters; at most {MAX_SESSION_ID_CHARACTERS} are allowed")
    if not value.isprintable():
        raise SessionIdError(param, "holds control characters")
    return value
