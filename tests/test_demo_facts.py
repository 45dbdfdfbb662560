"""What the demo model is taught to say about the server names only what the documentation names too."""

import re
from pathlib import Path

import pytest

from scripts.demo.server_facts import TOPICS

ROOT = Path(__file__).parents[1]
DOCS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/api.md", "docs/benchmarks.md", "docs/cli.md")
NAMED = re.compile(
    r"--[a-z][a-z-]*|/(?:v1/[a-z/]+|health)|mlx-serve (?:pull|list|run|serve|doctor)|make [a-z]+"
    r"|[a-z]+_[a-z_]+|Ctrl-C|Apache-2\.0|\d+(?:\.\d+)*"
)
# A verb of English, not a target of the Makefile.
ENGLISH = {"make one"}


def _named(answer: str) -> set[str]:
    """The flags, paths, commands, fields and numbers in an answer."""
    return set(NAMED.findall(answer)) - ENGLISH


def _documented(name: str) -> bool:
    """Whether the documentation holds `name` as a whole: `--slot` is not `--slots`, 808 is not 8080."""
    text = "\n".join((ROOT / path).read_text() for path in DOCS)
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


@pytest.mark.parametrize("answer", [topic.answer for topic in TOPICS if _named(topic.answer)])
def test_what_an_answer_names_is_documented(answer: str) -> None:
    assert [name for name in sorted(_named(answer)) if not _documented(name)] == []


def test_a_flag_that_does_not_exist_is_found_out() -> None:
    assert _named("Start it with --cache-memry and /v1/nothing.") == {"--cache-memry", "/v1/nothing"}
    assert not _documented("--cache-memry")
    assert not _documented("--cache-memor")
    assert not _documented("/v1/nothing")
