"""llm-comply: all of its cases in three APIs, but for those that docs/clients.md names."""

import json
import os
import subprocess
import sys
from pathlib import Path

LEFT = {
    "open-responses": {"image-input", "error-handling"},
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "anthropic": {"anth-image-input"},
}
"""No model here takes images, and a request that names no model means the default one."""

for name, left in LEFT.items():
    command = [str(Path(sys.executable).with_name("llm-comply")), "-u", f"{os.environ['BASE_URL']}/v1", "-k", "none"]
    command += ["-m", "demo", "--format", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    results = json.loads(done.stdout)["results"]
    failed = {result["id"]: result["errors"] for result in results if result["status"] == "failed"}
    assert failed.keys() == left, failed
