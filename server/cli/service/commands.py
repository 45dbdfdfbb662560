"""What `mlx-serve service install|status|logs|remove` do."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from models.names import resolve
from server.cli.config import config_file, load_config
from server.cli.service.managers import Launchd, ServiceManager, Systemd
from server.cli.service.units import PASSED_ON, ServiceSpec, passed_on
from server.errors import StartError
from server.settings import PREFIX


def install(environment: Mapping[str, str]) -> None:
    """Writes the service and starts it; raises ConfigError, ModelError or StartError."""
    seen = passed_on(environment)
    # As the service will see them: what only this shell has is not for it.
    config = load_config({}, seen)
    for name in config.models:
        resolve(name)
    manager = find_manager(environment)
    log_file = str(manager.log_file) if isinstance(manager, Launchd) else ""
    manager.install(ServiceSpec([*own_program(sys.argv[0]), "serve"], seen, config.drain_seconds, log_file))
    typer.echo(f"The server starts now and when you log in; {manager.file} says how.")
    typer.echo(f"Its settings are those of {config_file(seen)}; after a change install it again.")
    for name in _unseen(environment):
        typer.echo(f"It does not see {name} of this shell; write that setting into the file.")
    typer.echo("`mlx-serve service status` says whether it runs, `mlx-serve service logs` what it said.")


def show_state(environment: Mapping[str, str], *, as_json: bool) -> int:
    """Prints whether the server is installed and runs; returns 0 if it runs, 1 if not. Raises StartError."""
    manager = find_manager(environment)
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
    return 0 if state.is_running else 1


def show_log(environment: Mapping[str, str], *, follow: bool) -> int:
    """Shows the end of the log, or what is added to it until Ctrl-C; returns the exit status. Raises StartError."""
    manager = find_manager(environment)
    if not manager.state().is_installed:
        raise StartError("there is no service; `mlx-serve service install` makes one")
    command = manager.log_command(follow=follow)
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise StartError(f"{command[0]} cannot be run: {error.strerror}") from error


def remove(environment: Mapping[str, str]) -> None:
    """Ends the server and deletes its file; raises StartError."""
    manager = find_manager(environment)
    if manager.remove():
        typer.echo(f"The server has ended, and {manager.file} is deleted.")
    else:
        typer.echo("There is no service to remove.")


def find_manager(environment: Mapping[str, str]) -> ServiceManager:
    """Returns the manager of this machine."""
    return Launchd(Path.home()) if platform.system() == "Darwin" else Systemd(environment)


def own_program(started: str) -> Sequence[str]:
    """Returns the command that this program is started by, given `sys.argv[0]`."""
    path = Path(started)
    if path.name == "mlx-serve" and path.is_file() and os.access(path, os.X_OK):
        return [str(path.absolute())]
    import mlx_serve

    return [sys.executable, str(Path(mlx_serve.__file__).resolve())]


def _unseen(environment: Mapping[str, str]) -> Sequence[str]:
    return [name for name in environment if name.startswith(PREFIX) and name not in PASSED_ON]
