"""What the engine needs of a runner; `models.inference.runner.Runner` is the real one."""

from collections.abc import Sequence
from typing import Any, Protocol

from cache.types import LayerCache
from models.inference.sampling_params import SamplingParams
from models.output.grammar import MaskWords
from models.output.pieces import TokenLogprob
from server.engine.request import TokenArray


class Step(Protocol):
    """A decode step under way."""

    def tokens(self) -> list[int]:
        """Blocks until every row's next token is known and returns the tokens in row order."""

    def logprob(self, index: int, token: int) -> TokenLogprob | None:
        """Returns the log-probability of `token` in a row, behind `tokens`; None where it was not asked for."""


class RunnerPort(Protocol):
    """Prefill of one sequence, decode of many rows. Rows and steps are opaque to the engine."""

    overlaps: bool
    """Whether `start` returns while most of the step is still ahead."""

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int, /) -> None:
        """Evaluates tokens of one sequence after the content of its caches, with an adapter by its index."""

    def score(
        self, caches: list[LayerCache], tokens: TokenArray, following: TokenArray, num_top: int, adapter: int, /
    ) -> list[TokenLogprob]:
        """As `prefill`; also returns the log-probability of each of `following` after the token at the same index."""

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
        """Returns a row that decodes from `next_token` on. `generated` is the output after `prompt` so far."""

    def force(self, row: Any, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Feeds `token` to a row in the next step instead of the sampled token; it is the last of `generated`."""

    def prepare(self, rows: Sequence[Any], previous: Any, *, samples: bool = True) -> Step:
        """Returns a decode step; rows without a next token take the token that `previous` samples for them.

        Without `samples` the step evaluates, and samples only when `sample` is called.
        """

    def sample(self, step: Any, masks: Sequence[MaskWords | None]) -> None:
        """Samples a prepared step, each row within its mask. The step must then be started, or started again."""

    def start(self, step: Any) -> None:
        """Starts the computation of the prepared part of a step, without waiting."""

    def detach(self, row: Any) -> None:
        """Evaluates all state of a row into the row's own caches."""

    def close(self) -> None:
        """Releases the device; nothing is evaluated afterwards."""
