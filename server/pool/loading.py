"""Loads a model on a thread of its own, so that neither the event loop nor another model waits. Event loop only."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from server.engine.engine import DormantState
from server.engine.request import EngineStopped
from server.pool.members import Members, ModelHold, OpenedModel
from server.pool.names import ModelSource
from server.pool.served import ListedModel

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Around:
    """What else is in memory when a model is loaded."""

    weights: Sequence[int]
    """Bytes of weights of each model that stays loaded."""
    dormant_bytes: int = 0
    """Bytes of dormant state of other models that are not loaded."""
    dormant: DormantState | None = None
    """This model's dormant state from before it was unloaded; consumed."""


class Opener(Protocol):
    """Loads models. All methods block; `measure` and `open` raise ModelError for unusable files."""

    def measure(self, source: ModelSource) -> int:
        """Checks that all files are there; returns about how many bytes the weights will take."""
        ...

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> OpenedModel:
        """Returns the model with its engine running.

        `tell` is told each step of the loading; an error that it raises ends the loading.
        """
        ...

    def describe(self, source: ModelSource) -> ListedModel:
        """Returns what is known of a model that is not loaded; for damaged files, the name only."""
        ...


class LoadingAbandoned(Exception):
    """Raised into a loading that nobody wants any more, because the server stops."""


@dataclass(eq=False)
class Loading:
    """A model being loaded: who waits for it, and the current step."""

    source: ModelSource
    waiters: "list[asyncio.Future[None]]" = field(default_factory=list)
    step: str = "waiting"
    """A few words for a person."""
    task: "asyncio.Task[None] | None" = None
    can_be_given_up: bool = True
    """Whether the loading ends when nobody waits; false once its files are being read."""


async def on_thread(name: str, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, called on a daemon thread, so the end of the process does not wait for it."""
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


class Loadings:
    """The models being loaded, each once for everybody who waits for it."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._loadings: dict[str, Loading] = {}
        self.is_closed = False
        """Whether the server stops, so nothing is loaded any more."""

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._loadings

    @property
    def steps(self) -> Mapping[str, str]:
        """The current step of each loading model."""
        return {model_id: loading.step for model_id, loading in self._loadings.items()}

    def find(self, source: ModelSource) -> Loading | None:
        """Returns the loading of a model, if there is one."""
        return self._loadings.get(source.id)

    def begin(self, source: ModelSource) -> Loading:
        """Returns a new loading, which `end` ends. Raises EngineStopped while the server stops."""
        if self.is_closed:
            raise EngineStopped("the server is stopping")
        loading = self._loadings[source.id] = Loading(source)
        return loading

    async def wait(self, loading: Loading) -> ModelHold:
        """Returns a hold on the model once it is loaded. Raises the error that ended the loading."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loading.waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._leave(loading, waiter)
            raise
        return self._members.adopt(loading.source.id)

    def end(self, loading: Loading, error: Exception | None) -> None:
        """Wakes everybody who waits. If the model was loaded, each of them holds it from now on."""
        self._loadings.pop(loading.source.id, None)
        for waiter in loading.waiters:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                # Held before any other task runs: one that waits for memory would unload the unused model.
                member = self._members.find(loading.source.id)
                assert member is not None, "a loading ended well without a model"
                member.num_holds += 1
                member.idle.clear()
                waiter.set_result(None)
        loading.waiters.clear()

    def close(self) -> None:
        """Gives up the current loadings, and refuses new ones."""
        self.is_closed = True
        for loading in list(self._loadings.values()):
            self.end(loading, EngineStopped("the server is stopping"))
            if loading.can_be_given_up and loading.task is not None:
                loading.task.cancel()

    def _leave(self, loading: Loading, waiter: "asyncio.Future[None]") -> None:
        if waiter.done() and not waiter.cancelled():
            if waiter.exception() is None:
                self._members.adopt(loading.source.id).close()
            return
        if waiter not in loading.waiters:
            # The loading has ended between the cancellation and now.
            return
        loading.waiters.remove(waiter)
        if not loading.waiters and loading.can_be_given_up and loading.task is not None:
            self._loadings.pop(loading.source.id, None)
            loading.task.cancel()
