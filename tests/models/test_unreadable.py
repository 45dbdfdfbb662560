"""What may not be read is called that, not damaged."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from models import weights
from models.errors import ModelBroken
from models.loader import load
from models.names import resolve
from tests.support.tiny_models import write

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A model in a folder that any user may enter."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        yield write("qwen3", Path(parent) / "tiny")


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything, so while this lasts it is somebody else."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read(name: str, folder: Path) -> None:
    (folder / name).chmod(0)
    with without_privileges(), pytest.raises(ModelBroken, match=f"{name} is not readable: permission denied"):
        load(folder, "tiny")


def test_weights_and_their_index_that_may_not_be_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / name).chmod(0)
        with without_privileges(), pytest.raises(ModelBroken, match=f"{name} is not readable: permission denied"):
            weights.find_weight_files(folder)


def test_a_folder_that_may_not_be_entered(folder: Path) -> None:
    folder.chmod(0)
    try:
        with without_privileges(), pytest.raises(ModelBroken, match="tiny is not readable: permission denied"):
            resolve(str(folder))
        with without_privileges(), pytest.raises(ModelBroken, match="tiny is not readable: permission denied"):
            load(folder, "tiny")
    finally:
        folder.chmod(0o700)


def test_a_folder_inside_one_that_may_not_be_entered(folder: Path) -> None:
    folder.parent.chmod(0)
    try:
        with without_privileges(), pytest.raises(ModelBroken, match="not readable: permission denied"):
            resolve(str(folder))
    finally:
        folder.parent.chmod(0o700)
