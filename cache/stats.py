"""The cache's counters and gauges, for reports. Frozen: any thread may hold one."""

from dataclasses import dataclass, field

from cache.journal import MovedState


@dataclass(frozen=True)
class CacheStats:
    """What the prefix cache holds, of all namespaces together."""

    num_nodes: int = 0
    stored_bytes: int = 0
    """State on nodes, in memory."""
    live_bytes: int = 0
    """State in slots."""
    budget_bytes: int = 0
    bytes_per_token: float = 0.0
    """Of a conversation's state, as it grows; 0 for a model whose state does not."""
    num_evictions: int = 0
    """Leaves and snapshots given up for lack of memory, since the start."""
    moved: MovedState = field(default_factory=MovedState)
    """What was paged, written and read, since the start."""
    keeps_on_disk: bool = False
    """Whether there is a disk tier with a folder it can use."""
    disk_bytes: int = 0
    num_disk_files_gone: int = 0
    """Files that were missing or damaged when they were to be read, since the start."""
