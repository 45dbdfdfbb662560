"""A real server that pulls from a hub on loopback, as a process of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import forked
from tests.support.fake_hub import FakeHub

DEADLINE_SECONDS = 300.0


@contextmanager
def serving_beside(hub: FakeHub, home: Path) -> Iterator[str]:
    """Serves the demo model, with an empty store in `home`, while the block runs; gives the base address."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "XDG_RUNTIME_DIR": str(home)}
    arguments = ("serve", "demo", "--port", "0", "--cache-memory", "64MiB")
    pipe = subprocess.PIPE
    process = forked.start(*arguments, imported=forked.COMMANDS, env=environment, text=True, stdout=pipe)
    try:
        assert process.stdout is not None
        yield next(line.split()[1].removesuffix("/v1") for line in process.stdout if line.startswith("address"))
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_SECONDS)
