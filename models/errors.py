"""What can go wrong between text, tokens and logits, and on the way to a model.

ModelError
├── ModelNotFound
├── ModelBroken
├── PromptTooLong
├── TokenizerFailed
├── InvalidParameter
├── InvalidGrammar
├── EmbeddingUnsupported
├── GrammarFailed
├── StoreError
│   └── StoreDamaged
├── ModelfileError
└── PullFailed
    └── RepositoryNotFound
"""


class ModelError(Exception):
    """Base of all errors of this package. The message is one sentence for a person."""


class ModelNotFound(ModelError):
    """There is no model at the given place."""


class ModelBroken(ModelError):
    """The model's files are damaged, contradict each other, or need what this version lacks."""


class TokenizerFailed(ModelError):
    """The tokenizers library fails on a text, through no fault of ours or the client's."""


class PromptTooLong(ModelError):
    """A prompt does not fit; tokenizing ended as soon as that was clear."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens or more; at most {max_tokens} can be taken")
        self.num_tokens = num_tokens
        """Tokens counted so far."""
        self.max_tokens = max_tokens
        self.param = "messages"
        """The source of the prompt: `messages` or `prompt`."""


class InvalidParameter(ModelError):
    """A sampling parameter cannot be honoured."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidGrammar(ModelError):
    """A schema, pattern or grammar is wrong, or too complex to follow."""


class EmbeddingUnsupported(ModelError):
    """The model makes no vectors of texts."""

    param = "model"


class GrammarFailed(ModelError):
    """An output cannot follow its grammar any further: that has become too much work."""


class StoreError(ModelError):
    """A local name for a model cannot be read, made or changed."""


class StoreDamaged(StoreError):
    """The manifest was damaged and has been set aside."""


class ModelfileError(ModelError):
    """A Modelfile cannot be read, or asks for something unsupported; the message names the line."""


class PullFailed(ModelError):
    """A download failed; the bytes fetched so far are kept."""


class RepositoryNotFound(PullFailed):
    """The hub knows no such repository or revision, or hides it from us."""


FOREIGN_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,
    MemoryError,
)
"""What a template or a parser may raise for some input; Python's own parser raises MemoryError for deep nesting."""


def reason(error: BaseException) -> str:
    """Returns why something failed, in the system's words if it has any."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split()) or type(error).__name__


def brief(text: object, limit: int) -> str:
    """Returns at most `limit` characters of a text, in one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[:limit]}…"
