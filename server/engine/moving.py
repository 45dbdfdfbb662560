"""Bundles out of a running engine, and into one. Knows no HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import TypeVar

from cache import moving
from cache.disk.bundle import END, BundleHead, BundlePiece, BundleReader, BundleWriter
from cache.moving import Departure, Intake, LeavingPiece, MovingText
from models.adapter import client_namespace
from server.engine.engine import Engine
from server.engine.messages import on_thread
from server.engine.worker import Worker

Result = TypeVar("Result")

ALL = "all"
"""In place of a namespace: every one, each piece staying in its own. No namespace has this name."""
PAUSE_SECONDS = 0.005
"""Between two looks whether the disk was read."""


def is_of(namespace: str) -> Callable[[str], bool]:
    """Says of a namespace of states whether a client's, or `ALL`, has it."""
    return lambda name: namespace in (ALL, client_namespace(name)[0])


def into(namespace: str) -> Callable[[str], str]:
    """Names the namespace of states that one of a bundle enters: a client's, with the same adapter, or its own."""
    if namespace == ALL:
        return lambda name: name
    return lambda name: name.removesuffix(client_namespace(name)[0]) + namespace


def pulled(blocks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
    """The blocks of an event loop, on another thread."""

    async def following() -> bytes:
        return await anext(blocks, b"")

    while block := asyncio.run_coroutine_threadsafe(following(), loop).result():
        yield block


class BundleExport:
    """Bundles of one engine's conversations; a later one has only what came since. Event loop only."""

    head: BundleHead
    _pieces: Generator[LeavingPiece | None, None, None]

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._departure: Departure | None = None
        self._first: LeavingPiece | None = None
        self.num_conversations = self.num_tokens = self.num_bytes = 0

    async def begin(self, namespace: str, session_id: str | None = None) -> bool:
        """Chooses a client's namespace or `ALL`; or a session, in a namespace of states. False if nothing can leave.

        Raises what `Engine.execute` raises, as does `blocks`.
        """
        await self._engine.execute(self._choose, namespace, session_id)
        self._first = await self._next()
        return self._first is not None

    def _choose(self, worker: Worker, namespace: str, session_id: str | None) -> None:
        worker.close_answered()
        cache = worker.prefix_cache
        self._departure = self._departure or Departure(cache)
        if session_id is None:
            texts = moving.conversations(cache, is_of(namespace))
            left_out = moving.left_out_tokens(cache, is_of(namespace))
        else:
            tokens = worker.state.last(namespace, session_id)
            chosen = [MovingText(namespace, session_id, tokens)] if tokens is not None else []
            texts, left_out = iter(chosen), sum(moving.left_out_of(cache, text) for text in chosen)
        self._pieces = self._departure.pieces(texts)
        self.head = BundleHead(self._model, worker.state.fingerprint, left_out)

    async def num_left(self) -> int:
        """How many conversations have state that has not left."""

        def count(worker: Worker) -> int:
            departure = self._departure or Departure(worker.prefix_cache)
            return departure.num_left(moving.conversations(worker.prefix_cache, lambda name: True))

        return await self._engine.execute(count)

    async def _next(self) -> LeavingPiece | None:
        while True:
            piece = await self._engine.execute(lambda _: next(self._pieces, END))
            if piece is not None:
                return piece if isinstance(piece, LeavingPiece) else None
            await asyncio.sleep(PAUSE_SECONDS)

    async def blocks(self, may_go_on: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
        """Yields the bundle, with no further piece once `may_go_on` returns False."""
        writer, piece, before = BundleWriter(), self._first, None
        try:
            yield writer.head(self.head)
            while piece is not None and may_go_on():
                packed, data = await asyncio.to_thread(piece.packed)
                for block in filter(None, writer.piece(packed, data)):
                    yield block
                self.num_conversations += before is not piece.of
                self.num_tokens += 0 if piece.is_snapshot else piece.stop - piece.start
                self.num_bytes += len(data)
                before, piece = piece.of, await self._next()
            yield END
        finally:
            self._engine.execute_later(lambda _: self._pieces.close())


class BundleImport:
    """A bundle's way into a running engine. Event loop only."""

    def __init__(self, engine: Engine, namespace: str) -> None:
        """`namespace`: a client's, or `ALL`."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.intake = Intake(self._call, into(namespace))

    async def take(self, stream: AsyncIterator[bytes], max_bytes: int) -> None:
        """Keeps what arrives. Raises BundleError, and what the stream and `Engine.execute` raise."""
        fingerprint = await self._engine.execute(lambda worker: worker.state.fingerprint)
        blocks = pulled(stream, self._loop)
        try:
            await on_thread("import", lambda: self.intake.take(BundleReader(blocks, max_bytes), fingerprint))
        finally:
            self._engine.execute_later(_record, self.intake.kept)

    def _call(self, function: Callable[..., Result], *given: object) -> Result:
        asked = self._engine.execute(lambda worker: function(worker.prefix_cache, *given))
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


def _record(worker: Worker, pieces: Sequence[BundlePiece]) -> None:
    for piece in pieces:
        if piece.session_id is not None:
            worker.state.record(piece.namespace, piece.session_id, piece.tokens)
