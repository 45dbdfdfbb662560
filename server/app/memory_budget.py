"""How much memory state may take: the machine's, less weights and others' claims.

The arithmetic is pure. Each server claims its memory in a file that it keeps locked (flock(2)), in a folder that only
the user can enter; a file that can be locked was left by an ended process and is removed. Taking a claim and reading
the others' is one step under a lock of the folder.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import names
from models.store.stored_model import WeightsPlace
from server.pool.memory import Pressure

logger = logging.getLogger(__name__)

USABLE_SHARE = 0.75
"""Share of the machine's memory for weights and state."""
RECOMMENDED_SHARE = 0.9
"""Above this share of what the device recommends, Metal pages and everything becomes slow."""
STATE_SHARE = 0.25
"""Share of a machine's memory for state."""
WEIGHTS_SHARE = 0.8
"""Share of the usable memory for weights, where there is a choice of models."""
SMALLEST_BUDGET_BYTES = 256 << 20
"""Less would hold no conversation."""
POOL_SHARE = 1 / 16
"""Share of the budget for buffers that MLX keeps; they do not count towards the budget."""
SMALLEST_POOL_BYTES = 128 << 20
LARGEST_POOL_BYTES = 1 << 30
"""Holds one step's buffers with a reserve: with a smaller pool each step would allocate them again."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Machine:
    """Memory of a machine."""

    memory_bytes: int
    """Memory of a graphics card, else of the machine, or less inside a container."""
    recommended_bytes: int | None = None
    """The most that the device recommends to use; None on a CPU."""
    is_card: bool = False
    """A graphics card, whose memory only the server uses."""


@dataclass(frozen=True)
class MemoryPlan:
    """How one server divides memory."""

    machine_bytes: int
    weights_bytes: int
    budget_bytes: int
    others_bytes: int
    """Bytes claimed by this user's other servers."""
    most_bytes: int = 0
    """The budget once others have made way."""

    @property
    def rest_bytes(self) -> int:
        """Bytes for everything else; negative if the plan exceeds the memory."""
        return self.machine_bytes - self.weights_bytes - self.budget_bytes - self.others_bytes


def usable_bytes(machine: Machine) -> int:
    """The default for weights and state together."""
    usable = int(machine.memory_bytes * USABLE_SHARE)
    if machine.recommended_bytes is not None:
        usable = min(usable, int(machine.recommended_bytes * RECOMMENDED_SHARE))
    return usable


def largest_weights_bytes(machine: Machine) -> int:
    """The most that weights may take: beyond it the machine would page, or end the process."""
    whole = machine.memory_bytes if machine.recommended_bytes is None else machine.recommended_bytes
    return int(min(whole, machine.memory_bytes) * RECOMMENDED_SHARE) - SMALLEST_BUDGET_BYTES


def comfortable_weights_bytes(machine: Machine) -> int:
    """The most that weights should take beside conversations."""
    return int(usable_bytes(machine) * WEIGHTS_SHARE)


def largest_state_bytes(machine: Machine) -> int:
    """The most that state takes by default."""
    return machine.memory_bytes if machine.is_card else int(machine.memory_bytes * STATE_SHARE)


def share_of(usable_bytes: int, own: "Claim", others: Sequence["Claim"]) -> int:
    """One server's part for weights and state; each server finds the same division.

    Each server gets the memory that its state needs, or an equal part if memory is short, and an equal part of the
    rest. A server does not grow into memory that others have not yet given up.
    """
    claims = sorted((own, *others), key=lambda claim: claim.needed_bytes)
    left_bytes = usable_bytes - sum(claim.fixed_bytes for claim in claims)
    part_bytes = 0
    for number, claim in enumerate(claims):
        needed_bytes = max(min(claim.needed_bytes, left_bytes // (len(claims) - number)), 0)
        left_bytes -= needed_bytes
        part_bytes = needed_bytes if claim is own else part_bytes
    share_bytes = own.fixed_bytes + part_bytes + max(left_bytes, 0) // len(claims)
    free_bytes = usable_bytes - sum(claim.memory_bytes for claim in others)
    return min(share_bytes, max(free_bytes, own.memory_bytes))


def choose_most_bytes(machine: Machine, weights_bytes: int, useful_bytes: int, others: Sequence["Claim"]) -> int:
    """The most for state, once others have made way."""
    wanted_bytes = min(useful_bytes, largest_state_bytes(machine))
    wish = Claim(0, "", usable_bytes(machine), "", weights_bytes, wanted_bytes)
    return min(wanted_bytes, share_of(usable_bytes(machine), wish, others) - weights_bytes)


def choose_pool_bytes(budget_bytes: int) -> int:
    """Freed bytes that MLX may keep; Metal's own limit is all memory."""
    return min(max(int(budget_bytes * POOL_SHARE), SMALLEST_POOL_BYTES), LARGEST_POOL_BYTES)


def read_machine(device_info: dict[str, Any]) -> Machine:
    """A machine's memory from the result of `mx.device_info()`."""
    if device_info.get("total_memory"):
        return Machine(int(device_info["total_memory"]), is_card=True)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    recommended = device_info.get("max_recommended_working_set_size")
    return Machine(min(limits), int(recommended) if recommended else None)


PSI = Path("/proc/pressure/memory")
PSI_PERCENT = {Pressure.WARN: ("some", 10.0), Pressure.CRITICAL: ("full", 20.0)}
"""Shares of the last ten seconds in which some, or all, programs waited for memory."""
_MACOS_LEVEL = b"kern.memorystatus_vm_pressure_level"


def read_pressure(system: str, sysctl: Callable[[bytes], int | None] | None = None) -> Pressure:
    """How short memory is, as macOS says, or Linux by PSI; NORMAL if unknown."""
    if system == "Darwin":
        level = (sysctl or _sysctl)(_MACOS_LEVEL)
        return Pressure.NORMAL if level is None or level < 2 else Pressure.WARN if level < 4 else Pressure.CRITICAL
    try:
        waits = dict(re.findall(r"^(some|full) avg10=([\d.]+)", PSI.read_text(), re.MULTILINE))
    except OSError:
        return Pressure.NORMAL
    levels = (level for level, (kind, percent) in PSI_PERCENT.items() if float(waits.get(kind, 0)) >= percent)
    return max(levels, default=Pressure.NORMAL)


def _sysctl(name: bytes) -> int | None:
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else value.value


def this_machine() -> Machine:
    """This machine's memory, by MLX and the system."""
    # Asking the device takes a moment.
    import mlx.core as mx

    return read_machine(mx.device_info())


@dataclass(frozen=True)
class Claim:
    """One server's memory and address, for other servers."""

    pid: int
    model: str
    memory_bytes: int
    """Weights and budget."""
    url: str
    """Empty while the server starts."""
    weights_bytes: int | None = None
    """None if the claim has no budget to change."""
    needed_bytes: int = 0
    """Bytes that state takes, and some to grow."""

    @property
    def fixed_bytes(self) -> int:
        return self.memory_bytes if self.weights_bytes is None else self.weights_bytes

    @property
    def least_bytes(self) -> int:
        return min(self.fixed_bytes + self.needed_bytes, self.memory_bytes)


def runtime_folder(environment: Mapping[str, str]) -> Path:
    """This user's folder for claims."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "mlx-serve" if runtime else Path(tempfile.gettempdir()) / f"mlx-serve-{os.geteuid()}"


class OwnClaim:
    """The claim of this process."""

    def __init__(self, path: Path, descriptor: int, claim: Claim) -> None:
        self._path = path
        self._descriptor = descriptor
        self.tell(claim)

    def tell(self, claim: Claim) -> None:
        """Replaces the claim that others read."""
        self._claim = claim
        text = json.dumps(asdict(claim)).encode()
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)

    def find_share(self, usable_bytes: int) -> int:
        """This server's part beside those that run now. Blocks; for any thread."""
        own = self._claim
        return share_of(usable_bytes, own, [claim for claim in running(self._path.parent) if claim.pid != own.pid])

    def close(self) -> None:
        """Gives the claim up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def take(folder: Path, claim: Claim) -> tuple[OwnClaim, list[Claim]]:
    """Makes a claim; also returns the claims of running servers.

    Raises OSError, as for a folder that others may enter; a missing folder is made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        others = _claims(folder)
        path = folder / f"{claim.pid}.json"
        descriptor = _open(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return OwnClaim(path, descriptor, claim), others


def running(folder: Path) -> list[Claim]:
    """The running servers' claims; none if the folder cannot be read."""
    try:
        with _locked(folder):
            return _claims(folder)
    except OSError:
        return []


def find_user(place: WeightsPlace) -> Claim | None:
    """Another running server that uses a download, if any."""
    others = [one for one in running(runtime_folder(os.environ)) if one.pid != os.getpid()]
    return next((one for one in others if any(names.stands_for(used, place) for used in one.model.split(", "))), None)


def _claims(folder: Path) -> list[Claim]:
    return [claim for path in sorted(folder.glob("*.json")) if (claim := _read(path)) is not None]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"other users can use {folder}")
    descriptor = _open(folder / "lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _read(path: Path) -> Claim | None:
    """Returns a running server's claim; removes an ended one's."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _parse(file.read())
    path.unlink(missing_ok=True)
    return None


def _parse(text: bytes) -> Claim | None:
    try:
        claim = Claim(**json.loads(text))
    except (ValueError, TypeError):
        logger.debug("a claim of another version is not understood: %r", text)
        return None
    numbers = (claim.pid, claim.memory_bytes, claim.fixed_bytes, claim.needed_bytes)
    return claim if all(isinstance(number, int) for number in numbers) else None
