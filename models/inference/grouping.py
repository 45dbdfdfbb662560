"""Chooses which rows share padded buffers while they decode. Pure.

A *member* of a batch is a row alone, or a *group*: rows in one buffer per layer that is as long as the longest row
needs. Each member costs operations in every layer, and a group's rows are read with their padding. Costs count in
tokens: one is the time to read one token's keys and values in all layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GROWTH_TOKENS = 128
"""Spare tokens of a new buffer: copying a group anew costs each step one part in 64."""
EXPECTED_STEPS = 128
"""Steps that an arrangement is expected to last."""
COPY_TOKENS = 3
"""Cost of copying one token's keys and values: a read and a write, layer by layer."""


@dataclass(frozen=True)
class Row:
    """A row that decodes."""

    tokens: int
    reserved_tokens: int
    """Tokens that fit the row's own buffers, which its memory is accounted for."""
    group: int | None = None
    """The group that the row is in."""
    can_share: bool = True


@dataclass(frozen=True)
class Buffer:
    """A group's size."""

    room: int
    capacity: int
    """Tokens of each row."""


@dataclass(frozen=True)
class Wanted:
    """Rows that are to be a group, by place among all rows; perhaps in an existing one."""

    rows: tuple[int, ...]
    buffer: Buffer
    kept: int | None = None


def capacity_for(rows: Sequence[Row]) -> int:
    """Tokens of a new buffer: no more than was reserved for the longest, unless that is used up."""
    needed = max(row.tokens for row in rows) + 1
    return max(needed, min(needed + GROWTH_TOKENS, max(row.reserved_tokens for row in rows)))


def room_for(num_rows: int) -> int:
    """Rows of a new buffer: some may join."""
    return 1 << (num_rows - 1).bit_length()


def plan(rows: Sequence[Row], groups: Sequence[Buffer], *, member_tokens: float, spare_tokens: float) -> list[Wanted]:
    """The groups to have: the cheapest, unless the copies would not pay; other rows decode alone.

    `member_tokens` is the cost of a member. Groups hold at most `spare_tokens` more than their rows reserved.
    """
    now = _Arrangement(rows, groups, [_members(rows, index) for index in range(len(groups))], member_tokens)
    options = [now, now.with_members([]), now.with_joins(), *now.cheaper()]
    fitting = [option for option in options if option.extra_tokens <= max(0, spare_tokens)]
    return max(fitting, key=lambda option: option.gain_over(now)).wanted


def _members(rows: Sequence[Row], group: int) -> list[int]:
    return [place for place, row in enumerate(rows) if row.group == group]


class _Arrangement:
    """All groups that would be; a group of one row is none."""

    def __init__(
        self,
        rows: Sequence[Row],
        groups: Sequence[Buffer],
        members: Sequence[Sequence[int]],
        member_tokens: float,
        *,
        has_room: bool = True,
    ) -> None:
        self._rows = rows
        self._groups = groups
        self._members = [list(member) for member in members if len(member) > 1]
        self._member_tokens = member_tokens
        self._has_room = has_room
        self.wanted = list(self._place())

    def _place(self) -> Iterator[Wanted]:
        free = set(range(len(self._groups)))
        for member in sorted(self._members, key=len, reverse=True):
            held = {group: self._tokens_in(member, group) for group in free if self._fits(member, group)}
            kept = max(held, key=lambda group: held[group], default=None)
            if kept is not None and held[kept]:
                free.remove(kept)
                yield Wanted(tuple(member), self._groups[kept], kept)
            else:
                rows = [self._rows[place] for place in member]
                room = room_for(len(rows)) if self._has_room else len(rows)
                yield Wanted(tuple(member), Buffer(room, capacity_for(rows)))

    def _tokens_in(self, member: Sequence[int], group: int) -> int:
        return sum(self._rows[place].tokens for place in member if self._rows[place].group == group)

    def _fits(self, member: Sequence[int], group: int) -> bool:
        buffer, longest = self._groups[group], max(self._rows[place].tokens for place in member)
        return len(member) <= buffer.room and longest < buffer.capacity

    def with_joins(self) -> "_Arrangement":
        members = [list(member) for member in self._members]
        grouped = {place for member in members for place in member}
        for place in self._sorted_places():
            if place not in grouped and members:
                added = {index: self._cost_of([*m, place]) - self._cost_of(m) for index, m in enumerate(members)}
                best = min(added, key=lambda index: added[index])
                if added[best] < self._cost_of([place]):
                    members[best].append(place)
        return self.with_members(members)

    def cheaper(self) -> Iterator["_Arrangement"]:
        """The cheapest arrangement, then some that need less memory."""
        limit = float("inf")
        while limit >= 1:
            members = self._cheapest_members(limit)
            yield self.with_members(members)
            yield self.with_members(members, has_room=False)
            limit = min(limit, max(map(self._padding, members), default=0)) / 2

    def _padding(self, member: Sequence[int]) -> int:
        lengths = [self._rows[place].tokens for place in member]
        return max(lengths) * len(lengths) - sum(lengths)

    def _cheapest_members(self, most_padding: float) -> list[list[int]]:
        """Neighbours by length share: dynamic programming over where a member stops."""
        order = self._sorted_places()
        best: list[tuple[float, int]] = [(0.0, 0)]
        for stop in range(1, len(order) + 1):
            options = []
            for start in range(stop - 1, -1, -1):
                member = order[start:stop]
                if start < stop - 1 and self._padding(member) > most_padding:
                    break
                options.append((best[start][0] + self._cost_of(member), start))
            best.append(min(options))
        members, stop = [], len(order)
        while stop:
            start = best[stop][1]
            members.append(order[start:stop])
            stop = start
        return members

    def _sorted_places(self) -> list[int]:
        places = [place for place, row in enumerate(self._rows) if row.can_share]
        return sorted(places, key=lambda place: self._rows[place].tokens)

    def _cost_of(self, member: Sequence[int]) -> float:
        return self._member_tokens + len(member) * max(self._rows[place].tokens for place in member)

    def with_members(self, members: Sequence[Sequence[int]], *, has_room: bool = True) -> "_Arrangement":
        """Without `has_room` new groups have no room for more rows."""
        return _Arrangement(self._rows, self._groups, members, self._member_tokens, has_room=has_room)

    @property
    def extra_tokens(self) -> float:
        """Tokens that the groups' buffers hold beyond what their rows reserved."""
        held = sum(one.buffer.room * one.buffer.capacity for one in self.wanted)
        return held - sum(self._rows[place].reserved_tokens for one in self.wanted for place in one.rows)

    def gain_over(self, now: "_Arrangement") -> float:
        """Tokens not read while the arrangement lasts, less those copied to make it."""
        return EXPECTED_STEPS * (now._cost - self._cost) - COPY_TOKENS * self._copied_tokens

    @property
    def _cost(self) -> float:
        grouped = {place for member in self._members for place in member}
        alone = [[place] for place in range(len(self._rows)) if place not in grouped]
        return sum(self._cost_of(member) for member in (*self._members, *alone))

    @property
    def _copied_tokens(self) -> int:
        """Rows that join are copied; so is the row that fills a leaver's place."""
        kept = {place: one.kept for one in self.wanted for place in one.rows}
        total = 0
        for place, row in enumerate(self._rows):
            stays = place in kept and row.group is not None and kept[place] == row.group
            joins, leaves = place in kept and not stays, row.group is not None and not stays
            total += row.tokens * (joins + 2 * leaves)
        return total
