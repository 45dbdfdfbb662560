"""The server with a fault put in on purpose: python -m scripts.vision.faulty FAULT COMMAND...."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from models.prompt.pictures import Pictures
from models.vision import gemma4, layers, mistral3, qwen, towers
from models.vision.layers import PaddedEmbedding


def _without_deepstack() -> None:
    steps = qwen.QwenTower.steps

    def shallow(tower: qwen.QwenTower, picture: Any, pixels: Any) -> Any:
        features = yield from steps(tower, picture, pixels)
        return type(features)(features.rows)

    setattr(qwen.QwenTower, "steps", shallow)  # noqa: B010


def _without_row_ends() -> None:
    rows = mistral3.MistralTower._rows

    def plain(tower: mistral3.MistralTower, picture: Any, hidden: Any) -> Any:
        tower._row_ends = tower._row_ends * 0
        return rows(tower, picture, hidden)

    setattr(mistral3.MistralTower, "_rows", plain)  # noqa: B010


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _flat(pictures: Pictures, start: int, stop: int) -> Any:
    return np.tile(np.arange(start, stop), (3, 1))


FAULTS: dict[str, Callable[[], None]] = {
    "no shift": _replace(Pictures, "shift", lambda pictures, offset: 0),
    "flat positions": _replace(Pictures, "positions", _flat),
    "no deepstack": _without_deepstack,
    "causal blocks": _replace(layers, "with_later", lambda mask: mask),
    "layer inputs of another token": _replace(
        gemma4, "PaddedEmbedding", lambda inner, token: PaddedEmbedding(inner, 5)
    ),
    "rows without ends": _without_row_ends,
    "one id for all pictures": _replace(towers, "digest_of", lambda data, processing: bytes(16)),
}

if __name__ == "__main__":
    from server.cli.main import main

    FAULTS[sys.argv[1]]()
    sys.argv = ["mlx-serve", *sys.argv[2:]]
    main()
