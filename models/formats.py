"""How one model turns a text into a vector, or judges a query and a document. Pure.

`1_Pooling/config.json` of Sentence Transformers says which positions count. Without the file, a tokenizer that puts a
special token after each text belongs to a model that sums the text up there; other models get the mean. A reranker
here answers with yes or no to the prompt of Qwen3-Reranker's model card, "Usage"; the score is yes against no.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from models.errors import EmbeddingUnsupported

POOLING_FILE = Path("1_Pooling", "config.json")
_MODE = "pooling_mode_"

Vector: TypeAlias = NDArray[np.float32]


class Pooling(StrEnum):
    """The positions that make the vector, by Sentence Transformers' names."""

    MEAN = "mean"
    LAST = "lasttoken"
    FIRST = "cls"


@dataclass(frozen=True)
class EmbeddingFormat:
    """How a model makes vectors."""

    pooling: Pooling = Pooling.MEAN
    end_token_id: int | None = None
    """The token after every text, if any."""

    def cut(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """A text's first `max_tokens`; the end token stays at the end."""
        if len(tokens) <= max_tokens:
            return list(tokens)
        end = [] if self.end_token_id is None else [self.end_token_id]
        return [*tokens[: max_tokens - len(end)], *end]


def read_embedding_format(folder: Path, empty_text: Sequence[int], special_ids: frozenset[int]) -> EmbeddingFormat:
    """The format of the model in `folder`; raises EmbeddingUnsupported.

    `empty_text` are the tokens put around a text; `special_ids` are never text.
    """
    end = empty_text[-1] if empty_text and empty_text[-1] in special_ids else None
    pooling = _named(folder / POOLING_FILE)
    return EmbeddingFormat(pooling or (Pooling.MEAN if end is None else Pooling.LAST), end)


def _named(path: Path) -> Pooling | None:
    try:
        modes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        chosen = [key.removeprefix(_MODE) for key, value in modes.items() if key.startswith(_MODE) and value is True]
        plain = sorted(name.removesuffix("_tokens").removesuffix("_token") for name in chosen)
        return Pooling(modes.get("pooling_mode") or " and ".join(plain))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise EmbeddingUnsupported(f"the pooling that {POOLING_FILE} asks for is not supported: {error}") from error


DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QUESTION = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
JUDGED_PREFIX = (
    f'<|im_start|>system\n{_QUESTION} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGED_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NAME = re.compile(r"qwen3[-_.]?(vl[-_.])?reranker", re.IGNORECASE)
_ANSWERS = ("no", "yes")


@dataclass(frozen=True)
class Judgement:
    """Two tokens judge a text: `yes_id` against `no_id`."""

    no_id: int
    yes_id: int


Reading: TypeAlias = Pooling | Judgement


def judged_text(query: str, document: str, instruction: str | None = None) -> str:
    """The text to judge, between `JUDGED_PREFIX` and `JUDGED_SUFFIX`; special tokens in it are text."""
    return f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def read_rerank_format(
    name: str, config: Mapping[str, Any], template: str, token_id: Callable[[str], int | None]
) -> Judgement | None:
    """How a model judges; None if it is no reranker of this kind.

    A reranker's configuration names the two tokens (`classifier_from_token`, as vLLM reads it: no, then yes), or its
    template or name is Qwen3-Reranker's.
    """
    named = config.get("classifier_from_token")
    if named is None and _QUESTION not in template and not _NAME.search(name):
        return None
    answers = _ANSWERS if named is None else named
    if not isinstance(answers, list | tuple) or len(answers) != len(_ANSWERS):
        return None
    ids = [token_id(answer) if isinstance(answer, str) else None for answer in answers]
    if ids[0] is None or ids[1] is None or ids[0] == ids[1]:
        return None
    return Judgement(ids[0], ids[1])
