"""Chooses which rows share padded buffers while they decode. Pure.

A *member* of a batch is a row alone, or a *group*: rows in one buffer per layer that is as long as the longest row
needs. Each member costs operations in every layer, a group of different lengths also a mask, and a group's rows are
read with their padding. Costs count in tokens: one is the time to read one token's keys and values in all layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

GROWTH_TOKENS = 128
"""Spare tokens of a new buffer: copying a group anew costs each step one part in 64."""
EXPECTED_STEPS = 128
"""Steps that an arrangement is expected to last."""
COPY_TOKENS = 3
"""Cost of copying one token's keys and values: a read and a write, layer by layer."""


@dataclass(frozen=True)
class Costs:
    """What members of a batch cost in a step, in tokens read."""

    member: float
    mask: float = 0.0
    """More for a group of different lengths."""
    masked_token: float = 1.0
    """The cost of a token read under a mask; at least 1."""

    def of(self, num_rows: int, shortest: int, longest: int) -> float:
        """Cost of a member with so many rows, of these lengths."""
        num_tokens = num_rows * longest
        if shortest == longest:
            return self.member + num_tokens
        return self.member + self.mask + self.masked_token * num_tokens


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


_Members: TypeAlias = list[list[int]]
"""Rows that are to share, by place; those of one group each."""


def plan(rows: Sequence[Row], groups: Sequence[Buffer], *, costs: Costs, spare_tokens: float) -> list[Wanted]:
    """The groups to have: the cheapest, unless the copies would not pay; other rows decode alone.

    Groups hold at most `spare_tokens` more than their rows reserved.
    """
    planner = _Planner(rows, groups, costs)
    best, least = list[Wanted](), float("inf")
    for bound, option in planner.options():
        if bound >= least:
            break
        if planner.extra_tokens(option) <= max(0, spare_tokens) and (cost := planner.total_cost(option)) < least:
            best, least = option, cost
    return best


@dataclass(frozen=True)
class _Planner:
    """Compares arrangements; a group of one row is none."""

    rows: Sequence[Row]
    groups: Sequence[Buffer]
    costs: Costs

    def place(self, members: _Members, *, has_room: bool = True) -> list[Wanted]:
        """A group for each member: an existing one that holds some of it, else a new one, perhaps with spare room."""
        free, wanted = set(range(len(self.groups))), list[Wanted]()
        for member in sorted((one for one in members if len(one) > 1), key=len, reverse=True):
            rows = [self.rows[place] for place in member]
            group_tokens = {group: sum(row.tokens for row in rows if row.group == group) for group in free}
            fitting = [group for group in free if group_tokens[group] and _fits(rows, self.groups[group])]
            kept = max(fitting, key=lambda group: group_tokens[group], default=None)
            free -= {kept}
            room = 1 << (len(rows) - 1).bit_length() if has_room else len(rows)
            buffer = Buffer(room, capacity_for(rows)) if kept is None else self.groups[kept]
            wanted.append(Wanted(tuple(member), buffer, kept))
        return wanted

    def with_joins(self, now: _Members) -> _Members:
        """Rows that are alone join where that is cheaper."""
        members = [list(member) for member in now if len(member) > 1]
        grouped = {place for member in members for place in member}
        for place in self._sorted_places():
            if place not in grouped and members:
                added = [self._cost_of([*member, place]) - self._cost_of(member) for member in members]
                if min(added) < self._cost_of([place]):
                    members[added.index(min(added))].append(place)
        return members

    def options(self) -> Iterator[tuple[float, list[Wanted]]]:
        """Arrangements, each with a bound: no less is the total cost of this one and of all after it.

        First those that copy little; then the cheapest in a step, and some that need ever less memory.
        """
        now = [[at for at, row in enumerate(self.rows) if row.group == group] for group in range(len(self.groups))]
        yield from ((0.0, option) for option in (self.place(now), [], self.place(self.with_joins(now))))
        apart = sum(self.costs.of(1, row.tokens, row.tokens) for row in self.rows if not row.can_share)
        limit = float("inf")
        while limit >= 1:
            step, members = self._cheapest_members(limit)
            for has_room in (True, False):
                yield EXPECTED_STEPS * (step + apart), self.place(members, has_room=has_room)
            limit = min(limit, max(map(self._padding, members), default=0)) / 2

    def _padding(self, member: Sequence[int]) -> int:
        lengths = [self.rows[place].tokens for place in member]
        return max(lengths) * len(lengths) - sum(lengths)

    def _cheapest_members(self, most_padding: float) -> tuple[float, _Members]:
        """The least cost if neighbours by length share; and which: dynamic programming over where a member stops."""
        order = self._sorted_places()
        lengths = [self.rows[place].tokens for place in order]
        before, least = [0, *accumulate(lengths)], [(0.0, 0)]
        for stop, longest in enumerate(lengths, 1):
            # Shorter rows are better alone: there one costs a member and its tokens, here those of the longest.
            cheaper_alone = min(longest, self.costs.masked_token * longest - self.costs.member)
            best = float("inf"), 0
            for start in range(stop - 1, -1, -1):
                padding = (stop - start) * longest - before[stop] + before[start]
                if padding > most_padding or lengths[start] < cheaper_alone:
                    break
                cost = least[start][0] + self.costs.of(stop - start, lengths[start], longest)
                if cost <= best[0]:
                    best = cost, start
            least.append(best)
        members, stop = _Members(), len(order)
        while stop:
            members.append(order[least[stop][1] : stop])
            stop = least[stop][1]
        return least[-1][0], members

    def _sorted_places(self) -> list[int]:
        places = [place for place, row in enumerate(self.rows) if row.can_share]
        return sorted(places, key=lambda place: self.rows[place].tokens)

    def _cost_of(self, member: Sequence[int]) -> float:
        lengths = [self.rows[place].tokens for place in member]
        return self.costs.of(len(lengths), min(lengths), max(lengths))

    def extra_tokens(self, wanted: Sequence[Wanted]) -> int:
        """Tokens that the groups' buffers hold beyond what their rows reserved."""
        buffer_tokens = sum(one.buffer.room * one.buffer.capacity for one in wanted)
        return buffer_tokens - sum(self.rows[place].reserved_tokens for one in wanted for place in one.rows)

    def total_cost(self, wanted: Sequence[Wanted]) -> float:
        """The cost of the steps that an arrangement lasts, and of the copies that make it."""
        kept = {place: one.kept for one in wanted for place in one.rows}
        copied, step = 0, sum(self._cost_of(one.rows) for one in wanted)
        for place, row in enumerate(self.rows):
            if place not in kept:
                step += self.costs.of(1, row.tokens, row.tokens)
            # Rows that join are copied; so is the row that fills a leaver's place.
            stays = row.group is not None and kept.get(place) == row.group
            copied += row.tokens * ((place in kept and not stays) + 2 * (row.group is not None and not stays))
        return EXPECTED_STEPS * step + COPY_TOKENS * copied


def _fits(rows: Sequence[Row], buffer: Buffer) -> bool:
    return len(rows) <= buffer.room and max(row.tokens for row in rows) < buffer.capacity
