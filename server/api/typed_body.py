"""Checks a decoded body against the type that a dialect gives it, and says in the client's words what is wrong."""

import logging
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from server.api.errors import ApiError, Code
from server.api.field_rules import Rules, refuse_fields

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class BodyModel(BaseModel):
    """Base of all types of bodies: JSON's own types without conversion, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


def as_whole(value: Any) -> Any:
    """Some languages have one type of number only and write 16 as 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(as_whole)]
"""A whole number of either spelling."""


def parse_body(kind: type[Body], raw: dict[str, Any], rules: Rules) -> Body:
    """Returns the checked body; raises ApiError (400) that names the first field that is wrong."""
    refuse_fields(raw, rules)
    body = validated(kind, raw)
    unknown = sorted((body.model_extra or {}).keys() - rules.keys())
    if unknown:
        logger.debug("fields without meaning here: %s", ", ".join(unknown)[:500])
    return body


def validated(kind: type[Body], raw: Any, *place: int | str) -> Body:
    """Returns what stands at a `place` of a body, checked; raises ApiError (400) that names what is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0], place) from error


def _as_api_error(problem: ErrorDetails, place: tuple[int | str, ...]) -> ApiError:
    param = param_name((*place, *problem["loc"]))
    return ApiError(_code_of(problem["type"]), f"{param}: {problem['msg']}", param)


def _code_of(kind: str) -> Code:
    if kind == "missing":
        return Code.MISSING_PARAMETER
    return Code.INVALID_TYPE if kind.endswith("_type") else Code.INVALID_VALUE


def param_name(location: tuple[int | str, ...]) -> str:
    """Returns a place in a body as clients write it: `messages[0].content`. Bounded, as names come from them."""
    text = ""
    for step in location:
        if step == "[key]":
            continue
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".")[:200]
