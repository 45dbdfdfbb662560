"""How likely the model held one token of its output. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was put out, and what the model thought of it and of others in its place."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, before bias, penalties, temperature, filters and grammars."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with theirs, the likeliest first; it may be among them."""
