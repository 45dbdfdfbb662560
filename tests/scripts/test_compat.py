"""Which versions of mlx-lm `make compat` tries, and with what beside them."""

import tomllib

from packaging.requirements import Requirement

from scripts import compat


def test_the_versions_are_those_that_the_project_allows_up_to_the_locked_one() -> None:
    project = tomllib.loads((compat.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(
        requirement for text in project["dependencies"] if (requirement := Requirement(text)).name == "mlx-lm"
    )
    assert all(allowed.specifier.contains(version) for version in compat.VERSIONS)
    assert compat.VERSIONS[0] == str(next(iter(allowed.specifier)).version).replace("*", "0")
    assert compat.VERSIONS[-1] == compat.locked_version("mlx-lm", compat.LOCK.read_text(encoding="utf-8"))


def test_a_package_leaves_a_lock_file_with_its_hashes() -> None:
    before, after = "# made\nmlx==1 \\\n    --hash=a\n", "numpy==3 \\\n    --hash=d\n"
    lock = f"{before}mlx-lm==2 ; x \\\n    --hash=b \\\n    --hash=c\n{after}"
    assert compat.without("mlx-lm", lock) == before + after


def test_the_tests_that_it_runs_are_there() -> None:
    assert all((compat.ROOT / path).exists() for path in compat.TESTS)
