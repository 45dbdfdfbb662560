"""A model is loaded on one thread and runs on another, so nothing of it may be left to be evaluated."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from cache.layers.kinds import make_caches
from models.loader import load
from tests.support import tiny_models


def logits_on_another_thread(model: object) -> list[float]:
    def run() -> list[float]:
        logits = model(mx.array([[1, 2, 3]]), cache=make_caches(model))  # type: ignore[operator]
        found: list[float] = logits[0, -1].tolist()
        return found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v32"])
def test_a_loaded_model_runs_on_another_thread(name: str, tmp_path: Path) -> None:
    model = load(tiny_models.write(name, tmp_path / name), name).model
    assert len(logits_on_another_thread(model)) == tiny_models.VOCAB
