"""What servers on one machine tell each other."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app import memory_budget
from server.app.memory_budget import Claim, Machine, choose_most_bytes, share_of

HERE = Claim(os.getpid(), "here", 5, "http://127.0.0.1:1")
OTHER = Claim(4_000_000, "org/other", 7, "")


def test_the_second_sees_the_first_until_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, others = memory_budget.take(folder, HERE)
    assert others == []
    second, others = memory_budget.take(folder, OTHER)
    assert others == [HERE]
    assert memory_budget.running(folder) == [OTHER, HERE] or memory_budget.running(folder) == [HERE, OTHER]
    first.close()
    assert memory_budget.running(folder) == [OTHER]
    second.close()
    assert memory_budget.running(folder) == []
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_claim_is_told_anew_whether_longer_or_shorter(tmp_path: Path) -> None:
    own, _ = memory_budget.take(tmp_path / "run", HERE)
    for claim in (Claim(HERE.pid, "a much longer name", 10**12, "http://x"), Claim(HERE.pid, "s", 1, "")):
        own.tell(claim)
        assert memory_budget.running(tmp_path / "run") == [claim]
    own.close()


def test_what_a_killed_server_left_is_no_claim(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from server.app import memory_budget as claims
own, _ = claims.take(Path(sys.argv[1]), claims.Claim(os.getpid(), "killed", 9, ""))
print("taken", flush=True)
sys.stdin.read()
"""
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [claim.model for claim in memory_budget.running(folder)] == ["killed"]
        process.kill()
    assert (folder / f"{process.pid}.json").exists()
    assert memory_budget.running(folder) == []
    assert not (folder / f"{process.pid}.json").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pid": 1}', '{"pid": "x", "model": 1, "memory_bytes": "y", "url": 2}']
)
def test_a_claim_that_is_not_understood_counts_as_none(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own, _ = memory_budget.take(folder, OTHER)
    (folder / f"{OTHER.pid}.json").write_text(text)
    assert memory_budget.running(folder) == []
    own.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_can_enter_is_not_used(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="other users can use"):
        memory_budget.take(folder, HERE)
    assert memory_budget.running(folder) == []


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        memory_budget.take(tmp_path / "run", HERE)


def test_claims_can_be_read_by_others_programs_of_the_user(tmp_path: Path) -> None:
    own, _ = memory_budget.take(tmp_path / "run", HERE)
    text = (tmp_path / "run" / f"{HERE.pid}.json").read_text()
    told = {"pid": HERE.pid, "model": "here", "memory_bytes": 5, "url": "http://127.0.0.1:1"}
    assert json.loads(text) == told | {"weights_bytes": None, "needed_bytes": 0}
    own.close()


def claim(memory_bytes: int, weights_bytes: int | None = 0, needed_bytes: int = 0) -> Claim:
    return Claim(1, "m", memory_bytes, "", weights_bytes, needed_bytes)


def settled(usable_bytes: int, claims: list[Claim]) -> list[int]:
    """Returns what each server has once each has taken its share in turn, twice."""
    claims = list(claims)
    for number in [*range(len(claims))] * 2:
        others = [*claims[:number], *claims[number + 1 :]]
        share_bytes = share_of(usable_bytes, claims[number], others)
        grown_bytes = share_bytes - claims[number].memory_bytes
        free_bytes = usable_bytes - sum(one.memory_bytes for one in claims)
        assert grown_bytes <= max(free_bytes, 0), "a server grew into what another one has"
        claims[number] = replace(claims[number], memory_bytes=share_bytes)
    return [one.memory_bytes for one in claims]


def test_memory_goes_to_who_needs_it_whoever_came_first() -> None:
    assert settled(100, [claim(20)]) == [100]
    # The first has taken everything, and uses it: the second gets what it needs, at most an equal part.
    assert settled(100, [claim(100, 10, 90), claim(0, 10, 20)]) == [70, 30]
    assert settled(100, [claim(100, 10, 90), claim(0, 10, 90)]) == [50, 50]
    # What nobody needs is shared alike; weights are never divided.
    assert settled(100, [claim(100, 10, 20), claim(0, 30, 0)]) == [50, 50]
    assert settled(100, [claim(100, 10, 40), claim(0, 70, 40)]) == [20, 80]
    # Of another version, or with `--cache-memory`: what it has taken is left to it.
    assert share_of(100, claim(100, 10, 90), [claim(60, None)]) == 40
    assert share_of(100, claim(90, 90, 10), [claim(60, 60, 10)]) == 90


@given(
    claims=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)), min_size=1, max_size=4),
    first=st.integers(0, 3),
)
def test_the_division_does_not_depend_on_who_came_first(claims: list[tuple[int, int]], first: int) -> None:
    usable_bytes = 10 + sum(weights for weights, _ in claims)
    servers = [claim(weights, weights, needed) for weights, needed in claims]
    expected = settled(usable_bytes, servers)
    first %= len(servers)
    servers[first] = replace(servers[first], memory_bytes=servers[first].fixed_bytes + 10)
    found = settled(usable_bytes, servers)
    assert sum(found) <= usable_bytes
    assert all(abs(one - other) <= len(claims) for one, other in zip(found, expected, strict=True))


@given(
    weights=st.integers(0, 30),
    useful=st.integers(1, 120),
    others=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 60)), max_size=3),
)
def test_what_a_new_server_may_get_is_what_it_has_once_others_made_way(
    weights: int, useful: int, others: list[tuple[int, int]]
) -> None:
    before = [claim(weights, weights, needed) for weights, needed in others]
    machine = Machine(200, is_card=True)
    before = [replace(one, memory_bytes=size) for one, size in zip(before, settled(150, before), strict=True)]
    expected = settled(150, [*before, claim(weights, weights, useful)])[-1] - weights
    assert abs(choose_most_bytes(machine, weights, useful, before) - min(useful, expected)) <= len(before) + 1
