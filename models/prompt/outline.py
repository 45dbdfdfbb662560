"""How a rendered conversation is made up: where each message begins, in tokens."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Outline:
    """Token offsets in one prompt. An empty outline belongs to a prompt that is no conversation."""

    starts: tuple[int, ...] = ()
    """Where each message of the client begins, ascending; what stands before it belongs to the template."""
    roles: tuple[str, ...] = ()

    def message_at(self, offset: int) -> tuple[int | None, str | None]:
        """Returns index and role of the message that the token at `offset` belongs to; None without messages."""
        if not self.starts:
            return None, None
        index = max(0, bisect_right(self.starts, offset) - 1)
        return index, self.roles[index]


NO_OUTLINE = Outline()
"""The outline of a prompt that is no conversation."""
