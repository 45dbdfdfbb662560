"""The parts that all of OpenAI's answers share: head, token counts, finish reason, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from models.output.pieces import TokenLogprob
from server.api.openai.dialect import ErrorObject
from server.engine.request import Finished, FinishReason, GenerationRequest, Started
from server.pool.served import TokenReader


class AnswerHead(TypedDict):
    """The head of answers and chunks."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[str]
    """Only if the request names one."""


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int


class Usage(TypedDict):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Only if the model's thoughts are told apart."""


def usage_of(finished: Finished) -> Usage:
    """Returns a finished request's token counts."""
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
    """Returns an unfinished request's counts."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_predicted,
        "total_tokens": num_prompt + num_predicted,
        "prompt_tokens_details": {"cached_tokens": started.hit_tokens if started is not None else 0},
    }


class TokenIds(TypedDict, total=False):
    """The tokens sampled for a choice or chunk, if requested."""

    token_ids: list[int]


class PromptIds(TypedDict, total=False):
    """The prompt's tokens, if requested."""

    prompt_token_ids: list[int]


class StopFound(TypedDict):
    """What ended a choice, in vLLM's and SGLang's words."""

    stop_reason: str | int | None
    """None for an end of turn or a limit."""
    matched_stop: str | int | None
    """The same, or the end of turn's token."""


class ChoiceEnd(TokenIds, total=False):
    """The tokens of a choice, and what ended it: a stop or an error."""

    stop_reason: str | int | None
    matched_stop: str | int | None
    error: ErrorObject


def stop_found(finished: Finished, request: GenerationRequest) -> StopFound:
    """Returns what ended the answer."""
    token = finished.stop_token
    asked = token if token in request.stop_token_ids else None
    text = finished.stop_text
    return {
        "stop_reason": asked if text is None else text,
        "matched_stop": token if text is None else text,
    }


def finish_reason(finished: Finished, *, made_calls: bool = False) -> str:
    """Returns OpenAI's finish reason."""
    if made_calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return finished.reason.value


LEAST = -9999.0
"""Stands for minus infinity."""


class LikelyToken(TypedDict):
    """A token that was, or might have been, put out."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(LikelyToken):
    """A token, and the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer or chunk."""

    content: list[TokenLogprobs]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion or chunk, in lists by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


@dataclass(frozen=True)
class TokenNames:
    """Names the tokens of one answer."""

    texts: TokenReader
    are_ids: bool = False
    """`token_id:42` instead of texts."""

    def name(self, token: int) -> str:
        """Returns a token's text, or the bytes of a part of a character."""
        return f"token_id:{token}" if self.are_ids else _name(self.texts.piece(token))

    def likely(self, token: int, logprob: float) -> LikelyToken:
        """Returns a token's entry in chat."""
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": list(self.texts.piece(token))}


def chat_logprobs(told: Sequence[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    """Returns log-probabilities for chat."""
    content: list[TokenLogprobs] = []
    for one in told:
        top = [names.likely(token, logprob) for token, logprob in one.top]
        content.append({**names.likely(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobsWriter:
    """Writes one completion's log-probabilities in order."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._before = b""
        """Offsets count characters of this."""

    def again(self) -> "TextLogprobsWriter":
        """Returns a writer from the first token on."""
        return TextLogprobsWriter(self._names, self._num_top)

    def write(self, told: Sequence[TokenLogprob]) -> TextLogprobs:
        """Returns the log-probabilities of the next tokens."""
        top: list[dict[str, float] | None]
        top = [{self._names.name(token): _finite(logprob) for token, logprob in one.top} for one in told]
        return {
            "tokens": [self._names.name(one.token_id) for one in told],
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": top if self._num_top else None,
            "text_offset": [self._pass(one.token_id) for one in told],
        }

    def write_all(self, prompt: Sequence[int], scored: Sequence[TokenLogprob], num_characters: int) -> TextLogprobs:
        """Returns those of an echoed prompt of `num_characters` and its answer.

        The first token has none, and the tokenizer's prefix is not echoed.
        """
        told = self.write([TokenLogprob(prompt[0], 0.0), *scored])
        told["token_logprobs"][0] = None
        if told["top_logprobs"] is not None:
            told["top_logprobs"][0] = None
        num_hidden = len(self._names.texts.text(prompt)) - num_characters
        told["text_offset"] = [max(0, offset - num_hidden) for offset in told["text_offset"]]
        return told

    def _pass(self, token: int) -> int:
        offset = len(self._before.decode(errors="ignore"))
        self._before += self._names.texts.piece(token)
        return offset


def _name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
