"""A request's use of a loaded model, which is not unloaded meanwhile. Event loop only."""

from collections.abc import Callable

from server.api.context import ServedModel
from server.pool.member import Member


class ModelHold:
    """Somebody's use of a loaded model; it stays loaded until `close`."""

    def __init__(self, member: Member, on_close: Callable[[Member], None]) -> None:
        self._member = member
        self._on_close = on_close
        self._is_open = True
        member.num_holds += 1
        member.idle.clear()

    @property
    def model(self) -> ServedModel:
        """The model."""
        return self._member.opened.model

    def set_keep_alive(self, seconds: float) -> None:
        """Has the model stay loaded for so long after its last request, from now on."""
        self._member.keep_alive_seconds = seconds

    def close(self) -> None:
        """Ends the use; more than once is the same as once."""
        if not self._is_open:
            return
        self._is_open = False
        self._member.num_holds -= 1
        if not self._member.num_holds:
            self._member.idle.set()
        self._on_close(self._member)


def adopt(member: Member, on_close: Callable[[Member], None]) -> ModelHold:
    """Returns the hold that was counted when the model had been loaded."""
    member.num_holds -= 1
    return ModelHold(member, on_close)
