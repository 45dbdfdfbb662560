"""How likely the model held the tokens of a decode step, for the rows that are to tell it."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from models.inference.sampling_params import SamplingParams
from models.output.token_logprob import TokenLogprob


@dataclass(eq=False)
class StepLogprobs:
    """The distributions of some rows of a step: those of the model, before anything that changes what is sampled.

    Arrays have one row for each row of the step that tells, and are lazy until they are evaluated with the step.
    """

    places: dict[int, int]
    """Row of the step to row of the arrays."""
    num_top: list[int]
    """How many of the likeliest tokens each of them tells."""
    all: mx.array
    """Natural logarithms of the probabilities, float32 `[num_telling, vocab_size]`."""
    top_ids: mx.array
    """The likeliest tokens, the likeliest first, uint32 `[num_telling, max(num_top)]`."""

    @classmethod
    def of(cls, logits: mx.array, params: Sequence[SamplingParams]) -> "StepLogprobs | None":
        """Returns the distributions of the rows that tell, from logits `[num_rows, vocab_size]`; None without one."""
        telling = [row for row, one in enumerate(params) if one.top_logprobs is not None]
        if not telling:
            return None
        num_top = [params[row].top_logprobs or 0 for row in telling]
        chosen = logits[mx.array(telling)].astype(mx.float32)
        found = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        places = {row: place for place, row in enumerate(telling)}
        return cls(places, num_top, found, _likeliest(found, max(num_top)))

    @property
    def arrays(self) -> list[mx.array]:
        """What is to be evaluated before `read`."""
        return [self.all, self.top_ids]

    def read(self, row: int, token: int) -> TokenLogprob | None:
        """Returns what a row of the step tells of `token`, which may be another than the sampled one."""
        place = self.places.get(row)
        if place is None:
            return None
        # Views, where memory is shared: nothing is computed or copied.
        found, ids = np.asarray(self.all)[place], np.asarray(self.top_ids)[place, : self.num_top[place]]
        return TokenLogprob(token, float(found[token]), tuple((int(one), float(found[one])) for one in ids))


def _likeliest(found: mx.array, count: int) -> mx.array:
    """Returns the ids of the `count` largest of each row, the largest first."""
    if count == 0:
        return mx.zeros((found.shape[0], 0), mx.uint32)
    ids = mx.argpartition(-found, kth=count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(found, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
