"""docs/llama_cpp.md names every field of llama.cpp's endpoints."""

from typing import Any, get_type_hints

import pytest

from server.api.errors import Code
from server.api.generation import IN_TEXT
from server.api.llama_cpp.api import (
    ERRORS,
    IN_COMPLETION,
    DetokenizeBody,
    LlamaCompletion,
    LlamaCompletionBody,
    LlamaCppError,
    PropsBody,
    SlotBody,
    TokenizeBody,
    TokenPiece,
    TokensBody,
)
from tests.server.api.test_docs import ROOT, reasons, rows
from tests.support.docs import table

PAGE = (ROOT / "docs" / "llama_cpp.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("field of `/completion`", LlamaCompletionBody.__annotations__),
        ("field of a completion", get_type_hints(LlamaCompletion)),
        ("field of `/tokenize`", TokenizeBody.model_fields),
        ("field of `/detokenize`", DetokenizeBody.model_fields),
        ("field of a slot", get_type_hints(SlotBody)),
        ("field of `/props`", get_type_hints(PropsBody)),
    ],
)
def test_every_field_has_a_line(head: str, names: Any) -> None:
    assert set(rows("\n".join(sorted(table(PAGE, head))))) == set(names)


def test_every_field_that_only_completion_refuses_is_named() -> None:
    added = {name: rule for name, rule in IN_COMPLETION.items() if IN_TEXT.get(name) != rule}
    assert table(PAGE, "refused, because") == reasons(added)


def test_every_other_field_and_type_of_error_is_named() -> None:
    kinds = (TokensBody, TokenPiece)
    names = {
        "n_ctx",
        "params",
        "vision",
        "audio",
        "content",
        "prompt",
        "input_tokens",
        *(name for kind in kinds for name in get_type_hints(kind)),
    }
    assert all(f"`{name}`" in PAGE for name in names)
    assert all(f'"{name}"' in PAGE for name in get_type_hints(LlamaCppError))
    kinds_of_errors = {*ERRORS.values(), "server", "invalid_request"}
    assert all(f"`{name}_error`" in PAGE for name in kinds_of_errors) and ERRORS.keys() <= {
        code.status for code in Code
    }
