"""Keeps the head of a prompt the same where a client changes it without meaning anything by it. Pure.

Such a change makes all that follows differ from the prompt before, so nothing could be reused:
* the first line of Claude Code's system message, `x-anthropic-billing-header: cc_version=2.1.15.7b4;
  cc_entrypoint=cli; cch=eb6c6;`: `cch` and the version's last part become constants. The line is matched whole, only
  as the first one of a leading system message;
* the order of keys in a tool's definition: a tool is shown as first sent.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from models.prompt.shapes import Message, num_leading_system

_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: ?[a-z][a-z0-9_]*=[\w.+-]*;)+ ?(?=\r?\n|\Z)", re.ASCII)
_CHANGING_VALUES = (
    (re.compile(r"(?<=[ :;]cch=)[0-9A-Za-z]+(?=;)", re.ASCII), "00000"),
    (re.compile(r"(?<=[ :;]cc_version=)(\d+\.\d+\.\d+)\.[0-9a-f]{3}(?=;)", re.ASCII), r"\1.000"),
)


def with_constant_headers(messages: Sequence[Message]) -> list[Message]:
    """Messages with constant headers; changed ones are copies."""
    num_system = num_leading_system(messages)
    return [*map(_cleaned, messages[:num_system]), *messages[num_system:]]


def with_constant_header(text: str) -> str:
    """The text with constants in the first line."""
    line = _BILLING_LINE.match(text)
    if line is None:
        return text
    header = line[0]
    for pattern, constant in _CHANGING_VALUES:
        header = pattern.sub(constant, header)
    return header + text[line.end() :]


MAX_TOOLS = 512
"""Tools remembered; the least recently used are forgotten."""
MAX_TOOL_BYTES = 16 << 10
"""A longer definition is shown as sent. All remembered take at most 8 MiB."""


class ToolOrders:
    """Each tool's order of keys as first sent, by namespace. Any thread."""

    def __init__(self) -> None:
        # The cache has a lock of its own, and so has `setdefault`: two threads agree on one order.
        self._first = lru_cache(MAX_TOOLS)(lambda _namespace, _digest: dict[str, str]())

    def settle(self, namespace: str, tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tools with keys as first sent."""
        return [self._settle(namespace, tool) for tool in tools]

    def _settle(self, namespace: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        text = json.dumps(tool)
        if len(text) > MAX_TOOL_BYTES:
            return tool
        digest = hashlib.sha256(json.dumps(tool, sort_keys=True).encode()).digest()
        first = self._first(namespace, digest).setdefault("text", text)
        settled: Mapping[str, Any] = tool if first == text else json.loads(first)
        return settled


def _cleaned(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": with_constant_header(content)}
    if not content:
        return message
    first: Mapping[str, Any] = content[0]
    return {**message, "content": [{**first, "text": with_constant_header(first["text"])}, *content[1:]]}
