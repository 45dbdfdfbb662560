"""Tools as a client knows them, and the names by which the model is shown them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

INPUT: Final = "input"
"""The argument that holds the input of a custom tool."""
_SEPARATOR: Final = "__"


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True)
class ToolSet:
    """The tools of one request."""

    shown: Sequence[Mapping[str, Any]] = ()
    """Functions, as chat templates read them."""
    by_name: Mapping[str, ClientTool] | None = None
    """By the name that the model is shown."""

    def find(self, name: str) -> ClientTool:
        """Returns the tool that the model calls; one that it has made up is a function."""
        return (self.by_name or {}).get(name) or ClientTool(name)


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the name under which the model is shown a tool of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


def input_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments that stand for the input of a custom tool."""
    return {INPUT: text}
