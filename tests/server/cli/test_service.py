"""A server that starts at login: the files, and what is asked of launchd and systemd, which a fake stands for."""

import json
import os
import plistlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.app.config import StartError
from server.cli import at_login
from server.cli.at_login import ServiceManager, launchd, launchd_plist, passed_on, systemd_unit
from server.cli.at_login import systemd as systemd_manager
from server.cli.main import execute

COMMAND = ["/home/a b/bin/mlx-serve", "serve", '50% of $HOME "x" \\']
ENVIRONMENT = {"HF_HOME": "/models <100%>"}
SPEC = (COMMAND, ENVIRONMENT, 42)


class Programs:
    """Stands for systemctl and launchctl."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failing = ""
        self.output = ""
        self.early = 0
        """How often `bootstrap` comes too early."""
        self.ending = 0
        """How often `print` still finds an agent that is to end."""

    def __call__(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        line = " ".join(command)
        self.commands.append(line)
        if self.failing and self.failing in line:
            return subprocess.CompletedProcess(command, 1, "", "Failed to connect\n to bus")
        if "bootstrap" in line and self.early:
            self.early -= 1
            return subprocess.CompletedProcess(command, 5, "", "Bootstrap failed: 5: Input/output error")
        if "print" in line and not self.output:
            self.ending -= 1
            return subprocess.CompletedProcess(command, 0 if self.ending >= 0 else 113, self.output, "")
        return subprocess.CompletedProcess(command, 0, self.output, "")


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture(params=["systemd", "launchd"])
def manager(request: pytest.FixtureRequest, programs: Programs, tmp_path: Path) -> ServiceManager:
    if request.param == "systemd":
        return systemd_manager({"XDG_CONFIG_HOME": str(tmp_path)}, programs)
    return launchd(tmp_path, programs)


# ------------------------------------------------------------------------------------------------------- files


def test_launchd_reads_what_was_meant() -> None:
    entries = plistlib.loads(launchd_plist(Path("/logs/mlx-serve.log"), *SPEC).encode())
    assert entries["ProgramArguments"] == COMMAND
    assert entries["EnvironmentVariables"] == ENVIRONMENT
    assert entries["KeepAlive"] == {"SuccessfulExit": False} and entries["RunAtLoad"]
    assert entries["ExitTimeOut"] == 42
    assert entries["StandardErrorPath"] == "/logs/mlx-serve.log"
    assert entries["SoftResourceLimits"]["NumberOfFiles"] > 256


def test_a_unit_says_when_to_start_again_and_when_not() -> None:
    lines = systemd_unit(*SPEC).splitlines()
    assert r'ExecStart="/home/a b/bin/mlx-serve" "serve" "50%% of $$HOME \"x\" \\"' in lines
    assert 'Environment="HF_HOME=/models <100%%>"' in lines
    for line in ("Restart=on-failure", "RestartPreventExitStatus=2", "TimeoutStopSec=42", "WantedBy=default.target"):
        assert line in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("command", [["/bin/sh", "serve"], ["/bin/sh", '50% of $HOME "x" \\', "a b"]])
def test_systemd_understands_the_unit(command: list[str], tmp_path: Path) -> None:
    unit = tmp_path / "mlx-serve.service"
    # Its manual page is not installed here.
    text = systemd_unit(command, ENVIRONMENT, 10).replace("Documentation=", "#")
    unit.write_text(text)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "notice"}
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_no_secret_is_passed_on() -> None:
    environment = {"HF_HOME": "/m", "HF_TOKEN": "s", "MLX_SERVE_API_KEY": "s", "PATH": "/bin", "XDG_CONFIG_HOME": ""}
    assert passed_on(environment) == {"HF_HOME": "/m"}


# ---------------------------------------------------------------------------------------------------- managers


def test_it_is_removed_without_a_trace(manager: ServiceManager, programs: Programs, tmp_path: Path) -> None:
    assert not manager.state().is_installed
    assert not manager.remove()
    assert programs.commands == []
    manager.install(*SPEC)
    assert manager.file.read_text() == manager.describe(*SPEC)
    assert manager.state().is_installed
    manager.install(*SPEC)
    assert manager.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.endswith(".wants")] == []
    assert not manager.state().is_installed


def test_systemd_is_told_in_order(programs: Programs, tmp_path: Path) -> None:
    manager = systemd_manager({"XDG_CONFIG_HOME": str(tmp_path)}, programs)
    manager.install(*SPEC)
    assert programs.commands == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlx-serve.service",
        "systemctl --user restart mlx-serve.service",
    ]
    programs.commands.clear()
    manager.remove()
    assert programs.commands == [
        "systemctl --user disable --now mlx-serve.service",
        "systemctl --user daemon-reload",
        "systemctl --user reset-failed mlx-serve.service",
    ]


def test_launchd_is_told_in_order(programs: Programs, tmp_path: Path) -> None:
    launchd(tmp_path, programs).install(*SPEC)
    domain = f"gui/{os.getuid()}"
    assert programs.commands == [
        f"launchctl bootout {domain}/mlx-serve",
        f"launchctl print {domain}/mlx-serve",
        f"launchctl bootout {domain}/local.mlx-serve",
        f"launchctl print {domain}/local.mlx-serve",
        f"launchctl enable {domain}/local.mlx-serve",
        f"launchctl bootstrap {domain} {tmp_path}/Library/LaunchAgents/local.mlx-serve.plist",
    ]


def test_launchd_is_waited_for_until_the_agent_before_has_ended(programs: Programs, tmp_path: Path) -> None:
    pauses: list[float] = []
    manager = launchd(tmp_path, programs, pauses.append)
    programs.ending, programs.early = 3, 2
    manager.install(*SPEC)
    assert [line.split()[1] for line in programs.commands] == [
        *("bootout", "print", "print", "print", "print", "bootout", "print"),
        *("enable", "bootstrap", "bootstrap", "bootstrap"),
    ]
    assert len(pauses) == 5
    programs.early = 1000
    with pytest.raises(StartError, match="Bootstrap failed: 5: Input/output error"):
        manager.install(*SPEC)
    assert len(pauses) < 20


def test_launchd_needs_somebody_at_the_screen_and_the_error_says_so(tmp_path: Path) -> None:
    def over_ssh(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        said = "Bootstrap failed: 125: Domain does not support specified action"
        return subprocess.CompletedProcess(command, 125, "", said)

    with pytest.raises(StartError, match=r"failed: 125: .*; launchd starts agents of users who are logged in at the"):
        launchd(tmp_path, over_ssh).install(*SPEC)


def test_the_agent_of_an_older_version_goes_with_the_next_install(programs: Programs, tmp_path: Path) -> None:
    manager, former = launchd(tmp_path, programs), tmp_path / "Library" / "LaunchAgents" / "mlx-serve.plist"
    former.parent.mkdir(parents=True)
    former.write_text(launchd_plist(tmp_path, *SPEC))
    manager.install(*SPEC)
    assert not former.exists() and manager.state().is_installed


def test_a_program_that_does_not_answer_is_an_error_in_words(tmp_path: Path) -> None:
    def hang(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        raise subprocess.TimeoutExpired(command, 120)

    with pytest.raises(StartError, match=r"launchctl cannot be run: .*timed out after 120 seconds"):
        launchd(tmp_path, hang).install(*SPEC)


@pytest.mark.parametrize("failing", ["daemon-reload", "enable", "restart", "bootstrap"])
def test_a_failure_leaves_what_was_there(failing: str, manager: ServiceManager, programs: Programs) -> None:
    programs.failing = failing
    if not any(failing in command for command in _commands_of(manager, programs)):
        pytest.skip("the other manager's")
    with pytest.raises(StartError, match="failed: Failed to connect to bus"):
        manager.install(*SPEC)
    assert not manager.file.exists()
    programs.failing = ""
    manager.install(*SPEC)
    before = manager.file.read_text()
    programs.failing = failing
    with pytest.raises(StartError):
        manager.install(["/bin/other"], {}, 1)
    assert manager.file.read_text() == before


def _commands_of(manager: ServiceManager, programs: Programs) -> list[str]:
    failing, programs.failing = programs.failing, ""
    manager.install(*SPEC)
    manager.remove()
    programs.failing = failing
    return programs.commands


def test_the_file_of_somebody_else_is_left_alone(manager: ServiceManager, programs: Programs) -> None:
    manager.file.parent.mkdir(parents=True)
    manager.file.write_text("mine")
    for action in (lambda: manager.install(*SPEC), manager.remove, manager.state):
        with pytest.raises(StartError, match="was not written by mlx-serve"):
            action()
    assert manager.file.read_text() == "mine"
    assert programs.commands == []


@pytest.mark.parametrize(
    ("output", "is_running", "pid", "detail"),
    [
        ("ActiveState=active\nSubState=running\nMainPID=7\nExecMainStatus=0\n", True, 7, "active (running)"),
        ("ActiveState=failed\nSubState=failed\nExecMainStatus=2\n", False, None, "failed (failed), exit status 2"),
    ],
)
def test_the_state_of_a_unit(
    output: str, is_running: bool, pid: int | None, detail: str, programs: Programs, tmp_path: Path
) -> None:
    manager = systemd_manager({"XDG_CONFIG_HOME": str(tmp_path)}, programs)
    manager.install(*SPEC)
    programs.output = output
    state = manager.state()
    assert (state.is_running, state.pid, state.detail) == (is_running, pid, detail)


@pytest.mark.parametrize(
    ("output", "is_running", "pid", "detail"),
    [
        ("gui/501/mlx-serve = {\n\tstate = running\n\tpid = 7\n\tsub = {\n\t\tstate = active\n", True, 7, "running"),
        ("\tstate = not running\n\tlast exit code = 2\n", False, None, "not running, last exit code 2"),
        ("\tstate = running\n\tpid = 7\n\tlast exit code = (never exited)\n", True, 7, "running"),
    ],
)
def test_the_state_of_an_agent(
    output: str, is_running: bool, pid: int | None, detail: str, programs: Programs, tmp_path: Path
) -> None:
    manager = launchd(tmp_path, programs)
    manager.install(*SPEC)
    programs.output = output
    state = manager.state()
    assert (state.is_running, state.pid, state.detail) == (is_running, pid, detail)


# ---------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def systemd(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceManager:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    manager = systemd_manager({"XDG_CONFIG_HOME": str(tmp_path)}, programs)
    monkeypatch.setattr(at_login, "find_manager", lambda environment: manager)
    return manager


def test_the_commands(
    systemd: ServiceManager, programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVE_PORT", "9000")
    assert execute(["service", "status"]) == 1
    assert execute(["service", "logs"]) == 1
    assert execute(["service", "install"]) == 0
    assert "It does not see MLX_SERVE_PORT of this shell" in capsys.readouterr().out
    unit = systemd.file.read_text()
    assert (
        'mlx_serve.py" "serve" "--exit-when-stuck"' in unit
        and f"XDG_CONFIG_HOME={os.environ['XDG_CONFIG_HOME']}" in unit
    )
    programs.output = "ActiveState=active\nSubState=running\nMainPID=7\nExecMainStatus=0\n"
    assert execute(["service", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "installed": True,
        "running": True,
        "pid": 7,
        "detail": "active (running)",
        "file": str(systemd.file),
    }
    for _ in range(2):
        assert execute(["service", "remove"]) == 0
    assert "There is no service to remove." in capsys.readouterr().out


def test_settings_that_cannot_be_used_are_told_before_anything_is_installed(
    systemd: ServiceManager, programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mlx-serve" / "config.toml"
    file.parent.mkdir()
    for text, status in (("port = 70000", 2), ("model = 'org/unknown'", 1)):
        file.write_text(text)
        assert execute(["service", "install"]) == status
    assert not systemd.file.exists() and programs.commands == []


def test_the_program_is_the_one_that_was_started(tmp_path: Path) -> None:
    program = tmp_path / "mlx-serve"
    program.write_text("#!/bin/sh\n")
    assert list(at_login.own_program(str(program)))[1:] != []
    program.chmod(0o755)
    assert at_login.own_program(str(program)) == [str(program)]
