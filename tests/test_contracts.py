"""What modules say of themselves is checked by an import contract."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGES = ("cache", "models", "server", "scripts")
ONLY_IN_PART = {"server.app.memory_budget"}
"""Modules that say which part of them is pure."""


def modules() -> Iterator[tuple[str, str]]:
    """Yields each module of the packages with its docstring."""
    for package in ("cache", "models", "server"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def checked() -> set[str]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {contract["name"]: contract for contract in config["tool"]["importlinter"]["contracts"]}
    return set(contracts["decisions know no arrays, no clock and no network"]["source_modules"])


def test_every_module_that_calls_itself_pure_is_checked() -> None:
    pure = {name for name, docstring in modules() if re.search(r"\bpure\b", docstring, re.IGNORECASE)}
    assert len(pure) > 10
    assert pure - ONLY_IN_PART <= checked()


def test_every_module_that_the_architecture_calls_pure_is_checked() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `") and re.search(r"\bpure\b", line)]
    files = [file for row in rows for file in re.findall(r"`([\w/]+)\.py`", row.split("|")[1])]
    named = {f"cache.{file.replace('/', '.')}" for file in files}
    assert len(named) >= 5
    assert named <= checked()


SAME_TYPE = {"TokenArray"}
"""Aliases of one meaning, which two packages write out so that neither imports the other."""


def types_in(path: Path) -> Iterator[str]:
    """Yields the public classes of a module, and its aliases of types."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            name = ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Annotated["):
            name = ast.unparse(node.targets[0])
        else:
            continue
        if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
            yield name


def test_no_two_public_types_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for package in ("cache", "models", "server"):
        for path in (ROOT / package).rglob("*.py"):
            for name in types_in(path):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_TYPE} == {}


def names_in(path: Path) -> set[str]:
    """Every name that a module defines, those of a class also as `Class.name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def places_in(row: str) -> Iterator[tuple[str, str]]:
    """Yields each file and each name of a row; a name is in the file named before it."""
    path = ""
    for file, name in re.findall(r"`([\w/]+\.py)`|`([\w.]+)`", row):
        path = file or path
        if path:
            yield path, name


def test_every_place_where_the_architecture_says_a_thing_is_decided_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    answers = text.partition("## Where is it decided?")[2].partition("\n## ")[0]
    places = [place for row in re.findall(r"^\| .* \| (.*) \|$", answers, re.MULTILINE) for place in places_in(row)]
    assert len(places) > 80
    assert [path for path, _ in places if not (ROOT / path).is_file()] == []
    assert [f"{path}: {name}" for path, name in places if name and name not in names_in(ROOT / path)] == []


def test_the_architecture_names_every_folder_of_modules() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")}
    assert len(folders) > 20
    assert [str(folder) for folder in sorted(folders) if f"{folder}/" not in text] == []
