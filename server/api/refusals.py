"""Requests that were refused, by namespace, for `/v1/sessions` and `mlx-serve doctor`.

The same refusal is kept once and counted. The number of refusals of a namespace and of namespaces is bounded; the
least recently used go. Pure: no clock, no HTTP. Event loop only.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

MAX_REFUSALS = 32
"""Different refusals kept of one namespace."""
MAX_NAMESPACES = 128

_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Origin:
    """Whose request it is."""

    namespace: str
    session_id: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A request that was answered with an error, the last of its kind."""

    origin: Origin
    request_id: str
    ended: float
    """Seconds since 1970."""
    path: str
    status: int
    code: str
    param: str | None
    message: str
    count: int = 1
    """How many were alike."""


class Refusals:
    """The refusals of all namespaces."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, OrderedDict[_Key, Refusal]] = OrderedDict()

    def record(self, refusal: Refusal) -> None:
        """Keeps a refusal, or counts it to an earlier one that said the same."""
        known = self._namespaces.setdefault(refusal.origin.namespace, OrderedDict())
        key = refusal.path, refusal.code, refusal.message
        before = known.pop(key, None)
        known[key] = refusal if before is None else replace(refusal, count=before.count + 1)
        if len(known) > MAX_REFUSALS:
            known.popitem(last=False)
        self._namespaces.move_to_end(refusal.origin.namespace)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def of(self, namespace: str) -> Iterable[Refusal]:
        """Returns those of a namespace, the last first."""
        return reversed(self._namespaces.get(namespace, OrderedDict()).values())

    def all(self) -> Iterable[Refusal]:
        """Returns those of all namespaces, the last first."""
        every = [one for known in self._namespaces.values() for one in known.values()]
        return sorted(every, key=lambda one: -one.ended)

    def forget(self, namespace: str, session_id: str) -> None:
        """Drops what was refused of a session."""
        known = self._namespaces.get(namespace, OrderedDict())
        for key in [key for key, one in known.items() if one.origin.session_id == session_id]:
            del known[key]
