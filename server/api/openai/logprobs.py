"""How likely the model held each token of an answer, as OpenAI's endpoints tell it."""

from collections.abc import Sequence
from typing import TypedDict

from models.output.token_logprob import TokenLogprob
from server.api.context import TokenReader

LEAST = -9999.0
"""What stands for tokens that are as good as impossible: JSON has no infinity."""


class LikelyToken(TypedDict):
    """One token that was put out, or might have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(LikelyToken):
    """One token of the answer, and the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    """Those of an answer or a chunk of it, in chat."""

    content: list[TokenLogprobs]
    refusal: None


class TextLogprobs(TypedDict):
    """Those of a plain completion or a chunk of it; one entry for each token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def chat_logprobs(told: Sequence[TokenLogprob], texts: TokenReader) -> ChatLogprobs:
    """Returns what is told of some tokens."""
    content: list[TokenLogprobs] = []
    for one in told:
        top = [_likely(token, logprob, texts) for token, logprob in one.top]
        content.append({**_likely(one.token_id, one.logprob, texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobsWriter:
    """Writes what is told of the tokens of one completion, in order."""

    def __init__(self, texts: TokenReader, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._before = b""
        """The answer's text so far, of which every token's place is counted in characters."""

    def again(self) -> "TextLogprobsWriter":
        """Returns one that begins at the first token."""
        return TextLogprobsWriter(self._texts, self._num_top)

    def write(self, told: Sequence[TokenLogprob]) -> TextLogprobs:
        """Returns what is told of the next tokens."""
        top = [{_name(self._texts.piece(token)): _finite(logprob) for token, logprob in one.top} for one in told]
        return {
            "tokens": [_name(self._texts.piece(one.token_id)) for one in told],
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": top if self._num_top else None,
            "text_offset": [self._pass(one.token_id) for one in told],
        }

    def _pass(self, token: int) -> int:
        """Returns where a token begins, and goes behind it."""
        offset = len(self._before.decode(errors="ignore"))
        self._before += self._texts.piece(token)
        return offset


def _likely(token: int, logprob: float, texts: TokenReader) -> LikelyToken:
    piece = texts.piece(token)
    return {"token": _name(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _name(piece: bytes) -> str:
    """Returns a token as text; one that is a part of a character as its bytes, so that no two are called the same."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
