"""Replaces values at the head of the prompt that a client changes with every request by constants. Pure.

One such value makes every prompt differ from the last one in its first line, so that nothing could be reused; no
answer depends on it. A known line is matched as a whole, and only as the first line of a leading system message. Only
the changing values become constants. Knows messages, no client, no tokens.

Known lines:

* Claude Code's `x-anthropic-billing-header: cc_version=2.1.15.7b4; cc_entrypoint=cli; cch=eb6c6;`: `cch`, and the
  last part of the version, which differs from one conversation to the next.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A message of a template: `role`, and `content` as a text or a list of text parts."""

_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: ?[a-z][a-z0-9_]*=[\w.+-]*;)+ ?(?=\r?\n|\Z)", re.ASCII)
_CHANGING_VALUES = (
    (re.compile(r"(?<=[ :;]cch=)[0-9A-Za-z]+(?=;)", re.ASCII), "00000"),
    (re.compile(r"(?<=[ :;]cc_version=)(\d+\.\d+\.\d+)\.[0-9a-f]{3}(?=;)", re.ASCII), r"\1.000"),
)


def with_constant_headers(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with constants in leading system messages; changed messages are copies."""
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*map(_cleaned, messages[:num_system]), *messages[num_system:]]


def with_constant_header(text: str) -> str:
    """Returns the text of a system message with constants in its first line."""
    line = _BILLING_LINE.match(text)
    if line is None:
        return text
    header = line[0]
    for pattern, constant in _CHANGING_VALUES:
        header = pattern.sub(constant, header)
    return header + text[line.end() :]


def _cleaned(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": with_constant_header(content)}
    if not content:
        return message
    first: Mapping[str, Any] = content[0]
    return {**message, "content": [{**first, "text": with_constant_header(first["text"])}, *content[1:]]}
