"""What the engine needs of a runner, as `models.inference.runner.Runner` has it. Rows and steps are opaque here."""

from collections.abc import Sequence
from typing import Any, Protocol

from cache.types import LayerCache, SharedBuffers
from models.inference.sampling_params import SamplingParams
from models.inference.sampling_state import Draft
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from server.engine.request import TokenArray


class Step(Protocol):
    """A decode step under way: `models.inference.runner.DecodeStep`."""

    def tokens(self) -> list[list[int]]:
        """As `DecodeStep.tokens`."""

    def logprob(self, index: int, token: int, place: int = 0) -> TokenLogprob | None:
        """As `DecodeStep.logprob`."""


class RunnerPort(SharedBuffers, Protocol):
    """Prefill of one sequence, decode of many rows."""

    rows_form: str
    drafts_form: str
    overlaps: bool
    max_feed_tokens: int

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int, /) -> None:
        """As `Runner.prefill`."""

    def score(
        self, caches: list[LayerCache], tokens: TokenArray, following: TokenArray, num_top: int, adapter: int, /
    ) -> list[TokenLogprob]:
        """As `Runner.score`."""

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: SamplingParams,
        next_token: int,
        *,
        prompt: TokenArray,
        generated: Sequence[int],
        adapter: int,
    ) -> Any:
        """As `Runner.make_row`."""

    def force(self, row: Any, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """As `Runner.force`."""

    def prepare(
        self,
        rows: Sequence[Any],
        previous: Any,
        *,
        drafts: Sequence[Draft] = (),
        samples: bool = True,
        spare_bytes: float = 0,
    ) -> Step:
        """As `Runner.prepare`."""

    def sample(self, step: Any, masks: Sequence[MaskWords | None]) -> None:
        """As `Runner.sample`."""

    def start(self, step: Any) -> None:
        """As `Runner.start`."""

    def draft(self, rows: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        """As `Runner.draft`."""

    def settle(self, step: Any, accepted: Sequence[int]) -> list[int]:
        """As `Runner.settle`."""

    def take_change(self) -> bool:
        """As `Runner.take_change`."""

    def drain(self) -> None:
        """As `Runner.drain`."""

    def detach(self, row: Any) -> None:
        """As `Runner.detach`."""

    def close(self) -> None:
        """As `Runner.close`."""
