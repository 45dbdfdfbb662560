"""The engine's counters and gauges, as `/health` reports them. Frozen: any thread may hold one."""

from dataclasses import dataclass, field

from cache.journal import CacheStats


@dataclass(frozen=True)
class RequestCounts:
    """Unfinished requests by phase."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0


@dataclass(frozen=True)
class EngineStats:
    """What one engine does and holds, as of its last step."""

    requests: RequestCounts = field(default_factory=RequestCounts)
    num_preempted: int = 0
    """Times that a running sequence had to wait for memory."""
    cache: CacheStats = field(default_factory=CacheStats)
    num_open: int = 0
    """Requests that were submitted and have not ended, those included that the worker has not seen yet."""
