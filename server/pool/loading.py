"""Brings a model into memory on a thread of its own, so that neither the event loop nor another model waits."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from server.api.context import ListedModel
from server.engine.engine import DormantState
from server.pool.member import OpenedModel
from server.pool.source import ModelSource

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Around:
    """What a model finds when it is loaded."""

    weights: Sequence[int]
    """Bytes of weights of each model that stays loaded."""
    dormant_bytes: int = 0
    """What state of models that are not loaded takes, this one's not counted."""
    dormant: DormantState | None = None
    """This model's own, from before it was unloaded; consumed."""


class Opener(Protocol):
    """Loads models. All methods block; the first two raise ModelError for files that cannot be used."""

    def measure(self, source: ModelSource) -> int:
        """Returns about how much memory the weights will take, after a look at whether all files are there."""
        ...

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> OpenedModel:
        """Returns the model with its engine running.

        `tell` is told what is being done; what it raises ends the loading.
        """
        ...

    def describe(self, source: ModelSource) -> ListedModel:
        """Returns what is known of a model that is not loaded; of damaged files, nothing but the name."""
        ...


class LoadingAbandoned(Exception):
    """Raised into a loading that nobody wants any more, because the server stops."""


@dataclass(eq=False)
class Loading:
    """A model on its way, who waits for it, and what is being done."""

    source: ModelSource
    waiters: "list[asyncio.Future[None]]" = field(default_factory=list)
    step: str = "waiting"
    """A few words for a person."""
    task: "asyncio.Task[None] | None" = None
    can_be_given_up: bool = True
    """Whether it ends when nobody waits for it: until its files are being read."""


async def on_thread(name: str, work: Callable[[], Result]) -> Result:
    """Returns what `work` returns, called on a daemon thread: the end of the process does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[Result | None, BaseException | None] = work(), None
        except BaseException as error:  # handed to whoever awaits it
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody awaits it
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
