"""Checks a body as this API does: an unknown field is refused; the other dialects ignore it."""

from collections.abc import Mapping
from typing import Any

from server.api.errors import ApiError, Code
from server.api.field_rules import Rules
from server.api.typed_body import Body, parse_body


def parse_known(kind: type[Body], fields: Mapping[str, Any], rules: Rules) -> Body:
    """Returns the checked body; raises ApiError (400) that names the first field that is wrong or not in `rules`."""
    unknown = sorted(fields.keys() - rules.keys())
    if unknown:
        message = f"{unknown[0][:200]} is not known here"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, unknown[0][:200])
    return parse_body(kind, dict(fields), rules)
