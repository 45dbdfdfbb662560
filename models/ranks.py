"""One model divided among several machines, the *ranks*: each holds a part of every layer, and calls are of all.

What any rank decides, all must decide: a rank that calls the model alone waits for ever. So a decision follows from
messages, from the model's output, which sums make equal on all ranks, or from what `Ranks` has them agree on.
"""

import json
import math
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from models.errors import ModelBroken

Shared = TypeVar("Shared")

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")


class Ranks:
    """What the ranks of a group agree on. One thread at a time."""

    def __init__(self, group: Any = None) -> None:
        """Without a group, one machine."""
        self._group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()

    def share(self, value: Shared, root: int = 0) -> Shared:
        """The value of rank `root`, plain data, on all; tuples become lists."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == root else b""
        (length,) = self._sum([len(data)])
        return cast(Shared, json.loads(bytes(self._sum([*data] or [0] * length))))

    def gather(self, value: Shared) -> list[Shared]:
        """All ranks' values, plain data, in their order."""
        return [self.share(value, root) for root in range(self.size)]

    def any(self, value: bool) -> bool:
        """Whether some rank says so."""
        return value if self.size == 1 else self._sum([int(value)])[0] > 0

    def divide(self, model: Module, config: dict[str, Any], name: str) -> None:
        """Leaves this rank's part of each layer. Raises ModelBroken for a model that cannot be divided."""
        if self.size == 1:
            return
        divide = getattr(model, "shard", None)
        if divide is None:
            raise ModelBroken(f"{name}: mlx-lm divides no model of type {config.get('model_type')} among machines")
        check_heads(config, name, self.size)
        divide(self._group)

    def _sum(self, numbers: list[int]) -> list[int]:
        return cast(list[int], mx.distributed.all_sum(mx.array(numbers, mx.int32), group=self._group).tolist())


def check_heads(config: dict[str, Any], name: str, size: int) -> None:
    """Raises ModelBroken for a model whose heads cannot be divided among so many machines."""
    sections = config, config.get("text_config") or {}
    counts = {key: section[key] for section in sections for key in _HEADS if isinstance(section.get(key), int)}
    for key, count in counts.items():
        if count % size:
            most = math.gcd(*counts.values())
            possible = [str(number) for number in range(2, most + 1) if most % number == 0]
            advice = f"; {' or '.join(possible)} can" if possible else ""
            raise ModelBroken(f"{name}: {size} machines cannot share its {count} {key}{advice}")


ONE_RANK = Ranks()
