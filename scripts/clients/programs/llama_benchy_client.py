"""llama-benchy: two lengths at two concurrencies; it must count each answer's tokens by their ids."""

import functools
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "demo"
BOOK = "It was a bright morning in the small garden, and the gardener counted her plants. " * 2000
NUM_ANSWER = 16

with tempfile.TemporaryDirectory() as place:
    (Path(place) / "book.txt").write_text(BOOK)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place)
    books = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=books.serve_forever, daemon=True).start()
    command = [str(Path(sys.executable).with_name("llama-benchy")), "--base-url", f"{os.environ['BASE_URL']}/v1"]
    command += ["--model", "demo", "--tokenizer", str(TOKENIZER), "--skip-coherence", "--exit-on-first-fail"]
    command += ["--book-url", f"http://127.0.0.1:{books.server_port}/book.txt", "--runs", "2", "--exact-tg"]
    command += ["--pp", "64", "256", "--tg", str(NUM_ANSWER), "--concurrency", "1", "2"]
    command += ["--format", "json", "--save-result", f"{place}/result.json"]
    home = {**os.environ, "HOME": place}
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert "token_ids" not in done.stdout, "it counts without ids"
    result = json.loads((Path(place) / "result.json").read_text())
    assert len(result["benchmarks"]) == 4, result
