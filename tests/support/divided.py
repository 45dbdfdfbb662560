"""With `--ranks`: what serves a model in a test are several machines that hold it together.

`open_service` gives an engine that leads others, which are threads; processes get the flag. A test of what several
machines refuse is skipped, in the words of the refusal.
"""

import re
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import mlx.core as mx
import pytest

from models.errors import InvalidParameter, ModelBroken, ModelError
from models.loader import read_config
from models.ranks import ONE_RANK, Ranks, check_heads
from server.app import service
from server.app.config import ConfigError, ServerConfig, StartError
from server.cli.ranks import _check
from server.engine.engine import Engine
from server.engine.ranks import FollowingRank, LeadingRank
from tests.support import loopback
from tests.support.server_process import Process

_REFUSAL = re.compile(r"^mlx-serve: .*\bmachines\b.*", re.MULTILINE)
_open_whole, _queue, _start_process = service.open_service, Engine._queue, Process.__init__
_refusals, _processes = list[str](), list[Process]()
"""Of the test under way."""


def pytest_configure() -> None:
    """Before tests import what is replaced, and until the process ends."""
    patch = pytest.MonkeyPatch()
    loopback.patch_mlx(patch)
    patch.setattr(service, "open_service", _open)
    patch.setattr(Engine, "_queue", _noting_refusals)
    patch.setattr(Process, "__init__", _start)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test of one machine alone."""
    _refusals.clear()
    _processes.clear()
    if mark := item.get_closest_marker("alone"):
        pytest.skip(mark.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed after a refusal was of what is refused."""
    report = yield
    told = [*_refusals, *(found[0] for one in _processes if (found := _REFUSAL.search(one.output)))]
    if report.failed and told:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {told[0]}")
    return report


def _num_ranks(model: str) -> int:
    """Two, or three where two cannot share the heads."""
    with suppress(ModelBroken):
        check_heads(read_config(service.source_of(model).path)[0], model, 2)
        return 2
    return 3


def _start(process: Process, *arguments: str, **options: Any) -> None:
    _processes.append(process)
    added = () if "--ranks" in arguments else ("--ranks", str(_num_ranks(arguments[0])))
    _start_process(process, *arguments, *added, **options)


def _noting_refusals(engine: Engine, *given: Any) -> Any:
    try:
        return _queue(engine, *given)
    except InvalidParameter as error:
        _refusals.append(str(error))
        raise


def _open(config: ServerConfig, others: Any = (), tell: Any = print, ranks: Ranks = ONE_RANK, *given: Any) -> Any:
    if ranks.size > 1:
        return _open_whole(config, others, tell, ranks, *given)
    try:
        return opened(config, others)
    except (ConfigError, ModelBroken) as error:
        if "machines" in str(error):
            pytest.skip(str(error))
        raise


def opened(config: ServerConfig, others: Any = ()) -> service.Service:
    """What `open_service` gives, of a model that threads hold together; they begin once its engine does."""
    size = _num_ranks(config.models[0])
    _check(replace(config, ranks=size))
    team, pipes, begins = loopback.Team(size), [Pipe() for _ in range(1, size)], threading.Event()

    def follow(group: loopback.Group, follower: FollowingRank) -> None:
        loopback.be(group)
        try:
            part = _open_whole(config, others, ranks=Ranks(group))
            begins.wait()
            part.engine.follow(follower, part.model.grammars.compile)  # type: ignore[union-attr]
        except (ModelError, StartError):  # rank 0 has it too
            follower.end()
        except BaseException:
            team.barrier.abort()
            raise
        finally:
            mx.synchronize()
            mx.clear_streams()

    for number, (_, theirs) in enumerate(pipes, 1):
        given = loopback.Group(number, team), FollowingRank(theirs, lambda why: None)
        threading.Thread(target=follow, args=given, daemon=True).start()
    leader = LeadingRank([ours for ours, _ in pipes], lambda why: None)
    first = _open_whole(config, others, ranks=Ranks(loopback.Group(0, team)), leader=leader)
    make_worker = first.engine._make_worker
    first.engine._make_worker = lambda: begins.set() or make_worker()  # type: ignore[func-returns-value]
    return first
