"""The command notices packages that are not its own, before it runs anything of them."""

import base64
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "mlx_serve.py"
OURS = {
    "server/__init__.py": "",
    "server/cli/__init__.py": "",
    "server/cli/main.py": "def main():\n    print('runs')\n",
    "models/__init__.py": "",
    "cache/__init__.py": "",
}


Result: TypeAlias = "subprocess.CompletedProcess[str]"


def install(site: Path, name: str, files: dict[str, str]) -> None:
    """Writes a distribution's files and the list of them, as an installer does."""
    lines = []
    for file, text in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(text)}\n")
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    install(site, "mlx-serve", {**OURS, "mlx_serve.py": ENTRY.read_text()})
    return site


def start(*path: Path, run: tuple[str, ...] = ("-c", "import mlx_serve; mlx_serve.main()")) -> Result:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", "-P", *run]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def says_one_sentence(result: Result, *words: str) -> None:
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("mlx-serve: ") and len(result.stderr.splitlines()) == 1, result.stderr
    assert all(word in result.stderr for word in (*words, "environment of its own")), result.stderr


def test_its_own_packages_are_run(site: Path) -> None:
    result = start(site)
    assert (result.stdout, result.stderr) == ("runs\n", "")


def test_the_version_is_said_before_any_package_is_looked_at(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("raise SystemExit('imported for nothing')\n")
    result = start(site, run=("-c", "import sys, mlx_serve; sys.argv[1:] = ['--version']; mlx_serve.main()"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "mlx-serve 1.0\n", "")


def test_it_runs_as_a_module_too(site: Path) -> None:
    assert start(site, run=("-m", "mlx_serve")).stdout == "runs\n"


def test_ctrl_c_while_the_packages_are_imported_is_no_error_of_the_program(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("raise KeyboardInterrupt\n")
    result = start(site)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("file", OURS)
def test_a_file_that_another_distribution_wrote_over_is_told(site: Path, file: str) -> None:
    install(site, "flask-server", {file: "raise SystemExit('foreign code was run')\n", "flask_server.py": ""})
    says_one_sentence(start(site), "flask-server", str(site / file))


def test_files_of_others_beside_ours_do_no_harm(site: Path) -> None:
    install(site, "flask-server", {"server/extra.py": "", "flask_server.py": ""})
    assert start(site).stdout == "runs\n"


def test_a_change_by_hand_is_theirs_to_make(site: Path) -> None:
    (site / "server" / "cli" / "main.py").write_text("def main():\n    print('changed')\n")
    assert start(site).stdout == "changed\n"


@pytest.mark.parametrize("file", OURS)
def test_a_file_that_went_with_another_distribution_is_told(site: Path, file: str) -> None:
    (site / file).unlink()
    says_one_sentence(start(site), "missing", file.split("/")[0])


@pytest.mark.parametrize("package", ["server", "models", "cache"])
def test_a_package_of_that_name_that_comes_first_is_told(site: Path, package: str, tmp_path: Path) -> None:
    install(tmp_path / "other", "other", {f"{package}/__init__.py": "raise SystemExit('foreign code was run')\n"})
    says_one_sentence(start(tmp_path / "other", site), str(tmp_path / "other" / package))


def test_a_checkout_needs_no_list_of_files(tmp_path: Path) -> None:
    for file, text in {**OURS, "mlx_serve.py": ENTRY.read_text()}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert start(tmp_path).stdout == "runs\n"


def test_every_package_of_the_product_is_installed_and_nothing_else() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for name in ("cache", "models", "server") for file in (ROOT / name).rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(setup["packages"]) == packages | {"models.demo", "models.demo_hybrid"}
    assert setup["py-modules"] == ["mlx_serve"]
