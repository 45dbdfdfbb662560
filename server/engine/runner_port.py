"""What the engine needs of whatever evaluates tokens; `models.inference.runner.Runner` is the real one."""

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
        """Blocks until every row's next token is known and returns them in row order."""

    def logprob(self, index: int, token: int) -> TokenLogprob | None:
        """Returns how likely the model held `token` in a row, behind `tokens`; None where it was not asked for."""


class RunnerPort(Protocol):
    """Prefill of one sequence, decode of many rows. Rows and steps are its own: the engine only hands them back."""

    overlaps: bool
    """Whether `start` returns while most of the step is still ahead."""

    def prefill(self, caches: list[LayerCache], tokens: TokenArray, adapter: int, /) -> None:
        """Evaluates tokens of one sequence after what its caches hold, with an adapter by its index."""

    def score(
        self, caches: list[LayerCache], tokens: TokenArray, following: TokenArray, num_top: int, adapter: int, /
    ) -> list[TokenLogprob]:
        """As `prefill`; returns how likely the model held each of `following` behind the token in its place."""

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
        """Returns a row that decodes from `next_token` on; `generated` was put out after `prompt` so far."""

    def force(self, row: Any, token: int, *, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Has the next step feed a row `token`, not what the step before samples; it is the last of `generated`."""

    def prepare(self, rows: Sequence[Any], previous: Any, *, samples: bool = True) -> Step:
        """Returns one decode step; rows without a next token take the one `previous` samples for them.

        Without `samples` the step evaluates and samples nothing until `sample`.
        """

    def sample(self, step: Any, masks: Sequence[MaskWords | None]) -> None:
        """Has a step sample after all, each row among the tokens of its mask; to be started, or started again."""

    def start(self, step: Any) -> None:
        """Has computed what of a step is prepared, without waiting for it."""

    def detach(self, row: Any) -> None:
        """Makes a row's own caches hold all of its state, evaluated."""

    def close(self) -> None:
        """Lets go of the device; nothing is evaluated afterwards."""
