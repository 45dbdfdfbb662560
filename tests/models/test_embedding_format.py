"""How a model makes vectors is read from its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import EmbeddingUnsupported
from models.formats import POOLING_FILE, EmbeddingFormat, Pooling, read_embedding_format

SPECIAL = frozenset({1, 2})


def written(folder: Path, content: Any) -> Path:
    path = folder / POOLING_FILE
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
    ],
)
def test_the_file_says_which_positions_count(tmp_path: Path, modes: dict[str, Any], pooling: Pooling) -> None:
    assert read_embedding_format(written(tmp_path, modes), [], SPECIAL) == EmbeddingFormat(pooling)


@pytest.mark.parametrize(
    "content",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode_cls_token": False},
        {"pooling_mode": ["mean"]},
        [],
        "{",
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, content: Any) -> None:
    with pytest.raises(EmbeddingUnsupported, match="1_Pooling"):
        read_embedding_format(written(tmp_path, content), [], SPECIAL)


def test_without_a_file_the_end_of_texts_decides(tmp_path: Path) -> None:
    assert read_embedding_format(tmp_path, [], SPECIAL) == EmbeddingFormat(Pooling.MEAN)
    assert read_embedding_format(tmp_path, [1, 2], SPECIAL) == EmbeddingFormat(Pooling.LAST, 2)
    assert read_embedding_format(tmp_path, [7], SPECIAL) == EmbeddingFormat(Pooling.MEAN)


def test_a_cut_text_keeps_its_end() -> None:
    assert EmbeddingFormat(Pooling.LAST, 2).cut([5, 6, 7, 2], 3) == [5, 6, 2]
    assert EmbeddingFormat().cut([5, 6, 7], 2) == [5, 6]
    assert EmbeddingFormat(Pooling.LAST, 2).cut([5, 2], 2) == [5, 2]
