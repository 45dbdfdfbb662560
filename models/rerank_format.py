"""How a reranker reads a query and a document together and says whether they match. Pure.

Such a reranker is a language model that was trained to answer a question about both with yes or no. Its score is the
probability of yes against that of no as the next token. The prompt is that of Qwen3-Reranker's model card, "Usage".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from models.embedding_format import Pooling

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QUESTION = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
_PREFIX = (
    f'<|im_start|>system\n{_QUESTION} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NAME = re.compile(r"qwen3[-_.]?(vl[-_.])?reranker", re.IGNORECASE)
_ANSWERS = ("no", "yes")


@dataclass(frozen=True)
class Judgement:
    """The two tokens that a text is judged by: the score is the probability of `yes_id` against that of `no_id`."""

    no_id: int
    yes_id: int


Reading: TypeAlias = Pooling | Judgement
"""What is made of a text that a model has read."""


@dataclass(frozen=True)
class RerankFormat:
    """How one model judges."""

    judgement: Judgement

    @property
    def prefix(self) -> str:
        """What stands before query and document; its special tokens count as such."""
        return _PREFIX

    @property
    def suffix(self) -> str:
        """What stands behind them; its special tokens count as such."""
        return _SUFFIX

    def text(self, query: str, document: str, instruction: str | None = None) -> str:
        """Returns what is judged; special tokens in it are text."""
        return f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def read_rerank_format(
    name: str, config: Mapping[str, Any], template: str, token_id: Callable[[str], int | None]
) -> RerankFormat | None:
    """Returns how a model judges; None for one that is no reranker of this kind.

    It is one if its configuration names the two tokens (`classifier_from_token`, as vLLM reads it: no, then yes), if
    its chat template asks Qwen3-Reranker's question, or if it is called so. `token_id` returns a token's id.
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
    return RerankFormat(Judgement(ids[0], ids[1]))
