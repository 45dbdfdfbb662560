"""What a client is told when a request cannot be served: exception to code, code to status.

The dialect shapes the answer. A message never holds a stack trace, a path or a key.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from models.errors import EmbeddingUnsupported, InvalidParameter, PromptTooLong
from models.prompt.chat_template import ChatTemplateError
from server.api.rate_limits import OverLimit
from server.api.sessions import SessionIdError
from server.engine.request import AnswerUnbound, EngineError, EngineStopped, OutOfMemory, PromptTooLarge, QueueFull
from server.pool.errors import ModelInUse, ModelNameNeeded, ModelNotLoaded, ModelUnknown, PoolBusy, PoolError

logger = logging.getLogger(__name__)

RETRY_WHEN_STOPPED_SECONDS = 10


class Code(StrEnum):
    """Error codes for programs; `STATUS` has each one's status."""

    INVALID_HTTP = "invalid_http"
    INVALID_JSON = "invalid_json"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_required_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    TEMPLATE_ERROR = "template_error"
    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    HOST_NOT_ALLOWED = "host_not_allowed"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    OPERATOR_ONLY = "operator_only"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_NOT_LOADED = "model_not_loaded"
    MODEL_IN_USE = "model_in_use"
    MODEL_UNUSABLE = "model_unusable"
    MODELS_BUSY = "models_busy"
    SESSION_NOT_FOUND = "session_not_found"
    EDGE_NOT_FOUND = "edge_not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    UNKNOWN_PATH = "unknown_path"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    PIN_LIMIT = "pin_limit"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    QUEUE_FULL = "queue_full"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    GENERATION_FAILED = "generation_failed"
    INTERNAL_ERROR = "internal_error"
    OUT_OF_MEMORY = "out_of_memory"
    NO_FREE_SLOT = "no_free_slot"
    SERVER_STOPPING = "server_stopping"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_LISTENERS = "too_many_listeners"


STATUS: Mapping[Code, int] = {
    Code.INVALID_HTTP: 400,
    Code.INVALID_JSON: 400,
    Code.INVALID_TYPE: 400,
    Code.INVALID_VALUE: 400,
    Code.MISSING_PARAMETER: 400,
    Code.UNSUPPORTED_PARAMETER: 400,
    Code.TEMPLATE_ERROR: 400,
    Code.EMPTY_PROMPT: 400,
    Code.CONTEXT_EXCEEDED: 400,
    Code.INVALID_API_KEY: 401,
    Code.HOST_NOT_ALLOWED: 403,
    Code.ORIGIN_NOT_ALLOWED: 403,
    Code.OPERATOR_ONLY: 403,
    Code.MODEL_NOT_FOUND: 404,
    Code.MODEL_NOT_LOADED: 409,
    Code.MODEL_IN_USE: 409,
    Code.SESSION_NOT_FOUND: 404,
    Code.EDGE_NOT_FOUND: 404,
    Code.RESPONSE_NOT_FOUND: 404,
    Code.UNKNOWN_PATH: 404,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.REQUEST_TIMEOUT: 408,
    Code.PIN_LIMIT: 409,
    Code.BODY_TOO_LARGE: 413,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.UNSUPPORTED_ENCODING: 415,
    Code.QUEUE_FULL: 429,
    Code.RATE_LIMIT_EXCEEDED: 429,
    Code.GENERATION_FAILED: 500,
    Code.INTERNAL_ERROR: 500,
    Code.MODEL_UNUSABLE: 503,
    Code.MODELS_BUSY: 503,
    Code.OUT_OF_MEMORY: 503,
    Code.NO_FREE_SLOT: 503,
    Code.SERVER_STOPPING: 503,
    Code.TOO_MANY_CONNECTIONS: 503,
    Code.TOO_MANY_LISTENERS: 503,
}


@dataclass(eq=False)
class ApiError(Exception):
    """A request answered with an error; holds all that the answer says."""

    code: Code
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return STATUS[self.code]


@dataclass(eq=False)
class ContextExceeded(ApiError):
    """A prompt of `num_tokens` or more, where `max_tokens` fit, that leaves no space for an answer."""

    num_tokens: int = 0
    max_tokens: int = 0


def context_exceeded(num_tokens: int, max_tokens: int, param: str | None, *, is_exact: bool = True) -> ApiError:
    """Returns the error for a prompt of `num_tokens`, or more unless `is_exact`; `max_tokens` fit."""
    length = f"{num_tokens} tokens" if is_exact else f"{num_tokens} tokens or more"
    context = f"this model's context of {max_tokens + 1} tokens holds at most {max_tokens} and an answer"
    message = f"the prompt has {length}; {context}"
    return ContextExceeded(Code.CONTEXT_EXCEEDED, message, param, num_tokens=num_tokens, max_tokens=max_tokens)


def wrong(param: str, why: str, code: Code = Code.INVALID_VALUE) -> ApiError:
    """Returns the error of a field: its name, and why."""
    return ApiError(code, f"{param}: {why}", param)


def retry_later(code: Code, message: str, seconds: int) -> ApiError:
    """Returns an error for a request that may succeed after `seconds`."""
    return ApiError(code, message, headers={"Retry-After": str(seconds)})


def stopped() -> ApiError:
    """Returns the error of a stopped server."""
    return retry_later(Code.SERVER_STOPPING, "the server is stopping", RETRY_WHEN_STOPPED_SECONDS)


def as_api_error(error: Exception) -> ApiError | None:
    """Returns the client's error; None for a fault of the server."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            message = f"the model's chat template refuses these messages: {error}"
            return ApiError(Code.TEMPLATE_ERROR, message, "messages")
        case InvalidParameter() | SessionIdError() | EmbeddingUnsupported() | AnswerUnbound():
            return ApiError(Code.INVALID_VALUE, str(error), error.param)
        case QueueFull():
            return retry_later(Code.QUEUE_FULL, str(error), error.retry_after_seconds)
        case OverLimit():
            return retry_later(Code.RATE_LIMIT_EXCEEDED, str(error), error.retry_after_seconds)
        case EngineStopped():
            return stopped()
        case PoolError():
            return _of_the_pool(error)
        case PromptTooLong():
            return context_exceeded(error.num_tokens, error.max_tokens, error.param, is_exact=False)
        case PromptTooLarge():
            return ApiError(Code.CONTEXT_EXCEEDED, str(error))
        case OutOfMemory():
            return retry_later(Code.OUT_OF_MEMORY, str(error) or "not enough memory", error.retry_after_seconds)
        case EngineError():
            # The exception's message speaks of arrays and layers: it is for the log.
            return ApiError(Code.GENERATION_FAILED, "the model failed on this request")
    return None


def _of_the_pool(error: PoolError) -> ApiError:
    match error:
        case ModelUnknown():
            return ApiError(Code.MODEL_NOT_FOUND, str(error), "model")
        case ModelNameNeeded():
            return ApiError(Code.MISSING_PARAMETER, str(error), "model")
        case PoolBusy():
            return retry_later(Code.MODELS_BUSY, str(error), error.retry_after_seconds)
        case ModelNotLoaded():
            return ApiError(Code.MODEL_NOT_LOADED, str(error), "model")
        case ModelInUse():
            return ApiError(Code.MODEL_IN_USE, str(error), "model")
        case _:
            return ApiError(Code.MODEL_UNUSABLE, str(error), "model")


def explain(error: Exception, request_id: str) -> ApiError:
    """Returns the client's error; logs errors that no client can have caused."""
    known = as_api_error(error)
    if known is None:
        message = f"internal error; the server's log has the details under request {request_id}"
        known = ApiError(Code.INTERNAL_ERROR, message)
    if known.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return known
