"""Orders about one session, run on the worker thread."""

from dataclasses import dataclass
from typing import Protocol


class KnowsSessions(Protocol):
    """The part of the worker that these orders need."""

    def forget_session(self, namespace: str, session_id: str) -> None:
        """Drops what is known of a session beyond its tokens."""
        ...


@dataclass(frozen=True)
class ForgetSession:
    """Drops what the engine knows of a session beyond its tokens."""

    namespace: str
    session_id: str

    def run(self, worker: KnowsSessions) -> None:
        """Does it; an unknown session is none to forget."""
        worker.forget_session(self.namespace, self.session_id)
