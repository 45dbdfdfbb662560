"""Sequences of tokens as arrays, and where two of them part. Pure."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenArray: TypeAlias = NDArray[np.int32]
TOKEN_BYTES = 4


def common_prefix_length(left: TokenArray, right: TokenArray) -> int:
    """Returns how many leading tokens two arrays share."""
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num
