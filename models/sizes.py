"""Sizes as people read them."""


def size_text(num_bytes: int) -> str:
    """Returns a size as people read it, such as `3.4 GB`; a GB is 10^9 bytes."""
    for unit, bytes_per_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= bytes_per_unit:
            return f"{num_bytes / bytes_per_unit:.1f} {unit}"
    return f"{num_bytes} bytes"
