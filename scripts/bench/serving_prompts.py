"""Texts of a wanted length in tokens, and what of a prompt a cache without limits would already hold."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.types import common_prefix_length
from scripts.bench.serving_client import Messages
from tests.support import tiny_models

_SYLLABLES = ("ta", "re", "mi", "so", "la", "ven", "dor", "kel", "nim", "pra", "stu", "ol", "eth", "ba", "qui")


class TextMaker:
    """Makes texts that are the same in every run and share no start with one another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, num_tokens: int) -> str:
        """Returns words of about `num_tokens` tokens."""
        words = [f"{self._random.randrange(10**6):06d}"]
        while _count(" ".join(words)) < num_tokens:
            words += [self._word() for _ in range(max(1, (num_tokens - _count(" ".join(words))) // 8))]
        return " ".join(words)

    def message(self, num_tokens: int, role: str = "user") -> dict[str, str]:
        """Returns a chat message of about `num_tokens` tokens."""
        return {"role": role, "content": self.text(num_tokens)}

    def _word(self) -> str:
        return "".join(self._random.choice(_SYLLABLES) for _ in range(self._random.randint(1, 4)))


def _count(text: str) -> int:
    return len(_tokenizer().encode(text, add_special_tokens=False))


@cache
def _tokenizer() -> Any:
    return tiny_models.tokenizer()


def tokens_of(messages: Messages) -> NDArray[np.int32]:
    """Returns the prompt's tokens as every server with this tokenizer sees them."""
    tokenizer = _tokenizer()
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


class PerfectCache:
    """Remembers everything that was ever sent or said: the most that any cache could reuse."""

    def __init__(self) -> None:
        self._seen: list[NDArray[np.int32]] = []

    def cached_tokens(self, messages: Messages) -> int:
        """Returns how many prompt tokens are known; the last one must always be evaluated."""
        tokens = tokens_of(messages)
        return min(max((common_prefix_length(tokens, seen) for seen in self._seen), default=0), len(tokens) - 1)

    def remember(self, messages: Messages, answer: str) -> None:
        """Takes in a prompt and the answer to it."""
        said = _tokenizer().encode(answer, add_special_tokens=False)
        self._seen.append(np.concatenate([tokens_of(messages), np.array(said, np.int32)]))


def with_answer(messages: Messages, answer: str) -> Sequence[dict[str, str]]:
    """Returns the conversation with the answer that it got."""
    return [*messages, {"role": "assistant", "content": answer}]
