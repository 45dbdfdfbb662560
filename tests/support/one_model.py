"""A choice of one model, for chats that never change it."""

from collections.abc import Sequence

from server.cli.repl.conversation import Answerer, AnswerFailed


class OneModel:
    """A choice of one."""

    def __init__(self, current: Answerer) -> None:
        self.current = current

    def names(self) -> Sequence[str]:
        """Returns the only one."""
        return [self.current.name]

    def change(self, name: str) -> None:
        """Raises AnswerFailed for any other name."""
        if name != self.current.name:
            raise AnswerFailed(f"there is no other model here than {self.current.name}")
