"""The project's pages, for tests that compare them with the code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


class Page:
    """One page of docs/."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.text = (DOCS / name).read_text(encoding="utf-8")

    def section(self, title: str) -> str:
        """Returns the text below a heading, up to the next heading of any depth."""
        found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", self.text, re.DOTALL | re.MULTILINE)
        assert found, f"docs/{self._name} has no section {title!r}"
        return found.group(1)
