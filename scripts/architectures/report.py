"""What was found out about architectures, as lines and as a page of the docs. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from models.providers import VLM_VERSION
from scripts.architectures.configs import NOT_BUILT, NOTES

_HEAD = """\
# Architectures

{passed} of the {all} architectures of mlx-lm {version} pass every [check](#checks): they are built tiny, with seeded
weights, and tested for what this server needs of a model. A model's `config.json` names its architecture as
`model_type`.

"""

_CHECKS = """
## Checks

`make architectures` runs them and makes this page, also for another version of mlx-lm.

- **loads**: saved to a folder and loaded by the server's loader, the model gives the same logits.
- **restored = cold**: an answer from restored state, continued or forked, equals the answer without a cache.
- **together = alone**: answers decoded at the same time equal answers decoded alone; *in one batch* (continuous
  batching), or *row by row* if the model's code does not allow rows of different lengths. The server finds that out
  at its start.
- **cancelled**: a prompt is answered correctly after its first request was cancelled half-way.
- **paged**, **disk**: a conversation is restored from memory after another one took its slot, and from disk after a
  restart.
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
        failures = "; ".join(f"{title}: {reason}" for title, reason in self.reasons.items())
        return f"{self.name}: {failures or ', '.join(self.results.values())}"

    @property
    def kind(self) -> tuple[str, str]:
        """What it shares with others in the table: the classes of its caches, and how its rows are decoded."""
        return ", ".join(self.caches), self.results.get("together = alone", "no")


def page(results: Sequence[Result]) -> str:
    """Returns the page, as Markdown."""
    return "\n".join(_body(results)) + "\n"


def _body(results: Sequence[Result]) -> Iterator[str]:
    passed = [result for result in results if result.is_passed]
    failed = [result for result in results if not result.is_passed]
    counts = {"passed": len(passed), "all": len(results) + len(NOT_BUILT)}
    yield _HEAD.format(version=version("mlx-lm"), **counts).rstrip("\n")
    yield from ("", "| caches of its layers | rows are decoded | architectures |", "| --- | --- | --- |")
    for kind in sorted({result.kind for result in passed}):
        yield f"| {' | '.join(kind)} | {_names(result for result in passed if result.kind == kind)} |"
    shards = [result for result in results if result.shards]
    split = [result for result in shards if result.told_of_shards == "yes"]
    yield from ("", f"Split over two processes by tensor parallelism, with equal logits: {_names(split)}.")
    if not_split := _names(result for result in shards if result.told_of_shards != "yes"):
        yield f"Not with equal logits, or not tried: {not_split}."
    yield "mlx-lm cannot split the others."
    yield _CHECKS.rstrip("\n")
    if failed:
        yield from ("", "## What does not work", "")
        yield from map(_failure, failed)
    yield from ("", "## Not built here", "")
    for name, reason in NOT_BUILT.items():
        yield f"- `{name}`: {reason}."


_VLM_HEAD = """\
# Architectures of mlx-vlm

{passed} of {all} language models of mlx-vlm {version} that mlx-lm lacks pass every check: those of
[mlx-lm's](architectures.md#checks), and **quantized**: in affine 4 and 8 bit, mxfp4, nvfp4 and mxfp8 they give the
same logits after loading, bit for bit. `make architectures PROVIDER=1` runs them and makes this page; mlx-vlm must be
installed as in [models.md](models.md#models-of-a-provider). Only what passes is served.

| type | caches of its layers | rows are decoded |
| --- | --- | --- |"""


def vlm_page(results: Sequence[Result]) -> str:
    """Returns the page of mlx-vlm's models, as Markdown."""
    passed = [result for result in results if result.is_passed]
    lines = [_VLM_HEAD.format(passed=len(passed), all=len(results), version=VLM_VERSION)]
    lines += [f"| `{result.name}` | {' | '.join(result.kind)} |" for result in passed]
    failed = [result for result in results if not result.is_passed]
    return "\n".join([*lines, "", "## What does not work", "", *map(_failure, failed)]) + "\n"


def _names(results: Iterable[Result]) -> str:
    return ", ".join(f"`{result.name}`" for result in results)


def _failure(result: Result) -> str:
    reasons = [f"{title}: {reason}" for title, reason in result.reasons.items()]
    note = f" ({NOTES[result.name]})" if result.name in NOTES else ""
    return f"- `{result.name}`, {'; '.join(reasons)}{note}"
