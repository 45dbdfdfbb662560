"""A reranker that judges is known by its files or its name, and asked as it was trained."""

from typing import Any

import pytest

from models.formats import JUDGED_PREFIX, JUDGED_SUFFIX, Judgement, judged_text, read_rerank_format

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


def test_by_its_configuration_and_its_template() -> None:
    assert judgement(classifier_from_token=["nein", "ja"]) == Judgement(1, 2)
    assert judgement(template=f"system {QUESTION}") == Judgement(2152, 9693)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "BAAI/bge-reranker-v2-gemma", "Qwen3-Embedding-0.6B", ""])
def test_other_models_judge_nothing(name: str) -> None:
    assert judgement(name) is None


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
