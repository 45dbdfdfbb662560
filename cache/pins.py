"""Pins: named reasons not to evict nodes of the trie.

A pinned node is not evicted, and since only leaves are evicted whole, neither are the spans of the path to it. An
*explicit* pin holds until it is released. A *soft* pin ends at a given time, or earlier if a request would otherwise
have to wait or fail. Slots are paged out regardless of pins, since that loses nothing. This module reads no clock;
callers pass the time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.snapshots import KEPT_POINTS
from cache.trie import Node, PrefixTrie


@dataclass(frozen=True)
class PinName:
    """The name of a pin. A second pin of the same name replaces the first."""

    namespace: str
    label: str
    """The pinned session, or another label of the caller's."""
    is_soft: bool = False
    """A label can have a soft and an explicit pin at once."""


@dataclass(frozen=True, eq=False)
class _Pin:
    trie: PrefixTrie
    nodes: tuple[Node, ...]
    until: float | None
    """When a soft pin ends; None for an explicit one."""


class Pins:
    """All pins by name. `Node.num_pins` counts the pins on a node."""

    def __init__(self) -> None:
        self._pins: dict[PinName, _Pin] = {}

    def __contains__(self, name: PinName) -> bool:
        return name in self._pins

    def hold(self, name: PinName, trie: PrefixTrie, nodes: Sequence[Node], until: float | None = None) -> list[Node]:
        """Pins nodes in place of the name's earlier ones; returns the nodes that are no longer pinned."""
        for node in nodes:
            node.num_pins += 1
        freed = self.release(name)
        self._pins[name] = _Pin(trie, tuple(nodes), until)
        return freed

    def release(self, name: PinName) -> list[Node]:
        """Ends a pin, if any; returns the nodes that are no longer pinned."""
        pin = self._pins.pop(name, None)
        return [node for node in pin.nodes if _unpin(node)] if pin is not None else []

    def release_expired(self, now: float) -> list[tuple[PrefixTrie, Node]]:
        """Ends expired soft pins; returns the nodes that are no longer pinned, with their tries."""
        return self._release(name for name, pin in self._pins.items() if pin.until is not None and pin.until <= now)

    def release_soft(self) -> list[tuple[PrefixTrie, Node]]:
        """Ends all soft pins; returns the nodes that are no longer pinned, with their tries."""
        return self._release(name for name, pin in self._pins.items() if pin.until is not None)

    def release_all(self, namespace: str | None) -> None:
        """Ends the pins of one namespace, or all."""
        self._release(name for name in self._pins if namespace in (None, name.namespace))

    def labels(self, namespace: str) -> tuple[str, ...]:
        """Returns the labels of a namespace's explicit pins."""
        return tuple(n.label for n, pin in self._pins.items() if n.namespace == namespace and pin.until is None)

    def explicit(self, *, but: PinName | None = None) -> set[Node]:
        """Returns the nodes with explicit pins, except those that only the pin `but` holds."""
        held = (pin for name, pin in self._pins.items() if pin.until is None and name != but)
        return {node for pin in held for node in pin.nodes if node.parent is not None}

    def _release(self, names: Iterable[PinName]) -> list[tuple[PrefixTrie, Node]]:
        tries = [(name, self._pins[name].trie) for name in list(names)]
        return [(trie, node) for name, trie in tries for node in self.release(name)]


def choose_nodes(path: Sequence[Node]) -> list[Node]:
    """Returns the nodes to pin so that a sequence, and its next turn rendered differently, can be restored.

    These are its end, which protects the spans of the whole path, and the snapshots of its last two turns.
    """
    inner = [node for node in path[:-1] if node.snapshot is not None]
    return [*inner[-KEPT_POINTS:], *path[-1:]]


def path_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Returns the nodes on the paths to the given nodes, inclusive."""
    return {above for node in nodes for above in node.path()}


def _unpin(node: Node) -> bool:
    node.num_pins -= 1
    return node.num_pins == 0 and node.parent is not None
