"""A command to a running engine. Knows no cache and no request; the commands themselves are in `commands`.

A command is a small frozen dataclass. The worker thread calls its `run` once, between two steps, in the order in
which commands and requests came in.
"""

from typing import Protocol, TypeVar

ResultCo = TypeVar("ResultCo", covariant=True)
ContextContra = TypeVar("ContextContra", contravariant=True)


class Command(Protocol[ContextContra, ResultCo]):
    """Something to do with the worker. An error of `run` reaches only the caller of `Engine.execute`."""

    def run(self, worker: ContextContra, /) -> ResultCo:
        """Runs the command. It may take a fraction of a step's time at most, since every live row waits meanwhile."""
        ...
