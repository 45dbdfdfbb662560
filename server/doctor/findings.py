"""What the turns of one session lost, added up by cause: pure, alike for a server and for recorded requests."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.doctor.causes import Cause

NEGLIGIBLE_TOKENS = 128
"""What a note beside the newest message costs: nothing to mend, as long as it is not in the head."""


@dataclass(frozen=True)
class Loss:
    """What one turn evaluated although the turn before had it, and the text that made it so."""

    turn: int
    """From 1."""
    cause: Cause
    where: str
    """The place in the prompt, for a person: `system message`."""
    tokens: int
    seconds: float | None = None
    """None where no speed is known."""
    before: str = ""
    after: str = ""
    is_hidden: bool = False
    """Whether it changed behind another change of the same turn, and cost nothing only because of that."""


@dataclass(frozen=True)
class Checkup:
    """One session and its losses."""

    name: str
    num_turns: int
    kept: float | None
    """How much of the prompt before a turn reused, on average, 0 to 1; None for a single turn."""
    losses: tuple[Loss, ...]

    @property
    def tokens(self) -> int:
        """Tokens lost by all turns."""
        return sum(loss.tokens for loss in self.losses)

    @property
    def seconds(self) -> float:
        """Seconds lost, as far as known."""
        return sum(loss.seconds or 0.0 for loss in self.losses)


@dataclass(frozen=True)
class Finding:
    """One cause at one place, and what it cost in all the turns that it struck."""

    losses: tuple[Loss, ...]

    @property
    def cause(self) -> Cause:
        """The same for all its losses."""
        return self.losses[0].cause

    @property
    def example(self) -> Loss:
        """The last one with words to show, else the last one."""
        return next((loss for loss in reversed(self.losses) if loss.before or loss.after), self.losses[-1])

    @property
    def num_turns(self) -> int:
        """Turns that it struck."""
        return len({loss.turn for loss in self.losses})

    @property
    def tokens(self) -> int:
        """Tokens evaluated because of it."""
        return sum(loss.tokens for loss in self.losses)

    @property
    def seconds(self) -> float | None:
        """Seconds that it took; None where no speed is known."""
        known = [loss.seconds for loss in self.losses if loss.seconds is not None]
        return sum(known) if known else None

    @property
    def is_hidden(self) -> bool:
        """Whether it cost nothing because another change always stood before it."""
        return all(loss.is_hidden for loss in self.losses)


def findings_of(losses: Iterable[Loss]) -> list[Finding]:
    """Returns the losses by cause and place, the costliest first."""
    groups: dict[tuple[Cause, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.cause, loss.where), []).append(loss)
    findings = [Finding(tuple(group)) for group in groups.values()]
    return sorted(findings, key=lambda finding: (finding.is_hidden, -finding.tokens))


def is_negligible(role: str | None, tokens: int) -> bool:
    """Whether a loss is what the newest messages of a well-made prompt cost anyway."""
    return tokens == 0 or (role not in ("system", "developer") and tokens <= NEGLIGIBLE_TOKENS)


def place_name(index: int | None, role: str | None) -> str:
    """Returns a message's place in words."""
    if role is None or index is None:
        return "prompt"
    return "system message" if role in ("system", "developer") else f"message {index} ({role})"
