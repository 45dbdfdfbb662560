"""Memory that nothing uses goes back to the system."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.server.api.test_live import serving
from tests.support import tiny_models

ROOT = Path(__file__).parents[3]
PROGRAM = """
import re
from pathlib import Path
import mlx.core as mx
from server.engine.commands import give_back

def held():
    return int(re.findall(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0])

# Blocks too small to be mapped alone; the last one keeps the C library from shortening its heap.
blocks = [bytearray(b"x") * 60_000 for _ in range(2000)]
last = blocks[-1]
arrays = [mx.ones((1000, 1000)) for _ in range(10)]
mx.eval(arrays)
del blocks, arrays
freed = held()
give_back()
print(freed - held(), mx.get_cache_memory())
"""


@pytest.mark.usual
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
def test_freed_blocks_and_buffers_are_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert re.fullmatch(r"\d+ \d+\n", ran.stdout), ran.stderr
    num_kilobytes, cached = map(int, ran.stdout.split())
    assert num_kilobytes > 80_000 and cached == 0


@pytest.mark.alone("threads share MLX's memory, and one may still try the model out when another is done")
def test_what_loading_and_trying_a_model_took_is_given_back(tmp_path: Path) -> None:
    folder = tiny_models.write("llama", tmp_path / "tiny")
    gc.collect()  # what earlier tests left would be freed while the server starts
    with serving(folder):
        assert mx.get_cache_memory() == 0
