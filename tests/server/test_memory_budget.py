"""How much memory is shared out."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from server.app.config import ServerConfig
from server.app.memory_budget import (
    SMALLEST_BUDGET_BYTES,
    Claim,
    Machine,
    choose_pool_bytes,
    largest_weights_bytes,
    read_machine,
    read_pressure,
)
from server.app.service import Wiring, open_service, pool_memory
from server.pool.memory import Pressure

GIB = 1 << 30


def choose_budget_bytes(machine: Machine, weights_bytes: int, others_bytes: int = 0) -> int:
    return pool_memory(ServerConfig(), machine, [Claim(1, "", others_bytes, "")]).for_state([weights_bytes])


def test_a_quarter_of_the_machine_or_what_the_weights_leave_of_three() -> None:
    assert choose_budget_bytes(Machine(16 * GIB), 4 * GIB) == 4 * GIB
    assert choose_budget_bytes(Machine(128 * GIB, 96 * GIB), 5 * GIB) == 32 * GIB
    assert choose_budget_bytes(Machine(16 * GIB), 10 * GIB) == 2 * GIB


def test_a_card_is_nobody_elses() -> None:
    assert choose_budget_bytes(Machine(80 * GIB, is_card=True), 4 * GIB) == 56 * GIB


def test_never_more_than_the_device_recommends() -> None:
    budget = choose_budget_bytes(Machine(16 * GIB, recommended_bytes=10 * GIB), 6 * GIB)
    assert budget == int(10 * GIB * 0.9) - 6 * GIB


def test_a_generous_recommendation_does_not_raise_the_budget() -> None:
    assert choose_budget_bytes(Machine(16 * GIB, recommended_bytes=100 * GIB), 9 * GIB) == 3 * GIB


def test_large_weights_leave_the_smallest_budget() -> None:
    assert choose_budget_bytes(Machine(8 * GIB), 20 * GIB) == SMALLEST_BUDGET_BYTES


def test_this_machine_has_memory() -> None:
    machine = read_machine({"device_name": "cpu"})
    assert machine.memory_bytes > GIB // 4
    assert machine.recommended_bytes is None


def test_metal_recommends_and_a_card_has_memory_of_its_own() -> None:
    assert read_machine({"max_recommended_working_set_size": GIB}).recommended_bytes == GIB
    assert read_machine({"total_memory": 80 * GIB}) == Machine(80 * GIB, is_card=True)


def test_a_container_with_less_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr("server.app.memory_budget._CGROUP_LIMITS", (limit, tmp_path / "none"))
    assert read_machine({}).memory_bytes == 1_000_000
    limit.write_text("max\n")
    assert read_machine({}).memory_bytes > 1_000_000


def test_freed_buffers_have_a_sixteenth_of_the_budget_within_bounds() -> None:
    assert choose_pool_bytes(8 * GIB) == GIB // 2
    assert choose_pool_bytes(GIB) == GIB // 8
    assert choose_pool_bytes(256 << 20) == 128 << 20
    assert choose_pool_bytes(100 * GIB) == GIB


def test_weights_may_take_what_metal_recommends_or_the_machine_has() -> None:
    assert largest_weights_bytes(Machine(16 * GIB)) == int(16 * GIB * 0.9) - SMALLEST_BUDGET_BYTES
    assert largest_weights_bytes(Machine(16 * GIB, 10 * GIB)) == int(10 * GIB * 0.9) - SMALLEST_BUDGET_BYTES


def test_others_leave_less() -> None:
    assert choose_budget_bytes(Machine(16 * GIB), 4 * GIB, 5 * GIB) == 3 * GIB
    assert choose_budget_bytes(Machine(16 * GIB), 4 * GIB, 50 * GIB) == SMALLEST_BUDGET_BYTES


def test_a_budget_is_at_most_what_is_of_use_and_never_too_small_for_a_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ServerConfig(models=("demo",), slots=1, context_tokens=64)
    assert open_service(small).memory.budget_bytes == SMALLEST_BUDGET_BYTES
    monkeypatch.setattr("server.app.service._useful_bytes", lambda loaded, config: 300 << 20)
    assert open_service(small).memory.budget_bytes == 300 << 20


@dataclass
class Metal:
    """Stands for MLX's allocator on a Mac: what is in memory, and the limit that it was given."""

    active_bytes: int = 0
    limits: list[int] = field(default_factory=list)


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Metal:
    found = Metal()
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr("server.app.service.set_wired_limit", found.limits.append)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: found.active_bytes)
    return found


def test_exactly_the_weights_are_wired_and_state_never(metal: Metal) -> None:
    wiring = Wiring(Machine(64 * GIB, recommended_bytes=48 * GIB), is_wanted=True)
    metal.active_bytes = 5 * GIB + 1000
    wiring.update(5 * GIB, is_quiet=True)
    assert metal.limits == [5 * GIB]
    # Another model comes, while this one runs or has state; then this one goes, which lowers a number only.
    metal.active_bytes = 9 * GIB
    wiring.update(9 * GIB, is_quiet=False)
    metal.active_bytes = 10 * GIB
    wiring.update(9 * GIB, is_quiet=True)
    assert metal.limits == [5 * GIB]
    wiring.update(4 * GIB, is_quiet=False)
    assert metal.limits == [5 * GIB, 4 * GIB] and wiring.wired_bytes == 4 * GIB
    # Metal refuses a limit beyond what it recommends.
    metal.active_bytes = 50 * GIB
    wiring.update(50 * GIB, is_quiet=True)
    assert metal.limits[-1] == 48 * GIB


def test_a_server_wires_its_weights_as_it_starts(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.app.service.read_machine", lambda info: Machine(64 * GIB, 48 * GIB))
    service = open_service(ServerConfig(models=("demo",)))
    metal.active_bytes = service.memory.weights_bytes
    assert not metal.limits
    service.start()
    service.engine.stop()
    assert metal.limits == [service.memory.weights_bytes] == [service.wiring.wired_bytes]


@pytest.mark.parametrize(
    ("recommended", "is_wanted", "version"),
    [(None, True, "15.1"), (GIB, False, "15.1"), (GIB, True, "14.7"), (GIB, True, "")],
)
def test_nothing_is_wired_elsewhere(
    recommended: int | None, is_wanted: bool, version: str, metal: Metal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.mac_ver", lambda: (version, ("", "", ""), ""))
    wiring = Wiring(Machine(64 * GIB, recommended), is_wanted=is_wanted)
    wiring.update(GIB // 2, is_quiet=True)
    assert not metal.limits and not wiring.is_possible


@pytest.mark.parametrize(("level", "pressure"), [(1, 0), (2, 1), (4, 2), (None, 0)])
def test_macos_tells_its_pressure(level: int | None, pressure: int) -> None:
    told = {b"kern.memorystatus_vm_pressure_level": level}
    assert read_pressure("Darwin", lambda name: told[name]) == pressure


@pytest.mark.parametrize(
    ("some", "full", "pressure"), [("0.00", "0.00", 0), ("11.20", "1.00", 1), ("60.00", "25.31", 2)]
)
def test_linux_tells_how_long_programs_wait(
    some: str, full: str, pressure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app.memory_budget.PSI", tmp_path / "memory")
    assert read_pressure("Linux") == Pressure.NORMAL
    rest = "avg60=99.00 avg300=99.00 total=1"
    (tmp_path / "memory").write_text(f"some avg10={some} {rest}\nfull avg10={full} {rest}\n")
    assert read_pressure("Linux") == pressure
