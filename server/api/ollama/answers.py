"""What Ollama's answers have in common: their head, and in the last object counts and times in nanoseconds."""

import time
from datetime import UTC, datetime
from typing import NotRequired, TypedDict

from server.api.usage import CacheBody, costs_of
from server.engine.request import Finished

_NANOSECONDS = 1_000_000
"""In a millisecond."""


class OllamaHead(TypedDict):
    """How every object of an answer begins."""

    model: str
    """The name that the request gave."""
    created_at: str


class OllamaEnd(TypedDict):
    """What the last object of an answer adds."""

    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    """All tokens of the prompt, restored ones included."""
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    cache: NotRequired[CacheBody | None]
    """This server's own: what of the prompt was reused, and why not more."""


def head_of(name: str) -> OllamaHead:
    """Returns the head of an object that is made now."""
    return {"model": name, "created_at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")}


def end_of(finished: Finished, began: float, session_id: str | None) -> OllamaEnd:
    """Returns the end of an answer; `began` is `time.monotonic()` when its request was opened."""
    timings = finished.timings
    return {
        "done": True,
        "done_reason": finished.reason.value,
        "total_duration": _whole_nanoseconds(1000 * (time.monotonic() - began)),
        "load_duration": 0,
        "prompt_eval_count": finished.prompt_tokens,
        "prompt_eval_duration": _whole_nanoseconds(timings.prompt_ms),
        "eval_count": timings.predicted_tokens,
        "eval_duration": _whole_nanoseconds(timings.predicted_ms),
        "cache": costs_of(finished, session_id)["cache"],
    }


def loaded(keep_alive_seconds: float | None) -> OllamaEnd:
    """Returns the end of the answer to a request without a prompt: clients load and unload a model by it."""
    return {"done": True, "done_reason": "unload" if keep_alive_seconds == 0 else "load"}


def _whole_nanoseconds(milliseconds: float) -> int:
    """Returns at least 1, since clients divide by it."""
    return max(1, round(milliseconds * _NANOSECONDS))
