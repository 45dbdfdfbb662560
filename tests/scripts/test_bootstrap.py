"""Setting up a checkout: what each lock file holds, what is remembered, and what a person is told."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_serve
from scripts import bootstrap

ROOT = Path(__file__).parents[2]
RUN, DEV = (bootstrap.locked_packages(ROOT / name) for name in ("requirements.lock", "requirements-dev.lock"))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    for name, path in {"ROOT": "", "VENV": ".venv", "STAMP": ".venv/installed"}.items():
        monkeypatch.setattr(bootstrap, name, tmp_path / path)
    return tmp_path


def test_running_needs_no_tool_of_developers_and_the_same_versions() -> None:
    assert not {"pytest", "mypy", "ruff", "openai", "uv", "pre-commit"} & set(RUN)
    assert {"mlx", "mlx-lm", "transformers", "setuptools"} <= set(RUN)
    assert {name: DEV[name] for name in RUN} == RUN


def test_a_lock_names_no_index_and_has_a_hash_for_each_package() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "index" not in text
        packages = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
        assert packages and all("--hash=sha256:" in package for package in packages)


def test_old_interpreters_can_read_it_far_enough_to_be_told() -> None:
    ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_the_options_choose_the_lock_file_and_change_what_is_current(checkout: Path) -> None:
    marks = {bootstrap.fingerprint(options) for options in ([], ["dev"], ["cuda"], ["dev", "cuda"])}
    assert len(marks) == 4
    before = bootstrap.fingerprint([]), bootstrap.fingerprint(["dev"])
    (checkout / "requirements-dev.lock").write_text("pytest==1.0\n")
    assert bootstrap.fingerprint([]) == before[0]
    assert bootstrap.fingerprint(["dev"]) != before[1]


@pytest.mark.parametrize(
    ("made_with", "arguments", "wanted"),
    [
        (None, [], []),
        (None, ["--dev"], ["dev"]),
        ([], ["--dev"], ["dev"]),
        (["dev"], [], ["dev"]),
        (["cuda"], ["--dev"], ["dev", "cuda"]),
    ],
)
def test_what_was_added_once_stays(
    made_with: list[str] | None,
    arguments: list[str],
    wanted: list[str],
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if made_with is not None:
        bootstrap.STAMP.write_text(bootstrap.fingerprint(made_with))
    asked: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "set_up", asked.append)
    monkeypatch.setattr(bootstrap, "is_current", lambda _: False)
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", *arguments])
    bootstrap.main()
    assert asked == [wanted]
    assert bootstrap.STAMP.read_text() == bootstrap.fingerprint(wanted)


def test_ctrl_c_ends_with_a_sentence_and_leaves_no_stamp(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "set_up", interrupt)
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    with pytest.raises(SystemExit, match="the next make begins here again"):
        bootstrap.main()
    assert not bootstrap.STAMP.exists()


def test_the_words_of_pip_become_one_step() -> None:
    assert bootstrap.describe("Collecting rich==15.0.0 (from -r x)\n", 7, 45) == "Fetching packages: 7 of 45"
    assert bootstrap.describe("Installing collected packages: a, b\n", 43, 45) == "Unpacking 43 packages"
    assert bootstrap.describe("  Downloading rich-15.0.0-py3-none-any.whl\n", 7, 45) == ""


def test_pip_is_heard_only_where_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('Collecting x'); print('the reason', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    bootstrap.run_pip([sys.executable, "-c", program, "0"], 1)
    assert capsys.readouterr().out == ""
    with pytest.raises(subprocess.CalledProcessError):
        bootstrap.run_pip([sys.executable, "-c", program, "3"], 1)
    assert "the reason" in capsys.readouterr().out


def test_a_machine_without_mlx_is_told_which_ones_have_it() -> None:
    for system, machine, words in (
        ("Darwin", "x86_64", "made for Intel Macs"),
        ("Windows", "AMD64", "Windows on AMD64"),
        ("Linux", "i686", "i686"),
    ):
        problem = mlx_serve.find_machine_problem(system, machine)
        assert problem is not None and "Apple silicon" in problem and words in problem
    for system, machine in (("Darwin", "arm64"), ("Linux", "x86_64"), ("Linux", "aarch64")):
        assert mlx_serve.find_machine_problem(system, machine) is None


@pytest.mark.parametrize(
    ("system", "version", "words"),
    [
        ("Darwin", "13.6.1", "macOS 14 or newer; this is macOS 13.6.1"),
        ("Linux", "2.31", "glibc 2.35 or newer (Debian 12, Ubuntu 22.04 or newer); this is glibc 2.31"),
        ("Linux", "", "this is a system without glibc"),
        ("Darwin", "14.0", None),
        ("Darwin", "26.1", None),
        ("Linux", "2.35", None),
        ("Linux", "3.0", None),
    ],
)
def test_a_system_that_is_too_old_is_told_before_anything_is_fetched(
    system: str, version: str, words: str | None
) -> None:
    problem = bootstrap.find_system_problem(system, version)
    assert problem is None if words is None else words in str(problem)


def test_an_old_python_hands_over_to_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac, whose own python3 is 3.9, with another one on the path, or known to uv alone."""
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    monkeypatch.setattr(sys, "argv", ["scripts/bootstrap.py", "--dev"])

    def start(path: str, words: list[str]) -> None:
        started.append(words)
        sys.exit()

    monkeypatch.setattr("os.execv", start)
    monkeypatch.setenv("PATH", str(tmp_path))
    broken, working = tmp_path / "python3.13", tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 1\n")
    working.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in (broken, working):
        path.chmod(0o755)
    with pytest.raises(SystemExit):
        bootstrap.require_usable_python()
    assert started.pop() == [str(working), "scripts/bootstrap.py", "--dev"]
    working.rename(tmp_path / "elsewhere")
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\necho {tmp_path}/elsewhere\n")
    uv.chmod(0o755)
    with pytest.raises(SystemExit):
        bootstrap.require_usable_python()
    assert started.pop()[0] == f"{tmp_path}/elsewhere"
    uv.unlink()
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(SystemExit, match=r"brew install python@3\.13 \(or uv: .*, after xcode-select --install"):
        bootstrap.require_usable_python()
    assert not started
