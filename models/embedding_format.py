"""How one model makes a vector of a text: which positions count, and what ends a text. Pure.

Sentence Transformers keep the first in `1_Pooling/config.json`. Where that is missing, a tokenizer that puts a
special token behind each text belongs to a model trained to sum a text up there; any other model gets the mean.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from models.errors import EmbeddingUnsupported

POOLING_FILE = Path("1_Pooling", "config.json")
_MODE = "pooling_mode_"


class Pooling(StrEnum):
    """Which of a text's positions the vector is made of. The value is Sentence Transformers' name."""

    MEAN = "mean"
    LAST = "lasttoken"
    FIRST = "cls"


@dataclass(frozen=True)
class EmbeddingFormat:
    """How a model makes vectors."""

    pooling: Pooling = Pooling.MEAN
    end_token_id: int | None = None
    """The special token that the tokenizer puts behind every text; None where it puts none."""

    def cut(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Returns the first `max_tokens` of a text's tokens; what ends every text stays at the end."""
        if len(tokens) <= max_tokens:
            return list(tokens)
        end = [] if self.end_token_id is None else [self.end_token_id]
        return [*tokens[: max_tokens - len(end)], *end]


def read_embedding_format(folder: Path, empty_text: Sequence[int], special_ids: frozenset[int]) -> EmbeddingFormat:
    """Returns the format of the model in `folder`; raises EmbeddingUnsupported for a pooling that is not supported.

    `empty_text` are the tokens of an empty text with what the tokenizer puts around it; `special_ids` those that are
    never text.
    """
    end = empty_text[-1] if empty_text and empty_text[-1] in special_ids else None
    pooling = _named(folder / POOLING_FILE)
    return EmbeddingFormat(pooling or (Pooling.MEAN if end is None else Pooling.LAST), end)


def _named(path: Path) -> Pooling | None:
    """Returns the pooling that a file names; None where there is no file."""
    try:
        chosen = _chosen(json.loads(path.read_text(encoding="utf-8")))
        return Pooling(" and ".join(chosen))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise EmbeddingUnsupported(f"the pooling that {POOLING_FILE} asks for is not supported: {error}") from error


def _chosen(modes: dict[str, Any]) -> list[str]:
    """Returns the names of the modes that are on, in either way in which such files have been written."""
    if "pooling_mode" in modes:
        return [str(modes["pooling_mode"])]
    names = [key.removeprefix(_MODE) for key, value in modes.items() if key.startswith(_MODE) and value is True]
    return sorted(name.removesuffix("_tokens").removesuffix("_token") for name in names)
