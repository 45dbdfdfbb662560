"""What can go wrong between text, tokens and logits, and on the way to a model.

ModelError
├── ModelNotFound        no such folder, or nothing in it that could be a model
├── ModelBroken          a model is there but cannot be used: the message names the file and the fault
├── PromptTooLong        a text has more tokens than the model accepts; not all were counted
├── TokenizerFailed      the tokenizers library fails on a text
├── InvalidParameter     a sampling parameter is out of range; carries the parameter's name
├── InvalidGrammar       a schema, pattern or grammar is wrong, or too complex to follow
├── EmbeddingUnsupported the model makes no vectors of texts
├── GrammarFailed        an output cannot follow its grammar any further
├── StoreError           a local name for a model cannot be read, made or changed
│   └── StoreDamaged          the manifest was damaged, and is set aside
├── ModelfileError       a Modelfile cannot be read; the message names the line
└── PullFailed           a download failed; the bytes fetched so far are kept
    ├── HubUnreachable        no network, or the hub does not answer
    ├── RepositoryNotFound    no such repository or revision, or it is private
    ├── RepositoryGated       its owner asks for consent first
    ├── RepositoryUnsuitable  it holds no weights that MLX can load
    ├── MemoryTooSmall        the machine has no memory for its weights
    └── DiskTooFull           the disk cannot hold the download
"""


class ModelError(Exception):
    """Base of all errors of this package. The message is one sentence for a person."""


class ModelNotFound(ModelError):
    """There is no model at the given place."""


class ModelBroken(ModelError):
    """The model's files are incomplete, damaged, contradict each other, or need what this version lacks."""


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
        """The parameter's name as clients write it, such as `top_p`."""


class InvalidGrammar(ModelError):
    """A schema, pattern or grammar cannot constrain any output; the message states the fault."""


class EmbeddingUnsupported(ModelError):
    """The model makes no vectors of texts, or in an unknown way; the message states the reason."""

    param = "model"


class GrammarFailed(ModelError):
    """An output cannot be constrained any further: following its grammar has become too much work."""


class StoreError(ModelError):
    """A local name for a model cannot be read, made or changed."""


class StoreDamaged(StoreError):
    """The manifest was damaged and has been set aside; there are no stored models."""


class ModelfileError(ModelError):
    """A Modelfile cannot be read, or asks for something unsupported; the message names the line."""


class PullFailed(ModelError):
    """A download failed; the bytes fetched so far are kept."""


class HubUnreachable(PullFailed):
    """The hub does not answer."""


class RepositoryNotFound(PullFailed):
    """The hub knows no such repository or revision, or hides it from us."""


class RepositoryGated(PullFailed):
    """The repository's owner asks for consent before anyone downloads it."""


class RepositoryUnsuitable(PullFailed):
    """The repository holds no weights that MLX can load."""


class MemoryTooSmall(PullFailed):
    """The machine has too little memory for the weights."""


class DiskTooFull(PullFailed):
    """The disk cannot hold the download."""


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
    """Returns why something failed, in the system's words if it has any, such as `permission denied`."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split()) or type(error).__name__
