"""How likely the model held each token of an answer, as OpenAI's endpoints tell it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from models.output.pieces import TokenLogprob
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
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


@dataclass(frozen=True)
class TokenNames:
    """What the tokens of one answer are called."""

    texts: TokenReader
    are_ids: bool = False
    """`token_id:42`, else each by its text."""

    def name(self, token: int) -> str:
        """Returns its name; a part of a character is named by its bytes, so that no two are called the same."""
        return f"token_id:{token}" if self.are_ids else _name(self.texts.piece(token))

    def likely(self, token: int, logprob: float) -> LikelyToken:
        """Returns what is told of a token in chat."""
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": list(self.texts.piece(token))}


def chat_logprobs(told: Sequence[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    """Returns what is told of some tokens."""
    content: list[TokenLogprobs] = []
    for one in told:
        top = [names.likely(token, logprob) for token, logprob in one.top]
        content.append({**names.likely(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobsWriter:
    """Writes what is told of the tokens of one completion, in order."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._before = b""
        """The answer's text so far, of which every token's place is counted in characters."""

    def again(self) -> "TextLogprobsWriter":
        """Returns one that begins at the first token."""
        return TextLogprobsWriter(self._names, self._num_top)

    def write(self, told: Sequence[TokenLogprob]) -> TextLogprobs:
        """Returns what is told of the next tokens."""
        top: list[dict[str, float] | None]
        top = [{self._names.name(token): _finite(logprob) for token, logprob in one.top} for one in told]
        return {
            "tokens": [self._names.name(one.token_id) for one in told],
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": top if self._num_top else None,
            "text_offset": [self._pass(one.token_id) for one in told],
        }

    def write_all(self, prompt: Sequence[int], scored: Sequence[TokenLogprob], num_characters: int) -> TextLogprobs:
        """Returns what is told of a prompt, whose text as it is repeated has `num_characters`, and of its answer.

        Nothing comes before the first token, so that it has no probability. What the tokenizer puts in front of a
        text is not repeated.
        """
        told = self.write([TokenLogprob(prompt[0], 0.0), *scored])
        told["token_logprobs"][0] = None
        if told["top_logprobs"] is not None:
            told["top_logprobs"][0] = None
        num_hidden = len(self._names.texts.text(prompt)) - num_characters
        told["text_offset"] = [max(0, offset - num_hidden) for offset in told["text_offset"]]
        return told

    def _pass(self, token: int) -> int:
        """Returns where a token begins, and goes behind it."""
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
