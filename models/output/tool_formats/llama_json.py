"""Llama 3's calls in JSON: `{"name": …, "parameters": {…}}`, several one after another or parted by semicolons.

They are all of an answer, behind `<|python_tag|>` or without it.
"""

import json
from typing import Any, Final

from models.output.tool_formats.bare import BareFormat

PYTHON_TAG: Final = "<|python_tag|>"
_BEGINNINGS: Final = ('{"name":', '{"type":"function"')


def _may_be_call(text: str) -> bool:
    written = "".join(text.split())
    return any(written.startswith(beginning) or beginning.startswith(written) for beginning in _BEGINNINGS)


def _parse(text: str, tools: Any) -> list[Any]:
    decoder, calls, position = json.JSONDecoder(), list[Any](), 0
    while position < len(text):
        call, position = decoder.raw_decode(text, position)
        if not isinstance(call, dict) or not call.keys() <= _KEYS or not call.keys() & _ARGUMENTS:
            raise ValueError("no call")
        calls.append(call)
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n;"))
    return calls


_ARGUMENTS = frozenset({"parameters", "arguments"})
_KEYS = _ARGUMENTS | {"type", "name"}

_CALL_START: Final = r'\{\s*("type"\s*:\s*"function"|"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)")'

LLAMA_JSON = BareFormat(_may_be_call, _parse, _CALL_START, frames=(PYTHON_TAG,))
