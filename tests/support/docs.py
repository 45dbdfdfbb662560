"""The project's pages, for tests that compare them with the code."""

import re
from pathlib import Path

from pydantic import BaseModel

DOCS = Path(__file__).parents[2] / "docs"


class Page:
    """One page of docs/."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.text = (DOCS / name).read_text(encoding="utf-8")

    def section(self, title: str) -> str:
        """Returns the text below a heading, up to the next heading of any depth."""
        match = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", self.text, re.DOTALL | re.MULTILINE)
        assert match, f"docs/{self._name} has no section {title!r}"
        return match.group(1)

    def without_effect(self, title: str) -> set[str]:
        """Returns the fields that a section says have none."""
        return {name for line in table(self.section(title), "without effect, because") for name in names(line)}


def fields(body: type[BaseModel]) -> set[str]:
    """Returns the fields of a body, as clients write them."""
    return {field.alias or name for name, field in body.model_fields.items()}


def table(text: str, head: str) -> set[str]:
    """Returns the lines of the one table whose first column is headed so."""
    tables = re.findall(rf"^\| {head} \|.*\n\|---\|---\|\n((?:\|.*\n)*)", text, re.MULTILINE)
    assert len(tables) == 1, f"{len(tables)} tables of what is {head}"
    return set(tables[0].splitlines())


def names(line: str) -> list[str]:
    """Returns the names in the second column of a table's line."""
    return re.findall(r"`([^`]+)`", line.split("|")[2])
