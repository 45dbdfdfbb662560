"""How long a model takes to evaluate a prompt token, by its last long prompt; hence what a restored one has saved."""

from server.engine.request import Timings

PACE_TOKENS = 64
"""A prompt with fewer evaluated tokens says little of the time that a token takes."""


class Pace:
    """Seconds per prompt token by model. Event loop only."""

    def __init__(self) -> None:
        self._seconds_per_token = dict[str, float]()

    def note(self, model_id: str, timings: Timings) -> None:
        """Learns from a request that ended well."""
        if timings.evaluated_tokens >= PACE_TOKENS:
            self._seconds_per_token[model_id] = timings.prompt_ms / 1000 / timings.evaluated_tokens

    def seconds(self, model_id: str, num_tokens: int) -> float | None:
        """Returns how long evaluating so many tokens takes; None as long as that is not known."""
        each = self._seconds_per_token.get(model_id)
        return None if each is None else num_tokens * each
