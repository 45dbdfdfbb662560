"""What a client is told when a request cannot be served: exception to code, code to status.

The dialect shapes the answer. A message never holds a stack trace, a path or a key.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from models.errors import EmbeddingUnsupported, InvalidImage, InvalidParameter, PromptTooLong
from models.prompt.chat_template import ChatTemplateError
from server.app.keys import OverLimit
from server.engine.request import (
    AnswerUnbound,
    EngineError,
    EngineStopped,
    EngineStuck,
    OutOfMemory,
    PromptTooLarge,
    QueueFull,
    RankLost,
)
from server.pool.names import ModelInUse, ModelNameNeeded, ModelNotLoaded, ModelUnknown, PoolBusy, PoolError

logger = logging.getLogger(__name__)

RETRY_WHEN_STOPPED_SECONDS = 10


class Code(StrEnum):
    """Error codes for programs, each with its HTTP status."""

    _value_: str
    status: int

    def __new__(cls, value: str, status: int) -> "Code":
        """Makes a code of text and status."""
        code = str.__new__(cls, value)
        code._value_, code.status = value, status
        return code

    INVALID_HTTP = "invalid_http", 400
    INVALID_JSON = "invalid_json", 400
    INVALID_TYPE = "invalid_type", 400
    INVALID_VALUE = "invalid_value", 400
    MISSING_PARAMETER = "missing_required_parameter", 400
    UNSUPPORTED_PARAMETER = "unsupported_parameter", 400
    TEMPLATE_ERROR = "template_error", 400
    EMPTY_PROMPT = "empty_prompt", 400
    CONTEXT_EXCEEDED = "context_length_exceeded", 400
    INVALID_API_KEY = "invalid_api_key", 401
    HOST_NOT_ALLOWED = "host_not_allowed", 403
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", 403
    OPERATOR_ONLY = "operator_only", 403
    MODEL_NOT_FOUND = "model_not_found", 404
    MODEL_NOT_LOADED = "model_not_loaded", 409
    MODEL_IN_USE = "model_in_use", 409
    MODEL_UNUSABLE = "model_unusable", 503
    MODELS_BUSY = "models_busy", 503
    SESSION_NOT_FOUND = "session_not_found", 404
    EDGE_NOT_FOUND = "edge_not_found", 404
    RESPONSE_NOT_FOUND = "response_not_found", 404
    UNKNOWN_PATH = "unknown_path", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    REQUEST_TIMEOUT = "request_timeout", 408
    PIN_LIMIT = "pin_limit", 409
    BODY_TOO_LARGE = "body_too_large", 413
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415
    UNSUPPORTED_ENCODING = "unsupported_encoding", 415
    QUEUE_FULL = "queue_full", 429
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded", 429
    GENERATION_FAILED = "generation_failed", 500
    INTERNAL_ERROR = "internal_error", 500
    OUT_OF_MEMORY = "out_of_memory", 503
    NO_FREE_SLOT = "no_free_slot", 503
    INSUFFICIENT_STORAGE = "insufficient_storage", 507
    SERVER_STOPPING = "server_stopping", 503
    ENGINE_STUCK = "engine_stuck", 503
    MACHINE_LOST = "machine_lost", 503
    TOO_MANY_CONNECTIONS = "too_many_connections", 503
    TOO_MANY_LISTENERS = "too_many_listeners", 503


@dataclass(eq=False)
class ApiError(Exception):
    """All that an error's answer says."""

    code: Code
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return self.code.status


class ContextExceeded(ApiError):
    """A prompt of `num_tokens`, or more unless `is_exact`, that leaves no space for an answer."""

    def __init__(self, num_tokens: int, max_tokens: int, param: str | None, *, is_exact: bool = True) -> None:
        length = f"{num_tokens} tokens" if is_exact else f"{num_tokens} tokens or more"
        context = f"this model's context of {max_tokens + 1} tokens leaves room for at most {max_tokens}"
        super().__init__(Code.CONTEXT_EXCEEDED, f"the prompt has {length}; {context}", param)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


def path_of(*steps: int | str) -> str:
    """The path of a place in a body: `questions[0].name`; a name that is no plain word is quoted in brackets."""
    written = (
        f"[{json.dumps(step, ensure_ascii=False)}]"
        if number and not re.fullmatch(r"[\w-]+", str(step))
        else f"[{step}]"
        if isinstance(step, int)
        else f".{step}"
        for number, step in enumerate(steps)
    )
    return "".join(written).removeprefix(".")


def wrong(param: str, why: str, code: Code = Code.INVALID_VALUE) -> ApiError:
    """The error of a field: its name, and why."""
    return ApiError(code, f"{param}: {why}", param)


def retry_later(code: Code, message: str, seconds: int) -> ApiError:
    """An error of a request that may succeed after `seconds`."""
    return ApiError(code, message, headers={"Retry-After": str(seconds)})


def stopped() -> ApiError:
    """The error of a stopped server."""
    return retry_later(Code.SERVER_STOPPING, "the server is stopping", RETRY_WHEN_STOPPED_SECONDS)


_CODES: Mapping[type[Exception], Code] = {
    QueueFull: Code.QUEUE_FULL,
    OverLimit: Code.RATE_LIMIT_EXCEEDED,
    PoolBusy: Code.MODELS_BUSY,
    EngineStuck: Code.ENGINE_STUCK,
    RankLost: Code.MACHINE_LOST,
    OutOfMemory: Code.OUT_OF_MEMORY,
    ModelUnknown: Code.MODEL_NOT_FOUND,
    ModelNameNeeded: Code.MISSING_PARAMETER,
    ModelNotLoaded: Code.MODEL_NOT_LOADED,
    ModelInUse: Code.MODEL_IN_USE,
}


def as_api_error(error: Exception) -> ApiError | None:
    """The client's error; None for a fault of the server."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            message = f"the model's chat template refuses these messages: {error}"
            return ApiError(Code.TEMPLATE_ERROR, message, "messages")
        case InvalidParameter() | InvalidImage() | EmbeddingUnsupported() | AnswerUnbound():
            return ApiError(Code.INVALID_VALUE, str(error), error.param)
        case QueueFull() | OverLimit() | PoolBusy() | OutOfMemory() | EngineStuck() | RankLost():
            return retry_later(_CODES[type(error)], str(error) or "not enough memory", error.retry_after_seconds)
        case EngineStopped():
            return stopped()
        case PoolError():
            return ApiError(_CODES.get(type(error), Code.MODEL_UNUSABLE), str(error), "model")
        case PromptTooLong():
            return ContextExceeded(error.num_tokens, error.max_tokens, error.param, is_exact=False)
        case PromptTooLarge():
            return ApiError(Code.CONTEXT_EXCEEDED, str(error))
        case EngineError():
            # The exception's message speaks of arrays and layers: it is for the log.
            return ApiError(Code.GENERATION_FAILED, "the model failed on this request")
    return None


def explain(error: Exception, request_id: str) -> ApiError:
    """The client's error; logs faults of the server."""
    known = as_api_error(error)
    if known is None:
        message = f"internal error; the server's log has the details under request {request_id}"
        known = ApiError(Code.INTERNAL_ERROR, message)
    if known.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return known
