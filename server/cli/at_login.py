"""`mlx-serve service install|status|logs|remove`: a server at login, by launchd or systemd."""

import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from models.errors import told_as
from models.names import resolve
from server.app.config import MAX_FILES, PREFIX, StartError
from server.cli.config import config_file, load_config
from server.cli.options import Json, tell

Ended = subprocess.CompletedProcess[str]
Command = Sequence[str]

COMMANDS: Mapping[str, Mapping[str, list[list[str]]]] = tomllib.loads(
    Path(__file__).with_name("service.toml").read_text(encoding="utf-8")
)
_HINTS = {
    "connect to bus": "systemd has no session of this user: log in, not by su or sudo, or run `mlx-serve serve`",
    "failed: 125:": "launchd starts agents of users who are logged in at the screen: log in there, or run "
    "`mlx-serve serve`",
}
"""By what the system says."""
NO_SERVICE = "there is no service; `mlx-serve service install` makes one"

UNIT = "mlx-serve.service"
PLIST = "local.mlx-serve.plist"
"""Labels of launchd are names of hosts in reverse."""
MARK = "Written by `mlx-serve service install`."
"""No other file is overwritten or removed."""
STOP_SECONDS = 30
"""Beyond `drain_seconds`, for writing conversations to the disk."""
PAUSE_SECONDS = 0.5
MAX_PAUSES = {"bootout": 240, "bootstrap": 10}
"""A file that launchd refuses for good has the error of one that comes too early."""
TOO_EARLY = (5, 37)
"""What `launchctl bootstrap` ends with while the agent before is being cleaned up."""

PASSED_ON = (
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "LD_PRELOAD"),
    *("MLX_SERVE_CONFIG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Variables with locations, no secrets: everyone on the machine may ask systemd for them."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the server needs too."""
    return {name: environment[name] for name in PASSED_ON if environment.get(name)}


@dataclass(frozen=True)
class _ServiceState:
    """`detail` has the system's words."""

    is_installed: bool
    is_running: bool = False
    pid: int | None = None
    detail: str = ""


def _run_program(command: Command) -> Ended:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@dataclass(frozen=True)
class ServiceManager:
    """A file that describes the server, and the commands of service.toml that act on it."""

    commands: Mapping[str, list[list[str]]]
    file: Path
    describe: Callable[[Command, Mapping[str, str], int], str]
    """Makes the file of command, environment, and the seconds from a request to end until the kill."""
    read: Callable[[Ended], _ServiceState]
    """Makes a state of what `ask` printed."""
    leftover: Path
    """Removed with the file."""
    run: Callable[[Command], Ended]
    """Raises OSError where there is no such program."""
    former: Path | None = None
    """An older version's file, which goes once there is a new one."""

    def install(self, command: Command, environment: Mapping[str, str], stop_seconds: int) -> None:
        """Writes the file and starts the server, or raises StartError and leaves nothing new."""
        before = read_own(self.file)
        with told_as(StartError, f"{self.file} cannot be written"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.describe(command, environment, stop_seconds), encoding="utf-8")
        try:
            self._call("start")
        except StartError:
            if before is None:
                self.remove()
            else:
                self.file.write_text(before, encoding="utf-8")
            raise
        if self.former is not None and read_own(self.former) is not None:
            self.former.unlink()

    def remove(self) -> bool:
        """Ends the server and deletes the file; False if there was none. Raises StartError."""
        if read_own(self.file) is None:
            return False
        self._call("stop")
        with told_as(StartError, f"{self.file} cannot be deleted"):
            self.leftover.unlink(missing_ok=True)
            self.file.unlink(missing_ok=True)
        self._call("forget")
        return True

    def state(self) -> _ServiceState:
        """Raises StartError."""
        return _ServiceState(False) if read_own(self.file) is None else self.read(self._call("ask")[0])

    def _call(self, name: str) -> list[Ended]:
        return list(map(self._call_one, self.commands[name]))

    def _call_one(self, command: Command) -> Ended:
        program = command[0].removeprefix("-")
        words = [program, *command[1:]]
        with told_as(StartError, f"use `mlx-serve serve`, since {program} cannot be run", subprocess.TimeoutExpired):
            done = self.run(words)
        if done.returncode and program == command[0]:
            said = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
            hint = next((f"; {hint}" for text, hint in _HINTS.items() if text in said), "")
            raise StartError(f"`{' '.join(words)}` failed: {said}{hint}")
        return done


def read_own(file: Path) -> str | None:
    """The text of a file that `install` wrote; None for no file. Raises StartError for a file of another program."""
    with told_as(StartError, f"{file} cannot be read"):
        if not file.exists():
            return None
        text = file.read_text(encoding="utf-8")
    if MARK not in text:
        raise StartError(f"{file} was not written by mlx-serve, so it is left alone; remove or rename it")
    return text


def _described(name: str, **words: object) -> str:
    """The file of that name beside this one, filled in."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").format(max_files=MAX_FILES, **words)


def systemd(environment: Mapping[str, str], run: Callable[[Command], Ended] = _run_program) -> ServiceManager:
    """Systemd's manager of one user, on Linux."""
    folder = Path(environment.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"
    # Without a manager `systemctl disable` leaves this link.
    link = folder / "default.target.wants" / UNIT
    return ServiceManager(COMMANDS["systemd"], folder / UNIT, systemd_unit, _unit_state, link, run)


def systemd_unit(command: Command, environment: Mapping[str, str], stop_seconds: int) -> str:
    """A user's unit."""
    words = " ".join(_systemd_word(word).replace("$", "$$") for word in command)
    variables = " ".join(_systemd_word(f"{name}={value}") for name, value in environment.items())
    return _described(UNIT, command=words, variables=variables, stop_seconds=stop_seconds)


def _systemd_word(word: str) -> str:
    """Per systemd.syntax(7); `%` would begin a specifier."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _unit_state(done: Ended) -> _ServiceState:
    if done.returncode:
        return _ServiceState(True, detail=" ".join(done.stderr.split()))
    values = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    pid = int(values.get("MainPID") or 0)
    status = values.get("ExecMainStatus", "0")
    ended = f", exit status {status}" if status != "0" and not pid else ""
    detail = f"{values.get('ActiveState')} ({values.get('SubState')}){ended}"
    return _ServiceState(True, values.get("ActiveState") == "active", pid or None, detail)


def launchd(
    home: Path,
    run: Callable[[Command], Ended] = _run_program,
    pause: Callable[[float], object] = time.sleep,
) -> ServiceManager:
    """Launchd's manager of a user's agents, on macOS."""
    folder, log = home / "Library" / "LaunchAgents", home / "Library" / "Logs" / "mlx-serve.log"
    file = folder / PLIST
    places = {"domain": f"gui/{os.getuid()}", "file": str(file), "log": str(log)}
    commands = {
        name: [[word.format_map(places) for word in words] for words in listed]
        for name, listed in COMMANDS["launchd"].items()
    }

    def run_to_the_end(command: Command) -> Ended:
        """`bootout` returns before the agent has ended, and `bootstrap` fails until then."""
        done = run(command)
        for _ in range(MAX_PAUSES.get(command[1], 0)):
            is_gone = command[1] == "bootout" and run(("launchctl", "print", command[2])).returncode != 0
            if is_gone or (command[1] == "bootstrap" and done.returncode not in TOO_EARLY):
                break
            pause(PAUSE_SECONDS)
            done = done if command[1] == "bootout" else run(command)
        return done

    describe, former = partial(launchd_plist, log), folder / "mlx-serve.plist"
    return ServiceManager(commands, file, describe, _agent_state, log, run_to_the_end, former)


def launchd_plist(log: Path, command: Command, environment: Mapping[str, str], stop_seconds: int) -> str:
    """A property list for a user's agent."""
    entries = (f"<key>{name}</key><string>{escape(value)}</string>" for name, value in environment.items())
    texts = {"command": "".join(f"<string>{escape(word)}</string>" for word in command), "log": escape(str(log))}
    return _described(PLIST, variables="".join(entries), stop_seconds=stop_seconds, **texts)


def _agent_state(done: Ended) -> _ServiceState:
    if done.returncode:
        return _ServiceState(True, detail="not loaded")
    # The first of a name is the agent's own.
    said = dict(reversed(re.findall(r"^\s*(.+?) = (.*?)\s*$", done.stdout, re.MULTILINE)))
    state, pid, code = (said.get(name, "") for name in ("state", "pid", "last exit code"))
    ended = f", last exit code {code}" if code.isdigit() and code != "0" else ""
    return _ServiceState(True, state == "running", int(pid) if pid else None, f"{state or 'unknown'}{ended}")


def find_manager(environment: Mapping[str, str]) -> ServiceManager:
    """This machine's manager."""
    return launchd(Path.home()) if platform.system() == "Darwin" else systemd(environment)


def install() -> None:
    """Writes the service and starts it; raises ConfigError, ModelError or StartError."""
    seen = passed_on(os.environ)
    # As the service will see them, without the variables of this shell alone.
    config = load_config({}, seen)
    for name in config.models:
        resolve(name)
    manager = find_manager(os.environ)
    command = [*own_program(sys.argv[0]), "serve", "--exit-when-stuck"]
    manager.install(command, seen, int(config.drain_seconds) + STOP_SECONDS)
    typer.echo(f"The server starts now and when you log in; {manager.file} says how.")
    typer.echo(f"Its settings are those of {config_file(seen)}; after a change install it again.")
    for name in os.environ:
        if name.startswith(PREFIX) and name not in PASSED_ON:
            typer.echo(f"It does not see {name} of this shell; write that setting into the file.")
    typer.echo("`mlx-serve service status` says whether it runs, `mlx-serve service logs` what it said.")


def show_state(as_json: Json = False) -> None:
    """Prints the state; exit status 1 if the server does not run. Raises StartError."""
    manager = find_manager(os.environ)
    state = manager.state()
    figures = {"installed": state.is_installed, "running": state.is_running, "pid": state.pid}
    text = f"{state.detail}{f', process {state.pid}' if state.pid else ''}"
    record = {**figures, "detail": state.detail, "file": str(manager.file)}
    tell(record, text if state.is_installed else f"T{NO_SERVICE[1:]}.", as_json)
    raise typer.Exit(0 if state.is_running else 1)


def show_log(follow: Annotated[bool, typer.Option("--follow", "-f")] = False) -> None:
    """Shows the log's end, or follows it. Raises StartError."""
    manager = find_manager(os.environ)
    if not manager.state().is_installed:
        raise StartError(NO_SERVICE)
    [command] = manager.commands["follow" if follow else "log"]
    with told_as(StartError, f"{command[0]} cannot be run"):
        raise typer.Exit(subprocess.run(command, check=False).returncode)


def remove() -> None:
    """Ends the server and deletes its file; raises StartError."""
    manager = find_manager(os.environ)
    if manager.remove():
        typer.echo(f"The server has ended, and {manager.file} is deleted.")
    else:
        typer.echo("There is no service to remove.")


def own_program(started: str) -> Sequence[str]:
    """What started this program, given `sys.argv[0]`."""
    path = Path(started)
    if path.name == "mlx-serve" and path.is_file() and os.access(path, os.X_OK):
        return [str(path.absolute())]
    return [sys.executable, str(Path(__file__).resolve().parents[2] / "mlx_serve.py")]
