"""What servers on one machine tell each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.app import memory_budget
from server.app.memory_budget import Claim

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
    with pytest.raises(PermissionError, match="not this user's alone"):
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
    assert json.loads(text) == {"pid": HERE.pid, "model": "here", "memory_bytes": 5, "url": "http://127.0.0.1:1"}
    own.close()
