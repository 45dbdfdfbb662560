"""Tools as a client knows them, and the names by which the model is shown them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SEARCH: Final = "tool_search"
"""How the model is shown a search for tools that the client runs."""
INPUT: Final = "input"
"""The argument that holds the input of a custom tool."""
_SEPARATOR: Final = "__"


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_search: bool = False


@dataclass(frozen=True)
class ToolSet:
    """The tools of one request."""

    shown: Sequence[Mapping[str, Any]] = ()
    """Functions at the head of the prompt, as chat templates read them."""
    loaded: Sequence[Mapping[str, Any]] = ()
    """Functions that a search of the client has found since."""
    by_name: Mapping[str, ClientTool] | None = None
    """By the name that the model is shown."""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        """All functions that the model may call."""
        return [*self.shown, *self.loaded]

    def with_found(self, found: "ToolSet") -> "ToolSet":
        """Returns these tools and those that a search has found; a tool that was there already stays as it was."""
        known = {tool["function"]["name"] for tool in self.callable_tools}
        new = [tool for tool in found.shown if tool["function"]["name"] not in known]
        by_name = {**(found.by_name or {}), **(self.by_name or {})}
        return ToolSet(self.shown, [*self.loaded, *new], by_name)

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
