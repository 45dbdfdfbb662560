"""The object that this API calls a response: the same in every event that shows it, and where it is stored."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from server.api.errors import ApiError
from server.api.responses.body_types import ReasoningWish, ResponsesBody
from server.api.responses.output import ItemBody
from server.api.usage import CacheBody, TimingsBody
from server.engine.request import Finished


class InputTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int
    """Prompt tokens that were evaluated and can be reused."""


class AnswerTokensDetails(TypedDict):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of one request, as this API names them."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: AnswerTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ConversationName(TypedDict):
    """The conversation that a response belongs to."""

    id: str


class ReasoningBody(TypedDict):
    """What was asked of the model's thoughts."""

    effort: str | None
    summary: str | None


class ResponseBody(TypedDict):
    """One response, finished or not."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[ItemBody]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationName | None
    prompt_cache_key: str | None
    reasoning: ReasoningBody
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: Any
    tools: Sequence[Any]
    top_logprobs: Literal[0]
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: Mapping[str, str]
    timings: NotRequired[TimingsBody]
    cache: NotRequired[CacheBody | None]


def usage_of(finished: Finished) -> ResponseUsage:
    """Returns the token counts of a finished request."""
    timings = finished.timings
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": timings.cache_tokens,
            "cache_write_tokens": timings.evaluated_tokens,
        },
        "output_tokens": timings.predicted_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens or 0},
        "total_tokens": finished.prompt_tokens + timings.predicted_tokens,
    }


def error_of(error: ApiError) -> ResponseError:
    """Returns an error as a failed response holds it."""
    if error.status == 429:
        return {"code": "rate_limit_exceeded", "message": error.message}
    kept = "context_length_exceeded", "server_error"
    return {"code": kept[0] if error.code.value == kept[0] else kept[1], "message": error.message}


def begun_response(
    body: ResponsesBody,
    fields: Mapping[str, Any],
    *,
    response_id: str,
    model: str,
    temperature: float,
    top_p: float,
) -> ResponseBody:
    """Returns a response before its first token; `fields` are the body's as they were sent."""
    wish = body.reasoning or ReasoningWish()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation} if body.conversation is not None else None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": wish.effort, "summary": wish.summary or wish.generate_summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": body.is_stored,
        "temperature": temperature,
        "text": {"format": {"type": "text"}, **(fields.get("text") or {})},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_logprobs": 0,
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
