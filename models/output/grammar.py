"""What an output may be bound to, and how it is followed token by token. Pure: who compiles it stands elsewhere."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

MaskWords = NDArray[np.int32]
"""One bit for each token, the lowest of the first word for token 0; 1 where it may come next."""


JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON is written, as `x-guidance` in a schema says it."""


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; what of it is not known is an error."""
    LENIENT_JSON_SCHEMA = "lenient_json_schema"
    """A JSON schema; keywords that are not known bind nothing."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of texts, one of which is the output."""
    GBNF_OR_LARK = "gbnf_or_lark"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A description of all allowed outputs, not checked yet."""

    kind: GrammarKind
    text: str


class TokenMatcher(Protocol):
    """Follows one output. One thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is allowed as it is and nothing may follow."""
        ...

    def accept(self, token: int) -> None:
        """Takes the next token. One that is not allowed is an error, which `mask` raises."""

    def accept_text(self, text: str) -> None:
        """Takes text that a token has put out beside other things, as `accept` takes a token."""

    def mask(self) -> MaskWords:
        """Returns which tokens may come next, at least one; the end of turn only where the output may end.

        Raises GrammarFailed where that cannot be said.
        """
        ...

    def mask_without_end(self) -> MaskWords:
        """Returns a mask of all tokens but the ends of turn."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that is ready to be followed, any number of times. For any thread."""

    def begin(self) -> TokenMatcher:
        """Returns a matcher at the beginning of an output."""
        ...


@dataclass(frozen=True, eq=False)
class OutputGrammar:
    """What binds the answer of one request."""

    compiled: CompiledGrammar
    thought_start: int | None = None
    """The token that may begin a thought in place of the answer, which is then bound from its end on; None where the
    prompt has begun or closed the thought, or the model has none."""
    begun: str = ""
    """The beginning of the answer, where the prompt holds it already."""
    forces_calls: bool = False
    """Whether the answer can be nothing but tool calls."""
