"""The value of a node's state: its bytes, its cost to evaluate again, and the chance that it is wanted again.

From these figures `cache.eviction.policy` decides. They depend on the node and its neighbours only, and finding them
takes walks as long as a conversation at most, so they are computed again whenever something changes there.
"""

from collections.abc import Iterator, Mapping

from cache.eviction.policy import Candidate, Chance, chance_to_go_on
from cache.restore_points import RestorePointKind
from cache.snapshots import Snapshot
from cache.trie import Node
from cache.types import LayerKinds

_HEADS = (RestorePointKind.SYSTEM_END, RestorePointKind.BRANCH, RestorePointKind.INTERVAL)
"""Kinds of restore points at which no conversation ends."""


class Valuation:
    """Values nodes, and remembers where each session ended last."""

    def __init__(self, layout: LayerKinds) -> None:
        self._layout = layout
        self._needs_snapshots = layout.needs_snapshots
        self._ends: dict[tuple[str, str], Node] = {}
        """The end of each session, by namespace and name."""
        self._current: dict[tuple[str, str], dict[Node, None]] = {}
        """The nodes that were valued as the end of each session; several if the last one was evicted."""

    def record_session_end(self, namespace: str, node: Node) -> list[Node]:
        """Notes that the session of `node` ends there; returns the other nodes that were valued as its end."""
        if node.session_id is None:
            return []
        session = namespace, node.session_id
        before = self._ends.get(session, node)
        if before.parent is not None and before.last_used > node.last_used:
            return []
        self._ends[session] = node
        return [end for end in self._current.pop(session, {}) if end is not node]

    def forget_sessions(self, max_sessions: int) -> None:
        """Forgets the sessions whose ends were evicted, if more than `max_sessions` are remembered."""
        if len(self._ends) > max_sessions:
            self._ends = {session: node for session, node in self._ends.items() if node.parent is not None}
        if len(self._current) > max_sessions:
            held = ((key, [node for node in ends if node.parent is not None]) for key, ends in self._current.items())
            self._current = {session: dict.fromkeys(ends) for session, ends in held if ends}

    def evaluated_from(self, node: Node) -> Iterator[Node]:
        """Yields the leaves and snapshots whose tokens would be evaluated again from a restore point.

        They lie below it, down to the next restore points, these included. A node that is no restore point has
        none.
        """
        below = list(node.children.values()) if self._needs_snapshots and self._is_point(node) else []
        while below:
            next_node = below.pop()
            if next_node.snapshot is not None or not next_node.children:
                yield next_node
            if not self._is_point(next_node):
                below += next_node.children.values()

    def leaf_counting(self, node: Node) -> Node | None:
        """Returns the only leaf below a node, which the node's bytes may count for; None for a leaf or a fork."""
        if not self._needs_snapshots or not node.children:
            return None
        while len(node.children) == 1 and not self._is_point(node):
            (node,) = node.children.values()
        return None if node.children else node

    def affected_above(self, node: Node, held: Mapping[Node, Candidate], seen: set[Node]) -> Iterator[Node]:
        """Yields the nodes above `node` whose chance a change there may have lowered.

        `held` has their values so far. They are found upwards because the chance of a restore point depends on the
        next two below it, and on the sessions that end below it. Nodes further above are added to `seen`, so that
        several changes on one path look at them once.
        """
        num_points, above = 0, node.parent if self._needs_snapshots else None
        while above is not None and above.parent is not None and not (num_points >= 2 and above in seen):
            if num_points >= 2:
                seen.add(above)
            if above.snapshot is not None:
                num_points += 1
                chance = held[above].chance if above in held else None
                was_shared = chance == Chance.SHARED and above.kind is not RestorePointKind.SYSTEM_END
                if was_shared or (num_points <= 2 and chance in (Chance.EARLIER, Chance.LANDING)):
                    yield above
            above = above.parent

    def candidate(self, namespace: str, node: Node) -> Candidate:
        """Returns what evicting a leaf, or the snapshot of any other node, would free and cost."""
        return self._of_snapshot(namespace, node) if node.children else self._of_leaf(namespace, node)

    def _of_snapshot(self, namespace: str, node: Node) -> Candidate:
        num_bytes = node.snapshot.num_bytes if node.snapshot is not None else 0
        base = self._base(node)
        chance = self._chance_within(node) if base or not node.last_used else Chance.FIRST
        num_tokens, is_explicit = node.stop - base, node.is_explicit
        return Candidate((namespace, node), num_bytes, num_tokens, node.last_used_behind, chance, is_explicit)

    def _of_leaf(self, namespace: str, node: Node) -> Candidate:
        if not self._is_point(node):
            return Candidate((namespace, node), node.num_bytes, 0, node.last_used, Chance.UNUSABLE)
        base, chance = self._base(node), self._chance_at_end(namespace, node)
        if chance is Chance.CURRENT and not base and node.kind in _HEADS:
            chance = Chance.REST
        is_session = node.session_id is not None and not node.is_background and chance is not Chance.LEFT
        return Candidate(
            (namespace, node),
            self._tail_bytes(node),
            node.stop - base,
            node.last_used,
            chance_to_go_on(node.stop) if chance is Chance.CURRENT else chance,
            is_session_end=is_session,
        )

    def _chance_within(self, node: Node) -> Chance:
        if node.kind is RestorePointKind.SYSTEM_END or _is_shared(node):
            return Chance.SHARED
        return _chance_before_end(node) if node.last_used else Chance.SUPERSEDED

    def _chance_at_end(self, namespace: str, node: Node) -> Chance:
        if node.session_id is None:
            return Chance.PROBATION if node.is_on_probation else Chance.CURRENT
        session = namespace, node.session_id
        end = self._ends.get(session, node)
        if end is not node and end.parent is not None:
            return Chance.LEFT
        self._current.setdefault(session, {})[node] = None
        return Chance.CURRENT

    def _is_point(self, node: Node) -> bool:
        """Whether sequences can be restored where a node ends."""
        if not self._needs_snapshots:
            return True
        snapshot = node.snapshot
        return isinstance(snapshot, Snapshot) and (snapshot.points is not None or not self._layout.has_points)

    def _base(self, node: Node) -> int:
        """Returns the offset of the nearest restore point above a node: where evaluating it again would begin."""
        if not self._needs_snapshots:
            return node.start
        above = node.parent
        while above is not None and above.parent is not None:
            if self._is_point(above):
                return above.stop
            above = above.parent
        return 0

    def _tail_bytes(self, leaf: Node) -> int:
        """Returns the bytes of a leaf and of the nodes above it that nothing could be restored from without it."""
        num_bytes, node = leaf.num_bytes, leaf.parent
        while node is not None and self._needs_snapshots and not self._is_point(node):
            if len(node.children) > 1 or node.num_slots:
                break
            num_bytes, node = num_bytes + node.num_bytes, node.parent
        return num_bytes


def _chance_before_end(node: Node) -> Chance:
    prompt_end, newer = RestorePointKind.PROMPT_END, _newer(node)
    if newer is not None and not newer.children:
        return Chance.PROMPT if node.kind is prompt_end else Chance.LANDING
    is_landing = newer is not None and newer.kind is prompt_end and _is_last_point(newer)
    return Chance.LANDING if is_landing else Chance.EARLIER


def _is_last_point(node: Node) -> bool:
    newer = _newer(node)
    return newer is not None and not newer.children


def _newer(node: Node) -> Node | None:
    """Returns the next restore point below a node, or the leaf; None if several conversations go on there."""
    if len(node.children) != 1:
        return None
    (node,) = node.children.values()
    while node.snapshot is None and len(node.children) == 1:
        (node,) = node.children.values()
    return node


def _is_shared(node: Node) -> bool:
    """Whether several sessions end below a node. A leaf without a session counts as a session of its own."""
    owners = (leaf.session_id or leaf for leaf in _leaves(node))
    first = next(owners)
    return any(owner != first for owner in owners)


def _leaves(node: Node) -> Iterator[Node]:
    """Yields the leaves below a node one by one, since a caller may need only the first few of many."""
    stack = [iter((node,))]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        while len(step.children) == 1:
            (step,) = step.children.values()
        if step.children:
            stack.append(iter(step.children.values()))
        else:
            yield step
