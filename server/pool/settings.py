"""What may be loaded into a pool, and for how long it stays. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.pool.memory import PoolMemory
from server.pool.names import Alias


@dataclass(frozen=True)
class PoolSettings:
    """What may be loaded, and for how long it stays."""

    memory: PoolMemory = field(default_factory=lambda: PoolMemory(1 << 62))
    max_models: int | None = None
    """Models that may be loaded together; None: as many as fit."""
    keep_alive_seconds: float | None = None
    """How long an idle model stays; None: for ever while memory is ample, half an hour where it is short."""
    aliases: Sequence[Alias] = ()
    default_id: str | None = None
    """The model of requests that name none; None: the only one there is."""
