"""What was found out about architectures, as lines and as a page of the docs. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from scripts.architectures.configs import NOT_BUILT, NOTES

TITLES = ("loads", "restored = cold", "together = alone", "cancelled", "paged", "disk")

_HEAD = """\
# Architectures

Every architecture of mlx-lm {version}, built tiny with seeded weights, and tested for what this server needs of a
model. `make architectures` makes this page, also for another version of mlx-lm.

- **loads**: saved to a folder and loaded by the server's loader, the model gives the same logits.
- **restored = cold**: an answer from restored state, continued or forked, equals the answer without a cache.
- **together = alone**: answers decoded at the same time equal answers decoded alone; *in one batch* (continuous
  batching), or *row by row* if the model's code does not allow rows of different lengths. The server finds that out
  at its start.
- **cancelled**: a prompt is answered correctly after its first request was cancelled half-way.
- **paged**, **disk**: a conversation is restored from memory after another one took its slot, and from disk after a
  restart.
- **sharded**: split over two processes by tensor parallelism, the model gives the same logits; *none* if mlx-lm has
  no code for that. The server itself runs a model in one process.

"""


@dataclass
class Result:
    """What one architecture can do."""

    name: str
    caches: list[str] = field(default_factory=list)
    """Classes of the caches of its layers."""
    results: dict[str, str] = field(default_factory=dict)
    """By the title of a check: what it gave, `no` where it failed."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By the title of a check that failed, or `build`: why."""
    shards: bool = False
    """Whether mlx-lm can split it over machines."""
    told_of_shards: str = "not tried"

    @property
    def is_passed(self) -> bool:
        """Whether it was built and nothing failed."""
        return bool(self.results) and not self.reasons

    def line(self) -> str:
        """Returns one line for a terminal."""
        told = "; ".join(f"{title}: {reason}" for title, reason in self.reasons.items())
        return f"{self.name}: {told or ', '.join(self.results.values())}"

    def row(self) -> list[str]:
        """Returns its cells of the table."""
        sharded = self.told_of_shards if self.shards else "none"
        return [
            f"`{self.name}`",
            ", ".join(self.caches),
            *(self.results.get(title, "no") for title in TITLES),
            sharded,
        ]


def page(results: Sequence[Result]) -> str:
    """Returns the page, as Markdown."""
    num_passed = sum(result.is_passed for result in results)
    return _HEAD.format(version=version("mlx-lm")) + "\n".join(_body(results, num_passed)) + "\n"


def _body(results: Sequence[Result], num_passed: int) -> Iterator[str]:
    yield f"{num_passed} of {len(results) + len(NOT_BUILT)} pass every check."
    yield ""
    yield _cells(["architecture", "caches", *TITLES, "sharded"])
    yield _cells(["---"] * (len(TITLES) + 3))
    for result in results:
        yield _cells(result.row())
    failed = [result for result in results if not result.is_passed]
    if failed:
        yield from ("", "## What does not work", "")
        for result in failed:
            told = [f"{title}: {reason}" for title, reason in result.reasons.items()]
            note = f" ({NOTES[result.name]})" if result.name in NOTES else ""
            yield f"- `{result.name}`, {'; '.join(told)}{note}"
    yield from ("", "## Not built here", "")
    for name, reason in NOT_BUILT.items():
        yield f"- `{name}`: {reason}."


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
