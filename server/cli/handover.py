"""`--handover`: a server that is to stop gives its conversations to another one. Event loop only."""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from cache.moving import Departure
from models.texts import grouped, size_text
from server.app.config import ServerConfig
from server.app.keys import read_private
from server.cli.ask import AskedServer
from server.engine.messages import on_thread
from server.engine.moving import ALL, calling, choose
from server.engine.request import EngineError
from server.pool.members import Member
from server.pool.pool import ModelPool

logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""A server that takes nothing for so long gets nothing more; less than the process may go without progress."""


class Handover:
    """Sends what the other server lacks, as often as it is asked to."""

    def __init__(self, pool: ModelPool, config: ServerConfig, num_stored: Callable[[], int]) -> None:
        """`num_stored`: how many responses are stored, for any thread. Raises ConfigError and StartError."""
        self._pool, self.url, self._num_stored = pool, config.handover or "", num_stored
        path = config.handover_key_file
        text = "" if path is None else read_private(Path(path).expanduser(), f"--handover-key-file {path}")[0]
        self._server = AskedServer(self.url, text.strip() or None)
        is_in_file = config.cache_disk_bytes is not None
        self._fate = f"which stay in {config.cache_dir}" if is_in_file else "which were only in memory"
        self._departures: dict[str, Departure] = {}

    async def send(self, seconds: float) -> None:
        """Sends the newest first, as time allows. An error is logged."""
        deadline = time.monotonic() + seconds
        for member in self._pool.members:
            try:
                departure = self._departure_of(member)
                head, texts = await choose(member.engine, member.model.base_id, ALL)
                blocks = departure.blocks(head, texts, lambda: time.monotonic() < deadline)
                await on_thread("handover", partial(self._upload, member.source.id, blocks, deadline))
            except Exception as error:  # whatever it is, the server must end
                logger.warning("handover to %s: %s", self.url, error)
                del self._departures[member.source.id]  # what arrived is not known

    def _departure_of(self, member: Member) -> Departure:
        return self._departures.setdefault(member.source.id, Departure(calling(member.engine)))

    def _upload(self, model: str, blocks: Iterator[bytes], deadline: float) -> None:
        if (first := next(blocks, None)) is not None:
            self._server.timeout_seconds = min(SILENT_SECONDS, max(deadline - time.monotonic(), 1.0))
            query, headers = {"model": model, "namespace": ALL}, {"Content-Type": "application/x-tar"}
            self._server.upload("/v1/cache/import", query, chain([first], blocks), headers)

    async def tell(self) -> None:
        """Logs what was sent, and what was not."""
        for member in self._pool.members:
            departure, left = self._departure_of(member), 0
            with contextlib.suppress(EngineError):
                left = await member.engine.execute(lambda worker, gone=departure: gone.num_left(worker.prefix_cache))
            sums = f"{grouped(departure.num_tokens)} tokens, {size_text(departure.num_bytes)}"
            name, num_sent = member.source.id, departure.num_conversations
            logger.info("conversations of %s handed over to %s: %d (%s)", name, self.url, num_sent, sums)
            if left:
                logger.warning("conversations of %s not handed over, or not to their end: %d", name, left)
        with contextlib.suppress(sqlite3.Error):
            if num_stored := await asyncio.to_thread(self._num_stored):
                logger.warning("stored responses and conversations not handed over: %d, %s", num_stored, self._fate)
