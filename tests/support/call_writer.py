"""Writes calls as a family's template does, from its description."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from models.output.call_formats import CallFormat, Literal, Tags

Calls: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]


def written(form: CallFormat, calls: Calls) -> str:
    """One answer's calls."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        is_open, is_close = number == 0 or form.repeats_open, number == len(calls) - 1 or form.repeats_open
        head = form.head.replace("{}", name, 1).replace("#", str(number))
        call = head + _arguments(form.body, arguments) + form.end
        texts.append((form.open if is_open else "") + call + (form.close if is_close else ""))
    return form.gap.join(texts)


def _arguments(body: Tags | Literal, arguments: Mapping[str, Any]) -> str:
    if isinstance(body, Tags):
        return "".join(_tagged(body, key, value) for key, value in arguments.items())
    if not body.has_bare_keys:
        return json.dumps(arguments, ensure_ascii=False)
    pairs = (f"{key}{body.assign}{_literal(body, value)}" for key, value in arguments.items())
    return body.open + _gap(body).join(pairs) + body.close


def _tagged(body: Tags, name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and any(mark in value for mark in "<&\n"):
        text = body.quote[0] + text + body.quote[1]
    kinds = dict(body.kinds)
    kind = kinds.get(kind_of(value), kinds.get("", ""))
    return body.key.replace("{}", name).replace("*", kind) + text + body.end


def kind_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _gap(body: Literal) -> str:
    return "," if len(body.quote) > 1 else ", "


def _literal(body: Literal, value: Any) -> str:
    if body.assign == "=":
        return repr(value)
    if isinstance(value, str):
        return body.quote + value + body.quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(body, part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(body, part) for part in value) + "]"
    return json.dumps(value)
