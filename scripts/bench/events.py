"""What listening costs: decode tokens/s of eight streams, with and without five listeners to `/v1/events`.

    LD_PRELOAD=libopenblas.so.0 python -m scripts.bench.events [--blocks 8] [--model demo]

Blocks alternate; the figures are medians of the ratios of neighbours: of tokens/s, and of the processor time that the
server and its clients take, which is one process here. Listeners are processes of their own, which read what they get
and do nothing with it.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import open_service
from server.pool.pool import ModelPool
from tests.support.live_server import running

STREAMS = 8
LISTENERS = 5
TOKENS = 768
SETTLE_SECONDS = 2.0
"""In which the listeners' own start is over."""
READER = "import sys, urllib.request\nfor _ in urllib.request.urlopen(sys.argv[1]): pass"


def speed(address: str, model: str) -> tuple[float, float]:
    """Returns the tokens/s of all streams together, and the processor seconds that they took."""
    speeds: list[float] = []

    def ask(number: int) -> None:
        body = {
            "model": model, "messages": [{"role": "user", "content": f"My name is Ada {number}."}], "stream": False,
            "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False,
        }  # fmt: skip
        answer = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=300).json()
        speeds.append(answer["timings"]["predicted_per_second"])

    begun = time.process_time()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(speeds), time.process_time() - begun


@contextmanager
def listening(address: str, count: int) -> Iterator[None]:
    """Has so many processes listen while the block runs."""
    readers = [subprocess.Popen([sys.executable, "-c", READER, f"{address}/v1/events"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def measured(address: str, model: str, num_listeners: int) -> tuple[float, float]:
    """Returns what `speed` does, while so many listen."""
    with listening(address, num_listeners):
        return speed(address, model)


def main() -> None:
    """Measures, and prints a line for each pair and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    config = ServerConfig(models=(options.model,), slots=STREAMS)
    service = open_service(config)
    service.engine.start()
    speeds, times = [], []
    try:
        with running(create_pool_app(ModelPool.of(service.opened), config)) as address:
            speed(address, service.model.id)
            for number in range(options.blocks):
                # The second of a pair is not always the same one: a machine has its moods.
                counts = (0, LISTENERS) if number % 2 == 0 else (LISTENERS, 0)
                taken = {count: measured(address, service.model.id, count) for count in counts}
                (alone, alone_time), (heard, heard_time) = taken[0], taken[LISTENERS]
                speeds.append(heard / alone)
                times.append(heard_time / alone_time)
                print(
                    f"{alone:6.1f} -> {heard:6.1f} tokens/s, {alone_time:.2f} -> {heard_time:.2f} s of processor time"
                )
    finally:
        service.engine.stop()
    medians = f"tokens/s {statistics.median(speeds):.3f}, processor time {statistics.median(times):.3f}"
    print(f"{medians} of {len(times)} pairs")


if __name__ == "__main__":
    main()
