"""Checks one architecture and prints a JSON object; a process of its own, since a model's code may do anything.

Usage: python -m scripts.architectures.one NAME
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from scripts.architectures.checks import CHECKS, Difference, Subject
from scripts.architectures.configs import config

# isort: split
from mlx_lm.models.cache import make_prompt_cache


def check(name: str) -> dict[str, Any]:
    """Returns the kinds of the model's caches, what each check gave, and why one failed."""
    try:
        subject = Subject(config(name))
        caches = sorted({type(cache).__name__ for cache in make_prompt_cache(subject.model)})
    except Exception as error:
        return {"name": name, "caches": [], "results": {}, "reasons": {"build": _told(error)}, "shards": False}
    results, reasons = {}, {}
    for title, run in CHECKS.items():
        try:
            results[title] = run(subject)
        except Exception as error:
            results[title] = "no"
            reasons[title] = _told(error)
    return {
        "name": name,
        "caches": caches,
        "results": results,
        "reasons": reasons,
        "shards": hasattr(subject.model, "shard"),
    }


def _told(error: Exception) -> str:
    """Returns an error as one line; that of a model's own code with its place."""
    if isinstance(error, Difference):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]} ({place})"


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1])))
