"""Checks bodies: the types of their fields, and which fields are refused.

A field that would change the answer, and that no type reads, is refused with a reason, except for values that ask for
nothing. All others are ignored; docs/ names those that clients know.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from server.api.errors import ApiError, Code, path_of, wrong

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """Why a field is refused, as a clause."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values, besides null, with which the field asks for nothing."""

    def allows(self, value: Any) -> bool:
        """Whether a request may hold this value."""
        # True equals 1 in Python, but clients may not send it for a number.
        return value is None or any(
            value == other and (value is other or not isinstance(value, bool)) for other in self.neutral
        )


Rules: TypeAlias = dict[str, Rule]


def refused(table: str) -> dict[str, Rule]:
    """The fields of a table, whose lines hold a reason, a colon, and fields; indented lines go on with the fields.

    After a field's `=` stand, as JSON and with `|` between them, the values that ask for nothing.
    """
    lines = (line.partition(": ") for line in re.sub("\n +", " ", dedent(table).strip()).splitlines())
    named = ((why, field.partition("=")) for why, _, fields in lines for field in fields.split())
    return {
        name: Rule(why, tuple(json.loads(value) for value in values.split("|") if value))
        for why, (name, _, values) in named
    }


def refuse_fields(fields: Mapping[str, Any], rules: Mapping[str, Rule], place: str = "") -> None:
    """Raises ApiError (400) for the first refused field; `place` is prefixed to its name."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None and not rule.allows(value):
            taken = " or ".join(map(json.dumps, rule.neutral))
            message = f"{place}{name} is not supported: {rule.why}{f'; only {taken} is taken' if taken else ''}"
            raise ApiError(Code.UNSUPPORTED_PARAMETER, message, place + name)


Body = TypeVar("Body", bound=BaseModel)


class BodyModel(BaseModel):
    """Base of all bodies: JSON's own types without conversion, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


_TEXT_PARTS: Final = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_MEDIA: Final = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "sound"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""What parts of all dialects hold besides text, by their types."""


def part_text(part: Any) -> str | None:
    """The text that a part of a content holds, in any API's words; None if it is no part, or holds none."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (*_TEXT_PARTS, "refusal", "thinking"):
        return None
    content = part.get("text" if kind in _TEXT_PARTS else kind)
    if kind == "thinking" and isinstance(content, list):  # Mistral's
        texts = list(map(part_text, content))
        return None if None in texts else "".join(filter(None, texts))
    return content if isinstance(content, str) else None


def tool_result(value: Any) -> Any:
    """A tool's result as a text or parts: the JSON text of what is neither."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    is_content = all(part_text(part) is not None or media_of(part) for part in parts)
    return parts if is_content else json.dumps(value, ensure_ascii=False)


def media_of(part: Any) -> str | None:
    """`image`, `document`, `sound` or `video`; None for any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _MEDIA.get(kind) if isinstance(kind, str) else None


def as_whole(value: Any) -> Any:
    """16 for 16.0: some languages have only one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(as_whole)]


class FormatBody(BodyModel):
    """A format of an answer. Its schema stands beside `type`, or in `json_schema`, or `json_schema` is the schema."""

    @model_validator(mode="before")
    @classmethod
    def _as_flat(cls, value: Any) -> Any:
        inner = value.get("json_schema") if isinstance(value, dict) else None
        if not isinstance(inner, dict):
            return value
        is_schema = bool(inner.keys() - {"name", "description", "schema", "strict"})
        return {**({"schema": inner} if is_schema else inner), **value}


def parse_body(kind: type[Body], raw: Mapping[str, Any], rules: Mapping[str, Rule] = MappingProxyType({})) -> Body:
    """The checked body; raises ApiError (400) that names the first wrong field."""
    refuse_fields(raw, rules)
    body = validated(kind, raw)
    if body.model_extra:
        logger.debug("fields without effect: %s", ", ".join(sorted(body.model_extra))[:500])
        fields = [field.alias or name for name, field in kind.model_fields.items()]
        meant = {_letters(name): name for name in fields}
        told = [
            f"{name[:100]} (did you mean {meant[_letters(name)]}?)"
            for name in sorted(body.model_extra)
            if _letters(name) in meant
        ]
        if told:
            # One line, however many a client sends.
            logger.warning("fields without effect: %s", ", ".join(told)[:500])
    return body


def _letters(name: str) -> str:
    return name.replace("_", "").replace(".", "").lower()


def validated(kind: type[Body], raw: Any, *place: int | str) -> Body:
    """The checked value at `place` of a body; raises ApiError (400)."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = [_problem(raw, one) for one in error.errors(include_url=False)]
        raise _worst(problems, place) from error


_Problem: TypeAlias = tuple[tuple[int | str, ...], Code, str]
_MEMBER = re.compile(r"str|int|float|bool|[A-Z]\w*|.*\[.*")
"""What pydantic calls a member of a union, in a problem's place."""
_INPUT = "Input should be "


def _worst(problems: Sequence[_Problem], place: Sequence[int | str]) -> ApiError:
    """The first problem; of a union's members the one that fits most of the value, or what all would take."""
    inside = [one for one in problems if one[0][: len(problems[0][0])] == problems[0][0]]
    steps, code, why = max(inside, key=lambda one: len(one[0]))
    others = {said: None for at, _, said in inside if at == steps and said.startswith(_INPUT)}
    if why in others:
        why = _INPUT + " or ".join(said.removeprefix(_INPUT) for said in others)
    return wrong(path_of(*place, *steps)[:200], why, code)


def _problem(raw: Any, problem: ErrorDetails) -> _Problem:
    """Where in a body a problem is, and what is wrong, in words of JSON."""
    kind, why = problem["type"], problem["msg"].removeprefix("Value error, ")
    steps, code = _steps_in(raw, problem["loc"]), Code.INVALID_TYPE if kind.endswith("_type") else Code.INVALID_VALUE
    if kind in ("model_type", "model_attributes_type"):
        why = f"{_INPUT}a valid dictionary"
    if kind.startswith("union_tag"):
        context = problem["ctx"]
        steps, why = [*steps, context["discriminator"].strip("'")], f"{_INPUT}one of {context.get('expected_tags')}"
    if kind in ("missing", "union_tag_not_found"):
        code, why = Code.MISSING_PARAMETER, "Field required"
    return tuple(steps), code, why


def _steps_in(raw: Any, place: Sequence[int | str]) -> list[int | str]:
    """A problem's place in the body, without what pydantic adds to it: tags and members of unions."""
    steps, value = list[int | str](), raw
    for number, step in enumerate(place, 1):
        of_object, of_list = isinstance(value, Mapping), isinstance(value, list) and isinstance(step, int)
        inner = value.get(step) if of_object else value[step] if of_list else None
        is_tag = of_object and step == value.get("type") and not isinstance(inner, Mapping | list)
        is_member = inner is None and _MEMBER.fullmatch(str(step))
        if not (is_member or (is_tag and number < len(place))):
            steps.append(step)
            value = inner
    return steps
