"""Opens models without weights for a pool: the test says how large each is, when it is done, and whether it fails."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import ModelBroken
from server.pool.catalog import Catalog
from server.pool.members import Around, Member
from server.pool.names import ModelSource
from server.pool.served import ListedModel, ModelFacts
from tests.support.fake_engine import FakeEngine, fake_model

WAIT_SECONDS = 120.0


@dataclass
class FakeOpener:
    """Satisfies `CallOpener`. Its models are named by their ids and know nothing."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Weights in bytes by id; 1 where nothing is said."""
    broken: set[str] = field(default_factory=set)
    """Ids whose files turn out to be damaged when they are read."""
    missing: set[str] = field(default_factory=set)
    """Ids whose files are not there."""
    opened: list[str] = field(default_factory=list)
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    """The latest of each model."""
    may_finish: threading.Event = field(default_factory=threading.Event)
    """Cleared by a test in which loading takes until it is set."""
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_finish.set()

    def measure(self, source: ModelSource) -> int:
        if source.id in self.missing:
            raise ModelBroken(f"{source.id}: model.safetensors is missing")
        return self.sizes.get(source.id, 1)

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> Member:
        self.opened.append(source.id)
        tell("reading weights")
        self.has_begun.set()
        assert self.may_finish.wait(WAIT_SECONDS)
        tell("trying it out")
        if source.id in self.broken:
            raise ModelBroken(f"{source.id} is damaged")
        engine = self.engines[source.id] = FakeEngine(budget_bytes=around.budget_bytes)
        return Member(source, fake_model(id=source.id), engine, self.sizes.get(source.id, 1))

    def describe(self, source: ModelSource) -> ListedModel:
        return ListedModel(source.id, 1_600_000_000, 100, ModelFacts(architecture="fake"))


def catalog(*ids: str) -> Catalog:
    """Returns a catalog of models of these ids."""
    return Catalog([ModelSource(name, Path("/models") / name) for name in ids], has_others=False)
