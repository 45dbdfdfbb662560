"""What can go wrong between text, tokens and logits, and on the way to a model.

ModelError
├── ModelNotFound        no such folder, or nothing in it that could be a model
├── ModelBroken          a model is there but cannot be used: the message names the file and the fault
├── PromptTooLong        a text has more tokens than may be asked of the model; not all were counted
├── TokenizerFailed      the tokenizers library gives up on a text
├── InvalidParameter     a sampling parameter is out of range; carries the parameter's name
├── InvalidGrammar       a schema, pattern or grammar is wrong, or more than can be followed
├── EmbeddingUnsupported the model makes no vectors of texts
├── GrammarFailed        an output cannot be bound to its grammar any further
├── StoreError           a name of our own for a model cannot be read, made or changed
│   └── StoreDamaged          the manifest was damaged, and is set aside
├── ModelfileError       a Modelfile cannot be read; the message names the line
└── PullFailed           a download did not come about; what was fetched before is kept
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
    """The tokenizers library gives up on a text; no fault of ours or the client's."""


class PromptTooLong(ModelError):
    """A prompt does not fit; tokenizing ended where that was clear."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens or more; at most {max_tokens} can be taken")
        self.num_tokens = num_tokens
        """Counted so far."""
        self.max_tokens = max_tokens
        self.param = "messages"
        """What the prompt came from: `messages` or `prompt`."""


class InvalidParameter(ModelError):
    """A sampling parameter cannot be honoured."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        """The parameter's name as clients write it, such as `top_p`."""


class InvalidGrammar(ModelError):
    """No output can be bound to a schema, a pattern or a grammar; the message says what is wrong with it."""


class EmbeddingUnsupported(ModelError):
    """The model makes no vectors of texts, or in a way that is not known; the message says why."""

    param = "model"


class GrammarFailed(ModelError):
    """An output cannot be bound any further: following its grammar has become too much work."""


class StoreError(ModelError):
    """A name of our own for a model cannot be read, made or changed."""


class StoreDamaged(StoreError):
    """The manifest was damaged; it is set aside, and there are no stored models."""


class ModelfileError(ModelError):
    """A Modelfile cannot be read, or asks for what is not done here; the message names the line."""


class PullFailed(ModelError):
    """A download did not come about; what was fetched before is kept."""


class HubUnreachable(PullFailed):
    """The hub does not answer."""


class RepositoryNotFound(PullFailed):
    """The hub knows no such repository or revision, or does not show it to us."""


class RepositoryGated(PullFailed):
    """The repository's owner asks for consent before anyone downloads it."""


class RepositoryUnsuitable(PullFailed):
    """The repository holds no weights that MLX can load."""


class MemoryTooSmall(PullFailed):
    """The machine has no memory for the weights."""


class DiskTooFull(PullFailed):
    """The disk cannot hold the download."""


def reason(error: BaseException) -> str:
    """Returns why something failed, in the words of the system where it has some: `permission denied`."""
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split()) or type(error).__name__
