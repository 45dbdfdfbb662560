"""What is trained is what is served: the layers in PyTorch and in mlx-lm give the same. Needs PyTorch."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from models.mlx_lm_import import load_model

torch = pytest.importorskip("torch", reason="PyTorch is needed for training only, and is not installed")


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
def test_an_exported_model_gives_the_logits_that_it_was_trained_with(name: str, tmp_path: Path) -> None:
    from scripts.demo.torch import Trainer
    from scripts.demo.train import MODELS

    trainer = Trainer(MODELS[name], seed=3, threads=1)
    trainer.export(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    model, _ = load_model(tmp_path)
    tokens = np.random.default_rng(5).integers(0, 1500, (1, 192))
    with torch.no_grad():
        trained = trainer.network.logits(torch.tensor(tokens)).numpy()
    served = np.array(model(mx.array(tokens)))
    assert np.abs(served - trained).max() < 1e-3 * np.abs(trained).max()
