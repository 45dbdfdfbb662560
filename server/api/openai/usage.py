"""What all of OpenAI's answers hold: their head, token counts, and the reason of their end."""

from typing import NotRequired, TypedDict

from server.engine.request import Finished, FinishReason, GenerationRequest, Started


class AnswerHead(TypedDict):
    """How every answer, and every chunk of one, begins."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[str]
    """Only where the request says one: that which it was served with."""


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of one request, as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Only where the model's thoughts are told apart."""


def usage_of(finished: Finished) -> Usage:
    """Returns the token counts of a finished request."""
    predicted = finished.timings.predicted_tokens
    usage: Usage = {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": predicted,
        "total_tokens": finished.prompt_tokens + predicted,
        "prompt_tokens_details": {"cached_tokens": finished.timings.cache_tokens},
    }
    if finished.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": finished.reasoning_tokens}
    return usage


def usage_so_far(num_prompt: int, started: Started | None, num_predicted: int) -> Usage:
    """Returns the token counts of a request that goes on, or has not `started` yet."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_predicted,
        "total_tokens": num_prompt + num_predicted,
        "prompt_tokens_details": {"cached_tokens": started.hit_tokens if started is not None else 0},
    }


class TokenIds(TypedDict, total=False):
    """The tokens of a choice or of what a chunk adds to it, all that were sampled; only for requests that ask."""

    token_ids: list[int]


class PromptIds(TypedDict, total=False):
    """The tokens of a prompt; only for requests that ask."""

    prompt_token_ids: list[int]


class StopFound(TypedDict):
    """What ended a choice, as vLLM and SGLang name it."""

    stop_reason: str | int | None
    """The stop string, or the token of `stop_token_ids`; None for an end of turn or a limit."""
    matched_stop: str | int | None
    """The same, but the token of an end of turn too."""


def stop_found(finished: Finished, request: GenerationRequest) -> StopFound:
    """Returns what ended the answer to `request`."""
    token = finished.stop_token
    asked = token if token in request.stop_token_ids else None
    text = finished.stop_text
    return {
        "stop_reason": asked if text is None else text,
        "matched_stop": token if text is None else text,
    }


def finish_reason(finished: Finished, *, made_calls: bool = False) -> str:
    """Returns OpenAI's word for why the answer ended."""
    if made_calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return finished.reason.value
