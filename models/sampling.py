"""Per-request sampling, vectorised over the rows of a decode step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of one sequence is chosen. Validated by `check` before a request is queued."""

    temperature: float = 1.0
    """0 is greedy; range [0, 2]."""
    top_p: float = 1.0
    """Nucleus mass, range (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction of the likeliest, range [0, 1]."""
    seed: int | None = None
    """Same seed, same prompt: same tokens, however the request was batched."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Penalties look at all output tokens of the request; range [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, range [-100, 100]."""
