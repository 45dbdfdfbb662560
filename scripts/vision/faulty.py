"""The server with a fault put in on purpose: python -m scripts.vision.faulty FAULT COMMAND...."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from models.prompt.pictures import Pictures
from models.vision import qwen


def _without_deepstack() -> None:
    steps = qwen.QwenTower.steps

    def shallow(tower: qwen.QwenTower, picture: Any, pixels: Any) -> Any:
        features = yield from steps(tower, picture, pixels)
        return type(features)(features.rows)

    setattr(qwen.QwenTower, "steps", shallow)  # noqa: B010


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _flat(pictures: Pictures, start: int, stop: int) -> Any:
    return np.tile(np.arange(start, stop), (3, 1))


FAULTS: dict[str, Callable[[], None]] = {
    "no shift": _replace(Pictures, "shift", lambda pictures, offset: 0),
    "flat positions": _replace(Pictures, "positions", _flat),
    "no deepstack": _without_deepstack,
    "one id for all pictures": _replace(qwen, "digest_of", lambda data, processing: bytes(16)),
}

if __name__ == "__main__":
    from server.cli.main import main

    FAULTS[sys.argv[1]]()
    sys.argv = ["mlx-serve", *sys.argv[2:]]
    main()
