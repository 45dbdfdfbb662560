"""Orders about one session, run on the worker thread."""

from dataclasses import dataclass

from server.engine.worker import Worker


@dataclass(frozen=True)
class ForgetSession:
    """Drops what the engine knows of a session beyond its tokens."""

    namespace: str
    session_id: str

    def run(self, worker: Worker) -> None:
        """Does it; an unknown session is none to forget."""
        worker.forget_session(self.namespace, self.session_id)
