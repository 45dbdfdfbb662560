"""The `mlx-serve` command: checks that the program's packages are its own, then runs them.

`server`, `models` and `cache` are plain names: another distribution may write its files over ours, and a folder of
that name may come first on the path.
"""

import platform
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

DISTRIBUTION = "mlx-serve"
PACKAGES = ("server", "models", "cache")
ADVICE = "install mlx-serve into an environment of its own"


def main() -> NoReturn:
    """Runs the process's command, and ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The imports take a second or two. What Python calls at the end of each drops a KeyboardInterrupt, and a
        # Ctrl-C would be lost; so until a command is imported, it ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if sys.argv[1:] == ["--version"]:
            # `--version` needs no more, so nothing else is imported.
            from importlib.metadata import version

            sys.stdout.write(f"mlx-serve {version(DISTRIBUTION)}\n")
            sys.exit()
        if problem := find_problem(Path(__file__).resolve().parent):
            sys.exit(f"mlx-serve: {problem}; {ADVICE}")
        if problem := find_machine_problem(platform.system(), platform.machine()):
            sys.exit(f"mlx-serve: {problem}")
        from server.cli.main import main as run

        run()
    except KeyboardInterrupt:
        # 130 is what shells expect after SIGINT.
        sys.exit(130)


def find_machine_problem(system: str, machine: str) -> str | None:
    """Why MLX cannot run here, given what `platform.system` and `platform.machine` say."""
    if (system, machine) == ("Darwin", "arm64") or (system == "Linux" and machine in ("x86_64", "aarch64")):
        return None
    needed = "this needs a Mac with Apple silicon (M1 or newer), or Linux on x86-64 or ARM"
    if system == "Darwin":
        return f"{needed}; {sys.executable} is made for Intel Macs: on Apple silicon use a Python made for arm64"
    return f"{needed}; this is {system} on {machine}"


def find_problem(root: Path) -> str | None:
    """Why the packages in the folder `root` are not the program's own."""
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != root / package:
            fault = "is missing" if spec is None or spec.origin is None else f"is taken from {spec.origin}"
            return f"the package {package!r} {fault} instead of {root / package}"
    for name in changed_files(root):
        if not (root / name).exists():
            return f"{root / name} is missing"
        # Without another owner it is somebody's own change, and theirs to make.
        if other := other_owner(root, name):
            return f"{root / name} was overwritten by {other}"
    return None


def changed_files(root: Path) -> Iterator[str]:
    """Yields files of our packages that were changed after installation; none for a checkout."""
    for record in root.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(",")
            digest = rest.partition(",")[0].removeprefix("sha256=")
            if name.partition("/")[0] in PACKAGES and digest and digest != _digest(root / name):
                yield name


def other_owner(root: Path, name: str) -> str | None:
    """Another distribution in `root` that has the file `name`."""
    from importlib import metadata

    for distribution in metadata.distributions(path=[str(root)]):
        title = distribution.metadata["Name"]
        if title != DISTRIBUTION and any(str(file) == name for file in distribution.files or ()):
            return str(title)
    return None


def _digest(path: Path) -> str | None:
    """A file's hash as `RECORD` writes it (PEP 376): SHA-256, base64 for addresses, without padding."""
    import base64
    import hashlib

    if not path.is_file():
        return None
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
