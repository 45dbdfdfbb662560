"""The service files for launchd and systemd. Pure."""

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LABEL = "mlx-serve"
MARK = "Written by `mlx-serve service install`."
"""Marks every file, so that no other file is overwritten or removed."""
STOP_SECONDS = 30
"""Seconds beyond the time for running answers: conversations are written to the disk, and connections closed."""
MAX_FILES = 8192
"""Open files and connections. launchd's own limit of 256 would leave few connections."""
RESTART_SECONDS = 5
USAGE_STATUS = 2
"""Exit status for unusable settings: a restart would not help."""

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
"""Variables with locations. None is a secret: everyone on the machine may ask systemd for them."""


@dataclass(frozen=True)
class ServiceSpec:
    """How the server is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    drain_seconds: float
    """Seconds for running answers when the server ends."""
    log_file: str = ""
    """launchd's log file; systemd has its journal."""

    @property
    def stop_seconds(self) -> int:
        """Seconds from the request to end until the server is killed."""
        return int(self.drain_seconds) + STOP_SECONDS


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the environment that the server needs too."""
    return {name: environment[name] for name in PASSED_ON if environment.get(name)}


def systemd_unit(spec: ServiceSpec) -> str:
    """Returns a unit of systemd's, for the manager of one user."""
    command = " ".join(_systemd_word(word).replace("$", "$$") for word in spec.command)
    variables = [f"Environment={_systemd_word(f'{name}={value}')}" for name, value in spec.environment.items()]
    return "\n".join(
        [
            f"# {MARK}",
            "[Unit]",
            "Description=mlx-serve, a local inference server",
            "Documentation=man:mlx-serve(1)",
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
    """Returns a property list of launchd's, for an agent of one user."""
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
    """Returns a word in quotes, per systemd.syntax(7); `%` would begin a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
