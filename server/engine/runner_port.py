"""What the engine needs of a runner; `models.inference.runner.Runner` is the real one."""

from collections.abc import Sequence
from typing import Any, Protocol

from cache.types import LayerCache, SharedBuffers
from models.inference.sampling_params import SamplingParams
from models.inference.sampling_state import Draft
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from server.engine.request import TokenArray


class Step(Protocol):
    """A decode step under way."""

    def tokens(self) -> list[list[int]]:
        """Waits for the step; returns each row's samples: behind its last known token and each token of its draft."""

    def logprob(self, index: int, token: int, place: int = 0) -> TokenLogprob | None:
        """The log-probability of `token` as a row's sample number `place`, if asked for; `tokens` must come first."""


class RunnerPort(SharedBuffers, Protocol):
    """Prefill of one sequence, decode of many rows. Rows and steps are opaque to the engine."""

    rows_form: str
    """How several rows are evaluated, for a person."""
    drafts_form: str
    """Whether answers are drafted, for a person."""
    overlaps: bool
    """`start` returns while most of the step is still ahead."""
    max_feed_tokens: int
    """The most tokens of one row that a step evaluates."""

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int, /) -> None:
        """Evaluates tokens of one sequence behind its caches' content."""

    def score(
        self, caches: list[LayerCache], tokens: TokenArray, following: TokenArray, num_top: int, adapter: int, /
    ) -> list[TokenLogprob]:
        """As `prefill`; returns the log-probability of each of `following` after its token."""

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
        """A row that decodes from `next_token` on; `generated` is its output so far."""

    def force(self, row: Any, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Has the next step take `token`, the last of `generated`, for the sampled one."""

    def prepare(
        self,
        rows: Sequence[Any],
        previous: Any,
        *,
        drafts: Sequence[Draft] = (),
        samples: bool = True,
        spare_bytes: float = 0,
    ) -> Step:
        """A step; a row without known tokens takes what `previous` samples.

        `drafts` are one for each row, or none; with them, or several known tokens of a row, each row has known ones,
        and `settle` must follow. Without `samples` the step evaluates, and `sample` samples. Buffers that rows share
        may hold `spare_bytes` more than was reserved for them.
        """

    def sample(self, step: Any, masks: Sequence[MaskWords | None]) -> None:
        """Samples a prepared step, each sample within its mask; `start` must follow."""

    def start(self, step: Any) -> None:
        """Starts a prepared step, without waiting."""

    def draft(self, rows: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        """What the drafter expects each row to say behind its known tokens; waits for it."""

    def settle(self, step: Any, accepted: Sequence[int]) -> list[int]:
        """Ends a step that was read and fed a row several tokens: the first `accepted` tokens of each draft stay.

        Returns how many tokens of each feed are evaluated now: all that stay, or 0, and then they are to be known
        again.
        """

    def take_change(self) -> bool:
        """Whether shared buffers have changed since this was asked last."""

    def drain(self) -> None:
        """Waits for all that was started, and takes its errors, which else meet whoever evaluates next."""

    def detach(self, row: Any) -> None:
        """Evaluates all state of a row into the row's own caches."""

    def close(self) -> None:
        """Releases the device; nothing is evaluated afterwards."""
