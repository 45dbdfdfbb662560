"""What a request wants of the model's thoughts, in no dialect's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_EFFORT = "none"


@dataclass(frozen=True)
class ThinkingWish:
    """Whether, how hard and for how long the model shall think; None leaves it to the model's template."""

    is_enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    """The thought is closed after so many tokens."""

    def template_arguments(self) -> Mapping[str, Any]:
        """Returns the values by which chat templates are told."""
        arguments: dict[str, Any] = {}
        if self._enables is not None:
            arguments["enable_thinking"] = self._enables
        if self.effort is not None:
            arguments["reasoning_effort"] = self.effort
        return arguments

    @property
    def _enables(self) -> bool | None:
        if self.is_enabled is not None:
            return self.is_enabled
        return False if self.effort == NO_EFFORT or self.max_tokens == 0 else None
