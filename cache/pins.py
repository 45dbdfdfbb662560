"""Pins: named reasons not to evict nodes of the trie, and how much they may protect. Pure.

Only leaves are evicted whole, so a pin protects the spans above too. An *explicit* pin holds until released, a *soft*
pin until a given time, or until a request would have to wait or fail. Slots are paged out regardless: that loses
nothing.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache.budget import Ledger, PinLimit
from cache.snapshots import KEPT_POINTS
from cache.trie import Node, PrefixTrie
from cache.types import TokenArray


@dataclass(frozen=True)
class PinName:
    """A second pin of a name replaces the first."""

    namespace: str
    label: str
    is_soft: bool = False
    """A soft pin; the label may have an explicit pin too."""


@dataclass(frozen=True, eq=False)
class _Pin:
    nodes: list[Node]
    until: float | None


class Pins:
    """All pins by name. Worker thread only."""

    def __init__(self, ledger: Ledger) -> None:
        """Explicit pins may protect half of the budget."""
        self.bytes_per_token = 0.0
        """0 until measured."""
        self._ledger = ledger
        self._pins: dict[PinName, _Pin] = {}

    def __contains__(self, name: PinName) -> bool:
        return name in self._pins

    def pin(self, name: PinName, trie: PrefixTrie, tokens: TokenArray) -> int:
        """As `PrefixCache.pin`."""
        match = trie.match(tokens)
        if match.path:
            self._pin_path(name, match.path)
        return match.length

    def pin_until(self, name: PinName, trie: PrefixTrie, tokens: TokenArray, until: float) -> None:
        """Pins stored state softly, until the caller's clock reads `until`."""
        assert name.is_soft
        path = trie.match(tokens).path
        if path:
            self._hold(name, _nodes_to_pin(path), until)

    def follow(self, namespace: str, session_id: str | None, tip: Node) -> None:
        """Moves a session's pin, if any, to its sequence's end."""
        name = PinName(namespace, session_id or "")
        if name in self and tip.parent is not None:
            with contextlib.suppress(PinLimit):  # the earlier part of the session stays pinned
                self._pin_path(name, tip.path())

    def _pin_path(self, name: PinName, path: list[Node]) -> None:
        nodes = _nodes_to_pin(path)
        num_bytes = self._bytes_of({*nodes, *self.explicit(but=name)})
        limit = self._ledger.budget_bytes // 2
        if num_bytes > limit:
            raise PinLimit(num_bytes, limit)
        self._hold(name, nodes, None)

    def _bytes_of(self, nodes: set[Node]) -> int:
        snapshots = sum(node.snapshot.num_bytes for node in nodes if node.snapshot is not None)
        return snapshots + sum(
            node.span.num_bytes if node.span is not None else int(len(node.tokens) * self.bytes_per_token)
            for node in path_nodes(nodes)
        )

    def _hold(self, name: PinName, nodes: list[Node], until: float | None) -> None:
        for node in nodes:
            node.num_pins += 1
        self.release(name)
        self._pins[name] = _Pin(nodes, until)

    def release(self, name: PinName) -> None:
        """Ends a pin, if any."""
        pin = self._pins.pop(name, None)
        for node in pin.nodes if pin is not None else ():
            node.num_pins -= 1

    def release_expired(self, now: float) -> None:
        """Ends expired soft pins."""
        self._release(lambda name, pin: pin.until is not None and pin.until <= now)

    def release_soft(self) -> bool:
        """Ends soft pins; returns whether that unpinned a node."""
        nodes = self._release(lambda name, pin: pin.until is not None)
        return any(node.num_pins == 0 and node.parent is not None for node in nodes)

    def release_all(self, namespace: str | None) -> None:
        """Ends the pins of one namespace, or all."""
        self._release(lambda name, pin: namespace in (None, name.namespace))

    def _release(self, is_over: Callable[[PinName, _Pin], bool]) -> list[Node]:
        ended = [(name, pin) for name, pin in self._pins.items() if is_over(name, pin)]
        for name, _ in ended:
            self.release(name)
        return [node for _, pin in ended for node in pin.nodes]

    def labels(self, namespace: str) -> tuple[str, ...]:
        """Labels of a namespace's explicit pins."""
        return tuple(n.label for n, pin in self._pins.items() if n.namespace == namespace and pin.until is None)

    def explicit(self, *, but: PinName | None = None) -> set[Node]:
        """Nodes with explicit pins other than `but`."""
        held = (pin for name, pin in self._pins.items() if pin.until is None and name != but)
        return {node for pin in held for node in pin.nodes if node.parent is not None}


def path_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Nodes on the paths to `nodes`, inclusive."""
    return {above for node in nodes for above in node.path()}


def _nodes_to_pin(path: list[Node]) -> list[Node]:
    """The end protects all spans; two turns' snapshots serve a next turn rendered differently."""
    inner = [node for node in path[:-1] if node.snapshot is not None]
    return [*inner[-KEPT_POINTS:], *path[-1:]]
