"""What holds for every test: no network, no deadlines that depend on how busy the machine is."""

import gc
import ipaddress
import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from models.fast_blas import load_fast_blas

# A shell that starts the tests in the background has them ignore SIGINT, which every program they start inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read by transformers when it is imported: it advises to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Compiled once, and not in each of the many processes that tests start: that takes longer than most of them run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.pycache_prefix = str(Path(__file__).parents[1] / ".cache" / "bytecode")
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# As in a server, and before MLX is imported. Workers take all cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
load_fast_blas()

# What a developer has set for servers of their own is not for those of the tests, nor is what they typed in a chat.
for _variable in [name for name in os.environ if name.startswith("MLX_SERVE_")]:
    del os.environ[_variable]
_HOME_OF_TESTS = tempfile.TemporaryDirectory(prefix="mlx-serve-tests-")
for _variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
    os.environ[_variable] = _HOME_OF_TESTS.name
# A server without MODEL takes the model that its user used last.
os.environ["HF_HOME"] = _HOME_OF_TESTS.name

# Where nobody looks for new faults, the examples are the same each time.
settings.register_profile(
    "mlx-serve", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("mlx-serve")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what makes the tests more thorough than usual."""
    parser.addoption(
        "--all-faults",
        action="store_true",
        help="diagnose each fault on each model, with and without session ids; plant each fault in each precision;"
        " run all cases of tests that are marked as `usual`",
    )
    parser.addoption("--ranks", action="store_true", help="divide each served model among two or three machines")


def pytest_configure(config: pytest.Config) -> None:
    """Has several machines serve, if that is asked for."""
    if config.getoption("ranks"):
        config.pluginmanager.import_plugin("tests.support.divided")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases that no usual run has, unless the command line names one."""
    if config.getoption("all_faults") or any("[" in argument for argument in config.args):
        return
    kept = [item for item in items if _is_usual(item)]
    tested = {item.nodeid.partition("[")[0] for item in kept}
    left_out = [item for item in items if not _is_usual(item)]
    for item in left_out:
        if item.get_closest_marker("usual").args and item.nodeid.partition("[")[0] not in tested:  # type: ignore[union-attr]
            raise pytest.UsageError(f"no pattern of `usual` fits any case of {item.nodeid}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _is_usual(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("usual")
    case = item.nodeid.partition("[")[2].removesuffix("]")
    return mark is None or any(fnmatchcase(case, pattern) for pattern in mark.args)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Spreads a run of everything over the cores; a part runs in this process, with its output and its debugger.

    One process more than cores: a third of the time tests wait, for browsers, servers that end, and clocks.
    """
    is_part = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.getoption("keyword")
    return 0 if is_part else (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps what collecting tests makes, which lasts to the end, out of garbage collections."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in a line for each reason why tests were skipped: a program is missing, or the machine is another one."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Lets connections of this process reach loopback addresses only."""
    connect = socket.socket.connect

    def connect_on_loopback(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise ConnectionError(f"a test tried to reach {address[0]}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_on_loopback)
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture
def exact_buffers() -> Iterator[None]:
    """Keeps MLX from handing out buffers that were freed and are larger than asked for, so that budgets are exact."""
    import mlx.core as mx

    mx.clear_cache()
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets disk matter for prompts as short as those of tests."""
    monkeypatch.setattr("cache.disk.connector.MIN_RESTORE_TOKENS", 8)


@pytest.fixture
def tiers() -> Iterator[list[Any]]:
    """Disk tiers that a test opens; closed when it ends."""
    from tests.support.disk_driver import close_if_open

    opened: list[Any] = []
    yield opened
    for tier in opened:
        close_if_open(tier)


@pytest.fixture
def tier(tiers: list[Any], tmp_path: Path) -> Any:
    """A disk tier in the test's folder."""
    from tests.support.disk_driver import open_tier

    tiers.append(open_tier(tmp_path))
    return tiers[0]
