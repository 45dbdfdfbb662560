"""Definitions of tools loaded in the middle of a conversation, as its template writes them.

A later tool's definition is the text that the template adds to a prompt with one tool for a second one. It is written
where the tool is loaded: nothing before changes.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from models.prompt.shapes import SAMPLE_TOOL
from models.prompt.tokenize import LatelyUsed, spend
from models.texts import shared_length

Tool: TypeAlias = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`."""
MAX_KEPT_CHARACTERS: Final = 16 << 20
_SEPARATORS: Final = ", \t\r\n"
_BRACKETS: Final = ("<>", "{}", "[]", "()")


class ToolDefinitions:
    """Writes one model's definitions. Any thread."""

    def __init__(self, render: Callable[[Sequence[Tool]], str]) -> None:
        """`render` returns a short prompt with some tools, an empty one if the template refuses them."""
        self._render = render
        self._kept = LatelyUsed[str](MAX_KEPT_CHARACTERS)

    def block(self, names: Sequence[str], tools: Mapping[str, Tool], place: Hashable) -> str:
        """The named tools' definitions as one block, kept for the conversation at `place`.

        A name without a tool is declared unavailable, in a block not kept: the tool may come back. Raises what
        `spend` raises.
        """
        key = (place, tuple(names))
        kept = self._kept.recall(key)
        if kept is not None:
            spend(len(kept), "tools")
            return kept
        definitions = [tools[name] for name in names if name in tools]
        lines = ["<functions>", *map(self._definition, definitions), "</functions>"] if definitions else []
        text = "\n".join([*lines, *(f"{name} is no longer available." for name in names if name not in tools)])
        if len(definitions) < len(names):
            return text
        return self._kept.recall(key) or self._kept.keep(key, text, len(text))  # another thread may have kept it

    def _definition(self, tool: Tool) -> str:
        written = _inserted(self._render([SAMPLE_TOOL]), self._render([SAMPLE_TOOL, tool]))
        name, sample = tool["function"]["name"], SAMPLE_TOOL["function"]["name"]
        if name not in written or sample in written:
            # The template writes tools in another way than one after another, or not at all.
            written = f"<function>{json.dumps(dict(tool['function']), ensure_ascii=False)}</function>"
        spend(len(written), "tools")
        return written


def _inserted(shorter: str, longer: str) -> str:
    """The text that `longer` adds within `shorter`, without separators; "" if no insertion.

    If there are several places, the one between separators or brackets counts.
    """
    count = len(longer) - len(shorter)
    start = shared_length(shorter, longer)
    if count <= 0 or longer[start + count :] != shorter[start:]:
        return ""
    while not _is_whole(longer, start, start + count):
        if start == 0 or longer[start - 1] != longer[start + count - 1]:
            return ""
        start -= 1
    return longer[start : start + count].strip(_SEPARATORS)


def _is_whole(text: str, start: int, stop: int) -> bool:
    """Whether a part begins at a separator, or its end closes its bracket."""
    if start == 0 or text[start] in _SEPARATORS or text[start - 1] in _SEPARATORS:
        return True
    return text[start] + text[stop - 1] in _BRACKETS
