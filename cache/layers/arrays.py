"""Arrays that own their bytes.

A slice of a larger buffer keeps all of that buffer alive, behind the back of whoever counts bytes. So what is stored
is copied unless it owns its buffer.
"""

import functools
from typing import Any

import mlx.core as mx

_PROBE_BYTES = 1 << 20
_SMALLEST_BYTES = 8
"""The smallest allocation on CUDA, where sizes below a page are powers of two."""


def owned(array: mx.array) -> mx.array:
    """Returns `array`, or an evaluated copy of it where it is a view of a larger buffer."""
    mx.eval(array)
    if is_view(array):
        array = mx.array(array)
        mx.eval(array)
    return array


def is_view(array: mx.array) -> bool:
    """Whether an evaluated array's buffer is larger than an allocation of its own would be."""
    return int(mx.get_array_buffer_size(array)) > _allocated_bytes(array.nbytes)


def _allocated_bytes(num_bytes: int) -> int:
    """Returns the size of the buffer that the allocator gives an array, rounded up as on this device."""
    granule = _granule_bytes()
    if granule == 1:
        return num_bytes
    if num_bytes >= granule:
        return -(-num_bytes // granule) * granule
    return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST_BYTES


@functools.cache
def _granule_bytes() -> int:
    """Returns the step in which the allocator sizes large buffers: 1 byte on the CPU, 16 KiB on a GPU."""
    mx.clear_cache()  # a buffer that was freed may be handed out again although it is larger
    probe = mx.zeros((_PROBE_BYTES + 1,), mx.uint8)
    mx.eval(probe)
    return int(mx.get_array_buffer_size(probe)) - _PROBE_BYTES


def arrays_in(value: Any) -> list[mx.array]:
    """Returns every array that a layer cache reaches, whatever its class calls its state."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    return [array for part in value for array in arrays_in(part)]
