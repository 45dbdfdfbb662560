"""`mlx-serve service install|status|logs|remove`: a server at login, by launchd or systemd."""

import json
import os
import platform
import plistlib
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from models.errors import reason
from models.names import resolve
from server.app.config import PREFIX, StartError
from server.cli.config import config_file, load_config
from server.cli.options import Json, command_group

app = command_group()
_service = command_group(invoke_without_command=True)
app.add_typer(_service, name="service")

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Raises OSError where there is no such program."""

LOG_LINES = 100
NO_SESSION = "; this user has no session of systemd here: log in as that user, not by su or sudo"


LABEL = "mlx-serve"
MARK = "Written by `mlx-serve service install`."
"""No other file is overwritten or removed."""
STOP_SECONDS = 30
"""Beyond `drain_seconds`, for writing conversations to the disk."""
MAX_FILES = 8192
"""launchd's own limit is 256."""
RESTART_SECONDS = 5
USAGE_STATUS = 2
"""A restart would not help after this exit status."""

PASSED_ON = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "MLX_SERVE_CONFIG",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)
"""Variables with locations, no secrets: everyone on the machine may ask systemd for them."""


@dataclass(frozen=True)
class ServiceSpec:
    """How the server is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    drain_seconds: float
    log_file: str = ""

    @property
    def stop_seconds(self) -> int:
        """From the request to end until the kill."""
        return int(self.drain_seconds) + STOP_SECONDS


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the server needs too."""
    return {name: environment[name] for name in PASSED_ON if environment.get(name)}


def systemd_unit(spec: ServiceSpec) -> str:
    """Returns a unit for the manager of one user."""
    command = " ".join(_systemd_word(word).replace("$", "$$") for word in spec.command)
    variables = [f"Environment={_systemd_word(f'{name}={value}')}" for name, value in spec.environment.items()]
    return "\n".join(
        [
            f"# {MARK}",
            "[Unit]",
            "Description=mlx-serve, a local inference server",
            "StartLimitIntervalSec=300",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={command}",
            *variables,
            "Restart=on-failure",
            f"RestartSec={RESTART_SECONDS}",
            f"RestartPreventExitStatus={USAGE_STATUS}",
            f"TimeoutStopSec={spec.stop_seconds}",
            f"LimitNOFILE={MAX_FILES}",
            "UMask=0077",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def launchd_plist(spec: ServiceSpec) -> str:
    """Returns a property list for an agent of one user."""
    entries = {
        "Label": LABEL,
        "ProgramArguments": list(spec.command),
        "EnvironmentVariables": dict(spec.environment),
        "RunAtLoad": True,
        # After a crash, not after it was asked to end.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        # Others get less of the processor, and of the disk.
        "ProcessType": "Interactive",
        "ExitTimeOut": spec.stop_seconds,
        "SoftResourceLimits": {"NumberOfFiles": MAX_FILES},
        "Umask": 0o077,
        "StandardOutPath": spec.log_file,
        "StandardErrorPath": spec.log_file,
    }
    text = plistlib.dumps(entries, sort_keys=False).decode()
    return text.replace("<plist ", f"<!-- {MARK} -->\n<plist ", 1)


def _systemd_word(word: str) -> str:
    """Per systemd.syntax(7); `%` would begin a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


@dataclass(frozen=True)
class ServiceState:
    """`detail` has the system's words."""

    is_installed: bool
    is_running: bool = False
    pid: int | None = None
    detail: str = ""


def run_program(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


class ServiceManager(ABC):
    """A file that describes the server, and a program that acts on it."""

    file: Path

    def __init__(self, run: Runner) -> None:
        self._run = run

    @abstractmethod
    def describe(self, spec: ServiceSpec) -> str:
        """Returns the text of the file."""

    @abstractmethod
    def start(self) -> None:
        """Starts, or restarts, the server now and at each login. Raises StartError."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the server for now and later; no error if it does not run."""

    @abstractmethod
    def ask(self) -> ServiceState:
        """Returns the state of the server of an existing file."""

    @abstractmethod
    def log_command(self, *, follow: bool) -> Sequence[str]:
        """Returns the command that shows the end of the log."""

    @abstractmethod
    def forgotten(self) -> None:
        """Cleans up behind the removed file."""

    def install(self, spec: ServiceSpec) -> None:
        """Writes the file and starts the server. Raises StartError, and leaves nothing new then."""
        before = self._read()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.describe(spec), encoding="utf-8")
        except OSError as error:
            raise StartError(f"{self.file} cannot be written: {reason(error)}") from error
        try:
            self.start()
        except StartError:
            if before is None:
                self.remove()
            else:
                self.file.write_text(before, encoding="utf-8")
            raise

    def remove(self) -> bool:
        """Ends the server and deletes the file; False if there was none. Raises StartError."""
        if self._read() is None:
            return False
        self.stop()
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            raise StartError(f"{self.file} cannot be deleted: {reason(error)}") from error
        self.forgotten()
        return True

    def state(self) -> ServiceState:
        """Raises StartError."""
        return ServiceState(False) if self._read() is None else self.ask()

    def _read(self) -> str | None:
        """Raises StartError for a file of another program."""
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"{self.file} cannot be read: {reason(error)}") from error
        if MARK not in text:
            raise StartError(f"{self.file} was not written by mlx-serve, so it is left alone; remove or rename it")
        return text

    def _call(self, *command: str) -> "subprocess.CompletedProcess[str]":
        try:
            return self._run(command)
        except OSError as error:
            raise StartError(f"{command[0]} cannot be run: {reason(error)}") from error

    def _must(self, *command: str) -> None:
        done = self._call(*command)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
            hint = NO_SESSION if "connect to bus" in said else ""
            raise StartError(f"`{' '.join(command)}` failed: {said}{hint}")


class Systemd(ServiceManager):
    """systemd's user manager, on Linux."""

    def __init__(self, environment: Mapping[str, str], run: Runner = run_program) -> None:
        super().__init__(run)
        folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
        self._unit = f"{LABEL}.service"
        self.file = Path(folder).expanduser() / "systemd" / "user" / self._unit

    def describe(self, spec: ServiceSpec) -> str:
        """Returns the unit."""
        return systemd_unit(spec)

    def start(self) -> None:
        """Reads, enables and starts the unit."""
        self._must("systemctl", "--user", "daemon-reload")
        self._must("systemctl", "--user", "enable", self._unit)
        self._must("systemctl", "--user", "restart", self._unit)

    def stop(self) -> None:
        """Without a manager only the link of `enable` is left."""
        self._call("systemctl", "--user", "disable", "--now", self._unit)
        (self.file.parent / "default.target.wants" / self._unit).unlink(missing_ok=True)

    def forgotten(self) -> None:
        """Also forgets a failure of the unit."""
        self._call("systemctl", "--user", "daemon-reload")
        self._call("systemctl", "--user", "reset-failed", self._unit)

    def ask(self) -> ServiceState:
        """Reads properties, which are made for programs."""
        shown = "ActiveState,SubState,MainPID,ExecMainStatus"
        done = self._call("systemctl", "--user", "show", self._unit, f"--property={shown}")
        if done.returncode:
            return ServiceState(True, detail=" ".join(done.stderr.split()))
        values = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        pid = int(values.get("MainPID") or 0)
        status = values.get("ExecMainStatus", "0")
        ended = f", exit status {status}" if status != "0" and not pid else ""
        detail = f"{values.get('ActiveState')} ({values.get('SubState')}){ended}"
        return ServiceState(True, values.get("ActiveState") == "active", pid or None, detail)

    def log_command(self, *, follow: bool) -> Sequence[str]:
        """Returns the command for the unit's journal."""
        return ["journalctl", "--user", "--unit", self._unit, "--lines", str(LOG_LINES), *(["--follow"] * follow)]


class Launchd(ServiceManager):
    """launchd's agents of a user, on macOS."""

    def __init__(self, home: Path, run: Runner = run_program) -> None:
        super().__init__(run)
        self.file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.log_file = home / "Library" / "Logs" / f"{LABEL}.log"
        self._domain = f"gui/{os.getuid()}"

    def describe(self, spec: ServiceSpec) -> str:
        """Returns the property list."""
        return launchd_plist(spec)

    def start(self) -> None:
        """Loads the file, which starts the server; unloads an older one first."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.stop()
        self._must("launchctl", "enable", f"{self._domain}/{LABEL}")
        self._must("launchctl", "bootstrap", self._domain, str(self.file))

    def stop(self) -> None:
        """Returns once the agent has ended."""
        self._call("launchctl", "bootout", f"{self._domain}/{LABEL}")

    def forgotten(self) -> None:
        """Deletes the log, which nobody else reads."""
        self.log_file.unlink(missing_ok=True)

    def ask(self) -> ServiceState:
        """Parses launchctl's output for people, the only one there is."""
        done = self._call("launchctl", "print", f"{self._domain}/{LABEL}")
        if done.returncode:
            return ServiceState(True, detail="not loaded")
        state, pid, code = (_printed(done.stdout, name) for name in ("state", "pid", "last exit code"))
        ended = f", last exit code {code}" if code and code.isdigit() and code != "0" else ""
        return ServiceState(True, state == "running", int(pid) if pid else None, f"{state or 'unknown'}{ended}")

    def log_command(self, *, follow: bool) -> Sequence[str]:
        """Returns the command for the file to which launchd writes."""
        return ["tail", "-n", str(LOG_LINES), *(["-F"] * follow), str(self.log_file)]


def _printed(text: str, name: str) -> str:
    match = re.search(rf"^\s*{name} = (.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


@_service.callback()
def _without_a_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_service.command()
def install() -> None:
    """Writes the service and starts it; raises ConfigError, ModelError or StartError."""
    seen = passed_on(os.environ)
    # As the service will see them, without the variables of this shell alone.
    config = load_config({}, seen)
    for name in config.models:
        resolve(name)
    manager = find_manager(os.environ)
    log_file = str(manager.log_file) if isinstance(manager, Launchd) else ""
    manager.install(ServiceSpec([*own_program(sys.argv[0]), "serve"], seen, config.drain_seconds, log_file))
    typer.echo(f"The server starts now and when you log in; {manager.file} says how.")
    typer.echo(f"Its settings are those of {config_file(seen)}; after a change install it again.")
    for name in os.environ:
        if name.startswith(PREFIX) and name not in PASSED_ON:
            typer.echo(f"It does not see {name} of this shell; write that setting into the file.")
    typer.echo("`mlx-serve service status` says whether it runs, `mlx-serve service logs` what it said.")


@_service.command("status")
def show_state(as_json: Json = False) -> None:
    """Prints whether the server is installed and runs; exit status 1 if it does not run. Raises StartError."""
    manager = find_manager(os.environ)
    state = manager.state()
    if as_json:
        record = {
            "installed": state.is_installed,
            "running": state.is_running,
            "pid": state.pid,
            "detail": state.detail,
            "file": str(manager.file),
        }
        typer.echo(json.dumps(record, indent=2))
    elif not state.is_installed:
        typer.echo("There is no service; `mlx-serve service install` makes one.")
    else:
        typer.echo(f"{state.detail}{f', process {state.pid}' if state.pid else ''}")
    raise typer.Exit(0 if state.is_running else 1)


@_service.command("logs")
def show_log(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Shows the end of the log, or follows it until Ctrl-C. Raises StartError."""
    manager = find_manager(os.environ)
    if not manager.state().is_installed:
        raise StartError("there is no service; `mlx-serve service install` makes one")
    command = manager.log_command(follow=follow)
    try:
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    except OSError as error:
        raise StartError(f"{command[0]} cannot be run: {error.strerror}") from error


@_service.command()
def remove() -> None:
    """Ends the server and deletes its file; raises StartError."""
    manager = find_manager(os.environ)
    if manager.remove():
        typer.echo(f"The server has ended, and {manager.file} is deleted.")
    else:
        typer.echo("There is no service to remove.")


def find_manager(environment: Mapping[str, str]) -> ServiceManager:
    """Returns this machine's manager."""
    return Launchd(Path.home()) if platform.system() == "Darwin" else Systemd(environment)


def own_program(started: str) -> Sequence[str]:
    """Returns what started this program, given `sys.argv[0]`."""
    path = Path(started)
    if path.name == "mlx-serve" and path.is_file() and os.access(path, os.X_OK):
        return [str(path.absolute())]
    return [sys.executable, str(Path(__file__).resolve().parents[2] / "mlx_serve.py")]
