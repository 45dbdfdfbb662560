"""How a model makes vectors, and judges texts, is read from its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import EmbeddingUnsupported
from models.formats import (
    JUDGED_PREFIX,
    JUDGED_SUFFIX,
    POOLING_FILE,
    EmbeddingFormat,
    Judgement,
    Pooling,
    judged_text,
    read_embedding_format,
    read_rerank_format,
)

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


VOCABULARY = {"no": 2152, "yes": 9693, "nein": 1, "ja": 2}
QUESTION = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."


def judgement(name: str = "org/chat", template: str = "", **config: Any) -> Judgement | None:
    return read_rerank_format(name, config, template, VOCABULARY.get)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-Reranker-0.6B", "mlx-community/Qwen3-Reranker-4B-mxfp8", "qwen3-vl-reranker", "Qwen3Reranker"],
)
def test_by_its_name(name: str) -> None:
    assert judgement(name) == Judgement(no_id=2152, yes_id=9693)


@pytest.mark.parametrize("named", [["no"], ["no", "maybe"], ["yes", "yes"], "no yes", [1, 2], {}, 7])
def test_a_configuration_that_names_no_two_tokens_is_none(named: Any) -> None:
    assert judgement(classifier_from_token=named) is None


def test_the_prompt_is_that_of_the_model_card() -> None:
    assert JUDGED_PREFIX + judged_text("q?", "d.", "Find it.") + JUDGED_SUFFIX == (
        f'<|im_start|>system\n{QUESTION} Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Find it.\n<Query>: q?\n<Document>: d.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "Given a web search query, retrieve relevant passages" in judged_text("q", "d")
