"""Ranks as threads of one process: a model divided among several machines, without machines, ports or processes.

`mx.distributed` meets at a barrier, in the order of ranks, so all get the same bits. A rank that goes another way
than the others breaks the barrier: what would be a hang is an error.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
import pytest

from models.inference import embedding, probe
from tests.support import tiny_models

BARRIER_SECONDS = 60.0
"""A rank that waits for longer has lost the others; no test waits so long."""
RUN_SECONDS = 900.0
"""For all that ranks do; once one of them has failed, the others have as long as a barrier."""

_here = threading.local()
_building = threading.Lock()


class Group:
    """What `mx.distributed.init` returns on the thread of a rank."""

    def __init__(self, rank: int, team: "Team") -> None:
        self._rank, self.team = rank, team

    def rank(self) -> int:
        """The rank of this thread."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return self.team.size


class Team:
    """All ranks, which meet to exchange arrays."""

    def __init__(self, size: int) -> None:
        self.size, self.num_meetings = size, 0
        self.barrier = threading.Barrier(size, timeout=BARRIER_SECONDS)
        self._brought: list[Any] = [None] * size

    def exchange(self, array: mx.array, number: int) -> list[mx.array]:
        """The arrays of all ranks, whose shapes must be equal, for one that is of rank `number`."""
        mx.eval(array)
        self._brought[number] = array
        self.barrier.wait()
        brought = list(self._brought)
        self.barrier.wait()
        self.num_meetings += number == 0
        shapes = {tuple(one.shape) for one in brought}
        assert len(shapes) == 1, f"the ranks bring different shapes: {shapes}"
        return brought


def part_of(name: str, group: Group | None) -> Any:
    """A rank's part of a tiny model, or all of it."""
    with _building:
        model: Any = tiny_models.build_anew(name)
        if group is not None:
            model.shard(group)
        mx.eval(model.parameters())
    return model


def rank() -> int:
    """The rank of this thread; 0 outside of `run`."""
    return 0 if (group := getattr(_here, "group", None)) is None else group.rank()


def _all_sum(array: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    group = group or getattr(_here, "group", None)
    if group is None or group.size() == 1:
        return array
    first: mx.array
    first, *rest = group.team.exchange(array, group.rank())
    for one in rest:
        first = first + one
    mx.eval(first)
    return first


def _all_gather(array: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    group = group or _here.group
    gathered = mx.concatenate(group.team.exchange(array, group.rank()))
    mx.eval(gathered)
    return gathered


@contextmanager
def loopback() -> Iterator[Callable[[int, Callable[[Group], Any]], list[Any]]]:
    """Yields what runs a function on so many ranks, and returns what each returned; raises the first error."""
    with pytest.MonkeyPatch.context() as patch:
        patch_mlx(patch)
        yield _run


def patch_mlx(patch: pytest.MonkeyPatch) -> None:
    """Has threads meet in place of machines."""
    patch.setattr(mx.distributed, "init", lambda *_, **__: _here.group)
    patch.setattr(mx.distributed, "all_sum", _all_sum)
    patch.setattr(mx.distributed, "all_gather", _all_gather)
    for kind in (probe.Probe, probe._Rows, embedding.Embedder):
        for one in vars(kind).values():
            if isinstance(one, cached_property) and hasattr(one, "lock"):  # of the class, until Python 3.12
                patch.setattr(one, "lock", nullcontext())


def be(group: Group) -> None:
    """Has this thread be a rank."""
    _here.group = group


def _run(size: int, main: Callable[[Group], Any]) -> list[Any]:
    team, returned, errors = Team(size), [None] * size, list[BaseException]()
    ended = SimpleQueue[int]()

    def body(number: int) -> None:
        be(group := Group(number, team))
        try:
            returned[number] = main(group)
        except BaseException as error:
            error.add_note(f"on rank {number} of {size}, after {team.num_meetings} meetings")
            errors.append(error)
            team.barrier.abort()
        finally:
            mx.synchronize()
            mx.clear_streams()
            ended.put(number)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    left = set(range(size))
    while left:
        try:
            left.remove(ended.get(timeout=BARRIER_SECONDS if errors else RUN_SECONDS))
        except Empty:
            places = "".join(f"rank {number} stands at\n{_place(threads[number])}" for number in sorted(left))
            raise AssertionError(places) from (errors[0] if errors else None)
    for thread in threads:
        thread.join(BARRIER_SECONDS)
    if errors:
        raise errors[0]
    return returned


def _place(thread: threading.Thread) -> str:
    """The calls that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "its end\n"
