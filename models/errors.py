"""Errors between names of models, text, tokens and logits.

ModelError
├── ModelNotFound
├── ModelBroken
├── PromptTooLong
├── TokenizerFailed
├── InvalidParameter
├── InvalidGrammar
├── InvalidImage
├── EmbeddingUnsupported
├── GrammarFailed
├── RowLost
├── StoreError
├── ModelfileError
└── PullFailed
    └── RepositoryNotFound
"""

import contextlib
from collections.abc import Iterator


class ModelError(Exception):
    """The message is one sentence for a person."""


class ModelNotFound(ModelError):
    """No model at the given place."""


class ModelBroken(ModelError):
    """Files are damaged, contradict each other, or need what this version lacks."""


class TokenizerFailed(ModelError):
    """The tokenizers library fails, not the client."""


class PromptTooLong(ModelError):
    """Tokenizing ended as soon as the prompt could not fit."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens or more; at most {max_tokens} can be taken")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.param = "messages"
        """`messages` or `prompt`."""


class InvalidParameter(ModelError):
    """A field of a request cannot be honoured."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidGrammar(ModelError):
    """A schema, pattern or grammar is wrong or too complex."""


class InvalidImage(ModelError):
    """An image is damaged, too large, or of a kind that is not read."""

    param = "messages"


class EmbeddingUnsupported(ModelError):
    """The model makes no vectors of texts."""

    param = "model"


class RowLost(ModelError):
    """A row's state was lost by an earlier error; it must be evaluated again."""


class GrammarFailed(ModelError):
    """Following the grammar further has become too much work."""


class StoreError(ModelError):
    """A local name cannot be read or changed."""


class ModelfileError(ModelError):
    """A Modelfile is unreadable or unsupported; names the line."""


class PullFailed(ModelError):
    """A download failed; the bytes fetched are kept."""


class RepositoryNotFound(PullFailed):
    """The hub knows no such repository or revision, or hides it."""


FOREIGN_FAULTS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, SyntaxError),
    MemoryError,
)
"""What a template or parser may raise; Python's parser raises MemoryError for deep nesting."""


def reason(error: BaseException) -> str:
    """Why something failed, in the system's words if any."""
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def told_as(kind: type[Exception], what: str, *others: type[Exception]) -> Iterator[None]:
    """Raises `kind`, with `what` and the system's reason, in place of an OSError, a UnicodeError or `others`."""
    expected: tuple[type[Exception], ...] = (OSError, UnicodeError, *others)
    try:
        yield
    except expected as error:
        raise kind(f"{what}: {reason(error)}") from error


def brief(text: object, limit: int) -> str:
    """At most `limit` characters of a text, in one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[:limit]}…"
