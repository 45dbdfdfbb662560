"""What several tests of the command need."""

from pathlib import Path

import pytest

from tests.support.tiny_models import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    return write("qwen3", tmp_path_factory.mktemp("models") / "tiny")
