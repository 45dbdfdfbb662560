"""The loaded models: who uses them, and which of them take requests. Event loop only, but for what says otherwise."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from server.pool.hold import ModelHold, adopt
from server.pool.member import Member


class Members:
    """The loaded models, by identity."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._ready: Mapping[str, Member] = {}
        """Those of them that take requests. Replaced as a whole, since other threads read it."""
        self.on_release: Callable[[], None] = lambda: None
        """Called when a use of a model has ended."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """The one used last comes last."""
        return iter(sorted(self._members.values(), key=lambda member: member.last_used))

    def find(self, model_id: str) -> Member | None:
        """Returns a loaded model, whether it takes requests or not."""
        return self._members.get(model_id)

    def find_ready(self, model_id: str) -> Member | None:
        """Returns a loaded model that takes requests. For any thread."""
        return self._ready.get(model_id)

    def add(self, member: Member) -> None:
        """Takes a model that was loaded."""
        self._members[member.source.id] = member
        self._publish()

    def remove(self, member: Member) -> None:
        """Lets go of one that is about to be unloaded."""
        assert not member.is_busy, "a model was unloaded while it was held"
        del self._members[member.source.id]
        self._publish()

    def weights(self) -> list[int]:
        """Returns the bytes of weights of each."""
        return [member.opened.weights_bytes for member in self._members.values()]

    def hold(self, member: Member) -> ModelHold:
        """Returns a hold on a model."""
        return ModelHold(member, self._released)

    def adopt(self, model_id: str) -> ModelHold:
        """Returns the hold that was counted for somebody when the model had been loaded."""
        return adopt(self._members[model_id], self._released)

    def _released(self, member: Member) -> None:
        member.last_used = self._clock()
        self.on_release()

    @contextlib.contextmanager
    def closed_to_others(self, leaving: Sequence[Member]) -> Iterator[None]:
        """Keeps new requests from models that make way, so that they become idle."""
        for member in leaving:
            member.is_leaving = True
        self._publish()
        try:
            yield
        finally:
            for member in leaving:
                member.is_leaving = False
            self._publish()

    def _publish(self) -> None:
        self._ready = {name: member for name, member in self._members.items() if not member.is_leaving}
