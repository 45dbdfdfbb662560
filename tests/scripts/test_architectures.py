"""What `make architectures` finds out and writes; the whole of it is started by hand only."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from models.providers import VLM_FAILING, VLM_TYPES, VLM_VERSION
from scripts.architectures import checks, configs, one
from scripts.architectures.report import Result, page, vlm_page
from scripts.architectures.vlm_configs import VLM_CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.mark.usual("cohere2", "mamba")
@pytest.mark.parametrize("name", ["granite", "cohere2", "mamba", "olmo_hybrid"])
def test_attention_windows_and_recurrent_state_pass_every_check(name: str) -> None:
    found = Result(**one.check(name))
    assert found.is_passed, found.reasons
    assert list(found.results) == list(checks.CHECKS)


def test_a_model_that_cannot_be_built_is_told() -> None:
    found = Result(**one.check("olmo2_of_another_world"))
    assert not found.is_passed
    assert "ModuleNotFoundError" in found.reasons["build"]


def test_the_page_tells_what_works_what_does_not_and_why() -> None:
    good = Result("llama", ["KVCache"], dict.fromkeys(checks.CHECKS, "yes"), shards=True, told_of_shards="yes")
    bad = Result("odd", ["OddCache"], {**good.results, "disk": "no"}, {"disk": "nothing was restored"})
    text = page([good, bad])
    assert f"1 of the {2 + len(configs.NOT_BUILT)} architectures" in text
    assert "| KVCache | yes | `llama` |" in text and "equal logits: `llama`." in text
    assert "OddCache" not in text
    assert "- `odd`, disk: nothing was restored" in text


def test_the_page_in_the_docs_names_every_architecture_of_its_mlx_lm() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"mlx-lm {version('mlx-lm')} " not in text:
        pytest.skip("the page is of another mlx-lm than the installed one")
    lines = re.findall(r"^(?:\|.*\|.*(?=\| `)|- (?=`))(.*)$", text, re.MULTILINE)
    assert sorted(name for line in lines for name in re.findall(r"`([^`]+)`", line)) == configs.names()


def test_the_page_of_mlx_vlm_has_a_line_for_each_type_that_is_served() -> None:
    text = PAGE.with_name("architectures-mlx-vlm.md").read_text(encoding="utf-8")
    passed, failed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE), re.findall(r"^- `(\w+)`,", text, re.MULTILINE)
    assert f"mlx-vlm {VLM_VERSION} " in text
    assert (frozenset(passed), frozenset(failed)) == (VLM_TYPES, VLM_FAILING)
    assert sorted(passed + failed) == sorted(VLM_CONFIGS)


def test_a_type_that_fails_is_told_on_the_page_of_mlx_vlm() -> None:
    good = Result("step3p7", ["KVCache"], dict.fromkeys(checks.VLM_CHECKS, "yes"))
    bad = Result("hy_v4", ["CacheList"], {"loads": "no"}, {"loads": "refused"})
    text = vlm_page([good, bad])
    assert "1 of 2 language models" in text and "| `step3p7` | KVCache | yes |" in text
    assert "- `hy_v4`, loads: refused" in text and "| `hy_v4`" not in text
