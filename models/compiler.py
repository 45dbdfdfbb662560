"""Has MLX look for the C++ compiler that it fuses operations with."""

import mlx.core as mx


def find_compiler() -> None:
    """Has MLX look now instead of at the first fused operation.

    On a CPU it runs `g++ --version` by the C library's `system()`, once in a process; on a GPU it runs nothing.
    """
    mx.compile(lambda number: mx.exp(number) + 1)(mx.array(1.0))
