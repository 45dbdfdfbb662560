"""Makes `.venv` exactly what a lock file says; does nothing when it already is.

`requirements.lock` is what running needs; with `--dev` it is `requirements-dev.lock`, the same and what tests and
checks need. What was added once stays: an environment for developing, or with CUDA, remains one.

Run by the Makefile with whatever `python3` is on the path, so this file alone must be readable by old
interpreters (3.6 and newer) and import nothing but the standard library until it knows that the interpreter will do.

Usage: python3 scripts/bootstrap.py [--dev] [--cuda]
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MINIMUM = (3, 11)
ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
OPTIONS = ("dev", "cuda")
UV = "curl -LsSf https://astral.sh/uv/install.sh | sh"
ERROR_LINES = 30
"""How much of pip's output is shown after a failure."""


def main() -> None:
    """Brings `.venv` up to date, or ends with one sentence that says what is missing."""
    if is_current(fingerprint(find_options())):
        return
    require_usable_python()
    require_usable_machine()
    folder = os.open(str(ROOT), os.O_RDONLY)
    try:
        wait_for_others(folder)
        options = find_options()
        if not is_current(fingerprint(options)):
            set_up(options)
            STAMP.write_text(fingerprint(options))
    except subprocess.CalledProcessError as error:
        sys.exit("Setting up .venv failed (see above); the command was: " + " ".join(error.cmd))
    except KeyboardInterrupt:
        sys.exit("\nStopped; the next make begins here again.")
    finally:
        os.close(folder)


def find_options() -> "list[str]":
    """Returns the options asked for, and those that `.venv` was made with."""
    made_with = read_stamp().split()[1:]
    return [name for name in OPTIONS if "--" + name in sys.argv[1:] or name in made_with]


def read_stamp() -> str:
    """Returns what `.venv` was completed from; empty while it is not complete."""
    try:
        return STAMP.read_text()
    except FileNotFoundError:
        return ""


def wait_for_others(folder: int) -> None:
    """Locks the open folder for this process, once no other one sets up `.venv` in it."""
    import fcntl  # only here: Windows has none, and is told before what it lacks

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        finish_line("Another make is setting up .venv here; this one waits for it.")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def set_up(options: "list[str]") -> None:
    """Makes the environment if it is missing or broken, and installs what the lock file names."""
    started = time.monotonic()
    # Without its stamp the environment was never finished, and what pip half wrote it would not mend.
    if not (STAMP.exists() and works([PYTHON, "-m", "pip", "--version"])):
        show("Setting up .venv with Python " + platform.python_version())
        shutil.rmtree(str(VENV), ignore_errors=True)
        run([sys.executable, "-m", "venv", VENV])
    install(options)
    finish_line(f"Set up .venv in {time.monotonic() - started:.0f} s.")


def fingerprint(options: "list[str]") -> str:
    """Returns what a current `.venv` was made from: the files, the place, and the options."""
    digest = hashlib.sha256(str(VENV).encode())
    for name in (lock_file(options).name, "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return " ".join([digest.hexdigest(), *options])


def lock_file(options: "list[str]") -> Path:
    """Returns the lock file that has what the options ask for."""
    return ROOT / ("requirements-dev.lock" if "dev" in options else "requirements.lock")


def is_current(wanted: str) -> bool:
    """Returns whether `.venv` was completed from `wanted` and its interpreter still starts."""
    return read_stamp() == wanted and works([PYTHON, "-c", ""])


def require_usable_python() -> None:
    """Ends the program if this interpreter cannot make the environment."""
    if sys.version_info < MINIMUM:
        newer = find_newer_python()
        if newer:
            os.execv(newer, [newer, *sys.argv])
        how = "brew install python@3.13 (or uv: " + UV + " && uv python install 3.13)"
        sys.exit(
            f"mlx-serve needs Python 3.11 or newer, and {sys.executable} is {platform.python_version()}. "
            + ("Get one: " + how + ", after xcode-select --install" if platform.system() == "Darwin" else "")
            + " If a newer one is installed elsewhere, name it: make PYTHON=/path/to/python3.13"
        )
    try:
        __import__("ensurepip")
        __import__("venv")
    except ImportError:
        sys.exit("This Python cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv")


def find_newer_python() -> str:
    """Returns a Python that will do, by its name on the path or as uv knows it; empty if there is none."""
    names = [shutil.which("python3." + minor) for minor in ("13", "12", "11", "14")]
    uv = shutil.which("uv")
    if uv:
        asked = [uv, "python", "find", "--no-project", ">=3.11"]
        asked_uv = subprocess.Popen(asked, stdout=subprocess.PIPE, universal_newlines=True)
        names.append(asked_uv.communicate()[0].strip())
    check = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    return next((name for name in names if name and works([name, "-c", check])), "")


def require_usable_machine() -> None:
    """Ends the program on a machine that MLX is not made for. Only for an interpreter that passed the check above."""
    sys.path.insert(0, str(ROOT))
    from mlx_serve import find_machine_problem

    system = platform.system()
    problem = find_machine_problem(system, platform.machine())
    if problem is None:
        version = platform.mac_ver()[0] if system == "Darwin" else platform.libc_ver()[1]
        problem = find_system_problem(system, version)
    if problem is not None:
        sys.exit("mlx-serve: " + problem)


def find_system_problem(system: str, version: str) -> "str | None":
    """Returns why MLX is not made for a system, given the version of macOS or of the C library.

    An empty version, as of a Linux without glibc, is not enough.
    """
    needed = {"Darwin": ("macOS", (14,)), "Linux": ("glibc", (2, 35))}[system]
    if tuple(int(part) for part in version.split(".") if part.isdigit()) >= needed[1]:
        return None
    wanted = ".".join(map(str, needed[1]))
    system_found = f"{needed[0]} {version}" if version else f"a system without {needed[0]}"
    hint = " (Debian 12, Ubuntu 22.04 or newer)" if system == "Linux" else ""
    return f"this needs {needed[0]} {wanted} or newer{hint}; this is {system_found}"


def install(options: "list[str]") -> None:
    """Installs the locked packages, each checked against its hash, then the project itself in place."""
    if STAMP.exists():
        STAMP.unlink()
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
    lock = lock_file(options)
    # Python compiles what it imports; compiling everything else takes 10 of 35 seconds and a third of the disk space.
    fetch = [*pip, "install", "--no-compile"]
    run_pip([*fetch, "--require-hashes", "--requirement", lock], len(locked_packages(lock)))
    if "cuda" in options:
        # Both backends bring `mlx/lib/libmlx.so`: the last one installed wins, and the other must not remain.
        version = locked_packages(lock)["mlx"]
        run([*pip, "uninstall", "--quiet", "--yes", "mlx-cpu"])
        run_pip([*fetch, "--force-reinstall", "--no-deps", f"mlx=={version}"])
        run_pip([*fetch, f"mlx[cuda13]=={version}"])
    run_pip([*fetch, "--no-build-isolation", "--no-deps", "--editable", ROOT])


def locked_packages(lock: Path) -> "dict[str, str]":
    """Returns the version of each package in a lock."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))


# -------------------------------------------------------------------------------------------------- progress


def run_pip(command: "list[object]", num_packages: int = 0) -> None:
    """Runs pip; shows one line that says how far it is, and its own words only if it fails."""
    words = [str(part) for part in command]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*words, "--progress-bar", "off"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        num_found = 0
        for line in process.stdout or ():
            output.write(line)
            num_found += line.startswith("Collecting ")
            show(describe(line, num_found, num_packages))
        if process.wait() != 0:
            output.seek(0)
            finish_line("".join(output.readlines()[-ERROR_LINES:]))
            raise subprocess.CalledProcessError(process.returncode, words)


def describe(line: str, num_found: int, num_packages: int) -> str:
    """Returns what a line of pip's output means to a person; empty where it means nothing."""
    if line.startswith("Installing collected packages"):
        return f"Unpacking {num_found} packages" if num_found else ""
    if line.startswith("Collecting ") and num_packages:
        # Some locked packages are for other platforms, so this may end below the whole.
        return f"Fetching packages: {num_found} of {num_packages}"
    return ""


def show(text: str) -> None:
    """Shows a step in place of the last one; on a terminal only, for a log needs the result alone."""
    if text and sys.stdout.isatty():
        sys.stdout.write("\r\033[K" + text + " …")
        sys.stdout.flush()


def finish_line(text: str) -> None:
    """Prints a text in place of the step that was shown."""
    sys.stdout.write(("\r\033[K" if sys.stdout.isatty() else "") + text.rstrip("\n") + "\n")
    sys.stdout.flush()


def run(command: "list[object]") -> None:
    """Runs a command with its output shown; raises CalledProcessError."""
    sys.stdout.flush()
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def works(command: "list[object]") -> bool:
    """Returns whether a command starts and succeeds."""
    try:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return process.wait() == 0
    except OSError:
        return False


if __name__ == "__main__":
    main()
