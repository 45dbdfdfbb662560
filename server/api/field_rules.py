"""How the fields of a body are treated, and refusing those that ask for what is not done here.

A field is honoured; or it has no effect, as it could not change the answer; or it is refused with a reason, except
for the values that ask for nothing. Fields without a rule are left alone: they are listed at DEBUG. Each dialect
has tables of rules for its own fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from server.api.errors import ApiError, Code


class Treatment(Enum):
    """What becomes of a field."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """How one field is treated, and why."""

    treatment: Treatment
    why: str = ""
    """Why it has no effect or is refused: a clause that errors and docs/api.md repeat."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which a refused field asks for nothing."""
    is_read: bool = False
    """Whether the type of the body holds it, so that its own type and range are checked."""

    def allows(self, value: Any) -> bool:
        """Returns whether a request may hold this value."""
        if self.treatment is not Treatment.REFUSED or value is None:
            return True
        # True equals 1 in Python but is not the number that a client may send for it.
        return any(value == other and (value is other or not isinstance(value, bool)) for other in self.neutral)


Rules: TypeAlias = Mapping[str, Rule]


def honoured(names: str) -> dict[str, Rule]:
    """Returns the rules of fields that do what they ask for; `names` are separated by white space."""
    return dict.fromkeys(names.split(), Rule(Treatment.HONOURED, is_read=True))


def no_effect(why: str, names: str, *, is_read: bool = False) -> dict[str, Rule]:
    """Returns the rules of fields that could not change the answer, all for one reason."""
    return dict.fromkeys(names.split(), Rule(Treatment.NO_EFFECT, why, is_read=is_read))


def refused(why: str, **neutral: tuple[Any, ...]) -> dict[str, Rule]:
    """Returns the rules of fields that are refused for one reason; `neutral` holds the values that are taken."""
    return {name: Rule(Treatment.REFUSED, why, values) for name, values in neutral.items()}


def refuse_fields(fields: Mapping[str, Any], rules: Rules, place: str = "") -> None:
    """Raises ApiError (400) for the first field that asks for what is refused; `place` stands before its name."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None and not rule.allows(value):
            raise _refusal(place + name, rule)


def _refusal(name: str, rule: Rule) -> ApiError:
    taken = " or ".join(_json_text(value) for value in rule.neutral)
    accepted = f"; only {taken} is taken" if taken else ""
    return ApiError(Code.UNSUPPORTED_PARAMETER, f"{name} is not supported: {rule.why}{accepted}", name)


def _json_text(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))
