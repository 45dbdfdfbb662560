"""Evaluates one architecture split over two processes and compares the logits with those of the whole model.

Usage: mlx.launch -n 2 python -m scripts.architectures.shard NAME
"""

import sys
from typing import Any

import mlx.core as mx

from scripts.architectures.configs import config
from tests.support import tiny_models

TOLERANCE = 1e-3


def difference(name: str) -> float:
    """Returns by how much the logits of the split model differ at most, relative to the largest of the whole one."""
    group = mx.distributed.init(strict=True)
    tokens = mx.arange(1, 25)[None]
    model: Any = tiny_models.make(config(name))
    expected = model(tokens)
    mx.eval(expected)
    model.shard(group)
    return float(mx.abs(model(tokens) - expected).max() / mx.abs(expected).max())


if __name__ == "__main__":
    greatest = difference(sys.argv[1])
    if mx.distributed.init().rank() == 0:
        print("yes" if greatest <= TOLERANCE else f"the logits differ by {greatest:.2g}")
