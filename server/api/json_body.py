"""How every answer's JSON is written: UTF-8 that always encodes, compact, no NaN.

Text of a model or a client may hold half a character, which UTF-8 cannot; it is replaced, not a reason to fail.
"""

import json
from typing import Any

from starlette.responses import JSONResponse

from models.texts import well_formed

# One encoder for all: building one per chunk of a stream costs more than encoding the chunk.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """Returns `value` as JSON without half characters; raises ValueError or TypeError for what JSON cannot hold."""
    return well_formed(_encode(value))


class JsonBody(JSONResponse):
    """An answer of one JSON value."""

    def render(self, content: Any) -> bytes:
        """Returns the bytes of the body."""
        return json_text(content).encode()
