"""What a server did not evaluate while an agent ran: the difference between two looks at its sessions. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SessionCounts = Mapping[tuple[str, str], tuple[int, int]]
"""Of each session, by namespace and id: prompt tokens restored, and evaluated."""


@dataclass(frozen=True)
class LaunchSavings:
    """Prompt tokens, and how long they took or would have taken."""

    cached_tokens: int
    evaluated_tokens: int
    tokens_per_second: float = 0.0
    """Of prompts; 0 where it is not known."""

    def describe(self) -> str:
        """Returns one line for a person."""
        total = self.cached_tokens + self.evaluated_tokens
        if not total:
            return "Nothing was asked of the server."
        seconds = self.cached_tokens / self.tokens_per_second if self.tokens_per_second else 0
        saved = f", which saved about {_duration(seconds)}" if seconds >= 1 else ""
        share = f"{self.cached_tokens:,} of {total:,} prompt tokens ({self.cached_tokens / total:.0%})"
        return f"{share} were reused{saved}; {self.evaluated_tokens:,} were evaluated."


def count_sessions(sessions: Iterable[Mapping[str, Any]]) -> SessionCounts:
    """Returns the counts of `GET /v1/sessions`; raises KeyError or TypeError for what is none."""
    return {
        (str(session["namespace"]), str(session["id"])): (
            int(session["cached_tokens"]),
            int(session["evaluated_tokens"]),
        )
        for session in sessions
    }


def changed(before: SessionCounts, after: SessionCounts) -> list[tuple[str, str]]:
    """Returns the sessions that were asked something in between."""
    return [name for name, counts in after.items() if before.get(name) != counts]


def savings_between(before: SessionCounts, after: SessionCounts, tokens_per_second: float) -> LaunchSavings:
    """Returns what was restored and evaluated in between. A session that began anew counts from its beginning."""
    cached = evaluated = 0
    for name in changed(before, after):
        old_cached, old_evaluated = before.get(name, (0, 0))
        new_cached, new_evaluated = after[name]
        if new_cached < old_cached or new_evaluated < old_evaluated:
            old_cached = old_evaluated = 0
        cached += new_cached - old_cached
        evaluated += new_evaluated - old_evaluated
    return LaunchSavings(cached, evaluated, tokens_per_second)


def prompt_speed(turns: Iterable[Mapping[str, Any]]) -> float:
    """Returns the prompt tokens per second of some turns; 0 where nothing was evaluated."""
    tokens, milliseconds = 0, 0.0
    for turn in turns:
        tokens += int(turn["evaluated_tokens"])
        milliseconds += float(turn["prompt_ms"])
    return 1000 * tokens / milliseconds if milliseconds else 0.0


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
