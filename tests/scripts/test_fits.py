"""What fits a Mac: the table of the docs is the one that the program prints, and agrees with what `pull` chooses."""

from pathlib import Path

from models import names
from scripts.fits import SHAPES, machine_of, table
from server.app.memory_budget import comfortable_weights_bytes

DOCS = (Path(__file__).parents[2] / "docs" / "macs.md").read_text(encoding="utf-8")


def test_the_docs_have_the_table_that_the_program_prints() -> None:
    assert table(16, 25_000) in DOCS


def test_what_pull_chooses_of_a_family_is_the_largest_that_the_table_has_it_take() -> None:
    rows = [line.split(" | ") for line in table(16, 25_000).splitlines()[2:]]
    taken = {row[0].strip("|` ") for row in rows if row[2].strip() == "yes"}
    chosen = names.largest(names.find_family("qwen3"), comfortable_weights_bytes(machine_of(16)))
    assert chosen is not None and chosen.name in taken
    larger = [name for name in SHAPES if names.SHORT_NAMES[name].num_bytes > chosen.num_bytes]
    assert larger and not taken & set(larger)
