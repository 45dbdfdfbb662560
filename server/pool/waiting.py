"""Who waits for models that are on their way. Event loop only."""

import asyncio
from collections.abc import Mapping

from server.engine.request import EngineStopped
from server.pool.hold import ModelHold
from server.pool.loading import Loading
from server.pool.members import Members
from server.pool.source import ModelSource


class Loadings:
    """The models on their way, each loaded once for all who wait for it."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._loadings: dict[str, Loading] = {}
        self.is_closed = False
        """Whether nothing is loaded any more, because the server stops."""

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._loadings

    @property
    def steps(self) -> Mapping[str, str]:
        """What is being done, by model."""
        return {model_id: loading.step for model_id, loading in self._loadings.items()}

    def find(self, source: ModelSource) -> Loading | None:
        """Returns the loading of a model, if it is on its way."""
        return self._loadings.get(source.id)

    def begin(self, source: ModelSource) -> Loading:
        """Returns a new loading, which `end` ends. Raises EngineStopped while the server stops."""
        if self.is_closed:
            raise EngineStopped("the server is stopping")
        loading = self._loadings[source.id] = Loading(source)
        return loading

    async def wait(self, loading: Loading) -> ModelHold:
        """Returns a hold on the model once it is loaded; raises what kept it from being loaded."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loading.waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._leave(loading, waiter)
            raise
        return self._members.adopt(loading.source.id)

    def end(self, loading: Loading, error: Exception | None) -> None:
        """Lets go of all who wait. Where the model is loaded each of them holds it from now on."""
        self._loadings.pop(loading.source.id, None)
        for waiter in loading.waiters:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                # Held before anyone else gets a turn: whoever waits for memory would unload it unused.
                member = self._members.find(loading.source.id)
                assert member is not None, "a loading ended well without a model"
                member.num_holds += 1
                member.idle.clear()
                waiter.set_result(None)
        loading.waiters.clear()

    def close(self) -> None:
        """Gives up what is being loaded, and loads nothing more."""
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
