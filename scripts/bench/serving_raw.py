"""The engines without a server around them, as the yardstick for throughput.

Usage: python -m scripts.bench.serving_raw {ours,peer} FOLDER

Reads one JSON line per job from standard input, `{"prompts": [[token, …], …], "max_tokens": n, "num_shared": n}`, and
writes one with `{"seconds": s}`: from the first prompt token to the last generated one, greedy. Ours is the runner:
prefill in the server's chunks, then a launch per token; leading tokens that all prompts share are evaluated once and
their state is copied. The peer is mlx-lm's `BatchGenerator` with the defaults of its server, which shares nothing.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scripts.bench.common import ROOT, fast_blas_environment

Prompts = Sequence[Sequence[int]]
Job = Callable[[Prompts, int, int], None]


class RawEngine:
    """A process that runs jobs on a bare engine, kept for as many as there are."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process, for what it costs."""
        return self._process.pid

    async def seconds(self, prompts: Prompts, max_tokens: int, num_shared: int = 0) -> float:
        """Returns how long the prompts take, each continued by `max_tokens`; they share `num_shared`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"prompts": prompts, "max_tokens": max_tokens, "num_shared": num_shared}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()
        return float(json.loads(await self._process.stdout.readline())["seconds"])


@asynccontextmanager
async def raw_engine(kind: str, folder: Path) -> AsyncIterator[RawEngine]:
    """Runs a bare engine, `ours` or `peer`, while the block does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scripts.bench.serving_raw", kind, str(folder)),
        cwd=ROOT,
        env=fast_blas_environment(),
        stdin=PIPE,
        stdout=PIPE,
        limit=1 << 20,
    )
    try:
        yield RawEngine(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _our_job(folder: Path) -> Job:
    import copy

    import numpy as np

    from cache.snapshots import chunk_end
    from models.inference.runner import Runner
    from models.inference.sampling_params import SamplingParams
    from models.loader import load
    from server.app.config import ServerConfig
    from server.measure import launch

    loaded = load(folder, folder.name)
    runner = Runner(loaded.model, vocab_size=loaded.vocab_size)
    chunk_tokens = ServerConfig().chunk_tokens

    def prefill(caches: list[Any], prompt: Sequence[int], start: int, stop: int) -> None:
        while start < stop:
            end = chunk_end(start, stop, chunk_tokens)
            runner.prefill(caches, np.array(prompt[start:end], np.int32))
            start = end

    def run(prompts: Prompts, max_tokens: int, num_shared: int) -> None:
        rows = []
        shared = runner.make_caches()
        prefill(shared, prompts[0], 0, num_shared)
        for prompt in prompts:
            caches = copy.deepcopy(shared) if num_shared else runner.make_caches()
            prefill(caches, prompt, num_shared, len(prompt) - 1)
            rows.append(runner.make_row(caches, SamplingParams(temperature=0), prompt[-1]))
        current = launch(runner, rows, None)
        for _ in range(max_tokens - 1):
            following = launch(runner, rows, current)
            current.tokens()
            current = following
        current.tokens()

    return run


def _peer_job(folder: Path) -> Job:
    import cache.layers  # noqa: F401, I001  (first: importing mlx-lm changes limits of the process)
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    model: Any = load(str(folder))[0]

    def run(prompts: Prompts, max_tokens: int, num_shared: int) -> None:
        generator = BatchGenerator(model)
        generator.insert([list(prompt) for prompt in prompts], [max_tokens] * len(prompts))
        num_open = len(prompts)
        while num_open:
            num_open -= sum(response.finish_reason is not None for response in generator.next()[1])
        generator.close()

    return run


def main(kind: str, folder: Path) -> None:
    """Runs jobs until standard input ends."""
    run = _our_job(folder) if kind == "ours" else _peer_job(folder)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        run(job["prompts"], job["max_tokens"], job["num_shared"])
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
