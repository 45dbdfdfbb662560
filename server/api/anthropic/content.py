"""An answer's blocks as they grow, and their events. Pure.

Clients send thinking back with its signature, which proves nothing: any thinking is accepted. The signature of hidden
thinking holds the text.
"""

import base64
import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from typing_extensions import TypedDict

from models.output import pieces
from models.output.pieces import Piece
from models.texts import enclose, opened, read_object

_DIGEST: Final = "mlx-serve-1:"


def sign(reasoning: str) -> str:
    """The signature of visible thinking."""
    return _DIGEST + base64.b64encode(hashlib.sha256(reasoning.encode(errors="replace")).digest()).decode()


def reasoning_of(shown: str, signature: str) -> str:
    """The reasoning of a returned block: the visible text, or the signature's."""
    return shown or opened(signature) or ""


BlockEvent: TypeAlias = dict[str, Any]
"""An event's data; `type` is the event's name."""


class TextBlockBody(TypedDict):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlockBody(TypedDict):
    """What the model thinks before it answers."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockBody(TypedDict):
    """A call. A call that was cut off has no input, in a stream a part."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ServerToolUseBody(TypedDict):
    """A complete call of a search that ran here."""

    type: Literal["server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolSearchResultBody(TypedDict):
    """What a search has found, or Anthropic's word for why it failed."""

    type: Literal["tool_search_tool_result"]
    tool_use_id: str
    content: dict[str, Any]


BlockBody: TypeAlias = TextBlockBody | ThinkingBlockBody | ToolUseBlockBody | ServerToolUseBody | ToolSearchResultBody


@dataclass
class _Open:
    head: dict[str, Any]
    """Type; of a call, also id and name."""
    is_hidden: bool = False
    """Thinking whose text only the signature holds."""
    text: str = ""

    def body(self) -> Any:
        match self.head["type"]:
            case "text":
                return {**self.head, "text": self.text}
            case "thinking":
                signature = (enclose if self.is_hidden else sign)(self.text) if self.text else ""
                return {**self.head, "thinking": "" if self.is_hidden else self.text, "signature": signature}
        return {**self.head, "input": read_object(self.text) or {}}


class AnswerContent:
    """The content of one answer."""

    def __init__(self, *, shows_thinking: bool = True, searches: Container[str] = ()) -> None:
        """Without `shows_thinking`, signatures hold the thinking. `searches` run here."""
        self._shows_thinking = shows_thinking
        self._searches = searches
        self._ended: list[BlockBody] = []
        self._open: _Open | None = None
        self._num_streamed = 0

    @property
    def blocks(self) -> list[BlockBody]:
        """All blocks so far, texts around a failed call joined."""
        blocks = list(self._ended)
        if self._open is not None:
            _append(blocks, self._open.body())
        return blocks

    def add(self, piece: Piece) -> list[BlockEvent]:
        """Takes a piece; returns its events."""
        match piece:
            case pieces.Text(text):
                return [*self._ready("text"), self._grow(text, {"type": "text_delta", "text": text})]
            case pieces.Reasoning(text):
                events = self._ready("thinking", is_hidden=not self._shows_thinking)
                delta = self._grow(text, {"type": "thinking_delta", "thinking": text})
                return [*events, delta] if self._shows_thinking else events
            case pieces.ToolCallStarted(call_id, name):
                kind, prefix = ("server_tool_use", "srvtoolu_") if name in self._searches else ("tool_use", "toolu_")
                # The model's own id stays.
                own_id = f"{prefix}{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id
                return self._begin(_Open({"type": kind, "id": own_id, "name": name}))
            case pieces.ToolArguments(text):
                return [self._grow(text, {"type": "input_json_delta", "partial_json": text})]
            case pieces.ToolCallEnded() | pieces.ToolCallCut():
                return self.close()
            case pieces.ToolCallFailed(text):
                self._open = None
                return [self._stop(), *self.add(pieces.Text(text))]

    def close(self) -> list[BlockEvent]:
        """Ends the open block; returns its events."""
        if self._open is None:
            return []
        body, self._open = self._open.body(), None
        _append(self._ended, body)
        if body["type"] != "thinking":
            return [self._stop()]
        return [self._delta({"type": "signature_delta", "signature": body["signature"]}), self._stop()]

    def add_results(self, results: Sequence[ToolSearchResultBody]) -> list[BlockEvent]:
        """Adds search results; returns their events."""
        events = self.close()
        for result in results:
            self._ended.append(result)
            self._num_streamed += 1
            start = {"type": "content_block_start", "index": self._index, "content_block": result}
            events += [start, self._stop()]
        return events

    def _ready(self, kind: str, *, is_hidden: bool = False) -> list[BlockEvent]:
        """Begins a block of text or thinking, unless it is open."""
        is_open = self._open is not None and self._open.head["type"] == kind
        return [] if is_open else self._begin(_Open({"type": kind}, is_hidden))

    def _begin(self, block: _Open) -> list[BlockEvent]:
        events = self.close()
        self._open = block
        self._num_streamed += 1
        # The block as it is now, without content.
        start = {"type": "content_block_start", "index": self._index, "content_block": block.body()}
        return [*events, start]

    def _grow(self, text: str, delta: dict[str, str]) -> BlockEvent:
        assert self._open is not None, "a part belongs to a block"
        self._open.text += text
        return self._delta(delta)

    def _delta(self, delta: dict[str, str]) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> BlockEvent:
        return {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return self._num_streamed - 1


def _append(blocks: list[BlockBody], block: BlockBody) -> None:
    last = blocks[-1] if blocks else None
    if last is not None and last["type"] == "text" and block["type"] == "text":
        blocks[-1] = {"type": "text", "text": last["text"] + block["text"]}
    else:
        blocks.append(block)
