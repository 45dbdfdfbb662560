"""A checksum of a model's weights, made where they are: one pass over memory, little beside the loading.

Each array is taken as 32-bit words; a chunk's sum of word × odd random multiplier, modulo 2^32, changes with any one
word and with nearly any other change (multiply-shift hashing; Dietzfelbinger et al., 1997). Integer sums do not
depend on the order of adding, so every device and thread count comes to the same result. It tells models apart that
their makers made; it does not withstand one who looks for a collision.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

import mlx.core as mx
import numpy as np

_CHUNK_WORDS: Final = 1 << 22
_WORD_BYTES: Final = 4
_SEED: Final = 20_26


def checksum(arrays: Iterable[tuple[str, mx.array]]) -> str:
    """Returns 16 hexadecimal digits that differ for arrays of other names, types, shapes, or any other bytes."""
    multipliers = mx.array(np.random.default_rng(_SEED).integers(1 << 32, size=_CHUNK_WORDS, dtype=np.uint32) | 1)
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays, key=lambda named: named[0]):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.array(_chunk_sums(array, multipliers)).tobytes())
    return digest.hexdigest()


def _chunk_sums(array: mx.array, multipliers: mx.array) -> mx.array:
    """Returns one uint32 for each chunk of an array; shape [num_chunks]."""
    if array.size == 0:
        return mx.zeros(0, mx.uint32)
    words = _words(array)
    sums = []
    for start in range(0, words.size, _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        sums.append(mx.sum(chunk * multipliers[: chunk.size]))
        # At once, or the products of all chunks of a large array would be held together.
        mx.eval(sums[-1])
    return mx.stack(sums)


def _words(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    if flat.itemsize < _WORD_BYTES:
        flat = mx.view(flat, mx.uint8 if flat.itemsize == 1 else mx.uint16)
        missing = -flat.size % (_WORD_BYTES // flat.itemsize)
        flat = mx.pad(flat, (0, missing)) if missing else flat
    return mx.view(flat, mx.uint32)
