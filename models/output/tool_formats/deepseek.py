"""DeepSeek's calls: those of V3 and R1, whose arguments stand in a block of code, and those of V3.1."""

import json
import re
from typing import Any, Final

from models.output.tool_format import ToolFormat

_START: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FRAMES: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

_IN_BLOCK = re.compile(rf"\s*function{_SEPARATOR}(?P<name>[^\n]+)\n```json\s*(?=\{{)")
_BARE = re.compile(rf"\s*(?P<name>[^\n<]+){_SEPARATOR}\s*(?=\{{)")


def _parse_block(text: str, tools: Any) -> dict[str, Any]:
    head = _IN_BLOCK.match(text)
    arguments, fence, rest = text[head.end() :].rpartition("```") if head else ("", "", "")
    if head is None or not fence or rest.strip():
        raise ValueError("no call of DeepSeek V3")
    return {"name": head["name"].strip(), "arguments": json.loads(arguments)}


def _parse_bare(text: str, tools: Any) -> dict[str, Any]:
    head = _BARE.match(text)
    if head is None:
        raise ValueError("no call of DeepSeek V3.1")
    return {"name": head["name"].strip(), "arguments": json.loads(text[head.end() :])}


DEEPSEEK_V3 = ToolFormat(_START, _END, _parse_block, head=_IN_BLOCK, frames=_FRAMES)
"""`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line break, and the arguments in a block of code."""

DEEPSEEK_V3_1 = ToolFormat(_START, _END, _parse_bare, head=_BARE, frames=_FRAMES)
"""`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS`."""
