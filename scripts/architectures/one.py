"""Checks one architecture and prints a JSON object; a process of its own, since a model's code may do anything.

Usage: python -m scripts.architectures.one NAME
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from models import providers
from scripts.architectures.checks import CHECKS, VLM_CHECKS, Difference, Subject
from scripts.architectures.configs import config
from scripts.architectures.vlm_configs import VLM_CONFIGS

# isort: split
from mlx_lm.models.cache import make_prompt_cache


def check(name: str) -> dict[str, Any]:
    """Returns the kinds of the model's caches, what each check gave, and why one failed."""
    is_vlm = name in VLM_CONFIGS
    if is_vlm:
        providers.VLM_TYPES |= {name}  # what is not served is tried, too
    try:
        subject = Subject(config(name))
        caches = sorted({type(cache).__name__ for cache in make_prompt_cache(subject.model)})
    except Exception as error:
        return {"name": name, "caches": [], "results": {}, "reasons": {"build": _told(error)}, "shards": False}
    results, reasons = {}, {}
    for title, run in (VLM_CHECKS if is_vlm else CHECKS).items():
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
