"""Errors of finding, fetching and loading models. Each message is one sentence fit for a person.

ModelError
├── ModelNotFound         nothing here answers to that name; the message says how to get it
├── ModelIncomplete       the folder or the cached download lacks files
└── PullFailed            the download did not come about
    ├── HubUnreachable        no network, or the hub does not answer
    ├── RepositoryNotFound    no such repository or revision, or it is private
    ├── RepositoryGated       its owner asks for consent first
    ├── RepositoryUnsuitable  it holds no weights that MLX can load
    └── NoRoom                the disk is too full
"""


class ModelError(Exception):
    """Base of all errors that the models package reports."""


class ModelNotFound(ModelError):
    """Nothing on this machine answers to that name."""


class ModelIncomplete(ModelError):
    """What is there lacks files that a model needs."""


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


class NoRoom(PullFailed):
    """The disk cannot hold the download."""
