"""An answer's blocks, and their events. Pure.

Clients send thinking back with its signature, which proves nothing: any thinking is accepted. The signature of hidden
thinking holds the text.
"""

import base64
import hashlib
from collections.abc import Container, Sequence
from typing import Any, Final

from models.output import pieces
from models.output.pieces import OutputPart, OutputParts, PartEvent, PartStatus
from models.texts import enclose, opened, read_object

_DIGEST: Final = "mlx-serve-1:"


def sign(reasoning: str) -> str:
    """The signature of visible thinking."""
    return _DIGEST + base64.b64encode(hashlib.sha256(reasoning.encode(errors="replace")).digest()).decode()


def reasoning_of(shown: str, signature: str) -> str:
    """The reasoning of a returned block: the visible text, or the signature's."""
    return shown or opened(signature) or ""


class _Block(OutputPart):
    def __init__(self, head: dict[str, Any], *, is_hidden: bool = False) -> None:
        """`head` is the block without what grows. `is_hidden`: only the signature holds the text."""
        self.head = head
        self.is_hidden = is_hidden

    def body(self, status: PartStatus = "in_progress") -> dict[str, Any]:
        match self.head["type"]:
            case "text":
                return {**self.head, "text": self.text, "citations": None}
            case "thinking":
                signature = (enclose if self.is_hidden else sign)(self.text) if self.text else ""
                return {**self.head, "thinking": "" if self.is_hidden else self.text, "signature": signature}
            case "tool_search_tool_result":
                return self.head
        return {**self.head, "input": read_object(self.text) or {}, "caller": {"type": "direct"}}

    def begin(self) -> list[PartEvent]:
        return [self._event("start", content_block=self.body())]

    def grow(self, text: str) -> list[PartEvent]:
        self.text += text
        kind, field = _DELTAS.get(self.head["type"], ("input_json_delta", "partial_json"))
        return [] if self.is_hidden else [self._event("delta", delta={"type": kind, field: text})]

    def end(self, status: PartStatus) -> list[PartEvent]:
        if self.head["type"] != "thinking":
            return [self._event("stop")]
        signed = {"type": "signature_delta", "signature": self.body()["signature"]}
        return [self._event("delta", delta=signed), self._event("stop")]

    def _event(self, kind: str, **fields: Any) -> PartEvent:
        return {"type": f"content_block_{kind}", "index": self.index, **fields}


_DELTAS: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class AnswerContent(OutputParts):
    """The content of one answer."""

    def __init__(self, *, shows_thinking: bool = True, searches: Container[str] = ()) -> None:
        """Without `shows_thinking`, signatures hold the thinking. `searches` run here."""
        super().__init__()
        self._shows_thinking = shows_thinking
        self._searches = searches

    def part_of(self, piece: pieces.Text | pieces.Reasoning | pieces.ToolCallStarted) -> OutputPart:
        """A block."""
        match piece:
            case pieces.Text():
                return _Block({"type": "text"})
            case pieces.Reasoning():
                return _Block({"type": "thinking"}, is_hidden=not self._shows_thinking)
            case pieces.ToolCallStarted(call_id, name):
                kind, prefix = ("server_tool_use", "srvtoolu_") if name in self._searches else ("tool_use", "toolu_")
                # The model's own id stays.
                own_id = f"{prefix}{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id
                return _Block({"type": kind, "id": own_id, "name": name})

    def add_results(self, results: Sequence[dict[str, Any]]) -> list[PartEvent]:
        """Adds search results; returns their events."""
        begun = [event for result in results for event in self.begin(_Block(result))]
        return [*begun, *self.close()]
