"""The input of a custom tool, read from the JSON text of its arguments while that is written. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from models.texts import read_object
from server.api.responses.client_tools import INPUT

_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)
"""Text of a JSON string up to where an escape may not be complete."""


class CustomInput:
    """The input of one call."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read_to: int | None = None
        """Where in the arguments the input that is not yet read begins; None until it does."""
        self._told = ""

    def feed(self, arguments: str) -> str:
        """Takes more of the arguments' text; returns what it adds to the input."""
        self._arguments += arguments
        if self._read_to is None:
            head = _HEAD.match(self._arguments)
            if head is None:
                return ""
            self._read_to = head.end()
        found = _WHOLE.match(self._arguments, self._read_to)
        assert found is not None, "the pattern takes the empty text"
        self._read_to = found.end()
        added: str = json.loads(f'"{found.group()}"', strict=False)
        self._told += added
        return added

    def finish(self) -> tuple[str, str]:
        """Returns the whole input, and what of it `feed` has not told.

        Arguments of another shape are the input themselves, but for a single text under another name. Of those that
        were cut off it is what was told.
        """
        values = read_object(self._arguments)
        whole = self._told if values is None else _input_of(values, self._arguments)
        return whole, whole.removeprefix(self._told) if whole.startswith(self._told) else ""

    @property
    def so_far(self) -> str:
        """What was told of the input."""
        return self._told


def _input_of(values: Mapping[str, Any], arguments: str) -> str:
    value = values.get(INPUT, next(iter(values.values())) if len(values) == 1 else None)
    return value if isinstance(value, str) else arguments
